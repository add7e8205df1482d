package inprocess

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

var walkSeeds = flag.Int("walk.seeds", defaultSeeds, "how many random walks")

// Sizes of a walk.
const (
	defaultSeeds = 12 // .ci/run plays 100, make nightly 1,000
	shortSeeds   = 8
	walkRounds   = 2                // each ends with a quiet point
	roundSteps   = 16               // actions in a round
	shortRest    = 2 * time.Second  // longest pause between most actions
	longestRest  = 40 * time.Second // longest pause between some
	burst        = 8                // requests at once
)

var walkApps = []string{"a", "b"}

// SK7: TestRandomWalk deploys, deletes, kills, breaks and asks at random; at every quiet point nothing may be
// left over. A failing walk names its seed, which is its subtest: go test ./test/inprocess -run
// 'TestRandomWalk/seed_7$'.
func TestRandomWalk(t *testing.T) {
	n := *walkSeeds
	if testing.Short() {
		n = min(n, shortSeeds)
	}
	for seed := range n {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { walk(t, uint64(seed)) })
		})
	}
}

// randomWalk runs one random walk.
type randomWalk struct {
	t       *testing.T
	c       *harness.Cluster
	rand    *rand.Rand
	audit   *audit
	wanted  map[string]string // deployed apps → app.yaml
	steps   []string          // what was done, for the reader of a failure
	clients sync.WaitGroup

	mu          sync.Mutex
	sent, ended int
	outcomes    map[string]int
}

func walk(t *testing.T, seed uint64) {
	w := &randomWalk{
		t: t, c: harness.New(t), rand: rand.New(rand.NewPCG(seed, 0)), audit: &audit{open: map[entry]bool{}},
		wanted: map[string]string{}, outcomes: map[string]int{},
	}
	w.c.Expect(harness.EngineFails, harness.RequestsFail)
	defer w.c.Feed().Subscribe(w.audit)()
	w.deploy()
	for range walkRounds {
		for range roundSteps {
			w.step()
			w.rest()
		}
		w.settle()
	}
	t.Logf("%d requests: %v", w.sent, w.outcomes)
	if t.Failed() {
		t.Logf("seed %d: replay with -run 'TestRandomWalk/seed_%d$'; steps:\n%s", seed, seed, lines(w.steps))
	}
}

func lines(list []string) string {
	out := ""
	for _, s := range list {
		out += "  " + s + "\n"
	}
	return out
}

