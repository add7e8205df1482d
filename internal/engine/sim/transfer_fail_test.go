package sim

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/ports"
)

const (
	errorEnd   = `"type":"InternalServerError","param":null,"code":500}}`
	failedBody = `{"error":{"message":"Internal server error",` + errorEnd
	deadBody   = `{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the ` +
		`root cause.",` + errorEnd
)

// isBody compares byte by byte: spaces and the order of members count.
func isBody(t testing.TB, want, got string, why ...any) {
	t.Helper()
	assert.Equal(t, []string{want}, []string{got}, why...)
}

func TestADeadPrefillEngine(t *testing.T) {
	t.Parallel()
	for name, isKnown := range map[string]bool{"known": true, "unknown": false} {
		for policy, recompute := range map[string]bool{"fail": false, "recompute": true} {
			t.Run(name+" "+policy, func(t *testing.T) {
				t.Parallel()
				p, d := startPair(t, func(c *Config) {
					c.Transfer.Recompute, c.Transfer.HandshakeMax = recompute, time.Second
				})
				prompt := words(1, 70)
				if isKnown {
					_, _ = decode(t, d, words(2, 9), prefill(t, p, words(2, 9)), "")
				}
				params := prefill(t, p, prompt)
				require.NoError(t, p.Close())
				begun := time.Now()
				status, body := decode(t, d, prompt, params, "")
				if !isKnown {
					assert.GreaterOrEqual(t, time.Since(begun), d.cfg.Transfer.HandshakeMax,
						"nobody tells that nobody listens")
				}
				hasCounter(t, d, "nixl_num_failed_transfers_total", 1)
				if recompute {
					assert.Equal(t, http.StatusOK, status)
					assert.Equal(t, unbroken(t, prompt), textOf(t, body))
					return
				}
				assert.Equal(t, http.StatusInternalServerError, status)
				isBody(t, failedBody, body)
				status, body = decode(t, d, prompt, params, `,"stream":true`)
				assert.Equal(t, http.StatusOK, status)
				assert.Equal(t, `data: {"error": {"message": "Internal server error", "type": `+
					`"InternalServerError", "param": null, "code": 500}}`+"\n\n"+doneEvent, body)
				_, body = ask(t, d, "/v1/completions", completionBody(prompt, ""))
				assert.Equal(t, unbroken(t, prompt), textOf(t, body), "the decode engine lives")
				assert.Zero(t, d.Stats().UsedBlocks)
			})
		}
	}
}

func TestARestartedPrefillEngine(t *testing.T) {
	c := pairConfig(RoleProducer)
	_, port, _ := net.SplitHostPort(ports.TakeAddr(t))
	c.Transfer.SidePort, _ = strconv.Atoi(port)
	_, d := startPair(t)
	p, err := startServer(t.Context(), c)
	require.NoError(t, err)
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	_, body := decode(t, d, prompt, prefill(t, p, prompt), `,"cache_salt":"a"`)
	assert.Equal(t, want, textOf(t, body))
	old := prefill(t, p, prompt)
	require.NoError(t, p.Close())

	p = start(t, c)
	status, _ := decode(t, d, prompt, old, `,"cache_salt":"b"`)
	assert.Equal(t, http.StatusInternalServerError, status, "another engine is at the old one's place")
	for range 2 {
		params := prefill(t, p, prompt)
		assert.NotContains(t, old, p.ranks[0].exchange.id)
		_, body = decode(t, d, prompt, params, `,"cache_salt":"c"`)
		assert.Equal(t, want, textOf(t, body))
	}
}

func TestEnginesThatDoNotFit(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"block size": func(c *Config) { c.Model.BlockSize = 16 },
		"model":      func(c *Config) { c.Root = "another/model" },
	} {
		t.Run(name, func(t *testing.T) {
			c := pairConfig(RoleProducer)
			change(&c)
			p := start(t, c)
			_, d := startPair(t)
			status, body := decode(t, d, words(1, 40), prefill(t, p, words(1, 40)), "")
			assert.Equal(t, http.StatusInternalServerError, status)
			isBody(t, failedBody, body)
		})
	}
}

