package controller

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/parallel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agent is a node whose engines start and stop at once.
type agent struct {
	mu      sync.Mutex
	c       *Controller
	n       uint64
	newest  map[string]msg.UnitEvent
	refuses error
	orders  []string
}

func (a *agent) refuse(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuses = err
}

func (a *agent) seen() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.orders...)
}

func (a *agent) report(unit string, epoch uint64, kind msg.UnitEventKind) {
	a.n++
	e := msg.UnitEvent{Number: a.n, Unit: unit, Epoch: epoch, Kind: kind}
	a.newest[unit] = e
	r := &msg.NodeReport{Node: node("a", 8), Incarnation: 1, Events: []msg.UnitEvent{e}}
	for _, u := range slices.Sorted(maps.Keys(a.newest)) {
		r.Units = append(r.Units, a.newest[u])
	}
	_, _ = a.c.Renew(context.Background(), r)
}

func (a *agent) StartRank(_ context.Context, m *msg.StartRank) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.orders = append(a.orders, fmt.Sprintf("start %s %d", m.Unit, m.Epoch))
	if a.refuses != nil {
		return a.refuses
	}
	a.report(m.Unit, m.Epoch, msg.UnitStarted)
	a.report(m.Unit, m.Epoch, msg.UnitReady)
	return nil
}

func (a *agent) StopRank(_ context.Context, m *msg.StopRank) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.orders = append(a.orders, fmt.Sprintf("stop %s %d", m.Unit, m.Epoch))
	a.report(m.Unit, m.Epoch, msg.UnitGone)
	return nil
}

// counter implements Metrics.
type counter struct {
	mu     sync.Mutex
	phases map[string]state.Phase
}

func (c *counter) UnitPhase(_, unit string, p state.Phase) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.phases[unit] = p
}

func (c *counter) UnitForget(_, unit string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.phases, unit)
}

type rig struct {
	*Controller
	store   *memStore
	agent   *agent
	metrics *counter
	logs    *parallel.Buffer
}

// rigged runs f in a bubble of fake time with a started controller.
func rigged(t *testing.T, change func(*Config), f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{
			store: newMemStore(), agent: &agent{newest: map[string]msg.UnitEvent{}},
			metrics: &counter{phases: map[string]state.Phase{}},
			logs:    new(parallel.Buffer),
		}
		_, err := r.store.Propose(t.Context(), state.Command{PutNode: &state.PutNode{Node: node("a", 8)}})
		require.NoError(t, err)
		cfg := Config{
			Store: r.store, Proposer: r.store, Assigner: r.store, Metrics: r.metrics, Confirm: agree,
			StepDown: agree,
			Agent:    func(id string) (msg.NodeAgent, bool) { return r.agent, id == "a" },
			Log:      slog.New(slog.NewTextHandler(r.logs, nil)),
		}
		cfg.Timers.LeaseTTL = endlessLease
		if change != nil {
			change(&cfg)
		}
		r.Controller = New(cfg)
		r.agent.c = r.Controller
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		require.NoError(t, r.Start(system))
		f(t, r)
		require.NoError(t, r.Close())
		require.NoError(t, r.Close())
		system.Shutdown()
		time.Sleep(time.Second) // fake time: protoactor's own goroutines end
	})
}

func (r *rig) deploy(t *testing.T, apps ...*app.Application) state.Result {
	t.Helper()
	res, _, err := r.Deploy(t.Context(), Deployment{Apps: apps})
	require.NoError(t, err)
	synctest.Wait()
	return res
}

func TestDeployStatusEventsDelete(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		watch := r.Watch()
		res := r.deploy(t, sim("chat", 4, app.Independent))
		assert.Equal(t, map[string]uint64{"chat": 1}, res.Apps)
		<-watch
		s := r.Status()
		require.Len(t, s, 1)
		assert.Equal(t, "RUNNING", s[0].Status)
		assert.Equal(t, 4, s[0].Ready)
		assert.Equal(t, 4, s[0].Desired)
		require.Len(t, s[0].Units, 4)
		assert.Equal(t, client.RankStatus{Rank: 2, Node: "a", Phase: "ready", Epoch: 1},
			s[0].Units[2].Ranks[0])
		assert.Equal(t, state.Ready, r.metrics.phases["chat/0/3"])

		events := r.Events(0)
		require.NotEmpty(t, events)
		last := events[len(events)-1]
		assert.Equal(t, "RUNNING", last.To)
		assert.Empty(t, r.Events(last.Seq))
		assert.Len(t, r.Events(last.Seq-3), 3)

		_, err := r.Delete(t.Context(), "nope")
		assert.Equal(t, problem.NotFound, problem.CodeOf(err))
		_, err = r.Delete(t.Context(), "chat")
		require.NoError(t, err)
		synctest.Wait()
		assert.Empty(t, r.Status())
		assert.Empty(t, r.store.State().Apps)
		assert.Empty(t, r.metrics.phases)
	})
}

