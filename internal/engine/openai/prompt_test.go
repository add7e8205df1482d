package openai

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func scanned(t *testing.T, r Route, body string) *Body {
	t.Helper()
	var b Body
	require.NoError(t, b.Scan(r, []byte(body)))
	return &b
}

func TestText(t *testing.T) {
	tests := []struct {
		name  string
		route Route
		body  string
		want  string
	}{
		{
			"messages", Chat, `{"messages":[{"role":"user","content":"hi"}]}`,
			`[{"role":"user","content":"hi"}`,
		},
		{
			"messages with white space", Chat, "{\"messages\": [ {\"role\":\"user\"}\n ] }",
			`[ {"role":"user"}`,
		},
		{"no messages", Chat, `{"model":"m"}`, ``},
		{"empty messages", Chat, `{"messages":[ ]}`, ``},
		{"null messages", Chat, `{"messages":null}`, ``},
		{"messages are no list", Chat, `{"messages":{"role":"user"}}`, ``},
		{"prompt is not a chat's", Chat, `{"prompt":"x"}`, ``},
		{"a string as written", Completions, `{"prompt":"a\n\u0062"}`, `a\n\u0062`},
		{"empty string", Completions, `{"prompt":""}`, ``},
		{"strings: the first", Completions, `{"prompt":[ "ab" , "c"]}`, `ab`},
		{"ids", Completions, `{"prompt":[1, 2]}`, `[1, 2`},
		{"lists of ids: the first", Completions, `{"prompt":[[1,2] ,[3]]}`, `[1,2`},
		{"a number is none", Completions, `{"prompt":12}`, ``},
		{"mixed is whole", Completions, `{"prompt":["a",1]}`, `["a",1`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := scanned(t, tt.route, tt.body)
			assert.Equal(t, tt.want, string(b.Text([]byte(tt.body))))
		})
	}
}

// A turn that goes on begins with the turn before: what prefixes are found by.
func TestTextOfNextTurnBeginsWithThisOne(t *testing.T) {
	turn := `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"a"}`
	first, second := turn+`]}`, turn+`,{"role":"assistant","content":"b"},{"role":"user","content":"c"}]}`
	one := scanned(t, Chat, first).Text([]byte(first))
	two := scanned(t, Chat, second).Text([]byte(second))
	assert.True(t, bytes.HasPrefix(two, one), "%s | %s", one, two)
}

func TestTokenIDs(t *testing.T) {
	tests := []struct {
		prompt string
		want   []uint32
		ok     bool
	}{
		{`[1,2,3]`, []uint32{1, 2, 3}, true},
		{"[ 0 ,\n4294967295 ]", []uint32{0, 4294967295}, true},
		{`[[7,8],[9]]`, []uint32{7, 8}, true},
		{`[1,12,123,1234,12345,123456,1234567,12345678,123456789,9,98,987,9876,98765,987654,9876543,` +
			`98765432]`, []uint32{
			1, 12, 123, 1234, 12345, 123456, 1234567, 12345678, 123456789, 9, 98, 987, 9876, 98765, 987654,
			9876543, 98765432,
		}, true},
		{`[4294967296]`, nil, false},
		{`[-1]`, nil, false},
		{`[1.5]`, nil, false},
		{`[1e3]`, nil, false},
		{`[]`, nil, false},
		{`"1"`, nil, false},
		{`["1"]`, nil, false},
	}
	for _, tt := range tests {
		t.Run(tt.prompt, func(t *testing.T) {
			body := `{"prompt":` + tt.prompt + `}`
			got, ok := scanned(t, Completions, body).TokenIDs(nil, []byte(body))
			assert.Equal(t, tt.ok, ok)
			if tt.ok {
				assert.Equal(t, tt.want, got)
			}
		})
	}
}

// Every number reads as itself, wherever it stands.
func TestAppendIDs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOfN(rapid.OneOf(rapid.Uint32(), rapid.Uint32Max(200_000),
			rapid.Uint32Max(9_999_999)), 1, 50).Draw(t, "ids")
		raw, err := json.Marshal(want)
		require.NoError(t, err)
		got, ok := appendIDs(nil, raw)
		require.True(t, ok)
		require.Equal(t, want, got)
	})
}

func BenchmarkTokenIDs(b *testing.B) {
	raw := []byte("[" + strings.Repeat("15339,", 400<<10/6) + "7]")
	var ids []uint32
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		ids, _ = appendIDs(ids[:0], raw)
	}
}

