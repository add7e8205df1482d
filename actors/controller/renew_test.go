package controller

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// worker is a host that takes orders and renews its lease by itself.
type worker struct {
	mu sync.Mutex
	*host
}

func (w *worker) StartRank(_ context.Context, m *msg.StartRank) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.start(m)
}

func (w *worker) StopRank(_ context.Context, m *msg.StopRank) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stop(m)
	return nil
}

func (w *worker) renew(c *Controller) (msg.Lease, error) {
	w.mu.Lock()
	r := w.report(time.Now())
	w.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	l, err := c.Renew(ctx, r)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.taken(l.Acked)
	}
	return l, err
}

// nodesRig is a controller with the nodes of its state.
type nodesRig struct {
	*Controller
	t       *testing.T
	store   *memStore
	workers map[string]*worker
}

func (r *nodesRig) renewAll(rounds int) {
	for range rounds {
		for _, w := range r.workers {
			_, _ = w.renew(r.Controller)
		}
		synctest.Wait()
	}
}

func withNodes(t *testing.T, change func(*Config), f func(t *testing.T, r *nodesRig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &nodesRig{t: t, store: newMemStore(), workers: map[string]*worker{}}
		for _, id := range []string{"a", "b"} {
			h := newHost(id, 4)
			r.workers[id] = &worker{host: h}
			_, err := r.store.Propose(t.Context(), state.Command{PutNode: &state.PutNode{Node: h.node}})
			require.NoError(t, err)
		}
		cfg := Config{
			Self: "a", Store: r.store, Proposer: r.store, Assigner: r.store, Metrics: noMetrics{},
			Confirm: agree, StepDown: agree,
			Log:   slog.New(slog.DiscardHandler),
			Agent: func(id string) (msg.NodeAgent, bool) { w, ok := r.workers[id]; return w, ok },
		}
		if change != nil {
			change(&cfg)
		}
		r.Controller = New(cfg)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		require.NoError(t, r.Start(system))
		f(t, r)
		require.NoError(t, r.Close())
		system.Shutdown()
		time.Sleep(time.Second)
	})
}

func TestRenewThroughTheActor(t *testing.T) {
	withNodes(t, nil, func(t *testing.T, r *nodesRig) {
		l, err := r.workers["a"].renew(r.Controller)
		require.NoError(t, err)
		assert.Equal(t, msg.Lease{TTL: 10 * time.Second, Leader: "a", Index: 2}, l)
		_, _, err = r.Deploy(t.Context(), Deployment{Apps: []*app.Application{sim("moe", 8, app.Lockstep)}})
		require.NoError(t, err)
		synctest.Wait()
		r.renewAll(2)
		assert.Equal(t, "RUNNING", r.Status()[0].Status)
		list := r.Nodes()
		require.Len(t, list, 2)
		assert.Equal(t, "alive", list[1].State)
		assert.Equal(t, 4, list[1].SlotsUsed)
		assert.True(t, list[0].Leader)

		_, err = r.Renew(t.Context(), &msg.NodeReport{Node: state.Node{ID: "c", UID: "x"}})
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		joined := newHost("c", 4)
		_, err = r.store.Propose(t.Context(), state.Command{PutNode: &state.PutNode{Node: joined.node}})
		require.NoError(t, err)
		_, err = r.Renew(t.Context(), joined.report(time.Now()))
		require.NoError(t, err, "a node that has just joined is known")
	})
}

// slowStore shows the state only after ready is closed.
type slowStore struct {
	msg.Store
	ready chan struct{}
}

func (s slowStore) State() *state.State { <-s.ready; return s.Store.State() }

func TestRenewWaitsForALeaderThatHasJustBegun(t *testing.T) {
	var barrier chan struct{}
	withNodes(t, func(c *Config) {
		barrier = make(chan struct{})
		c.Store = slowStore{c.Store, barrier}
	}, func(t *testing.T, r *nodesRig) {
		_, err := r.workers["a"].renew(r.Controller)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.AfterFunc(time.Second/2, func() { close(barrier) })
		_, err = r.workers["a"].renew(r.Controller)
		require.NoError(t, err)
		require.NoError(t, r.Close())
		_, err = r.workers["a"].renew(r.Controller)
		require.ErrorIs(t, err, ErrStopped)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
	})
}

// This node leads, then another one, then this one again.
func TestLeadersFollowEachOtherInOneProcess(t *testing.T) {
	withNodes(t, nil, func(t *testing.T, r *nodesRig) {
		r.cfg.Metrics = &counter{phases: map[string]state.Phase{}}
		what := Deployment{Apps: []*app.Application{sim("moe", 8, app.Lockstep)}}
		_, _, err := r.Deploy(t.Context(), what)
		require.NoError(t, err)
		synctest.Wait()
		r.renewAll(2)
		require.Equal(t, "RUNNING", r.Status()[0].Status)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		defer system.Shutdown()
		last := r.Controller
		for range 3 {
			require.NoError(t, last.Close())
			next := New(last.cfg)
			assert.Empty(t, next.cfg.Metrics.(*counter).phases, "who does not lead counts nothing")
			require.NoError(t, next.Start(system))
			synctest.Wait()
			for _, w := range r.workers {
				_, err := w.renew(next)
				require.NoError(t, err)
			}
			synctest.Wait()
			assert.Equal(t, "RUNNING", next.Status()[0].Status)
			assert.Equal(t, state.Ready, next.cfg.Metrics.(*counter).phases["moe/0"])
			last = next
		}
		require.NoError(t, last.Close())
		assert.Equal(t, uint64(1), r.store.State().Epochs["moe/0"])
	})
}

