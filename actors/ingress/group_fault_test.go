package ingress

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// queueOf is the group queue of an ingress.
func (g *groupRig) queueOf(i int) *groupQueue { return &g.nodes[i].findAppRouter("demo").groups }

// held is how many requests wait in the queues that the ingresses own.
func (g *groupRig) held() (n int) {
	synctest.Wait()
	for i := range g.nodes {
		for _, s := range g.queueOf(i).state() {
			n += s.Held
		}
	}
	return n
}

// setPhase puts the phase of the group's unit into the state.
func (g *groupRig) setPhase(p state.Phase, epoch uint64) {
	g.store.set(func(st *state.State) {
		u := st.Units["demo/0"]
		u.Phase, u.Epoch, st.Epochs["demo/0"] = p, epoch, epoch
	})
	synctest.Wait()
}

// send has a client ask, and returns where its reply comes.
func (g *groupRig) send(ctx context.Context, node, body string, headers ...string) <-chan reply {
	c := make(chan reply, 1)
	go func() { c <- g.ask(ctx, node, body, headers...) }()
	return c
}

// fill takes all places of the ranks for about a minute, with requests that do not wait.
func (g *groupRig) fill(max int) {
	g.engine.mu.Lock()
	g.engine.prefill, g.engine.tokens = 30*time.Second, 2
	g.engine.mu.Unlock()
	for _, r := range g.replicas {
		for range max {
			g.send(g.t.Context(), "n1", promptOf(10), "X-Dpserve-Rank", r.id.String())
		}
	}
	time.Sleep(10 * time.Millisecond)
	synctest.Wait()
}

// LG24: a rank of the group dies. What waits, waits for the new ranks, at every ingress, and enters them.
func TestTheGroupRestarts(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 2}, func(t *testing.T, g *groupRig) {
		g.fill(2)
		var waiting []<-chan reply
		for i := range 6 {
			waiting = append(waiting, g.send(t.Context(), g.nodes[i%2].node, promptOf(3000)))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 6, g.held())
		g.replicas[1].say(false, true, "process_exit")
		g.setPhase(state.Starting, 2)
		for _, r := range g.replicas {
			r.gone()
		}
		time.Sleep(4 * time.Second)
		g.engine.mu.Lock()
		g.engine.prefill = 100 * time.Millisecond
		g.engine.mu.Unlock()
		for _, r := range g.replicas {
			r.reborn()
		}
		g.setPhase(state.Ready, 2)
		for _, c := range waiting {
			r := <-c
			assert.Equal(t, http.StatusOK, r.status, r.body)
			assert.Less(t, r.took, 6*time.Second)
		}
		assert.Zero(t, g.held())
	})
}

// LG25: the units of the application fail for good. What waits hears so at once.
func TestTheGroupIsGone(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 1}, func(t *testing.T, g *groupRig) {
		g.fill(1)
		var waiting []<-chan reply
		for i := range 4 {
			waiting = append(waiting, g.send(t.Context(), g.nodes[i%2].node, promptOf(3000)))
		}
		time.Sleep(100 * time.Millisecond)
		g.setPhase(state.Failed, 2)
		for _, r := range g.replicas {
			r.gone()
		}
		for _, c := range waiting {
			r := <-c
			assert.Equal(t, http.StatusServiceUnavailable, r.status)
			assert.Contains(t, r.body, "no_ready_rank")
			assert.Equal(t, 100*time.Millisecond, r.took.Truncate(10*time.Millisecond))
		}
		r := g.ask(t.Context(), "n2", promptOf(3000))
		assert.Equal(t, http.StatusServiceUnavailable, r.status)
		assert.Zero(t, r.took.Truncate(10*time.Millisecond), "but for the way to the owner")
	})
}

