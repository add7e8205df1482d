package openai

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// slowEventEnd is the dumb oracle: it looks at every prefix line by line.
func slowEventEnd(b []byte) int {
	for n := 1; n <= len(b); n++ {
		p := string(b[:n])
		if strings.HasSuffix(p, "\n\n") || strings.HasSuffix(p, "\n\r\n") {
			return n
		}
	}
	return -1
}

func TestEventEndAgreesWithOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := []byte(rapid.StringOfN(rapid.SampledFrom([]rune("ab:\r\n")), 0, 40, -1).Draw(t, "bytes"))
		assert.Equal(t, slowEventEnd(b), EventEnd(b, 0))
		// Searching again from where an earlier call gave up finds the same end.
		cut := rapid.IntRange(0, len(b)).Draw(t, "cut")
		if EventEnd(b[:cut], 0) < 0 {
			assert.Equal(t, slowEventEnd(b), EventEnd(b, cut))
		}
	})
}

func TestEventData(t *testing.T) {
	for in, want := range map[string]string{
		"data: {\"a\":1}\n\n":            `{"a":1}`,
		"data:{}\r\n\r\n":                `{}`,
		"event: x\ndata: 1\nid: 3\n\n":   "1",
		"\n\ndata: [DONE]\n\n":           "[DONE]",
		": comment\n\n":                  "",
		"data: {\r\nid: 3\r\ndata:}\r\n": "{\n}",
		"data: cut off, no end of line":  "cut off, no end of line",
	} {
		assert.Equal(t, want, string(EventData([]byte(in))), in)
	}
}

func TestWatcherKinds(t *testing.T) {
	cases := []struct {
		name, data string
		want       EventKind
	}{
		{"role", `{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,` +
			`"finish_reason":null}],"prompt_token_ids":[1,2]}`, EventEmpty},
		{"empty delta", `{"choices":[{"index":0,"delta":{"content":""},"finish_reason":null,` +
			`"token_ids":null}]}`, EventEmpty},
		{"empty text", `{"choices":[{"index":0,"text":"","finish_reason":null}]}`, EventEmpty},
		{"text", `{"choices":[{"index":0,"text":"a","finish_reason":null}]}`, EventContent},
		{"delta", `{"choices":[{"index":0,"delta":{"content":"a"}}]}`, EventContent},
		{
			"reasoning", `{"choices":[{"delta":{"role":"assistant","reasoning_content":"hm",` +
				`"content":null}}]}`,
			EventContent,
		},
		{"tool call", `{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x"}]}}]}`, EventContent},
		{"no tool call", `{"choices":[{"delta":{"tool_calls":[]}}]}`, EventEmpty},
		{"ids", `{"choices":[{"delta":{"content":""},"token_ids":[7]}]}`, EventContent},
		{"finish", `{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}`, EventFinish},
		{"spaced finish", `{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}`, EventFinish},
		{"abort", `{"choices":[{"index":0,"text":"x","finish_reason":"abort"}]}`, EventAbort},
		{"talks of abort", `{"choices":[{"index":0,"text":"\"finish_reason\":\"abort\"",` +
			`"finish_reason":null}]}`, EventContent},
		{"error", `{"error": {"message": "m", "code": 500}}`, EventError},
		{"spaced error", ` { "error" : "boom" }`, EventError},
		{"old error", `{"object":"error","message":"m","code":400}`, EventError},
		{"late error", `{"id":"x","choices":[],"error":{"message":"m"}}`, EventError},
		{"null error", `{"error":null,"choices":[{"text":"a"}]}`, EventContent},
		{"usage", `{"choices":[],"usage":{"prompt_tokens":1}}`, EventOther},
		{"done", `[DONE]`, EventDone},
		{"no json", `hello`, EventContent},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var w Watcher
			w.Reset(1)
			assert.Equal(t, c.want, w.Event([]byte("data: "+c.data+"\n\n")))
		})
	}
}

func TestWatcherOtherLines(t *testing.T) {
	var w Watcher
	w.Reset(1)
	assert.Equal(t, EventOther, w.Event([]byte(": ping\n\n")))
	assert.Equal(t, EventOther, w.Event([]byte("\n\n")))
	w.Begun()
	assert.Equal(t, EventContent,
		w.Event([]byte("data: {\"choices\":[{\"text\":\"\",\"finish_reason\":null}]}\n\n")),
		"after the beginning nobody tells them apart")
}

