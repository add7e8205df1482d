package inprocess

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// Sizes of a run. Ten seeds are 10,000 requests.
const (
	faultSeeds    = 2
	seedsVariable = "DPSERVE_PAIR_SEEDS" // the variable that says how many seeds instead
	faultRequests = 1000
	faultGap      = 120 * time.Millisecond // mean time between requests
	faultPrompts  = 120                    // different ones: what was cached wrongly is asked for again
	faultFreeze   = 45 * time.Second       // at most: longer than a lease
	faultLease    = 40 * time.Second       // a lease, and what may prolong it
)

// PD31: requests go through pairs of ranks while engines of both sides are killed, stand still and are
// started again at random. No text is wrong, no engine ends because of what dpserve sends it, and nothing is
// left over: no ticket, no request, no block that waits for a decode rank. The subtest is the seed.
func TestPairsUnderRandomFaults(t *testing.T) {
	n := faultSeeds
	if text := os.Getenv(seedsVariable); text != "" {
		var err error
		n, err = strconv.Atoi(text)
		require.NoError(t, err, seedsVariable)
	} else if testing.Short() {
		n = 1
	}
	for seed := range n {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { newFaultRun(t, uint64(seed)).play() })
		})
	}
}

// faultRun is the run of one seed.
type faultRun struct {
	t       *testing.T
	c       *harness.Cluster
	rand    *rand.Rand
	audit   *audit
	prompts []faultPrompt
	steps   []string
	clients sync.WaitGroup
	seen    map[*harness.Engine]bool

	mu       sync.Mutex
	ended    int
	outcomes map[string]int
	ways     map[string]int
	wrong    []string
}

// faultPrompt is a prompt with the text that an engine gives alone.
type faultPrompt struct {
	text   string
	tokens int
	want   string
}

// faultApp is a way to set an application of pairs up.
type faultApp struct{ keys, prefill, decode string }

func faultApps() []faultApp {
	const alone, group = "data_parallel: {dp_size: 3, coupling: independent}",
		"data_parallel: {dp_size: 2, coupling: lockstep}, num_groups: 2"
	return []faultApp{
		{"{decide: always}", alone, alone},
		{"{decide: 'uncached>=48', fallback: fail}", alone, alone},
		{"{decide: always}", group, alone},
		{"{decide: 'uncached>=48'}", alone, group},
	}
}

// cachesReset: an engine stood still with parameters of a prefill rank until their lease was over. Resets
// need development mode.
var cachesReset = harness.Fault{
	{
		Msg: "the prefix cache of a decode rank may hold wrong blocks and is reset",
		Why: "what it has read by now may belong to another prompt",
	},
	{
		Msg: "decode ranks have read prompts of this prefill rank after their lease.*",
		Why: "the prefill engine says so, too",
	},
	{Msg: "the reset of a prefix cache failed", With: "deadline exceeded", Why: "the engine stands still"},
}

func newFaultRun(t *testing.T, seed uint64) *faultRun {
	s := &faultRun{
		t: t, c: harness.New(t), rand: rand.New(rand.NewPCG(seed, 16)), audit: &audit{open: map[entry]bool{}},
		seen:     map[*harness.Engine]bool{},
		outcomes: map[string]int{}, ways: map[string]int{},
	}
	s.c.Expect(harness.PairsFail, harness.RequestsFail, cachesReset)
	t.Cleanup(s.c.Feed().Subscribe(s.audit))
	a := faultApps()[seed%uint64(len(faultApps()))]
	s.c.Deploy(fmt.Sprintf(`applications:
  - name: plain
    model: {id: plain}
    engine: {kind: sim, args: {%[1]s}}
  - name: pd
    model: {id: pd}
    engine: {kind: sim, args: {%[1]s}, env: {VLLM_SERVER_DEV_MODE: "1"}}
    prefill: {%[2]s}
    decode: {%[3]s}
    disaggregation: %[4]s
    max_ongoing_requests: 16
    timeouts: {queue_s: 30, first_token_s: 60, between_tokens_s: 20}
    graceful_shutdown_timeout_s: 1
`, "num_gpu_blocks_override: 192, max_model_len: 2048, block_size: 16", a.prefill, a.decode, a.keys))
	s.c.WaitStatus("plain", "RUNNING")
	s.c.WaitStatus("pd", "RUNNING")
	s.learn()
	return s
}

// learn asks the engine that has no partner for all texts.
func (s *faultRun) learn() {
	for i := range faultPrompts {
		words := strings.Repeat(" "+strconv.Itoa(s.rand.IntN(1000)), 5+s.rand.IntN(300))
		p := faultPrompt{text: fmt.Sprint("prompt ", i, words), tokens: 8 + s.rand.IntN(40)}
		st := s.ask(s.t.Context(), "plain", &p, true)
		require.True(s.t, st.OK(), st)
		p.want = st.Text
		s.prompts = append(s.prompts, p)
	}
}