func TestUserAndCacheSalt(t *testing.T) {
	b := scanned(t, Chat, `{"user":"a\u0062","cache_salt":"s\"1","tools":[{"x":1}],"messages":[]}`)
	assert.Equal(t, "ab", string(b.User))
	assert.Equal(t, `s"1`, string(b.CacheSalt))
	assert.NotZero(t, b.Tools)
	b = scanned(t, Chat, `{"user":7,"cache_salt":null,"tools":null}`)
	assert.Nil(t, b.User)
	assert.Nil(t, b.CacheSalt)
	assert.Zero(t, b.Tools)
}

func TestMedia(t *testing.T) {
	for content, want := range map[string]bool{
		`"look: \"image_url\" is a key"`:                              false,
		`[{"type":"text","text":"hi"}]`:                               false,
		`[{"type":"image_url","image_url":{"url":"data:,x"}}]`:        true,
		`[{"image_url":"data:,x"}]`:                                   true,
		`[{"type":"input_audio","input_audio":{"data":"x"}}]`:         true,
		`[{"type":"video_url","video_url":{"url":"http://x/a.mp4"}}]`: true,
		`[{"type":"image_embeds","image_embeds":"x"}]`:                true,
	} {
		body := `{"messages":[{"role":"user","content":` + content + `}]}`
		assert.Equal(t, want, scanned(t, Chat, body).Media([]byte(body)), content)
	}
}

func TestTokenizeBody(t *testing.T) {
	for _, tt := range []struct {
		route      Route
		body, want string
	}{
		{
			Chat, `{"stream":true,"tools":[{"a":1}],"model":"m","messages":[1],` +
				`"chat_template_kwargs":{"k":false},"seed":3}`,
			`{"model":"m","messages":[1],"tools":[{"a":1}],"chat_template_kwargs":{"k":false}}`,
		},
		{
			Completions, `{"prompt":["a","b"],"add_special_tokens":false}`,
			`{"prompt":"a","add_special_tokens":false}`,
		},
		{Completions, `{"model":null,"prompt":"a"}`, `{"prompt":"a"}`},
		{Completions, `{"model":"m"}`, ``},
		{Generate, `{"sampling_params":{},"text":"a"}`, `{"prompt":"a"}`},
	} {
		got := scanned(t, tt.route, tt.body).TokenizeBody(nil, []byte(tt.body))
		assert.Equal(t, tt.want, string(got))
	}
}

// Two questions have one key exactly when they are one question.
func TestTokenizeKey(t *testing.T) {
	bodies := []string{
		`{"model":"m","messages":[1]}`, `{"messages":[1]}`, `{"model":"n","messages":[1]}`,
		`{"model":"m","messages":[2]}`,
		`{"model":"m","messages":[1],"tools":[1]}`, `{"model":"m","messages":[1],"chat_template":[1]}`,
		`{"model":"m","messages":[1],"tools":[2]}`,
	}
	seen := map[[2]uint64]string{}
	for _, body := range bodies {
		hi, lo := scanned(t, Chat, body).TokenizeKey([]byte(body), 1)
		require.NotZero(t, hi)
		require.Empty(t, seen[[2]uint64{hi, lo}], body)
		seen[[2]uint64{hi, lo}] = body
	}
	more := `{"seed":3,"model":"m","stream":true,"messages":[1],"max_tokens":5}`
	hi, lo := scanned(t, Chat, more).TokenizeKey([]byte(more), 1)
	assert.Equal(t, bodies[0], seen[[2]uint64{hi, lo}], "what is not asked makes no difference")
	for _, member := range []string{
		`"documents":[]`, `"reasoning_effort":"low"`,
		`"truncate_prompt_tokens":8`, `"tool_choice":"none"`,
	} {
		body := `{"messages":[{"role":"user"}],` + member + `}`
		b := scanned(t, Chat, body)
		hi, lo := b.TokenizeKey([]byte(body), 1)
		assert.Zero(t, hi|lo, "/tokenize does not take %s", member)
		require.Len(t, b.Beside, 1)
		assert.Equal(t, member, body[b.Beside[0].Start:b.Beside[0].End])
	}
	assert.Empty(t, scanned(t, Chat,
		`{"documents":null,"reasoning_effort":null,"tool_choice":"auto","truncate_prompt_tokens":null}`).
		Beside)
	hi, _ = scanned(t, Chat, `{}`).TokenizeKey([]byte(`{}`), 1)
	assert.Zero(t, hi)
	for body, want := range map[string]bool{
		`{"text":"a"}`: true, `{"text":"a","image_data":null}`: true, `{"text":"a","image_data":"x"}`: false,
	} {
		hi, _ = scanned(t, Generate, body).TokenizeKey([]byte(body), 1)
		assert.Equal(t, want, hi != 0, body)
	}
}

