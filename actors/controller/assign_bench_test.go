package controller

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/state"
)

// benchUnits is how many units one deploy of BenchmarkDeployToStarted starts, each with a grant of its own.
const benchUnits = 64

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

// BenchmarkDeployToStarted measures the way of 64 units from Deploy over the RankAssigner to the order that
// starts them on their node.
func BenchmarkDeployToStarted(b *testing.B) {
	var first, all time.Duration
	for range b.N {
		store := &benchStore{memStore: newMemStore()}
		store.shared.Store(state.New())
		put := &state.PutNode{Node: node("a", benchUnits)}
		_, err := store.Propose(b.Context(), state.Command{PutNode: put})
		require.NoError(b, err)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		assigner := rankassigner.New(rankassigner.Config{
			Store: store, Proposer: store, Log: slog.New(slog.DiscardHandler),
		})
		agent := &startingAgent{assigner, make(chan string, benchUnits)}
		c := New(Config{
			Store: store, Proposer: store, Assigner: assigner, Log: slog.New(slog.DiscardHandler),
			Agent:  func(string) (msg.NodeAgent, bool) { return agent, true },
			Timers: Timers{LeaseTTL: endlessLease},
		})
		require.NoError(b, assigner.Start(system))
		require.NoError(b, c.Start(system))
		a := sim("gang", 1, app.Lockstep)
		a.NumGroups, a.NumReplicas = benchUnits, benchUnits
		began := time.Now()
		_, err = c.Deploy(b.Context(), []*app.Application{a}, nil, false, false)
		require.NoError(b, err)
		<-agent.started
		first += time.Since(began)
		for range benchUnits - 1 {
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
