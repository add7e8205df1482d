package inprocess

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// engineStats is what an engine has in hand.
func engineStats(t *testing.T, c *harness.Cluster, url string) sim.Stats {
	t.Helper()
	st, err := c.Stats(url)
	require.NoError(t, err)
	return st
}

// RT4: eight replicas, one system prompt of 2048 tokens, 70 % of the prefill that warm ranks can do. The
// busiest rank gets at most 1.3 times the mean, and all are warm after 200 requests.
func TestRT4SharedSystemPromptWarmsAllRanks(t *testing.T) {
	skipShort(t)
	const ranks, requests, system, own, output = 8, 600, 2048, 256, 16
	const gap = own * 47 * time.Microsecond * 10 / 7 / ranks
	for _, routing := range some(2, append([]string{
		"{policy: lmetric-1}", "{policy: mex}",
		"{policy: cache-aware, preset: tuned}", "{policy: least-kv}",
	}, workRouting()...)...) {
		t.Run(routing, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", ranks, "independent", "", "routing: "+routing))
				c.WaitStatus("a", "RUNNING")
				r, y := rand.New(rand.NewPCG(4, 4)), newTally(200)
				shared := freshPrompt(r, system)
				var mu sync.Mutex
				arrive(r, requests, gap, func(int) {
					mu.Lock()
					prompt := append(append([]uint32{}, shared...), freshPrompt(r, own)...)
					mu.Unlock()
					y.note(t, askIDs(t.Context(), c, "a", prompt, output))
				})
				assert.Len(t, y.first, ranks, "warm after 200 requests")
				assert.LessOrEqual(t, y.spread(ranks), 1.3)
				t.Logf("%d requests, busiest rank %.2f times the mean, %.1f %% cached, %v", requests,
					y.spread(ranks), 100*y.hitRate(), y.ranks)
				c.Quiet()
			})
		})
	}
}

// RT6: rank A has work in hand, rank B has served a lot and is idle. Prompts that neither knows go to B until
// both have as much to do.
func TestRT6ColdPromptsGoToTheIdleRank(t *testing.T) {
	const busy, prompt = 12, 2048
	for _, routing := range fewer(append(workRouting(), "{policy: lmetric-1}", "{policy: mex}",
		"{policy: cache-aware, preset: tuned}", "{policy: least-kv}", "{policy: scoring, preset: tuned}")) {
		t.Run(routing, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", 2, "independent", "", "routing: "+routing))
				c.WaitStatus("a", "RUNNING")
				r := rand.New(rand.NewPCG(6, 6))
				for range 40 {
					require.NoError(t, askOn(c, "a", "0/1", freshPrompt(r, prompt), 1))
				}
				c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeHang}) // what they have in hand stays as it is
				c.Fail("a", 0, 1, sim.Fault{Mode: sim.ModeHang})
				var wg sync.WaitGroup
				for range busy {
					prompt := freshPrompt(r, prompt)
					wg.Go(func() { assert.NoError(t, askOn(c, "a", "0/0", prompt, 1)) })
				}
				synctest.Wait()
				require.Equal(t, busy, c.Rank("a", 0, 0).InFlight)
				y := newTally(0)
				for range busy { // as many as make both equal
					prompt := freshPrompt(r, prompt)
					wg.Go(func() { y.note(t, askIDs(t.Context(), c, "a", prompt, 1)) })
					synctest.Wait()
				}
				c.Recover("a", 0, 0)
				c.Recover("a", 0, 1)
				wg.Wait()
				assert.GreaterOrEqual(t, y.ranks["0/1"]*10, busy*9)
				t.Logf("%d of %d cold prompts went to the idle rank", y.ranks["0/1"], busy)
				c.Quiet()
			})
		})
	}
}

