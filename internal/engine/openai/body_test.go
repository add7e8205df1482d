package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// scan is Scan with a fresh Body and no error allowed.
func scan(t require.TestingT, route Route, body string) *Body {
	var b Body
	require.NoError(t, b.Scan(route, []byte(body)), body)
	return &b
}

// refused is the BodyError of a body that must have one.
func refused(t require.TestingT, route Route, body string) *BodyError {
	var b Body
	var got *BodyError
	require.ErrorAs(t, b.Scan(route, []byte(body)), &got, body)
	assert.Equal(t, CodeInvalidRequest, got.Code)
	return got
}

func TestScanReadsTheFields(t *testing.T) {
	b := scan(t, Chat, ` {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}],
		"max_tokens": 6, "stream": true, "stream_options": {"include_usage": true}, "n": 2,
		"unknown": {"a": [1, -2.5e+3, null, true, false, "\u00e9\"\\"]}} `)
	assert.Equal(t, "tiny", string(b.Model))
	assert.True(t, b.HasModel)
	assert.True(t, b.Stream)
	assert.Equal(t, 2, b.N)
	assert.Equal(t, 2, b.Choices)
	assert.Equal(t, int64(6), b.MaxTokens)
	assert.Equal(t, len(`[{"role": "user", "content": "hello world"}]`), b.PromptBytes)
	assert.Equal(t, -1, b.PromptTokens)
	assert.Empty(t, b.Strip.Spans)
}

func TestScanDefaults(t *testing.T) {
	for _, body := range []string{
		`{}`, "{ }\n",
		`{"model":null,"n":null,"stream":null,"stream_options":null,"max_tokens":null,"prompt":null}`,
	} {
		b := scan(t, Completions, body)
		assert.False(t, b.HasModel)
		assert.False(t, b.Stream)
		assert.Equal(t, 1, b.N)
		assert.Equal(t, 1, b.Choices)
		assert.Equal(t, int64(-1), b.MaxTokens)
		assert.Equal(t, -1, b.PromptTokens)
	}
}

func TestScanForgetsTheBodyBefore(t *testing.T) {
	var b Body
	require.NoError(t, b.Scan(Chat,
		[]byte(`{"model":"\u0061","stream":true,"n":3,"bootstrap_room":1,"max_completion_tokens":5}`)))
	require.NoError(t, b.Scan(Chat, []byte(`{"max_tokens":9}`)))
	assert.Equal(t, int64(9), b.MaxTokens)
	assert.False(t, b.HasModel)
	assert.Nil(t, b.Model)
	assert.False(t, b.Stream)
	assert.Equal(t, 1, b.Choices)
	assert.Empty(t, b.Strip.Spans)
}

func TestScanPromptForms(t *testing.T) {
	tests := []struct {
		route           Route
		body            string
		choices, tokens int
		bytes           int
	}{
		{Completions, `{"prompt":"the quick"}`, 1, -1, 11},
		{Completions, `{"prompt":["hello","world"]}`, 2, -1, 17},
		{Completions, `{"prompt":[10, 11,12 , 0]}`, 1, 4, 15},
		{Completions, `{"prompt":[0]}`, 1, 1, 3},
		{Completions, `{"prompt":[-1]}`, 1, 1, 4},
		{Completions, `{"prompt":[[10, 11], [12, 13, 14]]}`, 2, 5, 24},
		{Completions, `{"prompt":[[10, 11], []],"n":3}`, 6, 2, 14},
		{Completions, `{"prompt":["a",[1]]}`, 2, -1, 9},
		{Completions, `{"prompt":[1,"a"]}`, 1, -1, 7},
		{Completions, `{"prompt":[[1],["a"]]}`, 2, -1, 11},
		{Completions, `{"prompt":[[[1]]]}`, 1, -1, 7},
		{Completions, `{"prompt":[]}`, 1, -1, 2},
		{Completions, `{"prompt":[null]}`, 1, -1, 6},
		{Completions, `{"prompt":{"a":[1,2]}}`, 1, -1, 11},
		{Completions, `{"messages":[1,2]}`, 1, -1, 0},
		{Chat, `{"messages":[{"content":"a"},{"content":"b"}],"n":4}`, 4, -1, 33},
		{Chat, `{"messages":[1,2]}`, 1, -1, 5},
		{Tokenize, `{"prompt":"the quick"}`, 1, -1, 11},
		{Tokenize, `{"messages":[]}`, 1, -1, 2},
		{Detokenize, `{"tokens":[10, 11, 12]}`, 1, 3, 12},
	}
	for _, tt := range tests {
		t.Run(tt.route.String()+tt.body, func(t *testing.T) {
			b := scan(t, tt.route, tt.body)
			assert.Equal(t, tt.choices, b.Choices)
			assert.Equal(t, tt.tokens, b.PromptTokens)
			assert.Equal(t, tt.bytes, b.PromptBytes)
		})
	}
}

