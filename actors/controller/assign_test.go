package controller

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/state"
)

// startingAgent notes the starts. Like a node, it asks for the rank of each replica before it starts it.
type startingAgent struct {
	assigner *rankassigner.Assigner
	started  chan string
}

func (a *startingAgent) StartRank(ctx context.Context, m *msg.StartRank) error {
	for _, r := range m.Ranks {
		id := fmt.Sprintf("%s.%d.%d", m.App.Name, m.Group, r.Rank)
		if _, err := a.assigner.Assign(ctx, m.App.Name, m.Group, id); err != nil {
			return err
		}
	}
	a.started <- m.Unit
	return nil
}

func (a *startingAgent) StopRank(context.Context, *msg.StopRank) error { return nil }

// benchStore shares one snapshot with all its readers, as the store of a node does.
type benchStore struct {
	*memStore
	shared atomic.Pointer[state.State]
}

func (s *benchStore) State() *state.State { return s.shared.Load() }

func (s *benchStore) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	s.lock <- struct{}{}
	defer func() { <-s.lock }()
	next := s.shared.Load().Clone()
	r, err := next.Apply(next.Index+1, &c)
	if err == nil {
		s.shared.Store(next)
		close(s.ch)
		s.ch = make(chan struct{})
	}
	return r, err
}

// BenchmarkDeployToStarted measures the way of units from Deploy over the RankAssigner to the order that
// starts them on their node. Each unit is a group with a grant of its own.
func BenchmarkDeployToStarted(b *testing.B) {
	for _, units := range []int{1, 64} {
		b.Run(fmt.Sprint(units), func(b *testing.B) { benchmarkDeploy(b, units) })
	}
}

func benchmarkDeploy(b *testing.B, units int) {
	b.Helper()
	var first, all time.Duration
	for range b.N {
		store := &benchStore{memStore: newMemStore()}
		store.shared.Store(state.New())
		put := &state.PutNode{Node: node("a", units)}
		_, err := store.Propose(b.Context(), state.Command{PutNode: put})
		require.NoError(b, err)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		assigner := rankassigner.New(rankassigner.Config{
			Store: store, Proposer: store, Log: slog.New(slog.DiscardHandler),
		})
		agent := &startingAgent{assigner, make(chan string, units)}
		c := New(Config{
			Store: store, Proposer: store, Assigner: assigner, Log: slog.New(slog.DiscardHandler),
			Agent:   func(string) (msg.NodeAgent, bool) { return agent, true },
			Metrics: noMetrics{}, Confirm: agree, StepDown: agree, Timers: Timers{LeaseTTL: endlessLease},
		})
		require.NoError(b, assigner.Start(system))
		require.NoError(b, c.Start(system))
		a := sim("gang", 1, app.Lockstep)
		a.NumGroups, a.NumReplicas = units, units
		began := time.Now()
		_, _, err = c.Deploy(b.Context(), Deployment{Apps: []*app.Application{a}})
		require.NoError(b, err)
		<-agent.started
		first += time.Since(began)
		for range units - 1 {
			<-agent.started
		}
		all += time.Since(began)
		require.NoError(b, c.Close())
		require.NoError(b, assigner.Close())
		system.Shutdown()
	}
	b.ReportMetric(float64(first.Microseconds())/float64(b.N), "µs/first")
	b.ReportMetric(float64(all.Microseconds())/float64(b.N), "µs/all")
}

// raftStore needs a raft write of this duration for each command. Commands at the same time share a write.
type raftStore struct {
	*memStore
	write time.Duration
}

func (s *raftStore) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	time.Sleep(s.write)
	return s.memStore.Propose(ctx, c)
}