func TestParseTokenizeOfCapturedAnswers(t *testing.T) {
	for file, want := range map[string][]uint32{
		"tokenize.json":      {309, 351, 353, 355},
		"tokenize_strs.json": {309, 351, 353, 355},
		"tokenize_chat.json": {1, 311, 201, 363, 360, 2, 201, 1, 67, 304, 364, 201},
	} {
		b, err := os.ReadFile("testdata/tokenize/" + file)
		require.NoError(t, err)
		got, ok := ParseTokenize(nil, b)
		assert.True(t, ok, file)
		assert.Equal(t, want, got, file)
	}
	for _, bad := range []string{
		``, `[]`, `{}`, `{"tokens":null}`, `{"tokens":["a"]}`, `{"tokens":[1]`,
		`{"tokens":[1]} x`, `{"tokens":[-1]}`, `{"a":{"tokens":[1]}}`,
	} {
		_, ok := ParseTokenize(nil, []byte(bad))
		assert.False(t, ok, bad)
	}
}

// FuzzPrompt: what is read of an accepted prompt is what encoding/json reads, and the question to a tokenizer
// is JSON.
func FuzzPrompt(f *testing.F) {
	addBodies(f)
	f.Add(uint8(Completions), []byte(`{"prompt":[[1,2],[3]],"cache_salt":"x","model":"a"}`))
	f.Add(uint8(Chat), []byte(`{"messages":[{"content":"a"} ],"tools":[1],"user":"u\n"}`))
	f.Fuzz(func(t *testing.T, route uint8, body []byte) {
		var b Body
		r := Route(route % uint8(NumRoutes))
		if b.Scan(r, body) != nil {
			return
		}
		text := b.Text(body)
		require.True(t, len(text) == 0 || bytes.Contains(body, text))
		b.Media(body)
		if ask := b.TokenizeBody(nil, body); len(ask) > 0 && r.Generates() {
			require.True(t, json.Valid(ask), "%q", ask)
		}
		ids, ok := b.TokenIDs(nil, body)
		var whole struct {
			Prompt json.RawMessage `json:"prompt"`
		}
		if !ok || r != Completions || bytes.Count(bytes.ToLower(body), []byte("prompt")) != 1 ||
			bytes.Contains(body, []byte(`\u`)) || json.Unmarshal(body, &whole) != nil {
			return
		}
		var want []uint32
		var lists [][]uint32
		if json.Unmarshal(whole.Prompt, &lists) == nil && len(lists) > 0 {
			want = lists[0]
		} else {
			require.NoError(t, json.Unmarshal(whole.Prompt, &want))
		}
		require.Len(t, ids, len(want))
		for i := range want {
			require.Equal(t, want[i], ids[i])
		}
	})
}

// FuzzParseTokenize: never panics, and takes no more than encoding/json would.
func FuzzParseTokenize(f *testing.F) {
	f.Add([]byte(`{"count":2,"tokens":[1,2]}`))
	f.Add([]byte(`{"tokens":[4294967296]}`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if _, ok := ParseTokenize(nil, answer); ok {
			require.True(t, json.Valid(answer))
		}
	})
}

func TestPromptAllocatesNothing(t *testing.T) {
	body := []byte(`{"model":"m","tools":[1],"user":"u","cache_salt":"s","prompt":[` +
		strings.TrimSuffix(strings.Repeat("123,", 1000), ",") + `]}`)
	var b Body
	var ids []uint32
	var ask []byte
	assert.Zero(t, testing.AllocsPerRun(10, func() {
		if b.Scan(Completions, body) == nil {
			ids, _ = b.TokenIDs(ids[:0], body)
			ask = b.TokenizeBody(ask[:0], body)
			b.Text(body)
			b.Media(body)
		}
	}))
	assert.Len(t, ids, 1000)
}

func TestHasMedia(t *testing.T) {
	for _, c := range []struct {
		text string
		want bool
	}{
		{`[{"role":"user","content":"the image_url of an input_audio, _ and __"}]`, false},
		{`[{"content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]`, true},
		{`[{"content":[{"type":"input_audio","input_audio":{"data":""}}]}]`, true},
		{`[{"content":[{"type":"audio_embeds"}]}]`, true},
		{`[{"content":[{"image_pil":""}]}]`, true},
		{`[{"content":"an_audio","x_pil":1}]`, false},
		{``, false},
		{`_`, false},
	} {
		assert.Equal(t, c.want, HasMedia([]byte(c.text)), c.text)
	}
}
