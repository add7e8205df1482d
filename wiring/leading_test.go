package wiring

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestLeadershipWonAgainBeginsAnew: between two looks another node may have led, so the actors of the earlier election go.
func TestLeadershipWonAgainBeginsAnew(t *testing.T) {
	n := newBackend(t, edgeFile).n
	n.kill() // the loop that looks by itself
	n.loops.Wait()
	first := n.leads.Load()
	require.NoError(t, n.adaptLeadership(t.Context()))
	assert.Same(t, first, n.leads.Load(), "the same term goes on")

	first.term--
	require.NoError(t, n.adaptLeadership(t.Context()))
	second := n.leads.Load()
	require.NotSame(t, first, second)
	assert.Equal(t, n.consensus.Term(), second.term)
	assert.Len(t, second.control.Status(), 1, "the new controller goes on with the application")
}
