package inprocess

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// idPrompt is a prompt of token ids: what it weighs is exact, for dpserve and for the engine.
type idPrompt struct {
	Model     string   `json:"model"`
	Prompt    []uint32 `json:"prompt"`
	MaxTokens int      `json:"max_tokens"`
	IgnoreEOS bool     `json:"ignore_eos"`
	Stream    bool     `json:"stream"`
	Options   struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	ReturnIDs bool `json:"return_token_ids"`
}

// idAnswer is what a client saw of a completion.
type idAnswer struct {
	status int
	rank   string // GROUP/RANK
	code   string // of the error, "" if there is none
	retry  string // Retry-After
	ids    []uint32
	prompt int // tokens, as the engine counts
	cached int
	err    error
}

func (a *idAnswer) ok() bool {
	return a.err == nil && a.status == http.StatusOK && a.code == "" && a.prompt > 0
}

func (a *idAnswer) String() string {
	return fmt.Sprintf("status %d rank %s code %q retry-after %q cached %d of %d err %v", a.status, a.rank,
		a.code, a.retry, a.cached, a.prompt, a.err)
}

// askIDs runs one streamed completion to its end.
func askIDs(ctx context.Context, c *harness.Cluster, model string, prompt []uint32, maxTokens int,
	header ...string,
) *idAnswer {
	return idPrompt{Model: model, Prompt: prompt, MaxTokens: maxTokens}.ask(ctx, c, header...)
}

// ask streams the completion to its end.
func (q idPrompt) ask(ctx context.Context, c *harness.Cluster, header ...string) *idAnswer {
	q.IgnoreEOS, q.Stream, q.Options.IncludeUsage = true, true, true
	body, err := json.Marshal(q)
	if err != nil {
		return &idAnswer{err: err}
	}
	resp, err := c.Post(ctx, "/v1/completions", string(body), header...)
	if err != nil {
		return &idAnswer{err: err}
	}
	defer resp.Body.Close()
	a := &idAnswer{
		status: resp.StatusCode, rank: resp.Header.Get("x-dpserve-group") + "/" +
			resp.Header.Get("x-dpserve-rank"), retry: resp.Header.Get("Retry-After"),
	}
	a.read(resp.Body)
	return a
}

// read takes the events, or the one object of an error.
func (a *idAnswer) read(body io.Reader) {
	lines := bufio.NewReader(body)
	for {
		line, err := lines.ReadString('\n')
		data := strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		if strings.HasPrefix(data, "{") {
			a.event(data)
		}
		if err != nil {
			if err != io.EOF {
				a.err = err
			}
			return
		}
	}
}

