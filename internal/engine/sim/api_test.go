package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/test/memnet"
)

type completion struct {
	ID      string `json:"id"`
	Choices []struct {
		Index        int      `json:"index"`
		Text         string   `json:"text"`
		FinishReason string   `json:"finish_reason"`
		StopReason   any      `json:"stop_reason"`
		TokenIDs     []uint32 `json:"token_ids"`
		Message      struct{ Content string }
		Delta        struct {
			Role, Content string
		} `json:"delta"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		Details          *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

func complete(t testing.TB, s *Server, path, body string) completion {
	t.Helper()
	status, answer := ask(t, s, path, body)
	require.Equal(t, 200, status, answer)
	var c completion
	require.NoError(t, json.Unmarshal([]byte(answer), &c))
	return c
}

// join reads a stream into the texts of its choices.
func joinStream(t testing.TB, body string) (texts map[int]string, last completion, empties int) {
	texts = map[int]string{}
	for _, e := range pieces(body) {
		if e == "[DONE]" {
			continue
		}
		var c completion
		require.NoError(t, json.Unmarshal([]byte(e), &c))
		for _, ch := range c.Choices {
			if ch.Text+ch.Delta.Content+ch.Delta.Role == "" {
				empties++
			}
			texts[ch.Index] += ch.Text + ch.Delta.Content
			last = c
		}
	}
	return texts, last, empties
}

func TestStreamAndPlainAnswerAreTheSameText(t *testing.T) {
	s := start(t, fast())
	for _, extra := range []string{
		"", `,"stop":["cache"]`,
		`,"stop":["e b","queue"],"include_stop_str_in_output":true`, `,"stream_interval":7`, `,"n":3`,
		`,"seed":5`,
	} {
		body := `{"prompt":"the quick","max_tokens":300` + extra
		plain := complete(t, s, "/v1/completions", body+"}")
		_, stream := ask(t, s, "/v1/completions", body+`,"stream":true}`)
		texts, _, empties := joinStream(t, stream)
		for _, ch := range plain.Choices {
			assert.Equal(t, ch.Text, texts[ch.Index], extra)
			assert.True(t, utf8.ValidString(ch.Text))
		}
		if extra == "" {
			assert.Positive(t, empties, "characters that span tokens show as empty deltas")
		}
	}
}

func TestStopStringsCutTheText(t *testing.T) {
	s := start(t, fast())
	base := complete(t, s, "/v1/completions", `{"prompt":"p","max_tokens":200,"ignore_eos":true}`)
	word := strings.Fields(base.Choices[0].Text)[9]
	got := complete(t, s, "/v1/completions",
		fmt.Sprintf(`{"prompt":"p","max_tokens":200,"ignore_eos":true,"stop":%q}`, word))
	assert.Equal(t, "stop", got.Choices[0].FinishReason)
	assert.Equal(t, word, got.Choices[0].StopReason)
	assert.NotContains(t, got.Choices[0].Text, word)
	assert.True(t, strings.HasPrefix(base.Choices[0].Text, got.Choices[0].Text+word))
	assert.Less(t, got.Usage.CompletionTokens, 200)
}

func TestStopTokenAndNaturalEnd(t *testing.T) {
	s := start(t, fast())
	ids := complete(t, s, "/v1/completions", `{"prompt":"p","max_tokens":20,"return_token_ids":true}`).
		Choices[0].TokenIDs
	require.Len(t, ids, 20)
	got := complete(t, s, "/v1/completions",
		fmt.Sprintf(`{"prompt":"p","max_tokens":20,"stop_token_ids":[%d]}`, ids[6]))
	assert.Equal(t, "stop", got.Choices[0].FinishReason)
	assert.InDelta(t, float64(ids[6]), got.Choices[0].StopReason, 0)
	assert.LessOrEqual(t, got.Usage.CompletionTokens, 7)

	const hi = `{"messages":[{"role":"user","content":"hi"}]`
	_, text := ask(t, s, "/v1/chat/completions", hi+"}")
	assert.Contains(t, text, `"finish_reason":"stop","stop_reason":null`)
	_, text = ask(t, s, "/v1/chat/completions", hi+`,"stream":true}`)
	assert.Contains(t, text, `"finish_reason":"stop","stop_reason":null`)
	natural := complete(t, s, "/v1/chat/completions", hi+"}")
	assert.Equal(t, "stop", natural.Choices[0].FinishReason)
	assert.Nil(t, natural.Choices[0].StopReason)
	assert.GreaterOrEqual(t, natural.Usage.CompletionTokens, em.AnswerMin)
}

func TestRolesComeFirstForAllChoices(t *testing.T) {
	s := start(t, fast())
	_, body := ask(t, s, "/v1/chat/completions", strings.Replace(chatBody, "{", `{"n":3,"stream":true,`, 1))
	for i, e := range pieces(body)[:3] {
		assert.Contains(t, e, fmt.Sprintf(`{"index":%d,"delta":{"role":"assistant","content":""}`, i))
	}
}

func TestPrefixCacheShowsInUsage(t *testing.T) {
	s := start(t, fast())
	prompt := strings.Repeat("0123456789abcdef", 20) // 80 tokens
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, prompt)
	assert.Zero(t, complete(t, s, "/v1/completions", body).Usage.Details.Cached)
	assert.Equal(t, 64, complete(t, s, "/v1/completions", body).Usage.Details.Cached,
		"whole blocks, at most prompt-1")

	c := fast()
	c.PromptTokensDetails = false
	assert.Nil(t, complete(t, start(t, c), "/v1/completions", body).Usage.Details)
}

func TestTokenIDsOutOfRange(t *testing.T) {
	s := start(t, fast())
	status, body := ask(t, s, "/v1/completions", `{"prompt":[4294967296]}`)
	assert.Equal(t, 400, status)
	assert.Contains(t, body, `"message":"Token id 4294967296 is out of vocabulary",`+
		`"type":"BadRequestError","param":null,"code":400`)
}

func TestInternalRanks(t *testing.T) {
	c := fast()
	c.InternalLB = 3
	s := start(t, c)
	for i := range 6 {
		status, _ := ask(t, s, "/v1/completions", wholeBody, "X-data-parallel-rank", fmt.Sprint(i%3))
		assert.Equal(t, 200, status)
	}
	for _, r := range s.ranks {
		assert.Equal(t, uint64(8), r.stats().GeneratedTokens)
	}
	for range 6 {
		_, _ = ask(t, s, "/v1/completions", wholeBody)
	}
	for _, r := range s.ranks {
		assert.Equal(t, uint64(16), r.stats().GeneratedTokens, "ties rotate")
	}
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	c := fast()
	c.KeepAlive = 30 * time.Millisecond
	s := start(t, c)
	conn, err := net.Dial("tcp", s.gate.Addr().String())
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = conn.Write([]byte("GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	buf := make([]byte, 4096)
	n, err := conn.Read(buf)
	require.NoError(t, err)
	assert.Contains(t, string(buf[:n]), "200 OK")
	_, err = conn.Read(buf)
	require.ErrorContains(t, err, "EOF")
}

// The engine runs on fake time and a memory network: a paced stream has one chunk per step, exactly.
func TestPacedStreamOnFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network memnet.Network
		c := fast()
		c.Model.FixedStep = 20 * time.Millisecond
		c.Listen = func(_ context.Context, addr string) (net.Listener, error) { return network.Listen(addr) }
		s, err := startServer(t.Context(), c)
		require.NoError(t, err)
		hc := &http.Client{Transport: &http.Transport{
			DialContext:       network.DialContext,
			DisableKeepAlives: true,
		}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/completions",
			strings.NewReader(streamBody))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		begun := time.Now()
		resp, err := hc.Do(req)
		require.NoError(t, err)
		assert.Zero(t, time.Since(begun), "the status does not wait for the first token")
		buf := make([]byte, 4096)
		for i := 1; i <= 40; i++ {
			_, err := resp.Body.Read(buf)
			require.NoError(t, err)
			assert.Equal(t, time.Duration(i)*20*time.Millisecond, time.Since(begun))
		}
		require.NoError(t, resp.Body.Close())
		require.NoError(t, s.Close())
		synctest.Wait()
	})
}

func TestEscapingIsValidJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")
		var back string
		require.NoError(t, json.Unmarshal(append(appendEscaped([]byte{'"'}, raw), '"'), &back))
		assert.Equal(t, em.ValidText(raw), back)
	})
}

// Numbers and booleans pass in every spelling that vLLM takes; anything else is a fault that names
// its member.
func TestMembersAreReadAsVLLMReadsThem(t *testing.T) {
	s := start(t, fast())
	for extra, param := range map[string]string{
		`"max_tokens":"3"`: "", `"max_tokens":3.0`: "", `"max_tokens":null`: "", `"max_tokens":true`: "",
		`"seed":-9223372036854775808`: "", `"temperature":"0.5"`: "", `"ignore_eos":"yes"`: "",
		`"stop":"x"`:         "",
		`"prompt":["a","b"]`: "", `"prompt":[1,2]`: "", `"prompt":[[1],[2]]`: "", `"prompt":["a",[1]]`: "",
		`"stream_options":null`: "", `"unknown":{}`: "",
		`"max_tokens":"x"`: "body.max_tokens", `"max_tokens":1.5`: "body.max_tokens", `"n":[1]`: "body.n",
		`"temperature":{}`: "body.temperature", `"ignore_eos":2`: "body.ignore_eos", `"stop":3`: "body.stop",
		`"stop_token_ids":["x"]`: "body.stop_token_ids", `"cache_salt":7`: "body.cache_salt",
		`"prompt":7`: "body.prompt", `"prompt":["a",7]`: "body.prompt", `"prompt":[1,"a"]`: "body.prompt",
		`"prompt":[-1]`: "body.prompt.0", `"stream_options":{"include_usage":"maybe"}`: "body.include_usage",
	} {
		status, body := ask(t, s, "/v1/completions", `{"prompt":"p","max_tokens":2,`+extra+`}`)
		if param == "" {
			assert.Equal(t, 200, status, "%s: %s", extra, body)
			continue
		}
		assert.Equal(t, 400, status, "%s: %s", extra, body)
		assert.Contains(t, body, `"type":"Bad Request","param":"`+param+`","code":400`, extra)
	}
	for _, body := range []string{"{", "[]", "null", "7", `{"prompt":"x"} x`, "{\"prompt\":\"\n\"}"} {
		status, answer := ask(t, s, "/v1/completions", body)
		assert.Equal(t, 400, status, answer)
		assert.Contains(t, answer, `"type":"Bad Request","param":"body`, body)
	}
}

// TestMalformedMessages: the fault names what is wrong with the messages, not that they are missing.
func TestMalformedMessages(t *testing.T) {
	s := start(t, fast())
	status, body := ask(t, s, "/v1/chat/completions", `{"messages":5}`)
	assert.Equal(t, http.StatusBadRequest, status)
	assert.Contains(t, body, "body.messages")
	assert.NotContains(t, body, msgRequired)
}

// Whatever a client sends, the engine answers with an error or an answer, and is empty afterwards.
func FuzzRequest(f *testing.F) {
	for _, seed := range []string{
		wholeBody, streamBody, chatBody, idsBody, `{"prompt":[[1,2],[3]],"n":2,"logprobs":2,"echo":true}`,
		`{"prompt":["a","b"],"stop":["x"]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"stream":true,` +
			`"stream_options":{"include_usage":true}}`,
		`{"prompt":"x","stop_token_ids":[1],"min_tokens":3,"prompt_logprobs":1}`, `{"prompt":-1}`, `{`, `[]`,
		`{"prompt":"\ud83d"}`,
	} {
		f.Add(seed)
	}
	c := fast()
	c.Model.MaxModelLen = 256
	s, err := startServer(context.Background(), c)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = s.Close() })
	f.Fuzz(func(t *testing.T, body string) {
		var v struct{ N json.RawMessage }
		if err := json.Unmarshal([]byte(body), &v); err == nil && len(v.N) > 2 {
			t.Skip("thousands of choices prove nothing")
		}
		for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} {
			rec := &recorder{header: http.Header{}}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, path,
				strings.NewReader(body))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			api{s}.ServeHTTP(rec, req)
			if rec.header.Get("Content-Type") == "application/json" {
				require.True(t, json.Valid(rec.body), "%s", rec.body)
			} else {
				for _, e := range pieces(string(rec.body)) {
					require.True(t, e == "[DONE]" || json.Valid([]byte(e)), e)
				}
			}
			require.Less(t, rec.status, 500)
		}
		require.Zero(t, s.Stats().InFlight)
	})
}

