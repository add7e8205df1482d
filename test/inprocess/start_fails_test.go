package inprocess

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// Engines outlive a process of their node that ends without being asked to stop, and every start that finds a
// port taken or fails later. The next start adopts them.
func TestHF58StartsThatFailLeaveTheEnginesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Grows(), harness.OnDisk(), harness.EnginesLiveOn(),
			harness.Metrics("127.0.0.1:9100"))
		c.Expect(harness.NodeFails, harness.DiskFails)
		c.Deploy(simApp("a", 2, "independent", "sim_step_ms: 10"))
		c.WaitUnit("a/0/0", "ready", 1)
		c.WaitUnit("a/0/1", "ready", 1)
		engines := c.Engines.Live()
		require.Len(t, engines, 2)
		m := c.Peer(0)
		liveOn := func(when string) {
			t.Helper()
			time.Sleep(20 * time.Second) // the drain of an application lasts less
			assert.Equal(t, engines, c.Engines.Live(), when)
		}
		adopted := func(when string) {
			t.Helper()
			require.NoError(t, m.Again(nil), when)
			c.Led()
			c.WaitUnit("a/0/0", "ready", 1)
			c.WaitUnit("a/0/1", "ready", 1)
			liveOn(when)
		}

		m.LetGo()
		liveOn("the process has ended with an error")
		for port, named := range map[string]string{
			":8000": "--http-bind", ":8265": "--admin-bind", ":9100": "--metrics-bind",
			":7947": "the node port",
		} {
			l, err := c.Net.Host(m.Host).Listen(m.Host + port)
			require.NoError(t, err)
			err = m.Again(nil)
			require.ErrorContains(t, err, "address already in use")
			require.ErrorContains(t, err, named)
			liveOn(named)
			require.NoError(t, l.Close())
		}
		require.ErrorContains(t, m.Again(map[string]time.Duration{"lease_ttl": time.Minute}), "lease_ttl")
		liveOn("a flag is refused")
		c.Engines.WhenFound = m.Disk.Fill
		require.Error(t, m.Again(nil))
		liveOn("a step after the adoption has failed")
		c.Engines.WhenFound = nil
		m.Disk.Heal()
		adopted("after all these")

		require.ErrorContains(t, m.BreakEndpoint(), "serve inference requests")
		liveOn("a server has failed")
		adopted("after that")
	})
}