func TestWatcherCompleteNeedsEveryChoice(t *testing.T) {
	var w Watcher
	w.Reset(2)
	finish := func(i string) {
		w.Event([]byte(`data: {"choices":[{"index":` + i + `,"finish_reason":"stop"}]}` + "\n\n"))
	}
	finish("1")
	assert.True(t, w.Finishing())
	finish("1")
	assert.False(t, w.Complete(), "the same choice twice")
	finish("0")
	assert.True(t, w.Complete())
	w.Reset(1)
	assert.False(t, w.Complete())
	w.Blind()
	assert.True(t, w.Complete())
}

func TestWatcherManyChoicesInOneChunk(t *testing.T) {
	var w Watcher
	w.Reset(2)
	w.Begun()
	kind := w.Event([]byte(`data: {"choices":[{"index":0,"finish_reason":null},{"index":1,` +
		`"finish_reason":"stop"}]}` + "\n\n"))
	assert.Equal(t, EventFinish, kind)
	assert.False(t, w.Complete())
}

func TestWatcherAllocatesNothing(t *testing.T) {
	var w Watcher
	w.Reset(2)
	role := []byte(`data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},` +
		`"finish_reason":null}]}` + "\n\n")
	last := []byte(`data: {"choices":[{"index":1,"delta":{"content":"a"},"finish_reason":"stop"}]}` + "\n\n")
	w.Event(last)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		w.Reset(2)
		w.Event(role)
		w.Begun()
		w.Event(role)
		w.Event(last)
	}))
}

// TestWatcherOnCapturedStreams plays what a real engine sent: every stream ends complete, with [DONE] last.
func TestWatcherOnCapturedStreams(t *testing.T) {
	files, err := filepath.Glob("testdata/sse/*.resp.http")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			kinds, w := watchFile(t, file, choicesOf(file))
			require.NotEmpty(t, kinds)
			assert.Equal(t, EventDone, kinds[len(kinds)-1])
			if strings.Contains(file, "err_") || strings.Contains(file, "queue_") {
				assert.Equal(t, []EventKind{EventError, EventDone}, kinds)
				assert.False(t, w.Complete())
				return
			}
			assert.True(t, w.Complete())
		})
	}
}

func choicesOf(file string) int {
	if strings.Contains(file, "n2") || strings.Contains(file, "two_prompts") {
		return 2
	}
	return 1
}

func watchFile(t *testing.T, file string, choices int) ([]EventKind, *Watcher) {
	t.Helper()
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	var body bytes.Buffer
	_, err = body.ReadFrom(resp.Body)
	require.NoError(t, err)
	w := &Watcher{}
	w.Reset(choices)
	var kinds []EventKind
	for b := body.Bytes(); len(b) > 0; {
		n := EventEnd(b, 0)
		require.Positive(t, n)
		kinds = append(kinds, w.Event(b[:n]))
		b = b[n:]
	}
	return kinds, w
}

func TestParseError(t *testing.T) {
	cases := []struct {
		in   string
		want EngineError
	}{
		{
			`{"error":{"message":"m","type":"Service Unavailable","param":null,"code":503}}`,
			EngineError{Status: 503, Type: "Service Unavailable", Message: "m", Length: 1},
		},
		{
			`{"error":{"message":"m","type":"t","code":"400"}}`,
			EngineError{Type: "t", Message: "m", Length: 1},
		},
		{`{"error":{"message":"m","type":"t","code":200}}`, EngineError{Type: "t", Message: "m", Length: 1}},
		{`{"error":"Unauthorized"}`, EngineError{Message: "Unauthorized", Length: 12}},
		{
			`{"object":"error","message":"m","type":"BadRequestError","param":"n","code":400}`,
			EngineError{Status: 400, Type: "BadRequestError", Message: "m", Param: "n", Length: 1},
		},
		{
			`{"error":{"message":"m","param":{"a":1},"code":503}}`,
			EngineError{Status: 503, Message: "m", Length: 1},
		},
		{`{"detail":"Not Found"}`, EngineError{Message: "Not Found", Length: 9}},
		{`nonsense`, EngineError{Message: "nonsense", Length: 8, IsBare: true}},
		{`{"error":null}`, EngineError{}},
	}
	for _, c := range cases {
		assert.Equal(t, c.want, ParseError([]byte(c.in)), c.in)
	}
	long := ParseError([]byte(`{"error":"` + strings.Repeat("ä", 1000) + `"}`))
	assert.LessOrEqual(t, len(long.Message), maxErrorText+len("…"))
}

