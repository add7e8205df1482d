package server

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Another node may have led between two checks, so the actors of the earlier election end.
func TestNewTermStartsNewLeaderActors(t *testing.T) {
	n := newBackend(t, edgeFile).n
	n.life.kill() // stop the loop that follows leadership
	n.life.loops.Wait()
	first, _ := n.leading.Current()
	require.NoError(t, n.leading.Adapt(t.Context()))
	still, _ := n.leading.Current()
	assert.Same(t, first, still, "the same term goes on")

	require.NoError(t, n.leading.StandDown())
	require.NoError(t, n.leading.Adapt(t.Context()))
	second, leads := n.leading.Current()
	require.True(t, leads)
	require.NotSame(t, first, second)
	assert.Len(t, second.control.Status(), 1, "the new controller goes on with the application")
}

// While no node leads, a node knows at least that it is there itself.
func TestNodesWithoutALeader(t *testing.T) {
	b := newBackend(t, edgeFile)
	b.n.life.kill() // stop the loop that follows leadership
	b.n.life.loops.Wait()
	require.NoError(t, b.n.leading.StandDown())
	list, err := b.Nodes(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	assert.Equal(t, "alive", list[0].State)
	assert.Equal(t, "itself", list[0].SeenBy)
	assert.Contains(t, list[0].Reason, "no node leads")
}