// LG26: a client that leaves is forgotten at once, one that waits for queue_s is told so then, one whose own
// time is over, then; the bounds of the queue hold; and a rank that is named, is asked.
func TestHeldRequestsEnd(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 1, app: func(a *app.Application) {
		a.MaxQueuedRequests = 5
	}}, func(t *testing.T, g *groupRig) {
		g.fill(1)
		ctx, leave := context.WithCancel(t.Context())
		left := g.send(ctx, "n2", promptOf(3000))
		hurries := g.send(t.Context(), "n2", promptOf(3000), "X-Dpserve-Timeout-Ms", "1500")
		var waiting []<-chan reply
		for range 3 {
			waiting = append(waiting, g.send(t.Context(), "n2", promptOf(3000)))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 5, g.held())
		full := g.ask(t.Context(), "n2", promptOf(3000))
		assert.Equal(t, http.StatusServiceUnavailable, full.status)
		assert.Contains(t, full.body, "max_queued_requests: 5")
		leave()
		require.Error(t, (<-left).err)
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 4, g.held())
		r := <-hurries
		assert.Equal(t, http.StatusGatewayTimeout, r.status, r.body)
		assert.Equal(t, 1500*time.Millisecond, r.took)
		for _, c := range waiting {
			r := <-c
			assert.Equal(t, http.StatusServiceUnavailable, r.status)
			assert.Contains(t, r.body, "queue_timeout")
			assert.Equal(t, 10*time.Second, r.took)
		}
		time.Sleep(100 * time.Millisecond) // the link takes some
		assert.Zero(t, g.held())
	})
}

// LG27: a rank that refuses a request which the owner has released grants it later, before those that arrived
// after it.
func TestARankRefusesAReleasedRequest(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 8}, func(t *testing.T, g *groupRig) {
		var refusals atomic.Int32 // of both ranks
		for _, r := range g.replicas {
			r.setRefuse(func(*msg.Admit) msg.Refusal {
				if refusals.Add(1) <= 3 {
					return msg.Full
				}
				return msg.Granted
			})
		}
		g.allAnswered(g.load(10, 10*time.Millisecond, g.spread(3000)), 3*time.Second)
		assert.Greater(t, refusals.Load(), int32(3))
	})
}

// LG28: a prompt above any budget of a cohort waits no longer than the others.
func TestLongPromptsGoFirst(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 1, max: 8}, func(t *testing.T, g *groupRig) {
		g.engine.tokens = 40
		replies := g.load(60, 20*time.Millisecond, func(i int) (string, string) {
			if i == 20 {
				return "n1", promptOf(200_000)
			}
			return "n1", promptOf(500)
		})
		g.allAnswered(replies, 10*time.Second)
		assert.Less(t, replies[20].took, replies[59].took+time.Second)
	})
}

// LG29: ten thousand requests wait, from two ingresses. As the ranks get room, the oldest go first; the rest
// hears after queue_s that there was no room.
func TestTenThousandWait(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 1, app: func(a *app.Application) {
		a.MaxQueuedRequests = 10_000
	}}, func(t *testing.T, g *groupRig) {
		g.fill(1)
		q, router := [2]*groupQueue{g.queueOf(0), g.queueOf(1)}, g.nodes[0]
		waits := make([]groupWait, 10_000)
		for i := range waits {
			w := &waits[i]
			*w = groupWait{
				id: router.requestID(), tokens: 3000, since: router.clock(), client: 1,
				answered: make(chan groupAnswer, 1),
			}
			require.True(t, q[i%2].join(w))
		}
		time.Sleep(11 * time.Second) // the link carries a message a millisecond
		assert.Equal(t, 10_000, g.held())
		var first *groupWait
		time.Sleep(20 * time.Second) // the first places are free
		synctest.Wait()
		for i := range waits {
			if len(waits[i].answered) > 0 && first == nil {
				first = &waits[i]
			}
		}
		assert.Same(t, &waits[0], first)
		for i := range waits {
			q[i%2].leave(&waits[i])
		}
		time.Sleep(11 * time.Second)
		assert.Zero(t, g.held())
	})
}