// TestOnlySentencesOfEnginesAreKnown: numbers may differ, words may not.
func TestOnlySentencesOfEnginesAreKnown(t *testing.T) {
	for message, known := range map[string]bool{
		"Unauthorized": true, "Unauthorized: sesame": false, "": false, "unauthorized": false,
		"n must be at least 1, got -3.": true, "n must be at least 1, got sesame.": false,
		"n must be at least 1, got .": false,
		"temperature must be non-negative, got -0.5. (parameter=temperature, value=-0.5)": true,
		"EngineCore encountered an issue. See stack trace (above) for the root cause.":    true,
		"EngineCore encountered an issue. prompt: sesame":                                 false,
		"This model's maximum context length is 2048 tokens. However, your prompt contains 5000 input " +
			"tokens, which exceeds this limit even without any output tokens. Please reduce the length of " +
			"the input prompt. (parameter=input_tokens, value=5000)": true,
	} {
		e := EngineError{Message: message}
		assert.Equal(t, known, e.IsKnown(), message)
	}
	e := EngineError{Type: "sesame", Param: "open sesame"}
	assert.Empty(t, e.KnownType()+e.KnownParam())
	e = EngineError{Type: "BadRequestError", Param: "max_tokens"}
	assert.Equal(t, "BadRequestError max_tokens", e.KnownType()+" "+e.KnownParam())
}

func TestAborted(t *testing.T) {
	assert.True(t, Aborted([]byte(`{"choices":[{"index":0,"text":"a","finish_reason": "abort"}]}`)))
	assert.False(t, Aborted([]byte(`{"choices":[{"index":0,"text":"say \"abort\"",`+
		`"finish_reason":"stop"}],"x":"abort"}`)))
	assert.False(t, Aborted([]byte(`{"choices":[{"finish_reason":"stop"}]}`)))
}

// FuzzSSE: however the bytes are cut, the same events come out; the classifier never panics; and what it says
// of a chunk with one plain choice agrees with encoding/json.
func FuzzSSE(f *testing.F) {
	f.Add([]byte("data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\ndata: "+
		"[DONE]\n\n"), 7)
	f.Add([]byte("data: {\"error\": {\"message\": \"m\", \"code\": 500}}\n\n"), 1)
	f.Add([]byte(": c\r\n\r\ndata:{\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}"+
		"\r\n\r\n"), 3)
	f.Add([]byte("data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\ndata: {\"usage\":{}}"), 40)
	f.Fuzz(func(t *testing.T, b []byte, step int) {
		assert.Equal(t, split(b, len(b)), split(b, step))
		var w Watcher
		w.Reset(1)
		for _, e := range split(b, len(b)) {
			checkAgainstJSON(t, w.Event([]byte(e)), EventData([]byte(e)))
		}
		ParseError(b)
		Aborted(b)
	})
}

// split feeds b in pieces of step bytes and collects the whole events.
func split(b []byte, step int) []string {
	var out []string
	searched := 0
	for end := 0; end < len(b); {
		end = min(end+max(step%64, 1), len(b))
		for {
			n := EventEnd(b[:end], searched)
			if n < 0 {
				searched = end
				break
			}
			out = append(out, string(b[:n]))
			b, end, searched = b[n:], end-n, 0
		}
	}
	return out
}

func checkAgainstJSON(t *testing.T, got EventKind, data []byte) {
	t.Helper()
	var c struct {
		Choices []struct {
			Index  *int    `json:"index"`
			Text   *string `json:"text"`
			Finish *string `json:"finish_reason"`
		} `json:"choices"`
	}
	plain := !bytes.ContainsAny(data, "\\") && bytes.Count(data, []byte(`"choices"`)) == 1 &&
		bytes.Count(data, []byte(`"`)) <= 12
	if !plain || json.Unmarshal(data, &c) != nil || len(c.Choices) != 1 || got == EventError {
		return
	}
	if f := c.Choices[0].Finish; f != nil && bytes.Count(data, finishKey) == 1 &&
		bytes.Contains(data, []byte(`"choices":[{`)) {
		want := EventFinish
		if *f == "abort" {
			want = EventAbort
		}
		if *f != "" {
			assert.Equal(t, want, got, string(data))
		}
	}
}

func BenchmarkWatcherEvent(b *testing.B) {
	event := []byte(`data: {"id":"chatcmpl-req-fixed-1","object":"chat.completion.chunk",` +
		`"created":1795230441,"model":"tiny","choices":[{"index":0,"delta":{"content":" over"},` +
		`"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	var w Watcher
	w.Reset(1)
	w.Begun()
	b.ReportAllocs()
	b.SetBytes(int64(len(event)))
	for b.Loop() {
		w.Event(event[:EventEnd(event, 0)])
	}
}
