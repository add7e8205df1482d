package cluster_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
)

// office is what a leader of these tests runs.
type office struct {
	number int
	closed bool
}

func (o *office) Close() error {
	o.closed = true
	return nil
}

// leadingRig starts offices on one node.
type leadingRig struct {
	cluster.Leading[*office]
	c       *cluster.Cluster
	started []*office
	fails   error // of Start
}

func newLeadingRig(t *testing.T, c *cluster.Cluster) *leadingRig {
	t.Helper()
	r := &leadingRig{c: c}
	r.Open(cluster.LeadingConfig[*office]{
		Store: c, Cluster: c, Log: slog.New(slog.DiscardHandler),
		Start: func(context.Context) (*office, error) {
			if r.fails != nil {
				return nil, r.fails
			}
			o := &office{number: len(r.started)}
			r.started = append(r.started, o)
			return o, nil
		},
		Prepare: func(_ context.Context, o *office) error {
			now, leads := r.Current()
			assert.True(t, leads)
			assert.Same(t, o, now, "it is shown before it can answer: it asks itself")
			return nil
		},
	})
	return r
}

// Another node may have led between two elections, so what belongs to the earlier one ends.
func TestNewTermStartsNewLeaderParts(t *testing.T) {
	c, err := cluster.Open(cluster.Config{NodeID: "node-1"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	require.NoError(t, c.Ready(t.Context()))
	r := newLeadingRig(t, c)
	_, leads := r.Current()
	assert.False(t, leads)

	r.fails = errors.New("no room")
	require.ErrorIs(t, r.Adapt(t.Context()), r.fails)
	r.fails = nil
	require.NoError(t, r.Adapt(t.Context()))
	require.NoError(t, r.Adapt(t.Context()))
	assert.Len(t, r.started, 1, "the same term goes on")

	r.SetTerm(c.Term() - 1)
	require.NoError(t, r.Adapt(t.Context()))
	require.Len(t, r.started, 2)
	assert.True(t, r.started[0].closed)
	now, leads := r.Current()
	assert.True(t, leads)
	assert.Same(t, r.started[1], now)

	require.NoError(t, r.StandDown())
	require.NoError(t, r.StandDown())
	assert.True(t, now.closed)
}

// A leader that loses the leadership ends what belongs to it, and the next one starts it.
func TestLeaderPartsFollowTheLeader(t *testing.T) {
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		first := g.leader()
		rigs := map[*member]*leadingRig{}
		for _, m := range g.running() {
			rigs[m] = newLeadingRig(t, m.Cluster)
			require.NoError(t, rigs[m].Adapt(t.Context()))
		}
		assert.Len(t, rigs[first].started, 1)
		require.NoError(t, first.StepDown(t.Context()))
		next := g.leader(g.others(first)...)
		require.Eventually(t, func() bool { return !first.Leader() }, limit, time.Millisecond)
		for m, r := range rigs {
			require.NoError(t, r.Adapt(t.Context()))
			_, leads := r.Current()
			assert.Equal(t, m == next, leads, m.NodeID())
		}
		assert.True(t, rigs[first].started[0].closed)
	})
}