// LG30: a deploy that names another policy ends the waiting in the group's queue, also of other ingresses,
// and one that names cohorts again begins it.
func TestAPolicyWithoutQueueTakesOver(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 2}, func(t *testing.T, g *groupRig) {
		g.fill(2)
		var waiting []<-chan reply
		for i := range 4 {
			waiting = append(waiting, g.send(t.Context(), g.nodes[i%2].node, promptOf(3000)))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 4, g.held())
		spec := *g.nodes[0].findAppRouter("demo").revision.Load().app
		spec.Routing.Policy = "lmetric-1"
		deploy(t, g.store, &spec, 2)
		time.Sleep(100 * time.Millisecond)
		assert.Zero(t, g.held())
		assert.Equal(t, 2, g.nodes[1].QueueLen("demo"))
		for _, c := range waiting {
			r := <-c
			assert.Contains(t, r.body, "queue_timeout")
			assert.LessOrEqual(t, r.took, 10*time.Second)
		}
	})
}

// LG31: the owner's Router has none of the group's ranks, so it returns what it was given, and the ingress
// that has the requests releases them itself.
func TestAnOwnerThatSeesNoRank(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 8}, func(t *testing.T, g *groupRig) {
		g.nodes[0].findAppRouter("demo").setUnits(nil, nil, "")
		g.allAnswered(g.load(20, 20*time.Millisecond, func(int) (string, string) {
			return "n2", promptOf(3000)
		}), time.Second)
		assert.Contains(t, g.queueOf(1).returned, "n1")
	})
}

// LG32: a client with many requests delays the one request of another client by one place, also if it comes
// over another ingress.
func TestClientsOfAGroupTakeTurns(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 1, ingresses: 2, max: 1, app: func(a *app.Application) {
		a.Timeouts.QueueS = 600
	}}, func(t *testing.T, g *groupRig) {
		g.engine.tokens = 1
		var clients sync.WaitGroup
		for i := range 20 {
			clients.Go(func() {
				g.ask(t.Context(), "n1", promptOf(3000), "Authorization", "Bearer many",
					"X-Request-Id", fmt.Sprint(i))
			})
			time.Sleep(time.Millisecond)
		}
		clients.Go(func() {
			g.ask(t.Context(), "n2", promptOf(3000), "Authorization", "Bearer one", "X-Request-Id", "one")
		})
		clients.Wait()
		for i, a := range g.engine.arrivals() {
			if a.id == "one" {
				assert.LessOrEqual(t, i, 3)
			}
		}
	})
}

// LG33: requests go to the group that has less to do, and those that wait for a group which is lost go to the
// other one.
func TestTwoGroups(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 2, ingresses: 2, max: 2, app: func(a *app.Application) {
		a.NumGroups, a.NumReplicas = 2, 4
	}}, func(t *testing.T, g *groupRig) {
		g.engine.prefill, g.engine.tokens = 2*time.Second, 2
		time.AfterFunc(time.Second, func() {
			for _, r := range g.replicas[2:] {
				r.setRefuse(func(*msg.Admit) msg.Refusal { return msg.Gone })
			}
			g.store.set(func(st *state.State) {
				st.Units["demo/1"].Phase, st.Units["demo/1"].Epoch, st.Epochs["demo/1"] = state.Starting, 2, 2
			})
		})
		replies := g.load(16, 50*time.Millisecond, g.spread(3000))
		groups := map[routing.RankID]int{}
		for i, a := range g.engine.arrivals() {
			if i < 4 {
				groups[routing.ID(a.rank/2, 0)]++
			}
		}
		assert.Equal(t, map[routing.RankID]int{routing.ID(0, 0): 2, routing.ID(1, 0): 2}, groups)
		for _, r := range replies {
			assert.Equal(t, http.StatusOK, r.status, r.body)
		}
	})
}