// RT9: a prompt of 100,000 tokens prefills on one rank of four; ten of 100 tokens come, and none goes there.
func TestRT9ShortPromptsKeepAwayFromALongPrefill(t *testing.T) {
	for _, routing := range fewer(append(workRouting(), "{policy: lmetric-1}", "{policy: mex}",
		"{policy: kv}", "{policy: least-kv}", "{policy: scoring}")) {
		t.Run(routing, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", 4, "independent", "max_model_len: 131072", "routing: "+routing))
				c.WaitStatus("a", "RUNNING")
				r := rand.New(rand.NewPCG(9, 9))
				long := make(chan *idAnswer, 1)
				began := time.Now()
				var took time.Duration
				go func() {
					a := askIDs(t.Context(), c, "a", freshPrompt(r, 100_000), 1)
					took = time.Since(began)
					long <- a
				}()
				time.Sleep(time.Second)
				var wg sync.WaitGroup
				y := newTally(0)
				for i := range 10 {
					prompt := freshPrompt(rand.New(rand.NewPCG(90, uint64(i))), 100)
					wg.Go(func() { y.note(t, askIDs(t.Context(), c, "a", prompt, 50)) })
					time.Sleep(20 * time.Millisecond)
				}
				wg.Wait()
				short := time.Since(began)
				a := <-long
				require.True(t, a.ok(), a)
				require.Less(t, short, took, "the long prefill outlasts the others")
				assert.Zero(t, y.ranks[a.rank], "beside the long prefill")
				t.Logf("0 of 10 on rank %s, whose prefill took %s: %v", a.rank, took.Round(time.Millisecond),
					y.ranks)
				c.Quiet()
			})
		})
	}
}

// report is by when a rank has told its KV usage: the period of a look at it, and the answer.
const report = 1100 * time.Millisecond

// crowd runs clients that send the next request as soon as they have an answer, until stop is closed.
func crowd(n int, stop <-chan struct{}, ask func()) *sync.WaitGroup {
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					ask()
				}
			}
		})
	}
	return &wg
}

// RT10: 512 clients on the eight ranks of one lockstep group; the KV memory of two is above 95 %. Those get
// nothing until they are below 90 %, the others of the same group go on, and share what waits.
func TestRT10FullRanksOfAGroupGetNothing(t *testing.T) {
	skipShort(t)
	const ranks, clients, limit = 8, 512, 0.95
	full := map[string]bool{"0/2": true, "0/5": true}
	for _, routing := range some(1, "power-of-two", "least-loaded", "kv", "lpwl") {
		t.Run(routing, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", ranks, "lockstep",
					"num_gpu_blocks_override: 2048, max_model_len: 32768, max_num_seqs: 32, sim_step_ms: 100",
					"max_ongoing_requests: 256", fmt.Sprintf("routing: {policy: %s, busy_threshold: %v}",
						routing, limit)))
				c.WaitStatus("a", "RUNNING")
				r := rand.New(rand.NewPCG(10, 10))
				var little, rest []func()
				for _, rank := range []int{2, 5} { // 30,400 of 32,768 tokens, and 1,500 more: 97 %
					url := c.Rank("a", 0, rank).URL
					rest = append(rest, parkOn(t, c, url, "a", freshPrompt(r, 30_400), 800))
					little = append(little, parkOn(t, c, url, "a", freshPrompt(r, 1_500), 800))
				}
				time.Sleep(report)
				y, stop := newTally(0), make(chan struct{})
				var sent atomic.Uint64
				wg := crowd(clients, stop, func() {
					y.note(t, askIDs(t.Context(), c, "a", freshPrompt(rand.New(rand.NewPCG(11, sent.Add(1))),
						64), 8))
				})
				queues, instant := map[string]int{}, 0.0
				for range 20 {
					time.Sleep(250 * time.Millisecond)
					instant = max(instant, waiting(t, c, full, queues))
				}
				worst := uneven(queues)
				above := y.take()
				for _, let := range little {
					let()
				}
				time.Sleep(4 * time.Second)
				between := y.take() // 93 %
				for _, served := range []map[string]int{above, between} {
					assert.Len(t, served, ranks-len(full), "the others of the group serve, and no more: %v",
						served)
					assert.Zero(t, served["0/2"]+served["0/5"], "%v", served)
				}
				assert.Positive(t, worst, "something waits")
				assert.LessOrEqual(t, worst, 1.5, "waiting over five seconds, the most over the mean")
				for _, let := range rest {
					let()
				}
				time.Sleep(4 * time.Second)
				close(stop)
				wg.Wait()
				assert.Len(t, y.ranks, ranks)
				t.Logf("97 %%: %v, 93 %%: %v, then: %v; "+
					"longest queue %.2f times the mean (%.2f at one moment)",
					above, between, y.ranks, worst, instant)
				c.Quiet()
			})
		})
	}
}