func TestScanMaxTokens(t *testing.T) {
	want := map[string]int64{
		`{"max_tokens":0}`: 0, `{"max_tokens":1000000000}`: 1e9, `{"max_tokens":2147483648}`: 1 << 31,
		`{"max_tokens":-1}`:                          -1,
		`{"max_tokens":7,"max_completion_tokens":5}`: 5, `{"max_completion_tokens":5,"max_tokens":7}`: 5,
		`{"max_completion_tokens":null,"max_tokens":7}`: 7, `{"max_tokens":"12"}`: 12,
		`{"max_tokens":"abc"}`: -1, `{"max_tokens":1e3}`: 1000,
		`{"max_tokens":[3]}`: -1, `{"max_tokens":true}`: -1, `{"max_tokens":""}`: -1,
	}
	for body, tokens := range want {
		assert.Equal(t, tokens, scan(t, Chat, body).MaxTokens, body)
	}
}

func TestScanModelIsDecoded(t *testing.T) {
	want := map[string]string{
		`"a\/b"`: "a/b", `"\u0074iny"`: "tiny", `"\ud83d\ude00"`: "😀", `"\"\\\b\f\n\r\t"`: "\"\\\b\f\n\r\t",
		`""`: "", `"é"`: "é",
		`"\ud83d"`: "\xed\xa0\xbd", `"\ud83d\u0041"`: "\xed\xa0\xbdA",
		`"\ude00\ud83d"`: "\xed\xb8\x80\xed\xa0\xbd",
	}
	for raw, model := range want {
		b := scan(t, Completions, `{"model":`+raw+`}`)
		assert.Equal(t, model, string(b.Model), raw)
		assert.True(t, b.HasModel)
	}
}