// Without partial nothing starts.
func TestPartialDeployStartsWhatFits(t *testing.T) {
	withNodes(t, nil, func(t *testing.T, r *nodesRig) {
		apps := []*app.Application{groups("moe", 3, 4)}
		_, _, err := r.Deploy(t.Context(), Deployment{Apps: apps})
		assert.Equal(t, problem.Unplaceable, problem.CodeOf(err))
		p, err := r.Plan(apps, false)
		require.NoError(t, err)
		assert.False(t, p.Fits)
		require.Len(t, p.Apps[0].Advice, 1)
		assert.Contains(t, p.Apps[0].Advice[0], "moe: its ranks wait for the slowest one")
		_, _, err = r.Deploy(t.Context(), Deployment{Apps: apps, Partial: true})
		require.NoError(t, err)
		synctest.Wait()
		r.renewAll(2)
		assert.Equal(t, 8, r.Status()[0].Ready)
		assert.Equal(t, "DEPLOYING", r.Status()[0].Status)
	})
}

// The orders waited behind a node that did not answer.
func TestOrdersForAnOldGrantAreNotSent(t *testing.T) {
	withNodes(t, nil, func(t *testing.T, r *nodesRig) {
		what := Deployment{Apps: []*app.Application{sim("chat", 1, app.Independent)}}
		_, _, err := r.Deploy(t.Context(), what)
		require.NoError(t, err)
		synctest.Wait()
		before := len(r.workers["a"].events) + len(r.workers["b"].events)
		r.executor.execute(StartEffect{"a", &msg.StartRank{Unit: "chat/0/0", Epoch: 7}})
		r.executor.execute(StartEffect{"b", &msg.StartRank{Unit: "chat/0/1", Epoch: 1}})
		synctest.Wait()
		assert.Equal(t, before, len(r.workers["a"].events)+len(r.workers["b"].events))
	})
}

// hearPresent makes the newest event of a unit one of an unknown kind.
func (w *world) hearPresent(node, unit string) {
	e := w.hears[node][unit]
	e.Kind, e.Number = msg.UnitPresent, e.Number+10
	w.hears[node][unit] = e
}

// MB6: Neither this leader nor the next one takes a unit for gone because its node reports an event kind of a
// later version.
func TestUnitWithNewsOfALaterVersionStaysReady(t *testing.T) {
	w := newWorld(t, node("a", 4))
	// used by the rule under test; the leases of this world outlast it
	w.core.timers.LeaseTTL = 10 * time.Second
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	w.hearPresent("a", "chat/0/0")
	w.takeTrace()
	renews := func() {
		for range 10 {
			w.now = w.now.Add(2 * time.Second)
			w.renews("a")
		}
		assert.Equal(t, state.Ready, w.phase("chat/0/0"))
		assert.Equal(t, uint64(1), w.state.Epochs["chat/0/0"])
		assert.Empty(t, w.takeTrace(), "no order, no command")
	}
	renews()

	w.core = NewCore(w.timers) // another leader
	w.step(StateSeen{w.state.Clone()})
	w.core.timers.LeaseTTL = 10 * time.Second
	w.takeTrace()
	renews()
	assert.False(t, w.core.units["chat/0/0"].hasUnreportedPart(), "the node has spoken of it")

	w.hears["a"]["chat/0/0"] = msg.UnitEvent{
		Unit: "chat/0/0", Epoch: 1, Kind: msg.UnitGone, WasReady: true,
		Number: 1000,
	}
	w.renews("a")
	assert.NotEqual(t, state.Ready, w.phase("chat/0/0"), "what this version knows counts as before")
}

// The ready event of a unit may arrive after a report with an unknown kind.
func TestEarlierNewsStillCountsBehindALaterVersions(t *testing.T) {
	w := newWorld(t, node("a", 4))
	w.deploy(sim("chat", 1, app.Independent))
	w.says("a", "chat/0/0", msg.UnitStarted)
	ready := w.hears["a"]["chat/0/0"]
	ready.Kind, ready.Number = msg.UnitReady, ready.Number+1
	w.hearPresent("a", "chat/0/0")
	w.renews("a")
	assert.Equal(t, state.Starting, w.phase("chat/0/0"), "its phase is not touched")
	w.renews("a", ready)
	assert.Equal(t, state.Ready, w.phase("chat/0/0"))
}