// waiting adds what waits in the engines now to sums by rank, without the ranks of except, and says how
// uneven it is now.
func waiting(t *testing.T, c *harness.Cluster, except map[string]bool, sums map[string]int) float64 {
	t.Helper()
	now := map[string]int{}
	st, _ := c.App("a")
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			if id := fmt.Sprintf("%d/%d", k.Group, k.Rank); !except[id] {
				now[id] = engineStats(t, c, k.URL).Waiting
				sums[id] += now[id]
			}
		}
	}
	return uneven(now)
}

// uneven is the largest over the mean.
func uneven(n map[string]int) float64 {
	most, all := 0, 0
	for _, v := range n {
		most, all = max(most, v), all+v
	}
	return float64(most) * float64(len(n)) / float64(max(1, all))
}

// OV3, RT16: busy_threshold 0.5 under every policy. Two of four ranks above it get nothing; all four: 503
// with Retry-After; answers again a second after the load fell.
func TestRT16BusyThresholdHoldsUnderEveryPolicy(t *testing.T) {
	for _, policy := range allRouting() {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Expect(harness.RequestRefused)
				c.Deploy(simApp("a", 4, "independent",
					"num_gpu_blocks_override: 256, max_model_len: 4096, sim_step_ms: 50",
					"routing: {policy: "+policy+", busy_threshold: 0.5}"))
				c.WaitStatus("a", "RUNNING")
				r := rand.New(rand.NewPCG(16, 16))
				code := "overloaded"
				if policy == "direct" {
					code = "no_ready_rank" // the client names the rank, and it is refused there
				}
				ask := func(rank int) *idAnswer {
					header := []string{"x-session-id", fmt.Sprint(r.Uint32())}
					if policy == "direct" {
						header = append(header, "x-dpserve-rank", fmt.Sprintf("0/%d", rank))
					}
					return askIDs(t.Context(), c, "a", freshPrompt(r, 40), 1, header...)
				}
				var release []func()
				above := func(ranks ...int) {
					for _, k := range ranks {
						prompt := freshPrompt(r, 2200) // 54 %, and growing
						release = append(release, parkOn(t, c, c.Rank("a", 0, k).URL, "a", prompt, 1800))
					}
					time.Sleep(report)
				}
				above(0, 3)
				y := newTally(0)
				for i := range 20 {
					y.note(t, ask(1+i%2))
				}
				assert.Zero(t, y.ranks["0/0"]+y.ranks["0/3"], "%v", y.ranks)
				if policy == "direct" {
					assert.Equal(t, code, ask(0).code, "a request that names a rank above the threshold")
				}
				above(1, 2)
				refused := ask(1)
				assert.Equal(t, http.StatusServiceUnavailable, refused.status, refused)
				assert.Equal(t, code, refused.code)
				assert.NotEmpty(t, refused.retry)
				for _, let := range release {
					let()
				}
				fell := time.Now()
				c.Until("an answer", func() error {
					if a := ask(1); !a.ok() {
						return fmt.Errorf("%s", a)
					}
					return nil
				})
				assert.LessOrEqual(t, time.Since(fell), 1200*time.Millisecond)
				t.Logf("%v; then %d %s, Retry-After %s; answers again after %s", y.ranks, refused.status,
					refused.code, refused.retry,
					time.Since(fell).Round(time.Millisecond))
				c.Quiet()
			})
		})
	}
}

// allRouting are all of this build that need no more than a name.
func allRouting() []string {
	return strings.Fields("round-robin random direct power-of-two least-loaded least-kv scoring " +
		"cache-aware prefix-aware kv lmetric-1 lpwl session-affinity mex")
}

// fewer are two of them under -short: what a policy decides is no matter of the race detector.
func fewer(routings []string) []string {
	if testing.Short() {
		return routings[:2]
	}
	return routings
}