// Parameters that would make one request do the work of millions are refused or bounded.
func TestGreedyParametersAreBounded(t *testing.T) {
	s := start(t, fast())
	for body, want := range map[string]int{
		`{"prompt":["a","b"],"n":16384}`:                                     400,
		`{"prompt":"a","prompt_logprobs":1000000000}`:                        400,
		`{"prompt":"a","logprobs":1000000000}`:                               400,
		`{"prompt":"a","min_tokens":9223372036854775807,"stop":["a"]}`:       200,
		`{"prompt":"a","stream":true,"stream_interval":9223372036854775807}`: 200,
		`{"prompt":"a","max_tokens":99999999999999999999}`:                   400,
		`{"prompt":"a","stop_token_ids":[-9223372036854775808,9223372036854775807],` +
			`"seed":-9223372036854775808}`: 200,
	} {
		status, answer := ask(t, s, "/v1/completions", body)
		assert.Equal(t, want, status, answer)
		assert.NotContains(t, answer, `"error": `)
	}
}

// Any command line gives a config that can start, or an error.
func FuzzFlags(f *testing.F) {
	f.Add("--port 1 --served-model-name a b --sim-fail crash=1@2 --block-size=3")
	f.Add("--data-parallel-size 2 --data-parallel-rank 1 --no-enable-prefix-caching --sim-step-ms 1e9")
	f.Fuzz(func(t *testing.T, line string) {
		cfg, _, err := ParseFlags(strings.Fields(line))
		if err == nil {
			require.NoError(t, cfg.Validate())
		}
	})
}

