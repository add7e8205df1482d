package sim

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fast is an engine whose steps take no time.
func fast() Config {
	c := Default()
	c.Model.Fixed = true
	return c
}

// paced is an engine with steps of 5 ms, so that requests can be met half-way.
func paced() Config {
	c := fast()
	c.Model.FixedStep = 5 * time.Millisecond
	return c
}

const (
	streamBody = `{"prompt":"tell me","max_tokens":40,"ignore_eos":true,"stream":true}`
	wholeBody  = `{"prompt":"tell me","max_tokens":4,"ignore_eos":true}`
	chatBody   = `{"messages":[{"role":"user","content":"hi"}],"max_tokens":4,"ignore_eos":true}`
	idsBody    = `{"prompt":[1,2,3],"max_tokens":4}`
	idsStream  = `{"prompt":[1,2,3],"max_tokens":4,"stream":true}`
)

func failWith(t *testing.T, s *Server, fault string) {
	t.Helper()
	status, body := ask(t, s, "/_sim/fail", fault)
	require.Equal(t, 200, status, body)
}

// pieces splits a stream into its events without the frame.
func pieces(body string) []string {
	var out []string
	for e := range strings.SplitSeq(body, "\n\n") {
		if data, ok := strings.CutPrefix(e, "data: "); ok {
			out = append(out, data)
		}
	}
	return out
}

func TestRequestFaults(t *testing.T) {
	for _, c := range []struct {
		name, fault   string
		status        int
		plain         string   // part of the plain answer
		events        int      // of the stream, [DONE] included
		tail          []string // parts of the last events
		broken        bool     // the connection is cut
		recoversAlone bool
	}{
		{
			name: "http-500", fault: `{"mode":"http-500","count":2}`, status: 500, plain: `"code":500`,
			recoversAlone: true,
		},
		{name: "http-503", fault: `{"mode":"http-503"}`, status: 503, plain: `"type":"InternalServerError"`},
		{
			name: "busy", fault: `{"mode":"busy"}`, status: 503, plain: `"type":"Service Unavailable"`,
			events: 2, tail: []string{`"code": 503`, "[DONE]"},
		},
		{
			name: "error first", fault: `{"mode":"error-event","code":400}`, status: 400, plain: `"code":400`,
			events: 2, tail: []string{`"code": 400`, "[DONE]"},
		},
		{
			name: "error later", fault: `{"mode":"error-event","after_tokens":3}`, status: 500,
			plain: `"code":500`, events: 5, tail: []string{`"code": 500`, "[DONE]"},
		},
		{
			name: "no done", fault: `{"mode":"no-done","after_tokens":3}`, status: 200, plain: `"length"`,
			events: 3, tail: []string{`"finish_reason":null`},
		},
		{
			name: "no done at the end", fault: `{"mode":"no-done"}`, status: 200, plain: `"length"`,
			events: 40,
			tail:   []string{`"finish_reason":"length"`},
		},
		{
			name: "abort", fault: `{"mode":"abort","after_tokens":2}`, status: 200,
			plain: `"finish_reason":"abort"`, events: 3, tail: []string{`"abort"`, "[DONE]"},
		},
		{
			name: "bare done", fault: `{"mode":"bare-done"}`, status: 200, plain: `"completion_tokens":0`,
			events: 1, tail: []string{"[DONE]"},
		},
		{name: "cut", fault: `{"mode":"cut","after_tokens":3}`, events: 3, broken: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, fast())
			failWith(t, s, c.fault)
			if c.broken {
				resp := post(t, s, "/v1/completions", streamBody)
				body, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				assert.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.ErrUnexpectedEOF),
					"%v", err)
				assert.LessOrEqual(t, len(pieces(string(body))), c.events)
			} else {
				status, body := ask(t, s, "/v1/completions", wholeBody)
				assert.Equal(t, c.status, status)
				assert.Contains(t, body, c.plain)
				status, body = ask(t, s, "/v1/completions", streamBody)
				if c.events > 0 {
					got := pieces(body)
					assert.Equal(t, 200, status)
					require.Len(t, got, c.events, body)
					for i, part := range c.tail {
						assert.Contains(t, got[len(got)-len(c.tail)+i], part)
					}
				}
			}
			if !c.recoversAlone {
				status, _ := ask(t, s, "/_sim/recover", "")
				assert.Equal(t, 200, status)
			}
			status, body := ask(t, s, "/v1/completions", streamBody)
			assert.Equal(t, 200, status)
			assert.Len(t, pieces(body), 41)
			eventually(t, func() bool {
				st := s.Stats()
				return st.Running == 0 && st.UsedBlocks == 0 && st.InFlight == 0
			})
		})
	}
}

