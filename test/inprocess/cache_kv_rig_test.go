package inprocess

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/test/harness"
)

// Lines of an application whose ranks' caches are followed by their events.
const (
	kvLocality  = "routing: {policy: scoring, identity: tokens, params: {profile: locality}}"
	kvDevMode   = `engine: {kind: sim, args: {sim_step_ms: 5}, env: {VLLM_SERVER_DEV_MODE: "1"}}`
	blockTokens = 16 // tokens per KV block of a simulated engine
)

// kvRig is a cluster and what these tests look at beside it.
type kvRig struct {
	*harness.Cluster
	t      *testing.T
	client *http.Client
}

func newKVRig(t *testing.T, options ...harness.Option) *kvRig {
	t.Helper()
	c := harness.New(t, options...)
	transport := &http.Transport{DialContext: c.Net.DialContext, MaxIdleConnsPerHost: 64}
	r := &kvRig{Cluster: c, t: t, client: &http.Client{Transport: transport}}
	t.Cleanup(r.client.CloseIdleConnections)
	return r
}

// kvDoc is a prompt of n token ids; prompts of different numbers share no block.
func kvDoc(number, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(1000 + (number*7919+i*31)%30000)
	}
	out[0] = uint32(1000 + number)
	return out
}

// kvAnswer is the answer to a prompt of token ids.
type kvAnswer struct {
	status         int
	rank           string // GROUP/RANK
	prompt, cached int    // tokens, by the engine's own count
	code           string // of an error
	ids            []uint32
}

// kvAsk is one request.
type kvAsk struct {
	addr   string // host:port of an ingress; "" = the node's own
	app    string
	rank   string // GROUP/RANK, through the node's own ingress; "" = as the policy says
	ids    []uint32
	tokens int // to generate
}

// complete sends a prompt and reads the whole answer.
func (r *kvRig) complete(q kvAsk) kvAnswer {
	r.t.Helper()
	if q.rank != "" {
		return r.force(q)
	}
	body, err := json.Marshal(map[string]any{
		"model": q.app, "prompt": q.ids, "max_tokens": max(1, q.tokens), "ignore_eos": true,
		"return_token_ids": true,
	})
	require.NoError(r.t, err)
	resp, err := r.post(q.addr, "/v1/completions", string(body))
	require.NoError(r.t, err)
	defer resp.Body.Close()
	var answer struct {
		Usage struct {
			PromptTokens        int `json:"prompt_tokens"`
			PromptTokensDetails struct {
				CachedTokens int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
		Choices []struct {
			TokenIDs []uint32 `json:"token_ids"`
		}
		Error struct{ Code any }
	}
	require.NoError(r.t, json.NewDecoder(resp.Body).Decode(&answer))
	out := kvAnswer{
		status: resp.StatusCode, rank: resp.Header.Get("x-dpserve-group") + "/" +
			resp.Header.Get("x-dpserve-rank"),
		prompt: answer.Usage.PromptTokens, cached: answer.Usage.PromptTokensDetails.CachedTokens,
		code: fmt.Sprint(answer.Error.Code),
	}
	if len(answer.Choices) > 0 {
		out.ids = answer.Choices[0].TokenIDs
	}
	return out
}

// force is complete on one rank, whatever the policy says.
func (r *kvRig) force(q kvAsk) kvAnswer {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{
		"token_ids": q.ids, "worker": q.rank, "sampling": map[string]any{
			"max_tokens": max(1, q.tokens),
			"ignore_eos": true,
		},
	})
	require.NoError(r.t, err)
	code, text := r.Do(http.MethodPost, "/api/v1/routers/"+q.app+"/generate", string(body))
	out := kvAnswer{status: code}
	if code != http.StatusOK || strings.Contains(text, "event: error") {
		out.status, out.code = max(code, http.StatusBadGateway), text[:min(len(text), 300)]
		return out
	}
	for line := range strings.Lines(text) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var part client.Part
		require.NoError(r.t, json.Unmarshal([]byte(data), &part))
		out.ids = append(out.ids, part.TokenIDs...)
		if part.Worker != "" {
			out.rank = part.Worker
		}
		if u := part.Usage; u != nil {
			out.prompt, out.cached = u.Prompt, u.Cached
		}
	}
	assert.Equal(r.t, q.rank, out.rank)
	return out
}