// PL2: what does not fit is refused at once, with what is needed and what each node has free, and starts
// nothing.
func TestDeployIsRefusedBeforeAnythingStarts(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		r.deploy(t, sim("small", 4, app.Independent))
		big := sim("big", 16, app.Lockstep)
		what := Deployment{Apps: []*app.Application{sim("fits", 1, app.Independent), big}}
		_, _, err := r.Deploy(t.Context(), what)
		var p *problem.Error
		require.ErrorAs(t, err, &p)
		assert.Equal(t, problem.Unplaceable, p.Code)
		assert.Equal(t, "place big/0: 4 of 16 ranks can be placed (PACK): short of slots", p.Message)
		assert.Equal(t, []string{
			"need: 16 ranks of 1 slot each, PACK",
			"node a: 4 of 8 slots free, 0 of 0 devices free, room for 4 ranks by its slots",
		}, p.Details)
		assert.Len(t, r.store.State().Apps, 1)

		grown := sim("small", 8, app.Independent)
		grown.Model.Source = "m2"
		r.deploy(t, grown)
		assert.Equal(t, "RUNNING", r.Status()[0].Status, "what is replaced makes room")

		what = Deployment{Apps: []*app.Application{sim("other", 8, app.Independent)}, Prune: true}
		_, _, err = r.Deploy(t.Context(), what)
		require.NoError(t, err, "so does what is pruned")
		synctest.Wait()
		require.Len(t, r.Status(), 1)
		assert.Equal(t, "other", r.Status()[0].Name)
		assert.Equal(t, "RUNNING", r.Status()[0].Status)
	})
}

func TestStatusShowsWhatWasJustDeployedOrDeleted(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		r.agent.refuse(context.DeadlineExceeded) // no answer
		for n := range 20 {
			name := fmt.Sprint("app", n)
			what := Deployment{Apps: []*app.Application{sim(name, 1, app.Independent)}, Prune: true}
			_, _, err := r.Deploy(t.Context(), what)
			require.NoError(t, err)
			names := map[string]string{}
			for _, s := range r.Status() {
				names[s.Name] = s.Status
			}
			require.Equal(t, "DEPLOYING", names[name])
			_, err = r.Delete(t.Context(), name)
			require.NoError(t, err)
			for _, s := range r.Status() {
				require.Equal(t, "DELETING", s.Status)
			}
		}
	})
}

func TestSilentNodeIsToldAgain(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		r.agent.refuse(problem.New(problem.Overloaded, "mailbox is full"))
		r.deploy(t, sim("chat", 1, app.Independent))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"start chat/0/0 1", "start chat/0/0 1", "start chat/0/0 1"}, r.agent.seen())
		r.agent.refuse(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.Equal(t, "RUNNING", r.Status()[0].Status)
		assert.Equal(t, uint64(1), r.store.State().Epochs["chat/0/0"])
	})
}

// The core survives the restart of the actor.
func TestPanicInReceiveForgetsNothing(t *testing.T) {
	var mu sync.Mutex
	broken := false
	rigged(t, func(c *Config) {
		c.Clock = func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			if broken {
				broken = false
				panic("clock")
			}
			return time.Now()
		}
	}, func(t *testing.T, r *rig) {
		r.deploy(t, sim("chat", 2, app.Independent))
		mu.Lock()
		broken = true
		mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := r.Renew(ctx, &msg.NodeReport{Node: node("a", 8), Incarnation: 1})
		require.ErrorIs(t, err, context.DeadlineExceeded, "its answer is lost, the deadline is not")
		synctest.Wait()
		assert.Equal(t, "RUNNING", r.Status()[0].Status)
		r.deploy(t, sim("more", 2, app.Independent))
		assert.Equal(t, "RUNNING", r.Status()[1].Status)
	})
}

func TestCallsAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemStore()
		c := New(Config{
			Store: store, Proposer: store, Assigner: store, Log: slog.New(slog.DiscardHandler),
			Agent:   func(string) (msg.NodeAgent, bool) { return nil, false },
			Metrics: noMetrics{}, Confirm: agree, StepDown: agree,
		})
		require.NoError(t, c.Close(), "never started")
		_, err := store.Propose(t.Context(), state.Command{PutNode: &state.PutNode{Node: node("a", 8)}})
		require.NoError(t, err)
		c = New(c.cfg)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		require.NoError(t, c.Start(system))
		require.NoError(t, c.Close())
		what := Deployment{Apps: []*app.Application{sim("chat", 1, app.Independent)}}
		_, _, err = c.Deploy(t.Context(), what)
		require.ErrorIs(t, err, ErrStopped)
		system.Shutdown()
		time.Sleep(time.Second)
	})
}

func TestTimersDefaults(t *testing.T) {
	assert.Equal(t, Timers{
		Unit: state.Timers{
			StartRetry: time.Second, FailedRetry: 5 * time.Minute, RestartMin: time.Second,
			RestartMax: 5 * time.Minute, RestartReset: 10 * time.Minute, Resend: 2 * time.Second,
		},
		Retry: time.Second, Call: 5 * time.Second, LeaseTTL: 10 * time.Second, Regrant: 12 * time.Second,
	}, Timers{}.withDefaults())
}

func TestRingKeepsTheLastThousand(t *testing.T) {
	r := newRing()
	for range 3 * eventRing {
		r.add(Event{})
	}
	got := r.since(0)
	require.Len(t, got, eventRing)
	assert.Equal(t, uint64(2*eventRing+1), got[0].Seq)
	assert.Equal(t, uint64(3*eventRing), got[eventRing-1].Seq)
	assert.Len(t, r.since(3*eventRing-5), 5)
}

// agree is Config.Confirm and Config.StepDown of a leader that is alone.
func agree(context.Context) error { return nil }

// noMetrics counts nothing.
type noMetrics struct{}

func (noMetrics) UnitPhase(string, string, state.Phase) {}
func (noMetrics) UnitForget(string, string)             {}
