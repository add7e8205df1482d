package ingress

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/pairengine"
)

// groupPair is an application of two pools in fake time: a lockstep group of prefill ranks, and decode
// ranks. A prompt takes prefill.
type groupPair struct {
	*groupRig // only its client and its engine's log are used
	pair      *pairRig
}

// inGroupPair runs a test. At its end nothing may be in flight, waiting or counted anywhere.
func inGroupPair(t *testing.T, max int, prefill time.Duration, change func(p, d *app.Application),
	test func(t *testing.T, g *groupPair),
) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		engine := &stepEngine{prefill: prefill}
		o := options{prefills: 4, decodes: 8, max: max, network: &memnet.Network{}}
		o.change = func(p, d *app.Application) {
			p.DataParallel.Coupling, p.Routing.Policy = app.Lockstep, app.DefaultPolicy(app.Lockstep)
			p.Timeouts.FirstTokenS, d.Timeouts.FirstTokenS = 600, 600
			if change != nil {
				change(p, d)
			}
		}
		pair := newPairRig(t, o)
		for i, e := range pair.p {
			e.Do(func(l *pairengine.Leg) bool {
				engine.mu.Lock()
				engine.arrived = append(engine.arrived, arrival{i, l.ID(), l.Began})
				engine.mu.Unlock()
				return l.StallUntil(after(engine.prefill))
			})
		}
		g := &groupPair{&groupRig{rig: pair.rig, engine: engine}, pair}
		test(t, g)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		q := &pair.in.findAppRouter(app.PoolName("demo", app.PoolPrefill)).groups
		for _, s := range q.state() {
			assert.Zero(t, s.Waiting+s.Held+s.Open, "%+v", s)
		}
		for _, pool := range []string{app.PoolPrefill, app.PoolDecode} {
			ar := pair.in.findAppRouter(app.PoolName("demo", pool))
			n, _ := ar.queue.size()
			assert.Zero(t, n)
			for _, rk := range ar.router.Load().Snapshot().Ranks {
				assert.Zero(t, rk.Load.O(), "open on %s rank %s", pool, rk.ID)
			}
		}
	})
}

// after is closed when a time is over.
func after(d time.Duration) <-chan struct{} {
	over := make(chan struct{})
	time.AfterFunc(d, func() { close(over) })
	return over
}

// held is how many requests wait for the group.
func (g *groupPair) held() (n int) {
	synctest.Wait()
	for _, s := range g.pair.in.findAppRouter(app.PoolName("demo", app.PoolPrefill)).groups.state() {
		n += s.Held
	}
	return n
}

// LG37: over a busy lockstep group of prefill ranks, prompts wait and enter it together, one on each rank,
// when the first tokens of the last ones are out; also if the decode ranks are a lockstep group. A prompt
// that names its prefill rank does not wait.
func TestPrefillPoolsShareSteps(t *testing.T) {
	t.Parallel()
	for _, coupling := range []app.Coupling{app.Independent, app.Lockstep} {
		inGroupPair(t, 8, 400*time.Millisecond, func(_, d *app.Application) {
			d.DataParallel.Coupling, d.Routing.Policy = coupling, app.DefaultPolicy(coupling)
		}, func(t *testing.T, g *groupPair) {
			began := time.Now()
			g.allAnswered(g.load(60, 50*time.Millisecond, func(int) (string, string) {
				return "n1", promptOf(3000)
			}), 4*time.Second)
			at := g.engine.arrivals()
			sizes := cohortsOf(at, began.Add(500*time.Millisecond), 0)
			require.Len(t, sizes, 14, "%s: %v", coupling, sizes)
			for i, n := range sizes {
				assert.Equal(t, 4, n, "%v", sizes)
				ranks := map[int]bool{}
				for _, a := range at[4+4*i:][:4] {
					ranks[a.rank] = true
				}
				assert.Len(t, ranks, 4)
			}
			g.fillPrefill()
			sent, held := time.Now(), g.send(t.Context(), "n1", promptOf(3000))
			<-g.send(t.Context(), "n1", promptOf(3000), "X-Dpserve-Prefill-Rank", "0/1")
			assert.Contains(t, g.on(1), sent)
			<-held
		})
	}
}