func TestScanRefuses(t *testing.T) {
	deep := strings.Repeat("[", maxDepth) + strings.Repeat("]", maxDepth)
	tests := []struct{ name, body, message, param string }{
		{"empty", ``, "body is empty; send a JSON object", ""},
		{"white", " \n", "body is empty; send a JSON object", ""},
		{"array", `[1]`, "body must be a JSON object", ""},
		{"string", `"x"`, "body must be a JSON object", ""},
		{"word", `nul`, "body is not valid JSON: it ends at byte 3, in the middle of a value", ""},
		{"two values", `[1] 2`, "body is not valid JSON: something follows the object at byte 4", ""},
		{"tail", `{} x`, "body is not valid JSON: something follows the object at byte 3", ""},
		{
			"cut", `{"model": "tiny", `, "body is not valid JSON: it ends at byte 18, in the middle of " +
				"a value",
			"",
		},
		{
			"cut string", `{"model": "ti`,
			"body is not valid JSON: it ends at byte 13, in the middle of a value", "model",
		},
		{"no colon", `{"a" 1}`, "body is not valid JSON: unexpected character at byte 5", ""},
		{"trailing comma", `{"a":1,}`, "body is not valid JSON: unexpected character at byte 7", ""},
		{"no quotes", `{a:1}`, "body is not valid JSON: unexpected character at byte 1", ""},
		{
			"control", "{\"prompt\":\"a\nb\"}",
			"body is not valid JSON: raw control character in a string at byte 12; escape it", "prompt",
		},
		{
			"escape", `{"prompt":"\x"}`, "body is not valid JSON: unknown escape in a string at byte 12",
			"prompt",
		},
		{
			"hex", `{"prompt":"\u12g4"}`, "body is not valid JSON: unknown escape in a string at byte 15",
			"prompt",
		},
		{"zero", `{"n":01}`, "body is not valid JSON: malformed number at byte 5", "n"},
		{"plus", `{"n":+1}`, "body is not valid JSON: unexpected character at byte 5", "n"},
		{"point", `{"n":1.}`, "body is not valid JSON: malformed number at byte 7", "n"},
		{"zero id", `{"prompt":[1,02,3]}`, "body is not valid JSON: malformed number at byte 13", "prompt"},
		{"true", `{"stream":tru}`, "body is not valid JSON: unknown word at byte 10; there are true, " +
			"false and null", "stream"},
		{
			"NaN", `{"temperature":NaN}`,
			"body is not valid JSON: NaN or Infinity at byte 15; send a finite number or leave the field out",
			"temperature",
		},
		{
			"Infinity", `{"temperature":-Infinity}`,
			"body is not valid JSON: NaN or Infinity at byte 16; send a finite number or leave the field out",
			"temperature",
		},
		{"deep", `{"a":` + deep + `}`, "body is nested deeper than 64 levels", "a"},
		{"double", `{"model":"a","n":1,"model":"b"}`, `field "model" is there twice; send it once`, "model"},
		{"double, escaped", `{"n":1,"\u006e":2}`, `field "n" is there twice; send it once`, "n"},
		{
			"double, both escaped", `{"\u0061b":1,"a\u0062":2}`, `field "ab" is there twice; send it once`,
			"ab",
		},
		{"n", `{"n":129}`, "n must be at most 128", "n"},
		{"n, a million", `{"n":1000000}`, "n must be at most 128", "n"},
		{"n, float", `{"n":1.29e2}`, "n must be at most 128", "n"},
		{"n, huge", `{"n":1e999}`, "n must be at most 128", "n"},
		{"n, string", `{"n":" 1_000 "}`, "n must be at most 128", "n"},
		{"n, escaped string", `{"n":"\u0031\u0032\u0039"}`, "n must be at most 128", "n"},
		{"max_tokens", `{"max_tokens":2147483649}`, "max_tokens must be at most 2147483648", "max_tokens"},
		{
			"max_completion_tokens", `{"max_completion_tokens":1e10}`,
			"max_completion_tokens must be at most 2147483648", "max_completion_tokens",
		},
		{"stream", `{"stream":1}`, "stream must be true or false", "stream"},
		{"stream, string", `{"stream":"true"}`, "stream must be true or false", "stream"},
		{"model", `{"model":7}`, "model must be a string", "model"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := refused(t, Chat, tt.body)
			assert.Equal(t, tt.message, got.Message)
			assert.Equal(t, tt.message, got.Error())
			assert.Equal(t, tt.param, got.Param)
		})
	}
}

// RP10: a request of more than 1,024 sequences is refused with the field named.
func TestScanBoundsTheSequencesOfARequest(t *testing.T) {
	list := func(n int) string { return `{"n":8,"prompt":["a"` + strings.Repeat(`,"a"`, n-1) + `]}` }
	assert.Equal(t, 1024, scan(t, Completions, list(128)).Choices)
	got := refused(t, Completions, list(129))
	assert.Equal(t, [...]string{"n × prompts must be at most 1024", "prompt"},
		[...]string{got.Message, got.Param})
	tokens := `{"prompt":[[1]` + strings.Repeat(`,[1]`, maxSequences) + `]}`
	assert.Equal(t, "prompt", refused(t, Completions, tokens).Param)
}