func TestStallHangsOneStreamOnly(t *testing.T) {
	s := start(t, fast())
	failWith(t, s, `{"mode":"stall","count":1,"after_tokens":2}`)
	resp := post(t, s, "/v1/completions", streamBody)
	status, _ := ask(t, s, "/v1/completions", wholeBody)
	assert.Equal(t, 200, status)
	assert.Equal(t, 1, s.Stats().InFlight)
	_ = resp.Body.Close()
	eventually(t, func() bool { return s.Stats().InFlight == 0 })
}

func TestHangKeepsHealthAndRecovers(t *testing.T) {
	s := start(t, paced())
	failWith(t, s, `{"mode":"hang"}`)
	got := make(chan string, 1)
	go func() {
		got <- tryAsk(s.URL()+"/v1/completions", wholeBody)
	}()
	eventually(t, func() bool { return s.Stats().InFlight == 1 })
	get(t, s, "/health")
	assert.Zero(t, s.Stats().Tokens)
	_, _ = ask(t, s, "/_sim/recover", "")
	assert.Contains(t, <-got, `"finish_reason":"length"`)
}

func TestFaultsEndByThemselves(t *testing.T) {
	s := start(t, fast())
	failWith(t, s, `{"mode":"health-503","for_s":0.05}`)
	failWith(t, s, `{"mode":"hang","for_s":0.05}`)
	status, _ := ask(t, s, "/v1/completions", wholeBody)
	assert.Equal(t, 200, status, "answered when the hang is over")
	eventually(t, func() bool { return !s.faults.is(ModeHealth503) })
}

