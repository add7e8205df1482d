package inprocess

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// Three nodes form: three votes, one app over all of them, and every ingress serves every rank.
func TestThreeNodesForm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(2))
		c.WaitVoters(3)
		c.Peer(1).Deploy(simApp("a", 6, "independent", "sim_step_ms: 10", "routing: {policy: direct}"))
		st := c.WaitStatus("a", "RUNNING")
		require.Equal(t, 6, st.Ready)
		for id, n := range c.List() {
			assert.Equal(t, "alive", n.State, id)
			assert.Equal(t, 2, n.Ranks, id)
		}
		for _, p := range c.Peers() {
			for rank := range 6 {
				s := p.StreamChat(t.Context(), "a", 20, "x-dpserve-rank", fmt.Sprintf("0/%d", rank))
				require.True(t, s.OK(), "%s rank %d: %s", p.ID, rank, s)
				assert.Equal(t, fmt.Sprintf("0/%d", rank), s.Rank)
				assert.Equal(t, 20, s.Chunks)
			}
		}
		c.Quiet()
	})
}
