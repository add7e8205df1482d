package inprocess

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/pairengine"
)

// simPools is an app.yaml of launched simulated engines in two pools; more are further lines of the
// application.
func simPools(prefills, decodes int, args, disaggregation string, more ...string) string {
	text := fmt.Sprintf(`applications:
  - name: pd
    model: {id: pd}
    engine: {kind: sim, args: {%s}}
    prefill: {data_parallel: {dp_size: %d}}
    decode: {data_parallel: {dp_size: %d}}
    disaggregation: {%s}
`, args, prefills, decodes, disaggregation)
	for _, line := range more {
		text += "    " + line + "\n"
	}
	return text
}

// simPair is a node with launched engines, all pairs of which have met.
func simPair(t *testing.T, yaml string, pairs int) *harness.Cluster {
	t.Helper()
	c := harness.New(t)
	c.Deploy(yaml)
	c.WaitStatus("pd", "RUNNING")
	c.Until("all pairs have met", func() error { return haveMet(c, pairs) })
	return c
}

// words is a prompt of about n tokens for the simulated engines.
func words(seed string, n int) string {
	return seed + strings.Repeat(" and it goes on", n/4)
}

func askPair(ctx context.Context, c *harness.Cluster, prompt string, tokens int) *harness.Stream {
	return askPairBody(ctx, c, harness.Chat("pd", prompt, tokens, true))
}

func askPairBody(ctx context.Context, c *harness.Cluster, body string) *harness.Stream {
	began := time.Now()
	resp, err := c.Post(ctx, "/v1/chat/completions", body)
	if err != nil {
		return &harness.Stream{Err: err}
	}
	return harness.ReadAnswer(resp, began)
}

// PD7, PD33: a short prompt has no prefill leg, a long one names both ranks, and a metric counts each way.
// The time of the transfers is measured.
func TestPD7ShortAndLongPrompts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := simPair(t, simPools(2, 4, "max_model_len: 32768", "decide: isl"), 8)
		before := prefillRequests(c)
		short := askPair(t.Context(), c, words("short", 100), 4)
		require.True(t, short.OK(), short)
		assert.Equal(t, "local", short.Way)
		assert.Empty(t, short.Prefill)
		assert.Equal(t, before, prefillRequests(c), "no prefill leg")
		long := askPair(t.Context(), c, words("long", 20_000), 4)
		require.True(t, long.OK(), long)
		assert.Equal(t, "remote", long.Way)
		assert.Regexp(t, `^0/[01]$`, long.Prefill)
		assert.Regexp(t, `^0/[0-3]$`, long.Rank)
		c.Quiet()
		assert.Equal(t, before+1, prefillRequests(c))
		page := metricsOf(t, c.Peer(0))
		assert.InDelta(t, 1, sumSeries(page, "dpserve_pd_requests_total", `way="local"`, `outcome="ok"`), 0)
		assert.InDelta(t, 1, sumSeries(page, "dpserve_pd_requests_total", `way="remote"`, `outcome="ok"`), 0)
		st, _ := c.App("pd")
		assert.EqualValues(t, 1, st.PD.Remote)
		assert.EqualValues(t, 1, st.PD.Local)

		for i := range 4 { // with the first one, enough to know the link
			long = askPair(t.Context(), c, words(fmt.Sprint("more", i), 20_000), 4)
			assert.Equal(t, "remote", long.Way)
		}
		c.Quiet()
		r, err := c.Router("pd").Info(t.Context())
		require.NoError(t, err)
		require.Len(t, r.Pair.Links, 1, "all engines are on one machine")
		assert.InEpsilon(t, sim.DefaultTokenBytes/25e6, r.Pair.TransferMs, 0.3, "25 GB/s")
	})
}

// prefillRequests are the requests that the prefill pool has ended.
func prefillRequests(c *harness.Cluster) (n uint64) {
	st, _ := c.App("pd")
	for _, u := range st.Units {
		if strings.HasPrefix(u.Unit, "pd.prefill/") {
			for _, k := range u.Ranks {
				n += k.Requests
			}
		}
	}
	return n
}