// A frame survives its encoding, and any bytes are some frame.
func FuzzFrame(f *testing.F) {
	f.Add([]byte("H\x01\x02\x00\x04\x00\x00\x00abcdefgh"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var b [frameSize]byte
		copy(b[:], raw)
		first := decodeFrame(b)
		require.Equal(t, first, decodeFrame(first.encode()))
	})
}

type recorder struct {
	header http.Header
	status int
	body   []byte
}

func (r *recorder) Header() http.Header { return r.header }
func (r *recorder) WriteHeader(s int)   { r.status = s }
func (r *recorder) Flush()              {}
func (r *recorder) Write(b []byte) (int, error) {
	r.body = append(r.body, b...)
	return len(b), nil
}

// TestPlainIDsAreThoseOfJSON: what plainIDs reads is what json.Unmarshal reads.
func TestPlainIDsAreThoseOfJSON(t *testing.T) {
	for text, plain := range map[string]bool{
		`[1]`: true, `[0,1,23456]`: true, `[7, 8,  9]`: true, `[ 5]`: true, `[999999999999999]`: true,
		`[]`: false, `[ ]`: false, `[-1]`: false, `[1.0]`: false, `[1e3]`: false, `[true]`: false,
		`[1 ]`: false, "[1,\n2]": false, `[9999999999999999]`: false, `["1"]`: false, `[[1]]`: false,
	} {
		ids, ok := plainIDs([]byte(text))
		assert.Equal(t, plain, ok, text)
		if ok {
			var want []int64
			require.NoError(t, json.Unmarshal([]byte(text), &want), text)
			assert.Equal(t, want, ids, text)
		}
	}
}

// A list that is read without encoding/json has the ids that encoding/json finds.
func FuzzPlainIDs(f *testing.F) {
	for _, text := range []string{`[1]`, `[0,1,23456]`, `[7,  9]`, `[-1]`, `[1e3]`, `["1"]`, `[[1]]`, `[]`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) == 0 || raw[0] != '[' || !json.Valid(raw) {
			return
		}
		if ids, ok := plainIDs(raw); ok {
			var want []int64
			require.NoError(t, json.Unmarshal(raw, &want))
			assert.Equal(t, want, ids)
		}
	})
}