// What ends the engine and what does not, one member at a time.
func TestMalformedParameters(t *testing.T) {
	prompt := words(1, 70) // three blocks of 32
	const other = `"f060c1b0-3e1a-4840-a72c-eae1094dc2bd"`
	for name, c := range map[string]struct {
		name, value string
		prompt      string
		status      int
		isDead      bool
		isWrong     bool
	}{
		"only do_remote_prefill": {"", "", prompt, 500, true, false},
		"no block ids":           {"remote_block_ids", "", prompt, 500, true, false},
		"null block ids":         {"remote_block_ids", "null", prompt, 500, true, false},
		"truncated":              {"remote_block_ids", "[[1,2]]", prompt, 500, true, false},
		"flat":                   {"remote_block_ids", "[1,2,3]", prompt, 500, true, false},
		"words":                  {"remote_block_ids", `["DUMMY_ID"]`, prompt, 500, true, false},
		"a longer prompt":        {"x", "1", words(1, 97), 500, true, false},
		"more":                   {"remote_block_ids", "[[1,2,3,9]]", prompt, 200, false, true},
		"out of range":           {"remote_block_ids", "[[100383,100377,100380]]", prompt, 500, false, false},
		"slightly out of range":  {"remote_block_ids", "[[1,2,129]]", prompt, 500, false, false},
		"block 0":                {"remote_block_ids", "[[0,1,2]]", prompt, 500, false, false},
		"wrong engine":           {"remote_engine_id", other, prompt, 500, false, false},
		"unknown request":        {"remote_request_id", `"cmpl-unknown"`, prompt, 200, false, false},
		"another prompt":         {"x", "1", words(2, 70), 200, false, true},
		"a port in a string":     {"remote_port", "", prompt, 200, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := startPair(t)
			params := prefill(t, p, prompt)
			switch {
			case c.name == "":
				params = `{"do_remote_prefill":true}`
			case name == "a port in a string":
				port := strconv.Itoa(p.ranks[0].exchange.side.port())
				params = member(t, params, "remote_port", strconv.Quote(port))
			default:
				params = member(t, params, c.name, c.value)
			}
			status, body := decode(t, d, c.prompt, params, "")
			assert.Equal(t, c.status, status, body)
			switch {
			case c.isDead:
				isBody(t, deadBody, body)
				eventually(t, func() bool { return d.dead.Load() })
			case status == http.StatusOK:
				assert.Equal(t, c.isWrong, textOf(t, body) != unbroken(t, c.prompt))
			default:
				isBody(t, failedBody, body)
			}
			if !c.isDead {
				_, plain := ask(t, d, "/v1/completions", completionBody(words(9, 9), ""))
				assert.Equal(t, unbroken(t, words(9, 9)), textOf(t, plain), "the engine lives")
			}
		})
	}
	t.Run("no object", func(t *testing.T) {
		_, d := startPair(t)
		status, _ := decode(t, d, prompt, `"params"`, "")
		assert.Equal(t, http.StatusBadRequest, status)
		assert.False(t, d.dead.Load())
	})
}

// Without its request id a decode leg waits for ever, and its end is the engine's.
func TestParametersWithoutARequestID(t *testing.T) {
	p, d := startPair(t)
	params := member(t, prefill(t, p, words(1, 70)), "remote_request_id", "")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	left := make(chan struct{})
	go func() {
		defer close(left)
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, d.URL()+"/v1/completions",
			strings.NewReader(completionBody(words(1, 70), `,"kv_transfer_params":`+params)))
		req.Header.Set("Content-Type", "application/json")
		if resp, err := client.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	assert.Contains(t, get(t, d, "/metrics"), `reason="deferred"} 1.0`)
	_, plain := ask(t, d, "/v1/completions", completionBody(words(9, 9), ""))
	assert.NotEmpty(t, textOf(t, plain), "the others go on")
	assert.False(t, d.dead.Load())
	cancel()
	<-left
	eventually(t, func() bool { return d.dead.Load() })
}

// A leg that is refused, or whose client leaves, frees the blocks: they may be reused before a second try.
func TestRejectedLegsReleaseTheLease(t *testing.T) {
	p, d := startPair(t)
	for name, more := range map[string]string{
		"temperature": `,"temperature":-1`, "model": `,"model":"unknown"`,
		"late, plain": `,"logprobs":50`, "late, streamed": `,"logprobs":50,"stream":true`,
	} {
		params := prefill(t, p, words(1, 70))
		assert.Equal(t, 1, p.Stats().Leases)
		_, body := decode(t, d, words(1, 70), params, more)
		assert.Contains(t, body, `"error"`, name)
		leasesEnd(t, p)
	}
	assert.Zero(t, p.ranks[0].stats().LateReads)
	params := prefill(t, p, words(1, 70))
	_, _ = decode(t, d, words(1, 70), params, `,"prompt_logprobs":0`)
	leasesEnd(t, p)
	assert.Zero(t, d.Stats().LoadedTokens, "a prompt whose tokens are all wanted is computed")
	busy, _ := startPair(t, func(c *Config) { c.Transfer.Role = RoleBoth })
	require.NoError(t, busy.Fail(Fault{Mode: ModeBusy}))
	_, _ = decode(t, busy, words(1, 70), prefill(t, p, words(1, 70)), "")
	leasesEnd(t, p)
}

