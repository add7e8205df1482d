package cluster_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// silences holds the nodes of a test that answer no question.
type silences struct {
	mu    sync.Mutex
	nodes map[string]bool
}

func (s *silences) set(node string, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes[node] = silent
}

func (s *silences) ask(_ context.Context, node string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes[node] {
		return errCut
	}
	return nil
}

// upkeep returns the Upkeep of one member, on which all nodes of the state renew their leases.
func (g *group) upkeep(m *member, s *silences) *cluster.Upkeep {
	return cluster.NewUpkeep(cluster.UpkeepConfig{
		Cluster: m.Cluster, Ask: s.ask, Log: slog.New(slog.DiscardHandler),
		Renews: func() map[string]bool {
			out := map[string]bool{}
			for name := range m.State().Nodes {
				out[name] = true
			}
			return out
		},
	})
}

// founded returns a group of one voter and the standbys named, of which the leader knows nothing yet but
// their records.
func founded(t *testing.T, names ...string) (*group, *member) {
	t.Helper()
	g := newGroup(t)
	first := g.add(cluster.Config{NodeID: "node-1"})
	g.ready(first)
	g.put(first)
	for _, name := range names {
		m := g.add(cluster.Config{NodeID: name, Member: true, ClusterID: first.ClusterID()})
		g.put(m)
	}
	return g, first
}

// voters returns the names of the voters by a node's log.
func voters(m *member) map[string]bool {
	out := map[string]bool{}
	for _, node := range m.State().Nodes {
		for _, in := range m.Members() {
			if in.Voter && in.UID == node.UID {
				out[node.ID] = true
			}
		}
	}
	return out
}

// A node that ends while it changes voters says nothing of the change that it leaves to the next leader.
func TestUpkeepIsSilentWhenItsNodeEnds(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		_, first := founded(t, "node-2", "node-3")
		ctx, end := context.WithTimeout(t.Context(), 10*time.Second)
		defer end()
		var log bytes.Buffer
		u := cluster.NewUpkeep(cluster.UpkeepConfig{
			Cluster: first.Cluster, Log: slog.New(slog.NewTextHandler(&log,
				&slog.HandlerOptions{Level: slog.LevelWarn})),
			Ask: func(context.Context, string) error {
				end()
				return nil
			},
			Renews: func() map[string]bool {
				return map[string]bool{"node-1": true, "node-2": true, "node-3": true}
			},
		})
		u.Run(ctx)
		require.ErrorIs(t, ctx.Err(), context.Canceled, "no change was begun")
		assert.Empty(t, log.String()) // the change that had begun may be made or not
	})
}

// The leader makes control nodes voters by itself, but none that does not answer.
func TestUpkeepGivesVotesToNodesThatAnswer(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		g, first := founded(t, "node-2", "node-3")
		silent := &silences{nodes: map[string]bool{"node-2": true, "node-3": true}}
		up := g.upkeep(first, silent)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { up.Run(ctx); close(ended) }()
		defer func() { cancel(); <-ended }()
		require.Eventually(t, func() bool { return len(first.Members()) == 3 }, limit, limit/1000)
		assert.Equal(t, map[string]bool{"node-1": true}, voters(first))

		silent.set("node-2", false)
		silent.set("node-3", false)
		require.Eventually(t, func() bool { return len(voters(first)) == 3 }, limit, limit/1000)
	})
}

// A removal takes the vote first, and gives one to a standby where the rest would have no living majority. A
// refused removal changes nothing.
func TestUpkeepRemovesAVoter(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		leader := g.leader()
		others := g.others(leader)
		leaves, dead := others[0].NodeID(), others[1].NodeID()
		g.propose(state.Command{DrainNode: &state.DrainNode{Node: leaves}})
		silent := &silences{nodes: map[string]bool{dead: true}}
		up, removed := g.upkeep(leader, silent), 0
		remove := func(_ context.Context, node string) error {
			assert.Equal(t, leaves, node)
			assert.False(t, voters(leader)[leaves], "the vote goes before the node")
			removed++
			return nil
		}
		require.ErrorIs(t, up.CheckLeave(t.Context(), leaves), state.ErrVoteNeeded)
		require.ErrorIs(t, up.Remove(t.Context(), leaves, remove), state.ErrVoteNeeded)
		assert.Len(t, voters(leader), 3)

		g.join(cluster.Config{NodeID: "node-4"}, false)
		require.Eventually(t, func() bool { return up.CheckLeave(t.Context(), leaves) == nil }, limit,
			limit/1000)
		assert.Len(t, voters(leader), 3, "a question changes nothing")
		require.NoError(t, up.Remove(t.Context(), leaves, remove))
		assert.Equal(t, map[string]bool{leader.NodeID(): true, dead: true, "node-4": true}, voters(leader))
		assert.Equal(t, 1, removed)
	})
}

// A leader that is removed only hands the leadership over.
func TestUpkeepHandsOverBeforeTheLeaderIsRemoved(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		leader := g.leader()
		g.propose(state.Command{DrainNode: &state.DrainNode{Node: leader.NodeID()}})
		up := g.upkeep(leader, &silences{nodes: map[string]bool{}})
		var err error
		require.Eventually(t, func() bool { // the voters may be a moment behind
			err = up.Remove(t.Context(), leader.NodeID(), func(context.Context, string) error {
				t.Error("removed by itself")
				return nil
			})
			return err != nil && !leader.Leader()
		}, limit, limit/1000, "last error: %v", &err)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		assert.NotSame(t, leader, g.leader(g.others(leader)...))
	})
}