// must is complete for a request that may not fail.
func (r *kvRig) must(q kvAsk) kvAnswer {
	r.t.Helper()
	out := r.complete(q)
	require.Equal(r.t, http.StatusOK, out.status, out.code)
	return out
}

func (r *kvRig) post(addr, path, body string, header ...string) (*http.Response, error) {
	if addr == "" {
		return r.Post(r.t.Context(), path, body, header...)
	}
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, "http://"+addr+path,
		strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return r.client.Do(req)
}

// spread sends prompts from first on to every rank of a group in turn, eight at a time.
func (r *kvRig) spread(app string, ranks, first, n, tokens int) {
	r.t.Helper()
	work := make(chan int)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range work {
				out := r.complete(kvAsk{
					app: app, rank: fmt.Sprintf("0/%d", i%ranks),
					ids: kvDoc(first+i, tokens),
				})
				assert.Equal(r.t, http.StatusOK, out.status, out.code)
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
}

// engine sends a request to an engine's own surface.
func (r *kvRig) engine(method, url, body string) string {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, url, strings.NewReader(body))
	require.NoError(r.t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.client.Do(req)
	require.NoError(r.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(r.t, err)
	require.Equal(r.t, http.StatusOK, resp.StatusCode, string(b))
	return string(b)
}

// held is how many blocks the engine at a URL has cached, and how many batches it has published.
func (r *kvRig) held(url string) (blocks int, batches uint64) {
	r.t.Helper()
	var tables []sim.BlockTable
	require.NoError(r.t, json.Unmarshal([]byte(r.engine(http.MethodGet, url+"/_sim/blocks", "")), &tables))
	require.Len(r.t, tables, 1)
	return len(tables[0].Blocks), tables[0].Next
}

// explain is what the node's own Router would decide for a prompt, with the hits of every rank.
func (r *kvRig) explain(app string, ids []uint32) client.Explanation {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"token_ids": ids})
	require.NoError(r.t, err)
	code, text := r.Do(http.MethodPost, "/api/v1/routers/"+app+"/explain", string(body))
	require.Equal(r.t, http.StatusOK, code, text)
	var x client.Explanation
	require.NoError(r.t, json.Unmarshal([]byte(text), &x))
	return x
}

// kvHits are the tokens of a prompt that the Router believes each rank to hold, by rank number.
func kvHits(x *client.Explanation) []int {
	out := make([]int, len(x.Ranks))
	for i := range x.Ranks {
		out[i] = x.Ranks[i].HitTokens
	}
	return out
}

// kvView is what an index holds: hashes by "GROUP/RANK tier".
type kvView map[string]map[string]bool

func (v kvView) add(run *client.Run) {
	key := run.Worker + " " + run.Tier
	if v[key] == nil {
		v[key] = map[string]bool{}
	}
	for _, h := range run.Blocks {
		v[key][h] = true
	}
}

// sizes are the blocks by block set, for a reader.
func (v kvView) sizes() map[string]int {
	out := map[string]int{}
	for key, set := range v {
		out[key] = len(set)
	}
	return out
}

// only returns the block sets of one tier.
func (v kvView) only(tier string) kvView {
	out := kvView{}
	for key, set := range v {
		if strings.HasSuffix(key, " "+tier) {
			out[key] = set
		}
	}
	return out
}