func (w *randomWalk) note(format string, args ...any) {
	w.steps = append(w.steps, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

// rest lets time pass: mostly less than a stream takes, now and then more than any deadline.
func (w *randomWalk) rest() {
	limit := shortRest
	if w.rand.IntN(8) == 0 {
		limit = longestRest
	}
	time.Sleep(time.Duration(w.rand.Int64N(int64(limit))))
}

// step does one thing.
func (w *randomWalk) step() {
	switch n := w.rand.IntN(20); {
	case n < 2:
		w.deploy()
	case n < 3:
		w.remove()
	case n < 6:
		w.kill()
	case n < 10:
		w.fail()
	case n < 12:
		w.heal()
	default:
		w.ask()
	}
}

func (w *randomWalk) pick(list ...string) string { return list[w.rand.IntN(len(list))] }

// deploy deploys an app, or another revision of it.
func (w *randomWalk) deploy() {
	name := w.pick(walkApps...)
	yaml := simApp(name, 1+w.rand.IntN(3), w.pick("independent", "lockstep"),
		"sim_step_ms: 20, num_gpu_blocks_override: 512, max_model_len: 4096, sim_startup_s: "+w.pick("0", "0",
			"0.5", "3"),
		"routing: {policy: "+w.pick("power-of-two", "round-robin", "least-loaded", "random")+"}",
		"max_ongoing_requests: "+w.pick("1", "2", "8"),
		"timeouts: {queue_s: 20, first_token_s: 15, between_tokens_s: 10}",
		"graceful_shutdown_timeout_s: "+w.pick("0", "1", "10"))
	code, text := w.c.Do(http.MethodPut, "/api/v1/apps?file=app.yaml", yaml)
	w.note("deploy %s: %d", name, code)
	switch code {
	case http.StatusAccepted:
		w.wanted[name] = yaml
	case http.StatusConflict: // it is being deleted
	default:
		w.t.Errorf("deploy %s: %d %s", name, code, text)
	}
}

func (w *randomWalk) remove() {
	name := w.pick(walkApps...)
	code, text := w.c.Do(http.MethodDelete, "/api/v1/apps/"+name, "")
	w.note("delete %s: %d", name, code)
	if code != http.StatusAccepted && code != http.StatusNotFound {
		w.t.Errorf("delete %s: %d %s", name, code, text)
	}
	delete(w.wanted, name)
}

// engine draws a live engine; nil if there is none.
func (w *randomWalk) engine() *harness.Engine {
	live := w.c.Engines.Live()
	if len(live) == 0 {
		return nil
	}
	return live[w.rand.IntN(len(live))]
}

func (w *randomWalk) kill() {
	if e := w.engine(); e != nil {
		w.note("kill %s", e)
		e.Kill()
	}
}

// fail breaks an engine: for good, for a while, or for some requests.
func (w *randomWalk) fail() {
	e := w.engine()
	if e == nil {
		return
	}
	f := sim.Fault{Mode: sim.Mode(w.pick(
		"crash", "kill", "core-dead", "hang", "slow", "refuse", "health-503", "stopping", "ignore-sigterm",
		"http-500", "http-503", "busy", "cut", "no-done", "error-event", "abort", "bare-done", "stall"))}
	f.ForS = float64(w.rand.IntN(40))
	f.Count = w.rand.IntN(8)
	f.AfterTokens = w.rand.IntN(5)
	err := w.c.Inject(e.URL, f) // one that is starting cannot be told
	w.note("fail %s %s for %v s, %d requests, after %d tokens: %v", e, f.Mode, f.ForS, f.Count, f.AfterTokens,
		err)
}

func (w *randomWalk) heal() {
	if e := w.engine(); e != nil {
		w.note("heal %s: %v", e, w.c.Heal(e.URL))
	}
}

// ask sends some requests at once. Some clients leave before the end.
func (w *randomWalk) ask() {
	n := 1 + w.rand.IntN(burst)
	w.note("%d requests", n)
	for range n {
		model, tokens, stream := w.model(), 1+w.rand.IntN(150), w.rand.IntN(4) > 0
		ctx, leave := context.WithCancel(w.t.Context())
		var patience *time.Timer
		if w.rand.IntN(5) == 0 {
			patience = time.AfterFunc(time.Duration(w.rand.Int64N(int64(2*time.Second))), leave)
		}
		w.sent++
		w.clients.Go(func() {
			defer leave()
			s := w.c.Chat(ctx, model, tokens, stream)
			left := patience != nil && !patience.Stop()
			w.end(s, left)
		})
	}
}

// model names an app, nearly always one that is deployed.
func (w *randomWalk) model() string {
	if len(w.wanted) == 0 || w.rand.IntN(30) == 0 {
		return w.pick(walkApps...)
	}
	return w.pick(slices.Sorted(maps.Keys(w.wanted))...)
}

// breaks are the codes of the error events that may end a stream. One that got comments and no content may
// end as one that is refused.
func breaks(s *harness.Stream) []string {
	codes := []string{"upstream_lost", "stalled", "drained"}
	if !s.FirstByte() {
		codes = append(codes, "overloaded", "queue_timeout", "no_ready_rank", "upstream_failed",
			"first_token_timeout", "503")
	}
	return codes
}

// end records how a request ended.
func (w *randomWalk) end(s *harness.Stream, left bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended++
	how := "ok"
	switch {
	case left:
		how = "left"
	case s.OK(), s.Status == http.StatusOK && s.Finish != "" && s.Error == "" && s.Err == nil:
		// complete, also without [DONE]
	case s.Status == http.StatusOK && s.Error == "500":
		how = "the engine's own error" // and its own end
	case s.Status == http.StatusOK:
		how = "broken " + s.Error
		assert.Contains(w.t, breaks(s), s.Error, s)
		assert.False(w.t, s.Done, s)
		assert.Empty(w.t, s.Finish, s)
		assert.False(w.t, s.Whole(), "a broken stream is cut: %v", s)
	default:
		how = fmt.Sprintf("%d %s", s.Status, s.Error)
		assert.True(w.t, s.Whole(), s)
		assert.Contains(w.t, []string{
			"404 model_not_found", "502 upstream_failed", "503 overloaded", "503 queue_timeout",
			"503 no_ready_rank", "504 first_token_timeout",
			"500 500", "503 503", // the engine's own words
		}, how)
	}
	w.outcomes[how]++
}

// settle heals everything and waits until it is quiet; then nothing may be left over.
func (w *randomWalk) settle() {
	w.note("quiet point")
	for _, e := range w.c.Engines.Live() {
		// one that is starting, refuses or dies cannot be told, and need not be
		w.note("heal %s: %v", e, w.c.Heal(e.URL))
	}
	w.clients.Wait()
	w.mu.Lock()
	assert.Equal(w.t, w.sent, w.ended)
	w.mu.Unlock()
	w.c.Until("what is wanted runs, and nothing else", w.unsettled)
	w.c.Quiet()
	w.c.Until("no request left in an engine", w.engaged)
	open, faults := w.audit.rest()
	assert.Zero(w.t, open, "tickets without an end")
	assert.Empty(w.t, faults)
}

// unsettled compares the apps and engines with what was deployed. A unit whose starts all failed gets another
// deploy.
func (w *randomWalk) unsettled() error {
	desired := 0
	names := map[string]bool{}
	for _, a := range w.c.Apps() {
		yaml := w.wanted[a.Name]
		names[a.Name] = true
		desired += a.Desired
		switch {
		case yaml == "":
			return fmt.Errorf("%s is %s", a.Name, a.Status)
		case a.Status == "DEPLOY_FAILED":
			w.note("deploy %s again", a.Name)
			w.c.Deploy(yaml)
			return fmt.Errorf("%s failed: %s", a.Name, a.Message)
		case a.Status != "RUNNING" || a.Ready != a.Desired:
			return fmt.Errorf("%s is %s: %s", a.Name, a.Status, a.Message)
		}
	}
	if len(names) != len(w.wanted) {
		return fmt.Errorf("there are %v, wanted %v", slices.Sorted(maps.Keys(names)),
			slices.Sorted(maps.Keys(w.wanted)))
	}
	if live := len(w.c.Engines.Live()); live != desired {
		return fmt.Errorf("%d engines live, %d are wanted", live, desired)
	}
	return nil
}

// engaged says which engine still works on something.
func (w *randomWalk) engaged() error {
	for _, e := range w.c.Engines.Live() {
		st, err := w.c.Stats(e.URL)
		if err != nil {
			return err
		}
		if st.InFlight > 0 || st.Running > 0 || st.Waiting > 0 {
			return fmt.Errorf("%s: %d in flight, %d running, %d waiting", e, st.InFlight, st.Running,
				st.Waiting)
		}
	}
	return nil
}