func TestAClientThatLeavesReleasesTheLease(t *testing.T) {
	t.Parallel()
	p, d := startPair(t, func(c *Config) { c.Transfer.GBps = 1e-6 }) // transfers take minutes
	params := prefill(t, p, words(1, 70))
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.URL()+"/v1/completions",
		strings.NewReader(completionBody(words(1, 70), `,"stream":true,"kv_transfer_params":`+params)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(t, err)
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	assert.Equal(t, 1, p.Stats().Leases)
	cancel()
	_ = resp.Body.Close()
	leasesEnd(t, p)
	eventually(t, func() bool { s := d.Stats(); return s.Loading+s.UsedBlocks+s.InFlight == 0 })
}

// A read that has begun is finished although the client leaves: the prefill engine hears once that the blocks
// are free, and not a second time after the lease.
func TestAReadThatHasBegunIsFinished(t *testing.T) {
	p, d := startPair(t, func(c *Config) {
		c.Transfer.GBps = 1
		c.Transfer.GBps = c.transferTime(5).Seconds() / 0.3 // 0.3 seconds for the prompt
	})
	params := prefill(t, p, words(1, 70))
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.URL()+"/v1/completions",
		strings.NewReader(completionBody(words(1, 70), `,"stream":true,"kv_transfer_params":`+params)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(t, err)
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	cancel()
	_ = resp.Body.Close()
	hasCounter(t, d, "nixl_bytes_transferred_count", 1)
	leasesEnd(t, p)
	assert.Zero(t, p.ranks[0].stats().LateReads)
}

// Heartbeats flow from the arrival on if the engines have met.
func TestHeartbeatsOfAWaitingLeg(t *testing.T) {
	t.Parallel()
	p, d := startPair(t, func(c *Config) { c.Transfer.Lease = 4 * time.Second })
	prompt := words(1, 70)
	_, _ = decode(t, d, words(2, 9), prefill(t, p, words(2, 9)), "")
	require.NoError(t, d.Fail(Fault{Mode: ModeHang}))
	params := prefill(t, p, prompt)
	done := make(chan string, 1)
	go func() {
		done <- tryAsk(d.URL()+"/v1/completions", completionBody(prompt, `,"kv_transfer_params":`+params))
	}()
	time.Sleep(5 * time.Second)
	require.Equal(t, 1, p.Stats().Leases, "the decode engine says that it waits")
	require.NoError(t, d.Recover())
	assert.Equal(t, unbroken(t, prompt), textOf(t, <-done))
	assert.Zero(t, p.ranks[0].stats().LeasesOver)
}

// And not before.
func TestNoHeartbeatsBeforeTheFirstContact(t *testing.T) {
	t.Parallel()
	p, d := startPair(t, func(c *Config) {
		c.Transfer.Lease, c.Transfer.FirstContact = 100*time.Millisecond, time.Second
	})
	prompt := words(1, 70)
	_, body := decode(t, d, prompt, prefill(t, p, prompt), "")
	assert.NotEmpty(t, body)
	eventually(t, func() bool { return p.ranks[0].stats().LateReads == 1 })
	assert.EqualValues(t, 1, p.ranks[0].stats().LeasesOver, "the first contact took longer than the lease")
}

// One handshake at a time: a dead engine holds up the first contact with a good one, not with a known one.
func TestHandshakesAreSerial(t *testing.T) {
	t.Parallel()
	p, d := startPair(t, func(c *Config) { c.Transfer.HandshakeMax = 2 * time.Second })
	known, _ := startPair(t)
	prompt := words(1, 40)
	_, _ = decode(t, d, words(2, 9), prefill(t, known, words(2, 9)), "")
	dead := member(t, member(t, prefill(t, p, prompt), "remote_port", strconv.Itoa(ports.Take(t, 1))),
		"remote_engine_id", `"dead"`)
	done := make(chan string, 1)
	go func() {
		done <- tryAsk(d.URL()+"/v1/completions", completionBody(prompt, `,"kv_transfer_params":`+dead))
	}()
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	_, body := decode(t, d, prompt, prefill(t, known, prompt), `,"cache_salt":"k"`)
	assert.NotEmpty(t, textOf(t, body))
	assert.Equal(t, 1, d.Stats().Loading, "the other one still shakes hands")
	_, body = decode(t, d, prompt, prefill(t, p, prompt), `,"cache_salt":"p"`)
	assert.NotEmpty(t, textOf(t, body))
	isBody(t, failedBody, <-done)
}

func TestAStreamedPrefillLegPinsBlocksForNobody(t *testing.T) {
	p, _ := startPair(t)
	_, body := ask(t, p, "/v1/completions", `{"prompt":"`+words(1, 40)+`","max_tokens":1,"stream":true,`+
		`"kv_transfer_params":`+prefillParams+`}`)
	assert.NotContains(t, body, "kv_transfer_params")
	assert.Equal(t, 1, p.Stats().Leases)
	usage := 2.0 / 128
	assert.Contains(t, get(t, p, "/metrics"),
		`kv_cache_usage_perc{engine="0",model_name="tiny"} `+strconv.FormatFloat(usage, 'f', -1, 64))
	assert.Contains(t, get(t, p, "/metrics"), `num_requests_running{engine="0",model_name="tiny"} 0.0`)
}

func TestAPrefillEngineFullOfLeases(t *testing.T) {
	t.Parallel()
	p, _ := startPair(t, func(c *Config) { c.Model.Blocks = 64; c.Transfer.Lease = time.Second })
	for i := range 2 {
		prefill(t, p, words(i, 1000))
	}
	done := make(chan string, 1)
	go func() { done <- tryAsk(p.URL()+"/v1/completions", completionBody(words(7, 500), "")) }()
	eventually(t, func() bool { return p.Stats().Waiting == 1 })
	page := get(t, p, "/metrics")
	assert.Contains(t, page, `kv_cache_usage_perc{engine="0",model_name="tiny"} 1.0`)
	assert.Contains(t, page, `reason="capacity"} 1.0`)
	assert.NotEmpty(t, textOf(t, <-done), "the leases ended")
}

// Two prompts in one body: the parameters are those of the first one, and both are loaded from it.
func TestTwoPromptsInOneBody(t *testing.T) {
	p, d := startPair(t)
	a, b := words(1, 46), words(2, 46)
	both := `{"prompt":["` + a + `","` + b + `"],"max_tokens":%,"kv_transfer_params":`
	_, first := ask(t, p, "/v1/completions", strings.Replace(both, "%", "1", 1)+prefillParams+`}`)
	assert.Equal(t, 2, p.Stats().Leases)
	params := string(readLeg(t, first).Params)
	assert.Contains(t, params, `"remote_num_tokens":46`)
	status, second := ask(t, d, "/v1/completions", strings.Replace(both, "%", "24", 1)+params+`}`)
	require.Equal(t, http.StatusOK, status)
	got := readLeg(t, second)
	assert.Equal(t, unbroken(t, a), got.Choices[0].Text)
	assert.NotEqual(t, unbroken(t, b), got.Choices[1].Text)
	assert.Equal(t, 1, p.Stats().Leases, "the second prompt's blocks wait for nobody")
}

func TestSeveralChoices(t *testing.T) {
	p, d := startPair(t)
	prompt := words(1, 46)
	_, first := ask(t, p, "/v1/completions", `{"prompt":"`+prompt+`","max_tokens":1,"n":2,`+
		`"kv_transfer_params":`+prefillParams+`}`, "X-Request-Id", "rid")
	params := string(readLeg(t, first).Params)
	assert.Regexp(t, `"remote_request_id":"1_cmpl-rid-0-[0-9a-f]{8}"`, params)
	assert.Equal(t, 2, p.Stats().Leases)
	_, second := decode(t, d, prompt, params, `,"n":2`)
	assert.Equal(t, unbroken(t, prompt), textOf(t, second))
	assert.Zero(t, d.Stats().WrongAnswers, "by luck: the second choice reads freed blocks")
	eventually(t, func() bool { return p.ranks[0].stats().LateReads == 1 })
	assert.Equal(t, 1, p.Stats().Leases)
}

// The count of cached tokens that a decode leg tells is the prefill engine's.
func TestCachedTokensAreThoseOfThePrefillEngine(t *testing.T) {
	p, d := startPair(t)
	prompt := words(1, 70)
	prefill(t, p, prompt)
	params := prefill(t, p, prompt)
	assert.Contains(t, params, `"remote_prefill_cached_tokens":64`)
	_, body := decode(t, d, prompt, params, `,"cache_salt":"new"`)
	assert.Equal(t, 64, readLeg(t, body).Usage.Details.Cached)
	_, body = decode(t, d, words(3, 70), prefill(t, p, words(3, 70)), "")
	assert.Zero(t, readLeg(t, body).Usage.Details.Cached)
}

func TestATransferTakesItsTime(t *testing.T) {
	p, d := startPair(t, func(c *Config) {
		c.Transfer.TokenBytes, c.Transfer.GBps = 1<<20, 1
		c.Model.Speed = 0.5
	})
	prompt := words(1, 60) // two blocks: 64 MiB at 1 GB/s, at half speed
	params := prefill(t, p, prompt)
	begun := time.Now()
	_, _ = decode(t, d, prompt, params, "")
	assert.GreaterOrEqual(t, time.Since(begun), 2*(64<<20)*time.Nanosecond)
	assert.Contains(t, get(t, d, "/metrics"),
		`nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 6.7108864e+07`)
}

// Tokens that the prefill engine told spare the decode engine's tokenizer, and are the prompt.
func TestPromptTokenIDsInParameters(t *testing.T) {
	p, d := startPair(t)
	messages := `{"messages":[{"role":"user","content":"` + words(1, 40) + `"}]`
	chat := messages + `,"max_tokens":24`
	_, first := ask(t, p, "/v1/chat/completions", messages+`,"max_tokens":1,"return_token_ids":true,`+
		`"kv_transfer_params":`+prefillParams+`}`)
	var ids struct {
		IDs json.RawMessage `json:"prompt_token_ids"`
	}
	require.NoError(t, json.Unmarshal([]byte(first), &ids))
	params := member(t, string(readLeg(t, first).Params), "prompt_token_ids", string(ids.IDs))
	_, want := ask(t, d, "/v1/chat/completions", chat+`,"cache_salt":"a"}`)
	_, got := ask(t, d, "/v1/chat/completions", `{"messages":[{"role":"user","content":"ignored"}],`+
		`"max_tokens":24,"kv_transfer_params":`+params+`}`)
	assert.Equal(t, readLeg(t, want).Choices[0].Message, readLeg(t, got).Choices[0].Message)
	for _, bad := range []string{`[1,-2]`, `"ids"`, `[[1]]`} {
		status, _ := ask(t, d, "/v1/chat/completions", chat+`,"kv_transfer_params":`+
			member(t, params, "prompt_token_ids", bad)+`}`)
		assert.Equal(t, http.StatusBadRequest, status, bad)
	}
}

func TestTransferFaults(t *testing.T) {
	t.Parallel()
	p, d := startPair(t, func(c *Config) { c.Transfer.HandshakeMax = time.Second })
	prompt := words(1, 46)
	require.NoError(t, d.Fail(Fault{Mode: ModeTransferFail, Count: 1}))
	status, _ := decode(t, d, prompt, prefill(t, p, prompt), "")
	assert.Equal(t, http.StatusInternalServerError, status)
	require.NoError(t, p.Fail(Fault{Mode: ModeTransferMeet, Count: 1}))
	status, _ = decode(t, d, prompt, prefill(t, p, prompt), "")
	assert.Equal(t, http.StatusInternalServerError, status)
	require.NoError(t, p.Fail(Fault{Mode: ModeTransferFail, Count: 1}))
	status, _ = decode(t, d, prompt, prefill(t, p, prompt), "")
	assert.Equal(t, http.StatusInternalServerError, status)
	require.NoError(t, p.Fail(Fault{Mode: ModeTransferSlow, Factor: 1e8, Count: 1})) // of 17 ns
	params := prefill(t, p, prompt)
	begun := time.Now()
	status, _ = decode(t, d, prompt, params, "")
	assert.Equal(t, http.StatusOK, status)
	assert.GreaterOrEqual(t, time.Since(begun), time.Second)

	require.NoError(t, p.Fail(Fault{Mode: ModeTransferNull, Count: 1}))
	_, body := ask(t, p, "/v1/completions",
		`{"prompt":"x","max_tokens":1,"kv_transfer_params":`+prefillParams+`}`)
	assert.Equal(t, "null", string(readLeg(t, body).Params))
	require.NoError(t, p.Fail(Fault{Mode: ModeTransferLease, LeaseS: 0.01}))
	prefill(t, p, prompt)
	eventually(t, func() bool { return p.ranks[0].stats().LeasesOver == 1 })
	require.NoError(t, p.Recover())
	prefill(t, p, prompt)
	time.Sleep(50 * time.Millisecond)
	assert.Positive(t, p.Stats().Leases)
}