// play sends the requests and makes the faults.
func (s *faultRun) play() {
	fault := s.pause(2 * time.Second)
	for range faultRequests {
		gap := time.Duration(s.rand.ExpFloat64() * float64(faultGap))
		time.Sleep(gap)
		if fault -= gap; fault <= 0 {
			s.fault()
			fault = s.pause(6 * time.Second)
		}
		s.send()
	}
	s.note("the faults are over")
	s.settle()
	s.t.Logf("%d requests: %v; prompts computed %v", s.ended, s.outcomes, s.ways)
	if s.t.Failed() {
		s.t.Logf("steps:\n%s", lines(s.steps))
	}
}

func (s *faultRun) pause(most time.Duration) time.Duration {
	return 200*time.Millisecond + time.Duration(s.rand.Int64N(int64(most)))
}

func (s *faultRun) note(format string, args ...any) {
	s.steps = append(s.steps, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

// engines are those of the pairs that live.
func (s *faultRun) engines() []*harness.Engine {
	all := slices.DeleteFunc(s.c.Engines.Live(), func(e *harness.Engine) bool {
		return !strings.HasPrefix(e.String(), "pd.")
	})
	for _, e := range all {
		s.seen[e] = true
	}
	return all
}

// fault kills an engine, stops it for a while, or lets it fail.
func (s *faultRun) fault() {
	all := s.engines()
	if len(all) == 0 {
		return
	}
	e := all[s.rand.IntN(len(all))]
	f := sim.Fault{ForS: 0.1 + s.rand.Float64()*faultFreeze.Seconds()}
	switch n := s.rand.IntN(16); {
	case n < 5:
		s.note("kill %s", e)
		e.Kill()
		return
	case n < 10:
		f.Mode = "hang"
	case n < 11:
		f.Mode = "slow"
	default:
		modes := []sim.Mode{"http-500", "busy", "cut", "error-event", "refuse"}
		f.Mode, f.Count, f.AfterTokens = modes[s.rand.IntN(len(modes))], 1+s.rand.IntN(6), s.rand.IntN(4)
		f.ForS = min(f.ForS, 5)
	}
	s.note("fail %s %s for %.1f s: %v", e, f.Mode, f.ForS, s.c.Inject(e.URL, f))
}

// send begins a request. Some clients leave before the end.
func (s *faultRun) send() {
	p, stream := &s.prompts[s.rand.IntN(len(s.prompts))], s.rand.IntN(4) > 0
	ctx, leave := context.WithCancel(s.t.Context())
	var patience *time.Timer
	if s.rand.IntN(20) == 0 {
		patience = time.AfterFunc(time.Duration(s.rand.Int64N(int64(2*time.Second))), leave)
	}
	s.clients.Go(func() {
		defer leave()
		st := s.ask(ctx, "pd", p, stream)
		s.end(p, st, patience != nil && !patience.Stop())
	})
}

// faultStream is what a client saw, and by whom the prompt was computed.
type faultStream struct {
	*harness.Stream
	way string
}

// ask sends a prompt and reads the answer.
func (s *faultRun) ask(ctx context.Context, model string, p *faultPrompt, stream bool) faultStream {
	body, err := json.Marshal(map[string]any{
		"model": model, "messages": []map[string]string{{"role": "user", "content": p.text}},
		"max_tokens": p.tokens, "ignore_eos": true, "stream": stream,
	})
	if err != nil {
		return faultStream{Stream: &harness.Stream{Err: err}}
	}
	resp, err := s.c.Post(ctx, "/v1/chat/completions", string(body))
	if err != nil {
		return faultStream{Stream: &harness.Stream{Err: err}}
	}
	way := resp.Header.Get("x-dpserve-prefill")
	if stream || resp.StatusCode != http.StatusOK {
		return faultStream{harness.ReadStream(resp), way}
	}
	defer resp.Body.Close()
	out := &harness.Stream{Status: resp.StatusCode}
	var answer struct {
		Choices []struct {
			Message      struct{ Content string }
			FinishReason string `json:"finish_reason"`
		}
	}
	text, err := io.ReadAll(resp.Body)
	if out.Err = err; err == nil {
		out.Err = json.Unmarshal(text, &answer)
	}
	for _, c := range answer.Choices {
		out.Text, out.Finish, out.Done = c.Message.Content, c.FinishReason, true
	}
	return faultStream{out, way}
}

// end compares an answer with the text of an engine alone. What came of a broken one is its beginning.
func (s *faultRun) end(p *faultPrompt, st faultStream, left bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended++
	how := "ok"
	switch {
	case left:
		how = "left"
	case st.OK():
	case st.Status == http.StatusOK:
		how = "broken " + st.Error
		assert.False(s.t, st.Whole() && st.Error == "" && st.Finish == "", "an answer without an end: %v", st)
	default:
		how = fmt.Sprintf("%d %s", st.Status, st.Error)
		assert.Contains(s.t, []int{
			http.StatusInternalServerError, // the engine's own words
			http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout,
		}, st.Status, st)
	}
	s.outcomes[how]++
	s.ways[st.way]++
	if st.OK() && st.Text != p.want || !strings.HasPrefix(p.want, st.Text) {
		s.wrong = append(s.wrong, fmt.Sprintf("%s, %s: %q, not %q", how, st.way, st.Text, p.want))
	}
}

// settle heals the engines, waits until everything runs and rests, and looks at what is left.
func (s *faultRun) settle() {
	for _, e := range s.engines() {
		_ = s.c.Heal(e.URL) // one that is starting or dies cannot be told, and need not be
	}
	s.clients.Wait()
	s.c.WaitStatus("pd", "RUNNING")
	s.c.Quiet()
	time.Sleep(faultLease)
	s.c.Until("no request and no block is held in an engine", s.held)
	open, faults := s.audit.rest()
	assert.Zero(s.t, open, "tickets without an end")
	assert.Empty(s.t, faults)
	assert.Empty(s.t, s.wrong, "wrong texts")
	assert.Equal(s.t, faultRequests, s.ended)
	assert.Greater(s.t, s.outcomes["ok"], faultRequests/2, "most requests get their answer")
	assert.Empty(s.t, s.dead(), "engines that ended by themselves")
	for i := range s.prompts { // a cache with wrong blocks would show now
		st := s.ask(s.t.Context(), "pd", &s.prompts[i], true)
		assert.True(s.t, st.OK(), st)
		assert.Equal(s.t, s.prompts[i].want, st.Text, "after the faults")
	}
}

// held says which engine still works on something, or keeps blocks for somebody.
func (s *faultRun) held() error {
	for _, e := range s.engines() {
		st, err := s.c.Stats(e.URL)
		if err != nil {
			return err
		}
		if st.InFlight > 0 || st.Running > 0 || st.Waiting > 0 || st.UsedBlocks > 0 {
			return fmt.Errorf("%s: %d in flight, %d running, %d waiting, %d blocks used", e, st.InFlight,
				st.Running, st.Waiting, st.UsedBlocks)
		}
	}
	return nil
}

// dead are engines that ended although nobody had asked them to: neither this test nor their node.
func (s *faultRun) dead() (out []string) {
	for e := range s.seen {
		if e.EndedByItself() {
			out = append(out, e.String())
		}
	}
	return out
}

// TestRandomFaultsWouldShowAWrongText: parameters that are used when their lease is over, and their
// blocks have another prompt, give status 200 and a text that is not the right one, then and later. So
// the run is able to see it.
func TestRandomFaultsWouldShowAWrongText(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFaultRun(t, 0)
		engines := &http.Client{Transport: &http.Transport{DialContext: s.c.Net.DialContext}}
		defer engines.CloseIdleConnections()
		prefill, decode := s.side("pd.prefill"), s.side("pd.decode")
		p := &s.prompts[0]
		ask := func(e *harness.Engine, p *faultPrompt, more map[string]any) faultAnswer {
			body := map[string]any{
				"model": "pd", "messages": []map[string]string{{"role": "user", "content": p.text}},
				"max_tokens": p.tokens, "ignore_eos": true,
			}
			maps.Copy(body, more)
			return askEngine(t, engines, e.URL, body)
		}
		kept := ask(prefill, p, map[string]any{"max_tokens": 1, "kv_transfer_params": map[string]any{
			"do_remote_decode": true, "do_remote_prefill": false,
		}})
		require.Greater(t, len(kept.Params), len("null"), "%s: %v", kept.Params, prefill.Argv)
		time.Sleep(faultLease)
		for i := range s.prompts[1:] {
			ask(prefill, &s.prompts[1+i], map[string]any{"max_tokens": 1})
		}
		late := ask(decode, p, map[string]any{"kv_transfer_params": kept.Params})
		assert.NotEqual(t, p.want, late.text(), "read too late")
		again := ask(decode, p, nil)
		assert.NotEqual(t, p.want, again.text(), "the wrong blocks stay in the cache")
	})
}

// side is the first engine of a pool.
func (s *faultRun) side(pool string) *harness.Engine {
	all := s.engines()
	i := slices.IndexFunc(all, func(e *harness.Engine) bool {
		return strings.HasPrefix(e.String(), pool+"/")
	})
	require.NotEqual(s.t, -1, i, pool)
	return all[i]
}

// faultAnswer is an engine's own answer.
type faultAnswer struct {
	Choices []struct{ Message struct{ Content string } }
	Params  json.RawMessage `json:"kv_transfer_params"`
}

func (a *faultAnswer) text() string { return a.Choices[0].Message.Content }

// askEngine sends a chat to an engine itself.
func askEngine(t *testing.T, c *http.Client, url string, body map[string]any) (a faultAnswer) {
	t.Helper()
	b, err := json.Marshal(body)
	require.NoError(t, err)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions",
		bytes.NewReader(b))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s", text)
	require.NoError(t, json.Unmarshal(text, &a))
	require.Len(t, a.Choices, 1, "%s", text)
	return a
}