func TestRefuseClosesThePortForAWhile(t *testing.T) {
	s := start(t, fast())
	failWith(t, s, `{"mode":"refuse","for_s":0.2}`)
	addr := s.gate.Addr().String()
	eventually(t, func() bool {
		_, err := net.Dial("tcp", addr)
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	eventually(t, func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	status, _ := ask(t, s, "/v1/completions", wholeBody)
	assert.Equal(t, 200, status)
}

// TestRefuseOnAConnectionFromBefore: a connection that was opened in advance gets no answer either.
func TestRefuseOnAConnectionFromBefore(t *testing.T) {
	s := start(t, fast())
	unused, err := net.Dial("tcp", s.gate.Addr().String())
	require.NoError(t, err)
	status, _ := ask(t, s, "/v1/completions", wholeBody) // connections are taken in their order
	require.Equal(t, 200, status)
	require.NoError(t, s.Fail(Fault{Mode: ModeRefuse}))
	_, err = io.WriteString(unused, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n")
	require.NoError(t, err)
	answer, _ := io.ReadAll(unused)
	assert.Empty(t, answer)
	require.NoError(t, unused.Close())
}

func TestSlowStretchesSteps(t *testing.T) {
	s := start(t, paced())
	failWith(t, s, `{"mode":"slow","factor":1000000}`)
	resp := post(t, s, "/v1/completions", streamBody)
	defer func() { _ = resp.Body.Close() }()
	eventually(t, func() bool { return s.Stats().Running == 1 })
	assert.Zero(t, s.Stats().Tokens)
}

func TestStoppingAnswersByKindOfRequest(t *testing.T) {
	s := start(t, fast())
	failWith(t, s, `{"mode":"stopping"}`)
	for _, c := range []struct {
		path, body string
		status     int
		want       string
	}{
		{"/v1/completions", wholeBody, 500, msgStopping},
		{"/v1/completions", streamBody, 500, msgStopping},
		{"/v1/chat/completions", chatBody, 500, msgStopping},
		{"/tokenize", `{"prompt":"x"}`, 500, msgStopping},
		{"/v1/completions", idsBody, 200, `"text":"","logprobs":null,"finish_reason":"abort"`},
		{"/v1/completions", idsStream, 200, "data: [DONE]\n\n"},
	} {
		status, body := ask(t, s, c.path, c.body)
		assert.Equal(t, c.status, status, c.body)
		assert.Contains(t, body, c.want)
	}
	assert.Empty(t, get(t, s, "/health"))
}

func TestBadFaultsAreRefusedWithAReason(t *testing.T) {
	s := start(t, fast())
	for body, want := range map[string]string{
		`{"mode":"explode"}`:              "unknown fault mode",
		`{"mode":"slow","for_s":-1}`:      "must not be negative",
		`{"mode":"error-event","code":7}`: "no error",
		`{"mode":"orphan"}`:               "process of its own",
		`{"mood":"slow"}`:                 "unknown field",
		`nonsense`:                        "invalid character",
	} {
		status, answer := ask(t, s, "/_sim/fail", body)
		assert.Equal(t, 400, status, body)
		assert.Contains(t, answer, want)
	}
}

// A dead core ends streams with the error event, plain requests with 500, and then the process with exit code
// 0.
func TestCoreDead(t *testing.T) {
	t.Parallel()
	c := paced()
	s, err := New(c)
	require.NoError(t, err)
	require.NoError(t, s.Listen(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Serve() }()
	bodies := make(chan string, 2)
	for _, body := range []string{streamBody, strings.Replace(wholeBody, "4", "1000", 1)} {
		go func() {
			bodies <- tryAsk(s.URL()+"/v1/completions", body)
		}()
	}
	eventually(t, func() bool { return s.Stats().Running == 2 })
	failWith(t, s, `{"mode":"core-dead"}`)
	for range 2 {
		assert.Contains(t, <-bodies, msgEngineDead)
	}
	status, _ := ask(t, s, "/v1/completions", wholeBody)
	assert.Equal(t, 500, status)
	var exit *ExitError
	require.ErrorAs(t, <-ended, &exit)
	assert.Zero(t, exit.Code)
	require.NoError(t, s.Close())
}

func TestCrashCutsEverything(t *testing.T) {
	s, err := New(paced())
	require.NoError(t, err)
	require.ErrorIs(t, s.Serve(), errNotListening)
	require.NoError(t, s.Listen(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Serve() }()
	resp := post(t, s, "/v1/completions", streamBody)
	failWith(t, s, `{"mode":"crash","exit_code":3}`)
	_, err = io.ReadAll(resp.Body)
	require.Error(t, err)
	_ = resp.Body.Close()
	var exit *ExitError
	require.ErrorAs(t, <-ended, &exit)
	assert.Equal(t, 3, exit.Code)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close(), "twice is fine")
}

func TestShutdownWithoutTimeoutAborts(t *testing.T) {
	s := start(t, paced())
	got := make(chan string, 1)
	go func() {
		got <- tryAsk(s.URL()+"/v1/completions", strings.Replace(streamBody, "40", "4000", 1))
	}()
	eventually(t, func() bool { return s.Stats().Tokens > 2 })
	s.Shutdown(context.Background(), 0)
	events := pieces(<-got)
	assert.Contains(t, events[len(events)-2], `"finish_reason":"abort"`)
	assert.Equal(t, "[DONE]", events[len(events)-1])
}

func TestShutdownDrains(t *testing.T) {
	c := paced()
	c.Linger = time.Millisecond
	s := start(t, c)
	got := make(chan string, 1)
	go func() {
		got <- tryAsk(s.URL()+"/v1/completions", streamBody)
	}()
	eventually(t, func() bool { return s.Stats().Tokens > 2 })
	s.Shutdown(context.Background(), 10*time.Second)
	assert.Contains(t, <-got, `"finish_reason":"length"`)
	_, err := net.Dial("tcp", s.gate.Addr().String())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

// A client that leaves takes its request out of the engine at once, streaming or not, and nothing counts it
// as a success.
func TestClientThatLeavesIsGoneFromTheEngine(t *testing.T) {
	s := start(t, paced())
	for _, body := range []string{
		strings.Replace(streamBody, "40", "4000", 1),
		strings.Replace(wholeBody, "4", "4000", 1),
	} {
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions",
			strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			resp, err := client.Do(req)
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		}()
		eventually(t, func() bool { return s.Stats().Running == 1 })
		leave()
		<-gone
		eventually(t, func() bool {
			st := s.Stats()
			return st.Running == 0 && st.UsedBlocks == 0 && st.InFlight == 0
		})
	}
	st := s.Stats()
	assert.Equal(t, uint64(2), st.Aborted)
	assert.Zero(t, st.Finished["abort"])
}

func TestStatsAsJSON(t *testing.T) {
	s := start(t, fast())
	_, _ = ask(t, s, "/v1/completions", wholeBody)
	var st Stats
	require.NoError(t, json.Unmarshal([]byte(get(t, s, "/_sim/stats")), &st))
	assert.Equal(t, uint64(4), st.Tokens)
	assert.Equal(t, uint64(1), st.Finished["length"])
}