func TestScanAcceptsWhatIsTheEnginesToJudge(t *testing.T) {
	deep := strings.Repeat("[", maxDepth-1) + strings.Repeat("]", maxDepth-1)
	for _, body := range []string{
		`{"a":` + deep + `}`, `{"n":0}`, `{"n":-3}`, `{"n":128}`, `{"n":"x"}`, `{"n":[1]}`, `{"n":1.5}`,
		`{"max_tokens":-1e999}`, `{"temperature":-1}`,
		`{"messages":7}`, `{"":1,"a":{"x":1,"x":2}}`, `{"A":1,"a":2}`, `{"\ud800":1,"\ud801":2}`,
		`{"stream_options":[1]}`, `{"stream_options":"x"}`,
	} {
		scan(t, Chat, body)
	}
}

// SP8: each bad shape is refused at once, and what is large but allowed passes unchanged.
func TestBodyLimits(t *testing.T) {
	distinct := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `,"k%d":0`, i)
		}
		return b.String()[1:]
	}
	// below the top level doubles are the engine's to judge
	more := func(n int) string { return strings.Repeat(`,"k":0`, n) }
	tests := []struct{ name, body, message string }{
		{
			"depth 10,000", `{"a":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
			"body is nested deeper than 64 levels",
		},
		{"depth 10,000, objects", strings.Repeat(`{"a":`, 10_000), "body is nested deeper than 64 levels"},
		{"1M keys", `{` + distinct(maxFields+1) + more(1_000_000) + `}`, "body has more than 1024 fields"},
		{
			"1M nested keys", `{"logit_bias":{"a":0` + more(1_000_000) + `}}`,
			"body has more than 262144 keys in all",
		},
		{"duplicate keys", `{"model":"a","model":"b"}`, `field "model" is there twice; send it once`},
		{"n 129", `{"n":129}`, "n must be at most 128"},
		{"n 10^6", `{"n":1000000}`, "n must be at most 128"},
		{"max_tokens 2^31 + 1", `{"max_tokens":2147483649}`, "max_tokens must be at most 2147483648"},
		{"NaN", `{"temperature":NaN}`, "body is not valid JSON: NaN or Infinity at byte 15; send a " +
			"finite number or leave the field out"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, route := range []Route{Completions, Chat} {
				assert.Equal(t, tt.message, refused(t, route, tt.body).Message)
			}
		})
	}
	// What is behind a limit is not read: here it is no JSON, and the refusal does not say so. So the time
	// that a refusal takes has a bound, however large the body is.
	const broken = "!]}"
	for body, message := range map[string]string{
		`{"a":` + strings.Repeat("[", maxDepth) + broken:  "body is nested deeper than 64 levels",
		`{` + distinct(maxFields+2) + broken:              "body has more than 1024 fields",
		`{"logit_bias":{"a":0` + more(maxKeys+1) + broken: "body has more than 262144 keys in all",
		`{"model":"a","model":"b"` + broken:               `field "model" is there twice; send it once`,
	} {
		assert.Equal(t, message, refused(t, Chat, body).Message)
	}
	body := []byte(`{"max_tokens":1000000000}`)
	assert.Equal(t, body, scan(t, Chat, string(body)).Spliced(nil, body), "10^9 passes: nothing is clamped")
	scan(t, Chat, `{`+distinct(maxFields)+`}`)
	scan(t, Chat, `{"logit_bias":{"a":0`+more(maxKeys-2)+`}}`)
}

func TestScanDoesNotAllocate(t *testing.T) {
	bodies := []string{
		`{"model":"ti\u006ey","messages":[{"role":"user","content":"hi\n"}],"\u006e":2,"stream":true,` +
			`"stream_options":{"include_usage":true},"bootstrap_room":1}`,
		`{"model":"tiny","prompt":[[1,2],[3]],"max_tokens":5}`,
	}
	for _, text := range bodies {
		body := []byte(text)
		var b Body
		dst := make([]byte, 0, 4096)
		assert.Zero(t, testing.AllocsPerRun(100, func() {
			if err := b.Scan(Completions, body); err != nil {
				t.Error(err)
			}
			dst = b.Spliced(dst[:0], body)
		}))
	}
}

func TestSpliced(t *testing.T) {
	tests := map[string]string{
		`{"a":1}`:                                `{"a":1}`,
		`{"routed_dp_rank":1}`:                   `{}`,
		`{ "routed_dp_rank" : 1 }`:               `{  }`,
		`{"routed_dp_rank":1,"a":2}`:             `{"a":2}`,
		`{"a":1,"routed_dp_rank":1}`:             `{"a":1}`,
		`{"a":1 , "routed_dp_rank":1 }`:          `{"a":1 }`,
		`{"a":1, "data_parallel_rank":1, "b":2}`: `{"a":1, "b":2}`,
		`{"a":1,"bootstrap_host":"x","bootstrap_port":1,"bootstrap_room":2,"b":3}`: `{"a":1,"b":3}`,
		`{"bootstrap_room":1,"kv_transfer_params":{"x":[1,"}"]}}`:                  `{}`,
		`{"bootstrap_room":1,"a":1,"disagg_prefill_dp_rank":2}`:                    `{"a":1}`,
		`{"a":1,"bootstrap_anything":1,"bootstrap_more":1}`:                        `{"a":1}`,
		`{"\u0072outed_dp_rank":1,"a":{"routed_dp_rank":2}}`: `{"a":{"routed_dp_r` +
			`ank":2}}`,
		`{"Routed_dp_rank":1,"routed_dp_rank2":2,"x-data-parallel-rank":3}`: `{"Routed_dp_rank":` +
			`1,"routed_dp_rank2":2,"x-data-parallel-rank":3}`,
	}
	for body, want := range tests {
		b := scan(t, Completions, body)
		assert.Equal(t, want, string(b.Spliced(nil, []byte(body))), body)
		if len(b.Strip.Spans) > 0 {
			assert.Equal(t, "kept"+want, string(b.Spliced([]byte("kept"), []byte(body))), body)
		}
	}
}

func TestAppendField(t *testing.T) {
	tests := map[string]string{
		`{}`: `{"rank":3}`, `{ }`: `{"rank":3}`, `{"a":1}`: `{"a":1,"rank":3}`,
		" {\"a\":{}\n} \n": " {\"a\":{},\"rank\":3} \n", `{"a":"{"}`: `{"a":"{","rank":3}`,
	}
	for body, want := range tests {
		got := AppendField(nil, []byte(body), "rank", []byte("3"))
		assert.Equal(t, want, string(got), body)
		scan(t, Completions, string(got))
	}
}

// drawObject is any object: members in order, keys of ours among them, odd white space, some keys escaped.
func drawObject(t *rapid.T) (body string, keys []string) {
	space := rapid.SampledFrom([]string{"", "", " ", "\n\t", "  \r\n"})
	key := rapid.SampledFrom([]string{
		"a", "model2", "routed_dp_rank", "data_parallel_rank", "bootstrap_room",
		"bootstrap_host", "kv_transfer_params", "disagg_prefill_dp_rank", "z", "",
	})
	value := rapid.SampledFrom([]string{`1`, `"x,}]"`, `{"b":[1,2]}`, `[]`, `null`, `-1.5e3`, `"\"\\"`})
	keys = rapid.SliceOfDistinct(key, rapid.ID[string]).Draw(t, "keys")
	var out strings.Builder
	sp := func() string { return space.Draw(t, "space") }
	out.WriteString(sp() + "{" + sp())
	for i, k := range keys {
		if i > 0 {
			out.WriteString("," + sp())
		}
		written := k
		if len(k) > 0 && rapid.Bool().Draw(t, "escape") {
			written = fmt.Sprintf(`\u%04x`, k[0]) + k[1:]
		}
		out.WriteString(`"` + written + `"` + sp() + ":" + sp() + value.Draw(t, "value") + sp())
	}
	out.WriteString("}" + sp())
	return out.String(), keys
}

// What is left after splicing is the same object without our members: order, spelling and values as they
// were.
func TestSplicedKeepsTheRest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		body, _ := drawObject(t)
		checkSplice(t, []byte(body))
	})
}

// checkSplice scans, splices and compares member by member.
func checkSplice(t require.TestingT, body []byte) {
	var b, again Body
	require.NoError(t, b.Scan(Detokenize, body))
	before := bytes.Clone(body)
	got := b.Spliced(nil, body)
	require.Equal(t, before, body, "the body itself is not touched")
	require.NoError(t, again.Scan(Detokenize, got), "%s → %s", body, got)
	require.Empty(t, again.Strip.Spans)
	var want []rawMember
	for _, m := range rawMembers(t, body) {
		if !Reserved([]byte(m.key)) {
			want = append(want, m)
		}
	}
	require.Equal(t, want, rawMembers(t, got))
}

type rawMember struct{ key, value string }

// rawMembers reads an object with the standard library: keys decoded, values as written.
func rawMembers(t require.TestingT, body []byte) (out []rawMember) {
	d := json.NewDecoder(bytes.NewReader(body))
	_, err := d.Token()
	require.NoError(t, err)
	for d.More() {
		k, err := d.Token()
		require.NoError(t, err)
		var v json.RawMessage
		require.NoError(t, d.Decode(&v))
		key, _ := k.(string)
		out = append(out, rawMember{key, string(v)})
	}
	return out
}

// plainByBytes is the rule: the index of the first quote, backslash or control character from i on.
func plainByBytes(b []byte, i int) int {
	for i < len(b) && b[i] >= ' ' && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}

// RC1: TestPlainMatchesTheByteLoop draws runs that end in the first words, in a block and behind many, of
// ASCII and of other text.
func TestPlainMatchesTheByteLoop(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		filler := rapid.SampledFrom([]byte{'x', ' ', '!', '#', 0x7f, 0x80, 0xa0, 0xa2, 0xdc, 0xff})
		alphabet := rapid.SampledFrom([]byte{
			'a', ' ', 0x7f, 0x80, 0xff, 0xa2, 0xdc, '!', '#', '[', ']', '"',
			'\\', 0, 0x1f,
		})
		var b []byte
		for range rapid.IntRange(1, 4).Draw(t, "runs") {
			b = append(b, bytes.Repeat([]byte{filler.Draw(t, "filler")}, rapid.IntRange(0, 200).
				Draw(t, "run"))...)
			b = append(b, rapid.SliceOfN(alphabet, 0, 12).Draw(t, "bytes")...)
		}
		from := rapid.IntRange(0, len(b)).Draw(t, "from")
		assert.Equal(t, plainByBytes(b, from), plain(b, from), "%q", b)
	})
}

// RC1: each byte value at each place of a run that is longer than a block and the words before it, in ASCII
// and behind other text, ends the run or does not.
func TestPlainFindsEveryByteAtEveryPlace(t *testing.T) {
	const size = 16 + 3*block + 9
	for _, around := range []byte{'x', '!', '#', ']', ' ', 0x80, 0xa2, 0xff} {
		for place := range size {
			b := bytes.Repeat([]byte{around}, size)
			for c := range 256 {
				b[place] = byte(c)
				if want, got := plainByBytes(b, 0), plain(b, 0); want != got {
					t.Fatalf("byte %#x at %d among %#x: %d, not %d", c, place, around, got, want)
				}
			}
		}
	}
}

// TestForgetKeepsNothingOfTheBody: what was scanned can be freed while the flags and numbers are still there.
func TestForgetKeepsNothingOfTheBody(t *testing.T) {
	var b Body
	text := []byte(`{"model":"m","user":"u","cache_salt":"c","stream":true,"max_tokens":3,` +
		`"m\u0065ssages":[],"x":"` + strings.Repeat("y", 1<<20) + `"}`)
	alive := weak.Make(&text[0])
	require.NoError(t, b.Scan(Chat, text))
	text = nil // the garbage collector must not find it here
	b.Forget()
	runtime.GC()
	assert.Nil(t, alive.Value())
	assert.Equal(t, []any{true, true, int64(3), 1}, []any{b.HasModel, b.Stream, b.MaxTokens, b.Choices})
}
