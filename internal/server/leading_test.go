package server

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Another node may have led between two checks, so the actors of the earlier election end.
func TestNewTermStartsNewLeaderActors(t *testing.T) {
	n := newBackend(t, edgeFile).n
	n.kill() // stop the loop that follows leadership
	n.loops.Wait()
	first := n.leading.Load()
	require.NoError(t, n.adaptLeadership(t.Context()))
	assert.Same(t, first, n.leading.Load(), "the same term goes on")

	first.term--
	require.NoError(t, n.adaptLeadership(t.Context()))
	second := n.leading.Load()
	require.NotSame(t, first, second)
	assert.Equal(t, n.consensus.Term(), second.term)
	assert.Len(t, second.control.Status(), 1, "the new controller goes on with the application")
}