// From deploy to started unit it takes two writes, whatever the number of units: the application, and the
// grants, which do not wait for each other.
func TestUnitsStartAfterTwoWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const units, write = 64, 5 * time.Millisecond
		store := &raftStore{newMemStore(), write}
		put := &state.PutNode{Node: node("a", units)}
		_, err := store.Propose(t.Context(), state.Command{PutNode: put})
		require.NoError(t, err)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		log := slog.New(slog.DiscardHandler)
		assigner := rankassigner.New(rankassigner.Config{Store: store, Proposer: store, Log: log})
		agent := &startingAgent{assigner, make(chan string, units)}
		c := New(Config{
			Store: store, Proposer: store, Assigner: assigner, Log: log,
			Agent:   func(string) (msg.NodeAgent, bool) { return agent, true },
			Metrics: noMetrics{}, Confirm: agree, StepDown: agree, Timers: Timers{LeaseTTL: endlessLease},
		})
		require.NoError(t, assigner.Start(system))
		require.NoError(t, c.Start(system))
		a := sim("gang", 1, app.Lockstep)
		a.NumGroups, a.NumReplicas = units, units
		began := time.Now()
		_, _, err = c.Deploy(t.Context(), Deployment{Apps: []*app.Application{a}})
		require.NoError(t, err)
		for range units {
			<-agent.started
		}
		assert.Equal(t, 2*write, time.Since(began), "fake time")
		require.NoError(t, c.Close())
		require.NoError(t, assigner.Close())
		system.Shutdown()
		time.Sleep(time.Second) // fake time: protoactor's own goroutines end
	})
}

// A group without room is asked for again after each change, and its answer is no change.
func TestGroupWithoutRoomIsAskedForOncePerChange(t *testing.T) {
	w := newWorld(t, node("a", 2))
	asked := 0
	w.auto = func(_ *world, e Effect) bool {
		if _, ok := e.(AssignEffect); ok {
			asked++
		}
		return false
	}
	w.deploy(sim("one", 3, app.Lockstep), sim("two", 4, app.Lockstep))
	assert.Contains(t, view{w.core}.Status()[0].Message, "2 of 3 ranks can be placed")
	asked = 0
	w.step(TimerFired{})
	assert.Equal(t, 2, asked, "one request for each group")
	w.renews("a")
	assert.Equal(t, 2, asked, "a renewal without news")
}

// Units of a group that find no room in requests of their own are placed together.
func TestUnitsThatWaitArePlacedTogether(t *testing.T) {
	w := newWorld(t, node("a", 1))
	w.deploy(sim("small", 1, app.Independent))
	var held []*msg.AssignGroup
	w.auto = func(_ *world, e Effect) bool {
		a, ok := e.(AssignEffect)
		if ok {
			held = append(held, a.Request)
		}
		return ok
	}
	w.deploy(sim("chat", 1, app.Independent))
	w.deploy(sim("chat", 2, app.Independent))
	require.Len(t, held, 2, "one unit each")
	n := 0
	for ; n < len(held) && n < 10; n++ {
		w.step(GroupAssigned{w.assign(held[n])})
	}
	assert.Less(t, n, 10, "the requests end")
	assert.Len(t, held[n-1].Grant.Units, 2)
	assert.Contains(t, view{w.core}.Status()[0].Message, "0 of 2 ranks can be placed")
}

// No unit leaves a draining node for room that a request under way may get.
func TestMovesWaitForRequestsUnderWay(t *testing.T) {
	c := newFleet(t, newHost("a", 1), newHost("b", 1))
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "a:0", c.where("chat/0/0"))
	var held []*msg.AssignGroup
	c.auto = func(w *world, e Effect) bool {
		a, ok := e.(AssignEffect)
		if ok {
			held = append(held, a.Request)
		}
		return ok || c.carry(w, e)
	}
	c.deploy(sim("more", 1, app.Independent))
	require.Len(t, held, 1)
	c.drain("a", time.Time{})
	assert.Equal(t, state.Ready, c.phase("chat/0/0"))
	c.step(GroupAssigned{c.assign(held[0])})
	assert.Equal(t, "b:0", c.where("more/0/0"))
	assert.Equal(t, state.Ready, c.phase("chat/0/0"))
	assert.Contains(t, view{c.core}.Status()[0].Units[0].Reason, "stays on draining node a: place chat/0")
}

// Independent ranks without room share one line of the message, and a long message says how much it leaves
// out.
func TestMessageNamesAReasonOnce(t *testing.T) {
	w := newWorld(t, node("a", 2))
	w.deploy(sim("one", 7, app.Independent))
	message := view{w.core}.Status()[0].Message
	assert.Contains(t, message, "one/0/0 and 6 more are pending: place one/0: 2 of 7 ranks can be placed")
	assert.True(t, strings.HasSuffix(message,
		"; hint: add nodes or slots, ask for fewer ranks, or delete an application"), message)
	assert.NotContains(t, message, "\n")

	assert.Equal(t, "1\n2\n3\n4\nand 2 more", joinMessage([]string{"1", "2", "3", "4", "5", "6"}))
	assert.Equal(t, "1\n2\n3\n4", joinMessage([]string{"1", "2", "3", "4"}))
}