func (a *idAnswer) event(data string) {
	var e struct {
		Error   *struct{ Code any }
		Choices []struct {
			IDs []uint32 `json:"token_ids"`
		}
		Usage *struct {
			Prompt int `json:"prompt_tokens"`
			More   *struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if a.err = json.Unmarshal([]byte(data), &e); a.err != nil {
		return
	}
	if e.Error != nil {
		a.code = fmt.Sprint(e.Error.Code)
	}
	for _, c := range e.Choices {
		a.ids = append(a.ids, c.IDs...)
	}
	if e.Usage != nil {
		a.prompt = e.Usage.Prompt
		if e.Usage.More != nil {
			a.cached = e.Usage.More.Cached
		}
	}
}

// askOn runs a completion on a rank, whatever the policy says.
func askOn(c *harness.Cluster, app, worker string, prompt []uint32, maxTokens int) error {
	body, err := json.Marshal(map[string]any{
		"token_ids": prompt, "worker": worker, "sampling": map[string]any{
			"max_tokens": maxTokens,
			"ignore_eos": true,
		},
	})
	if err != nil {
		return err
	}
	code, text := c.Do(http.MethodPost, "/api/v1/routers/"+app+"/generate", string(body))
	if code != http.StatusOK || strings.Contains(text, "event: error") {
		return fmt.Errorf("generate on %s: %d %s", worker, code, text[:min(len(text), 300)])
	}
	return nil
}

// parkOn sends a request directly to an engine, without dpserve, so that it uses KV memory. release cancels
// it and waits until the engine has ended it.
func parkOn(t *testing.T, c *harness.Cluster, url, model string, prompt []uint32,
	maxTokens int,
) (release func()) {
	t.Helper()
	body, err := json.Marshal(idPrompt{
		Model: model, Prompt: prompt, MaxTokens: maxTokens, IgnoreEOS: true,
		Stream: true,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
		strings.NewReader(string(body)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	transport := &http.Transport{DialContext: c.Net.DialContext}
	resp, err := transport.RoundTrip(req)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	first := make([]byte, 1)
	_, err = io.ReadFull(resp.Body, first) // its prompt is in the cache
	require.NoError(t, err)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, resp.Body) // ends with an error: it is cancelled
	}()
	before := engineStats(t, c, url).Running
	return func() {
		cancel()
		<-drained
		_ = resp.Body.Close()
		transport.CloseIdleConnections()
		c.Until("the engine lets go", func() error {
			if now := engineStats(t, c, url).Running; now >= before {
				return fmt.Errorf("%d running", now)
			}
			return nil
		})
	}
}

// freshPrompt is a prompt that shares no block with any other.
func freshPrompt(r *rand.Rand, tokens int) []uint32 {
	out := make([]uint32, tokens)
	for i := range out {
		out[i] = 1 + r.Uint32N(1<<24)
	}
	return out
}

// tally counts where requests went. Safe for concurrent use.
type tally struct {
	mu     sync.Mutex
	ranks  map[string]int
	prompt int // tokens
	cached int
	failed int
	first  map[string]int // ranks of the first requests that were asked for
	early  int
}

func newTally(early int) *tally {
	return &tally{ranks: map[string]int{}, first: map[string]int{}, early: early}
}

func (y *tally) note(t *testing.T, a *idAnswer) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if !assert.True(t, a.ok(), a) {
		y.failed++
		return
	}
	y.ranks[a.rank]++
	y.prompt, y.cached = y.prompt+a.prompt, y.cached+a.cached
	if y.early > 0 {
		y.early--
		y.first[a.rank]++
	}
}

// take is how many each rank served since the last take.
func (y *tally) take() map[string]int {
	y.mu.Lock()
	defer y.mu.Unlock()
	out := y.ranks
	y.ranks = map[string]int{}
	return out
}

func (y *tally) hitRate() float64 { return float64(y.cached) / float64(max(1, y.prompt)) }

// spread is the busiest of n ranks over their mean.
func (y *tally) spread(n int) float64 {
	most, all := 0, 0
	for _, served := range y.ranks {
		most, all = max(most, served), all+served
	}
	return float64(most) * float64(n) / float64(max(1, all))
}

// arrive starts n requests at random times whose gaps have exactly this mean, and waits for their ends.
func arrive(r *rand.Rand, n int, gap time.Duration, request func(i int)) {
	gaps, sum := make([]float64, n), 0.0
	for i := range gaps {
		gaps[i] = r.ExpFloat64()
		sum += gaps[i]
	}
	var wg sync.WaitGroup
	for i := range n {
		time.Sleep(time.Duration(gaps[i] * float64(n) / sum * float64(gap)))
		wg.Go(func() { request(i) })
	}
	wg.Wait()
}

// workRouting are the policies that weigh prefill work and stay with a cache, as app.yaml has them.
func workRouting() []string {
	return []string{"{policy: kv, preset: tuned}", "{policy: lpwl}"}
}

// accepting says that the tests take their full size (make acceptance).
func accepting() bool { return os.Getenv("DPSERVE_ACCEPTANCE") != "" }

// some are the first few of all, and all of them in an acceptance run.
func some(few int, all ...string) []string {
	if accepting() {
		return all
	}
	return all[:few]
}

// skipShort leaves a test with thousands of requests to the runs without the race detector, under which it
// takes minutes.
func skipShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("thousands of requests")
	}
}