// LG37: a prompt that no prefill rank is to compute does not wait for one.
func TestPromptsThatStayAreNotHeld(t *testing.T) {
	t.Parallel()
	inGroupPair(t, 1, 30*time.Second, func(p, d *app.Application) {
		for _, a := range []*app.Application{p, d} {
			a.Disaggregation.Decide = "uncached>=2000"
		}
	}, func(t *testing.T, g *groupPair) {
		g.fillPrefill()
		held := g.send(t.Context(), "n1", promptOf(3000))
		assert.Equal(t, 1, g.held())
		r := g.ask(t.Context(), "n1", promptOf(1000))
		assert.Equal(t, http.StatusOK, r.status)
		assert.Zero(t, r.took)
		assert.Contains(t, (<-held).body, "queue_timeout")
	})
}

// LG48: the rank that the queue names refuses, or has met no decode rank. The requests go on as if they had
// not waited, and other prefill ranks compute the prompts.
func TestAReleasedPromptCannotBePaired(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(g *groupPair){
		"refuses": func(g *groupPair) {
			g.pair.prefills[2].setRefuse(func(*msg.Admit) msg.Refusal { return msg.Full })
		},
		"has met none": func(g *groupPair) {
			r := g.pair.prefills[2]
			g.pair.p[2].DoFirst(noPeer)
			g.pair.in.findPair("demo").router.Update(func(t *routing.PairTable) {
				t.ForgetPrefill(routing.RankRef{ID: r.id, Incarnation: r.incarnation})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			inGroupPair(t, 8, 400*time.Millisecond, nil, func(t *testing.T, g *groupPair) {
				spoil(g)
				g.allAnswered(g.load(20, 50*time.Millisecond, func(int) (string, string) {
					return "n1", promptOf(3000)
				}), 4*time.Second)
				assert.Len(t, g.engine.arrivals(), 20)
				assert.Empty(t, g.on(2))
			})
		})
	}
}

// LG48: a client that leaves while its prompt waits for prefill ranks is forgotten at once, and one that
// waits for queue_s is told so then.
func TestHeldForPrefillEnds(t *testing.T) {
	t.Parallel()
	inGroupPair(t, 1, 30*time.Second, nil, func(t *testing.T, g *groupPair) {
		g.fillPrefill()
		ctx, leave := context.WithCancel(t.Context())
		left := g.send(ctx, "n1", promptOf(3000))
		var waiting []<-chan reply
		for range 3 {
			waiting = append(waiting, g.send(t.Context(), "n1", promptOf(3000)))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 4, g.held())
		leave()
		require.Error(t, (<-left).err)
		assert.Equal(t, 3, g.held())
		for _, c := range waiting {
			r := <-c
			assert.Equal(t, http.StatusServiceUnavailable, r.status)
			assert.Contains(t, r.body, "queue_timeout")
			assert.Equal(t, 10*time.Second, r.took)
		}
		assert.Zero(t, g.held())
	})
}

// on lists when requests came to a prefill rank.
func (g *groupPair) on(rank int) (at []time.Time) {
	for _, a := range g.engine.arrivals() {
		if a.rank == rank {
			at = append(at, a.at)
		}
	}
	return at
}

// fillPrefill has each prefill rank compute one prompt.
func (g *groupPair) fillPrefill() {
	n := len(g.engine.arrivals()) + len(g.pair.prefills)
	for range g.pair.prefills {
		g.send(g.t.Context(), "n1", promptOf(3000))
	}
	time.Sleep(10 * time.Millisecond)
	synctest.Wait()
	require.Len(g.t, g.engine.arrivals(), n)
}

// LG48: a rank of the group dies. What waits does not wait for the new group: decode ranks compute the
// prompts.
func TestAPrefillRankIsLostUnderHeldRequests(t *testing.T) {
	t.Parallel()
	inGroupPair(t, 1, 30*time.Second, nil, func(t *testing.T, g *groupPair) {
		g.fillPrefill()
		var waiting []<-chan reply
		for range 3 {
			waiting = append(waiting, g.send(t.Context(), "n1", promptOf(3000)))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 3, g.held())
		g.pair.prefills[1].say(false, true, "process_exit")
		unit := g.pair.prefills[0].unit
		g.pair.store.set(func(st *state.State) {
			u := st.Units[unit]
			u.Phase, u.Epoch, st.Epochs[unit] = state.Starting, 2, 2
		})
		synctest.Wait()
		for _, r := range g.pair.prefills {
			r.gone()
		}
		for _, c := range waiting {
			r := <-c
			assert.Equal(t, http.StatusOK, r.status, r.body)
			assert.Equal(t, 100*time.Millisecond, r.took)
		}
		assert.Zero(t, g.held())
	})
}