// PD9: no prefill rank lives, in unequal pools.
func TestPD9NoPrefillRank(t *testing.T) {
	for _, sizes := range [][2]int{{2, 4}, {4, 2}} {
		for _, fallback := range []string{"local", "fail"} {
			bubble(t, fmt.Sprintf("%d and %d %s", sizes[0], sizes[1], fallback), func(t *testing.T) {
				r := newPairRig(t, "nixl", sizes[0], sizes[1], "decide: always, fallback: "+fallback)
				r.Expect(harness.PairsFail, harness.RequestRefused)
				used := map[string]bool{}
				var mu sync.Mutex
				var guests sync.WaitGroup
				r.engines.Pause = time.Second
				for i := range 32 {
					guests.Go(func() {
						a := r.ask(pairBody(fmt.Sprintf("guest %d", i), 4))
						r.right(a)
						mu.Lock()
						defer mu.Unlock()
						assert.Equal(t, "remote", a.Way)
						used["p"+a.Prefill], used["d"+a.Rank] = true, true
					})
				}
				guests.Wait()
				r.engines.Pause = 0
				assert.Len(t, used, sizes[0]+sizes[1], "all ranks of both pools serve: %v", used)
				for _, p := range r.prefill {
					p.Stop()
				}
				r.Until("no prefill rank is ready", func() error {
					for _, u := range r.units("pd.prefill/") {
						if u.Phase == "ready" {
							return fmt.Errorf("%s is ready", u.Unit)
						}
					}
					return nil
				})
				assert.Contains(t, r.pairStatus().Pairs, "off")
				a := r.ask(pairBody("alone", 4))
				if fallback == "local" {
					r.right(a)
					assert.Equal(t, "fallback", a.Way, "%v", a)
					assert.InDelta(t, 1, r.total("dpserve_pd_requests_total", `way="fallback"`), 0)
				} else {
					assert.Equal(t, http.StatusServiceUnavailable, a.Status, "%v", a)
					assert.LessOrEqual(t, a.Total, 100*time.Millisecond)
				}
				for _, p := range r.prefill {
					p.Start()
				}
				r.met()
				a = r.ask(pairBody("together again", 4))
				r.right(a)
				assert.Equal(t, "remote", a.Way, "%v", a)
				r.rest()
			})
		}
	}
}

// PD11: a prefill rank is added to decode ranks at run time, and removed, under requests.
func TestPD11PrefillRankComesAndGoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newPairEngines(t, "nixl")
		r.addDecode(pairengine.Decode, 1)
		r.addDecode(pairengine.Decode, 1)
		yaml := r.engines.App("decide: always")
		p := r.addPrefill(1)
		r.Deploy(yaml)
		r.WaitStatus("pd", "RUNNING")
		revision := r.pairRevision()
		assert.Contains(t, r.pairStatus().Pairs, "off")

		stop := make(chan struct{})
		var mu sync.Mutex
		ways := map[string]int{}
		asked := crowd(4, stop, func() {
			a := r.ask(pairBody(fmt.Sprint(time.Now().UnixNano()), 4))
			r.right(a)
			mu.Lock()
			ways[a.Way]++
			mu.Unlock()
			time.Sleep(100 * time.Millisecond)
		})
		time.Sleep(time.Second)
		r.add(p)
		r.Until("pairs are on", func() error {
			if s := r.pairStatus(); s.Pairs != "on" || s.Met != 2 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		a := r.ask(pairBody("the next request", 4))
		r.right(a)
		assert.Equal(t, "remote", a.Way, "%v", a)
		time.Sleep(time.Second)
		r.remove(p)
		r.Until("pairs are off", func() error {
			if s := r.pairStatus(); s.Pairs == "on" || s.All != 0 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		a = r.ask(pairBody("decode ranks alone", 4))
		r.right(a)
		assert.NotEqual(t, "remote", a.Way, "%v", a)
		close(stop)
		asked.Wait()
		assert.Positive(t, ways["remote"])
		assert.Positive(t, ways["fallback"]+ways["local"])
		assert.NotEmpty(t, revision)
		r.rest()
	})
}

// pairRevision names what a redeploy would change: the epochs of the decode ranks.
func (r *pairRig) pairRevision() string {
	st, _ := r.App("pd")
	var out []string
	for _, u := range st.Units {
		if strings.HasPrefix(u.Unit, "pd.decode/") {
			out = append(out, fmt.Sprintf("%s %d", u.Unit, u.Epoch))
		}
	}
	return strings.Join(out, ", ")
}

// PD6: a prefill engine, then a decode engine, is restarted in its place under requests. A new life never
// gets what the one before has left (the fleet checks it), and each restart is one change of incarnation.
func TestPD6RestartsInPlace(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		bubble(t, transfer, func(t *testing.T) {
			r := newPairRig(t, transfer, 2, 2, "decide: always")
			r.Expect(harness.PairsFail, harness.EngineReplaced, harness.StreamBreaks)
			r.engines.Pause = 20 * time.Millisecond
			pause := 50 * time.Millisecond // too short for a health check
			if transfer == "mooncake" {    // its legs name the engine's life, which dpserve must ask for
				pause = 2 * time.Second
			}
			stop := make(chan struct{})
			var mu sync.Mutex
			lost, wrong := 0, 0
			asked := crowd(8, stop, func() {
				a := r.ask(pairBody(fmt.Sprint(time.Now().UnixNano()), 10))
				time.Sleep(10 * time.Millisecond)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case a.OK() && a.Text != r.engines.Unbroken(a.body):
					wrong++
				case !a.OK() && a.FirstByte():
					lost++
				case !a.OK():
					t.Errorf("before the first byte: %v", a)
				}
			})
			time.Sleep(2 * time.Second)
			for _, e := range []*pairengine.Engine{r.prefill[0], r.decode[0]} {
				before := r.incarnations()
				e.Stop()
				time.Sleep(pause)
				e.Start()
				r.Until(e.Name+" serves again", func() error { return haveMet(r.Cluster, r.pairs()) })
				time.Sleep(3 * time.Second)
				after := r.incarnations()
				changed := 0
				for unit, was := range before {
					if after[unit] != was {
						changed++
					}
				}
				assert.Equal(t, 1, changed, "%s is one restart: %v, then %v", e.Name, before, after)
			}
			close(stop)
			asked.Wait()
			assert.Zero(t, wrong)
			assert.LessOrEqual(t, lost, 8, "only streams of the decode engine that ended")
			r.rest()
		})
	}
}

