package loadgen

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// captured returns the answer in a file of testdata.
func captured(t *testing.T, name string) (*http.Response, []byte) {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".resp.http")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(text)), nil)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp, body
}

// summarizeKinds returns the run-length form of the events of body, like "role 1, token 8, finish 1, usage 1,
// done 1".
func summarizeKinds(t *testing.T, body []byte) string {
	t.Helper()
	names := [...]string{"token", "role", "usage", "error", "done", "finish", "abort"}
	var out []string
	var cut splitter
	require.NoError(t, cut.feed(body, func(data []byte) { out = append(out, names[classify(data)]) }))
	return strings.Join(out, " ")
}

func TestClassifyCaptures(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"chat_stream_usage":            "role token token token token token finish usage done",
		"cmpl_stream_usage_cont":       "token token finish usage done",
		"err_logprobs_too_many_stream": "error done",
	} {
		_, body := captured(t, name)
		assert.Equal(t, want, summarizeKinds(t, body), name)
	}
}

func TestClassify(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]eventKind{
		`{"choices":[{"index":0,"delta":{"content":""},` +
			`"finish_reason":null}]}`: tokenEvent,
		`{"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},` +
			`"finish_reason":null}]}`: tokenEvent,
		`{"choices":[{"index":0,"delta":{"role":"assistant","content":null},` +
			`"finish_reason":null}]}`: roleEvent,
		`{"choices":[{"index":0,` +
			`"delta":{"role":"assistant"}}]}`: roleEvent,
		`{"choices":[{"index":0,"delta":{"content":"say ` +
			`\"finish_reason\":\"stop\""}}]}`: tokenEvent,
		`{"choices":[{"index":0,"delta":{},` +
			`"finish_reason":"stop"}]}`: finishEvent,
		`{"choices":[{"index":0,"text":"",` +
			`"finish_reason":"abort"}]}`: abortEvent,
		`{"choices":[],` +
			`"usage":{"prompt_tokens":1}}`: usageEvent,
		`{"choices":[{"text":"a"}],` +
			`"usage":{"prompt_tokens":1}}`: tokenEvent,
		`{"choices":[{"text":"a"}],` +
			`"usage":null}`: tokenEvent,
		`{"error": {"message":"x"}}`: errorEvent,
		`[DONE]`:                     doneEvent,
	} {
		assert.Equal(t, want, classify([]byte(text)), text)
		spaced := strings.NewReplacer(":", ": ", ",", ", ").Replace(text)
		assert.Equal(t, want, classify([]byte(spaced)), spaced)
	}
}

func TestParseUsageOfCaptures(t *testing.T) {
	t.Parallel()
	_, body := captured(t, "chat_stream_usage")
	s := &sample{}
	var cut splitter
	require.NoError(t, cut.feed(body, func(data []byte) { s.addEvent(data, time.Unix(1, 0)) }))
	assert.Equal(t, 6, s.usage.Completion)
	assert.Positive(t, s.usage.Prompt)
	assert.Equal(t, 6, s.chunks)
	_, body = captured(t, "cmpl")
	assert.Positive(t, parseUsage(body).Completion)
}

func TestStatusFailureNamesNoText(t *testing.T) {
	t.Parallel()
	resp, body := captured(t, "err_unknown_model_404")
	resp.Body = io.NopCloser(bytes.NewReader(body))
	assert.Equal(t, "http 404 NotFoundError", statusFailure(resp))
	assert.Equal(t, " overloaded", errorWord([]byte(`{"error":{"code":"overloaded","type":"x y"}}`)))
	assert.Empty(t, errorWord([]byte(`{"error":{"code":503,"type":"my secret prompt"}}`)))
	assert.Empty(t, errorWord([]byte(`{"error":"Unauthorized"}`)))
	assert.Empty(t, errorWord([]byte(`x`)))
}

// lines returns the splitter's output for a text that arrives in pieces.
func lines(t require.TestingT, text []byte, pieces []int) []string {
	var out []string
	var cut splitter
	record := func(data []byte) { out = append(out, string(data)) }
	for _, n := range pieces {
		n = min(n, len(text))
		require.NoError(t, cut.feed(text[:n], record))
		text = text[n:]
	}
	require.NoError(t, cut.feed(text, record))
	return out
}

// splitSlowly is a simple splitter that the test compares with.
func splitSlowly(text string) []string {
	var out []string
	all := strings.Split(text, "\n")
	for _, line := range all[:len(all)-1] {
		if data, ok := strings.CutPrefix(line, "data:"); ok {
			out = append(out, strings.TrimSpace(data))
		}
	}
	return out
}

func TestSplitterIgnoresReadBoundaries(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOf(
			rapid.SampledFrom(
				[]string{
					"data: ", "data:", "\n", "\r\n", "\n\n", "x", `{"a":1}`, ": comment", "event: x\n",
					"é",
				})).Draw(t, "parts")
		pieces := rapid.SliceOf(rapid.IntRange(0, 7)).Draw(t, "pieces")
		text := strings.Join(parts, "")
		require.Equal(t, splitSlowly(text), lines(t, []byte(text), pieces))
	})
}

func TestSplitterIsBounded(t *testing.T) {
	t.Parallel()
	var cut splitter
	piece := bytes.Repeat([]byte("x"), 1<<20)
	var err error
	for range 5 {
		err = cut.feed(piece, func([]byte) {})
	}
	require.ErrorIs(t, err, errEventTooLong)
	assert.LessOrEqual(t, len(cut.rest), maxEvent)
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte(
		"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\ndata: [DONE]\n\n"), 3)
	f.Add([]byte(
		"data:{\"error\": {\"code\": 503}}\r\n\r\ndata: "+
			"{\"choices\":[],\"usage\":{\"prompt_tokens\":1e9}}\n"), 7)
	f.Fuzz(func(t *testing.T, text []byte, piece int) {
		if len(text) > maxEvent {
			return
		}
		pieces := make([]int, 0, 64)
		for range 64 {
			pieces = append(pieces, max(0, piece%1000))
		}
		require.Equal(t, splitSlowly(string(text)), lines(t, text, pieces))
		s := &sample{}
		var cut splitter
		require.NoError(t, cut.feed(text, func(data []byte) { s.addEvent(data, time.Unix(1, 0)) }))
		require.Len(t, s.gaps, max(0, s.chunks-1))
	})
}

func BenchmarkEvent(b *testing.B) {
	data := []byte(
		`data: {"id":"chatcmpl-x","object":"chat.completion.chunk","created":1795230441,"model":"tiny",` +
			`"choices":[{"index":0,"delta":{"content":"q"},"logprobs":null,"finish_reason":null,` +
			`"token_ids":null}]}` + "\n\n")
	s := &sample{gaps: make([]time.Duration, 0, 1)}
	now := time.Now()
	var cut splitter
	note := func(data []byte) { s.addEvent(data, now) }
	b.ReportAllocs()
	for b.Loop() {
		s.gaps, s.chunks = s.gaps[:0], 0
		if err := cut.feed(data, note); err != nil {
			b.Fatal(err)
		}
	}
}
