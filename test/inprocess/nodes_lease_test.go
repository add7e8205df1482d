package inprocess

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/harness"
)

// HF23: Leases last as long as in the beginning of the cluster, whoever leads: a leader that granted shorter
// ones would give ranks away that a node still holds by the lease of the leader before. A node that is told
// otherwise does not start, one that is told nothing does.
func TestLeasesLastAsLongAsTheClusterSays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.OnDisk(),
			harness.Timers(map[string]time.Duration{"lease_ttl": 20 * time.Second}),
			harness.Roles(1, "worker"))
		require.Equal(t, int64(20_000), c.Peer(1).State().LeaseTTL)
		c.Peer(0).Close()
		err := c.Peer(0).Again(map[string]time.Duration{"lease_ttl": 3 * time.Second})
		require.EqualError(t, err,
			"--timers lease_ttl=3s: the leases of this cluster last 20s since it began")
		assert.Equal(t, problem.Conflict, problem.CodeOf(err))
		for _, regrant := range []time.Duration{12 * time.Second, 21 * time.Second} {
			err = c.Peer(0).Again(map[string]time.Duration{"lease_regrant": regrant})
			require.EqualError(t, err, "--timers lease_regrant="+regrant.String()+": the leases of this "+
				"cluster last 20s, and a node may need 2s more to end its engines")
			assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
		}
		require.NoError(t, c.Peer(0).Again(map[string]time.Duration{"lease_regrant": 22 * time.Second}))
		c.Led()
		c.Expect(harness.NodeFails)
		c.Until("the worker is alive", func() error { return aliveHere(c, "node-2") })
		gone := c.Peer(0).When(lost("node-2"))
		c.Peer(1).Silence()
		silent := time.Now()
		after := (<-gone).Sub(silent)
		assert.Greater(t, after, 20*time.Second)
		assert.Less(t, after, 25*time.Second)
		c.Reconnect()
		c.Until("the worker is alive", func() error { return aliveHere(c, "node-2") })
	})
}