// incarnations are those of all ranks, by unit.
func (r *pairRig) incarnations() map[string]string {
	out := map[string]string{}
	st, _ := r.App("pd")
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			out[u.Unit] = k.Incarnation
		}
	}
	return out
}

// RT5: one prefill rank and five decode ranks, single turns, 256 and 512 clients at a time. Each decode rank
// gets 15 to 25 % of the requests.
func TestRT5SharesOfDecodeRanks(t *testing.T) {
	for _, clients := range []int{256, 512} {
		for _, decide := range []string{"always", "isl"} {
			if !accepting() && (decide == "isl") != (clients == 512) {
				continue // one of each is enough
			}
			bubble(t, fmt.Sprintf("%d %s", clients, decide), func(t *testing.T) {
				skipShort(t)
				sharesOfDecodeRanks(t, clients, decide)
			})
		}
	}
}

func sharesOfDecodeRanks(t *testing.T, clients int, decide string) {
	t.Helper()
	c := simPair(t, simPools(1, 5, "max_num_seqs: 512, max_model_len: 8192, num_gpu_blocks_override: 131072",
		"decide: "+decide, "max_ongoing_requests: 512"), 5)
	rounds := 1
	if accepting() {
		rounds = 2
	}
	served, ways := map[string]int{}, map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for turn := range rounds {
				body := harness.Chat("pd", words(fmt.Sprintf("client %d round %d", i, turn), 2500), 20, false)
				s := askPairBody(t.Context(), c, body)
				mu.Lock()
				if assert.True(t, s.OK(), s) {
					served[s.Rank]++
					ways[s.Way]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	assert.Len(t, served, 5)
	for rank, n := range served {
		share := float64(n) / float64(rounds*clients)
		assert.GreaterOrEqual(t, share, 0.15, "%s: %v", rank, served)
		assert.LessOrEqual(t, share, 0.25, "%s: %v", rank, served)
	}
	assert.Positive(t, ways["remote"])
	t.Logf("%d clients, decide %s: %v, %v", clients, decide, served, ways)
	c.Quiet()
}

// PD30: SGLang's decode engines take no request without a partner: whatever the decider says, each prompt
// gets one, or goes to a rank of role both.
func TestPairsOfEnginesThatNeedAPartner(t *testing.T) {
	for _, hasBoth := range []bool{false, true} {
		bubble(t, fmt.Sprintf("a rank of role both %v", hasBoth), func(t *testing.T) {
			r := newPairEngines(t, "sglang")
			r.Expect(harness.RequestRefused)
			r.addPrefill(1)
			r.addDecode(pairengine.Decode, 1)
			if hasBoth {
				r.addDecode(pairengine.Both, 1)
			}
			r.serve("decide: isl")
			for i := range 4 {
				a := r.ask(pairBody(fmt.Sprintf("short prompt %d", i), 4))
				r.right(a)
				if !hasBoth {
					assert.Equal(t, "remote", a.Way, "%v", a)
				}
			}
			several := strings.Replace(harness.Chat("pd", "several", 4, false), "{", `{"n":2,`, 1)
			if a := r.ask(several); hasBoth {
				assert.Equal(t, "0/1", a.Rank, "%v", a)
			} else {
				assert.Equal(t, http.StatusServiceUnavailable, a.Status, "%v", a)
			}
			r.rest()
		})
	}
}

// Engines that ask for a key: dpserve's own requests bring it, so pairs meet, and clients bring theirs.
func TestPairsOfEnginesWithAKey(t *testing.T) {
	bubble(t, "two keys", func(t *testing.T) {
		c := simPair(t, simPools(1, 2, "api_key: secret, sim_step_ms: 2", "decide: always"), 2)
		body := harness.Chat("pd", words("who has the key", 100), 4, true)
		for key, want := range map[string]int{"secret": http.StatusOK, "other": http.StatusUnauthorized} {
			resp, err := c.Post(t.Context(), "/v1/chat/completions", body, "Authorization", "Bearer "+key)
			require.NoError(t, err)
			a := harness.ReadAnswer(resp, time.Now())
			assert.Equal(t, want, a.Status, "%v", a)
		}
		c.Quiet()
	})
}

// PD8 with engines that have blocks: the client leaves in the prefill, in the transfer, in the answer. Within
// a second neither engine has a request, and no block of it.
func TestPD8BlocksAreFree(t *testing.T) {
	for _, stage := range []string{"prefill", "transfer", "decode"} {
		bubble(t, stage, func(t *testing.T) {
			const args = "max_model_len: 32768, max_num_batched_tokens: 512, sim_step_ms: 50"
			c := simPair(t, simPools(1, 1, args, "decide: always"), 1)
			urls := map[string]string{}
			st, _ := c.App("pd")
			for _, u := range st.Units {
				for _, k := range u.Ranks {
					urls[strings.Split(u.Unit, "/")[0]] = k.URL
				}
			}
			p, d := urls["pd.prefill"], urls["pd.decode"]
			if stage == "transfer" {
				require.NoError(t, c.Inject(p, sim.Fault{Mode: sim.ModeTransferSlow, Factor: 1e6}))
			}
			ctx, leave := context.WithCancel(t.Context())
			replied := make(chan struct{})
			go func() {
				defer close(replied)
				askPair(ctx, c, words("a guest who leaves", 10_000), 400)
			}()
			c.Until("the request is in its "+stage, func() error {
				prefill, decode := engineStats(t, c, p), engineStats(t, c, d)
				is := map[string]bool{
					"prefill": prefill.Running > 0, "transfer": decode.Loading > 0,
					"decode": decode.Running > 0 && decode.Loading == 0,
				}
				if !is[stage] {
					return fmt.Errorf("prefill %+v, decode %+v", prefill, decode)
				}
				return nil
			})
			leave()
			<-replied
			require.NoError(t, harness.WaitFor(time.Second, 20*time.Millisecond, func() error {
				synctest.Wait()
				for _, url := range urls {
					s := engineStats(t, c, url)
					if s.Running+s.Waiting+s.InFlight+s.Loading+s.Leases+s.UsedBlocks > 0 {
						return fmt.Errorf("%s: %+v", url, s)
					}
				}
				return nil
			}))
			c.Quiet()
			page := metricsOf(t, c.Peer(0))
			assert.InDelta(t, 1, sumSeries(page, "dpserve_pd_requests_total"), 0)
			assert.InDelta(t, 1, sumSeries(page, "dpserve_pd_requests_total", `outcome="client_gone"`), 0)
		})
	}
}