// dump is the index of the node's own ingress.
func (r *kvRig) dump(app string) kvView {
	r.t.Helper()
	code, text := r.Do(http.MethodGet, "/api/v1/routers/"+app+"/dump_events", "")
	require.Equal(r.t, http.StatusOK, code, text)
	var d struct {
		Events    []client.Run
		Truncated bool
	}
	require.NoError(r.t, json.Unmarshal([]byte(text), &d))
	require.False(r.t, d.Truncated)
	v := kvView{}
	for i := range d.Events {
		v.add(&d.Events[i])
	}
	return v
}

// second is an ingress beside the node's own.
type second struct {
	*ingress.Ingress
	addr string
	cut  func() // ends it at once, its streams with it
}

// join starts a second ingress; edit changes its configuration.
func (r *kvRig) join(name string, edit func(*ingress.Config)) *second {
	r.t.Helper()
	cfg := ingress.Config{
		Node: name, Store: r.Store(), Feed: r.Feed(), Metrics: telemetry.New(),
		Log: slog.New(slog.NewJSONHandler(r.Journal, nil)), Seed: 7,
		Dial: r.Net.DialContext,
	}
	if edit != nil {
		edit(&cfg)
	}
	in, err := ingress.New(cfg)
	require.NoError(r.t, err)
	l, err := r.Net.Listen("127.0.0.1:0")
	require.NoError(r.t, err)
	require.NoError(r.t, in.Attach(l))
	served := make(chan error, 1)
	go func() { served <- in.Serve() }()
	end := sync.OnceFunc(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = in.Close(ctx) // what still runs is cut
		<-served
	})
	r.t.Cleanup(end)
	return &second{Ingress: in, addr: l.Addr().String(), cut: end}
}

// dump is its index.
func (s *second) dump(t *testing.T, app string) kvView {
	t.Helper()
	v := kvView{}
	truncated, err := s.DumpEvents(t.Context(), app, func(run *client.Run) error { v.add(run); return nil })
	require.NoError(t, err)
	require.False(t, truncated)
	return v
}

// settled lets time pass until the index of the node's own ingress holds, for every rank, exactly as many
// blocks as the rank's engine.
func (r *kvRig) settled(app string) kvView {
	r.t.Helper()
	var v kvView
	r.Until("the index is what the engines hold", func() error {
		v = r.dump(app).only("gpu")
		st, _ := r.App(app)
		for _, u := range st.Units {
			for _, k := range u.Ranks {
				n, _ := r.held(k.URL)
				if have := len(v[fmt.Sprintf("%d/%d gpu", k.Group, k.Rank)]); have != n {
					return fmt.Errorf("rank %d: %d blocks in the index, %d in the engine", k.Rank, have, n)
				}
			}
		}
		return nil
	})
	return v
}

// soon lets time pass in small steps until f returns nil, for at most limit, and returns the time that it
// took.
func soon(t *testing.T, limit time.Duration, what string, f func() error) time.Duration {
	t.Helper()
	began := time.Now()
	err := harness.WaitFor(limit, 5*time.Millisecond, func() error {
		synctest.Wait()
		return f()
	})
	if err != nil {
		t.Fatalf("%s: not within %s: %v", what, limit, err)
	}
	return time.Since(began)
}

// same compares two indexes and says where they differ.
func same(a, b kvView) error {
	if maps.EqualFunc(a, b, maps.Equal) {
		return nil
	}
	return fmt.Errorf("%v here, %v there", a.sizes(), b.sizes())
}

// warnings are the journal's lines of level WARN and ERROR.
func (r *kvRig) warnings() []string {
	return append(r.Journal.Find(`"level":"WARN"`), r.Journal.Errors()...)
}

// idle waits for the state that every test must leave behind.
func (r *kvRig) idle() {
	r.t.Helper()
	r.Quiet()
	for _, e := range r.Engines.Live() {
		st, err := r.Stats(e.URL)
		require.NoError(r.t, err)
		assert.Zero(r.t, st.InFlight+st.Running+st.Waiting, "%s", e)
	}
}
