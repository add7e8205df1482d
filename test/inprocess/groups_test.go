package inprocess

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/test/harness"
)

// LG23, LG36: two nodes take requests for a lockstep group on a third one. The first one owns the group's
// queue, where more requests wait than the group can take. It is killed, or not heard by anybody for five
// seconds. What waits at the other node is answered, each request at one rank, and nothing is left in a queue
// or on a rank.
func TestTheOwnerOfAGroupFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fail, mend func(c *harness.Cluster)
		faults     []harness.Fault
		isDead     bool
	}{
		"killed": {
			fail:   func(c *harness.Cluster) { c.Peer(0).Drop() },
			faults: []harness.Fault{harness.NodeFails}, isDead: true,
		},
		"frozen": {
			fail:   func(c *harness.Cluster) { c.Peer(0).Silence() },
			mend:   func(c *harness.Cluster) { c.Reconnect() },
			faults: []harness.Fault{harness.NodeFails, harness.StreamBreaks},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				cl := harness.New(t, harness.Nodes(3), harness.Slots(4),
					harness.Roles(0, "control", "ingress"),
					harness.Roles(1, "control", "ingress"), harness.Roles(2, "control", "worker"))
				cl.Expect(c.faults...)
				cl.WaitVoters(3)
				// After a comment there is no header that says how many ranks were asked.
				cl.Deploy(simApp("gang", 4, "lockstep", "sim_step_ms: 10", "max_ongoing_requests: 2",
					"timeouts: {keepalive_s: 0}"))
				cl.WaitUnit("gang/0", "ready", 1)
				time.Sleep(2 * time.Second)
				owner := ask(t, cl.Peer(0), "gang", 40*time.Millisecond, 20)
				other := ask(t, cl.Peer(1), "gang", 20*time.Millisecond, 20)
				time.Sleep(2 * time.Second)
				c.fail(cl)
				time.Sleep(5 * time.Second)
				if c.mend != nil {
					c.mend(cl)
				}
				time.Sleep(3 * time.Second)
				asks := other.end()
				if own := owner.end(); !c.isDead {
					clean(t, own)
				}
				assert.Zero(t, clean(t, asks))
				assert.Greater(t, len(asks), 150)
				longest := time.Duration(0)
				for _, a := range asks {
					assert.Equal(t, "1", a.Attempts)
					longest = max(longest, a.First)
				}
				t.Logf("longest wait %s of %d", longest, len(asks))
			})
		})
	}
}
