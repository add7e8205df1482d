package inprocess

import (
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// changes makes a number of changes of the state and returns the longest that one took.
func changes(t *testing.T, c *harness.Cluster, n int) (longest time.Duration) {
	t.Helper()
	for range n {
		at := time.Now()
		code, text := c.Do(http.MethodPost, "/api/v1/join-tokens?ttl=1s&uses=1", "")
		assert.Equal(t, http.StatusCreated, code, text)
		longest = max(longest, time.Since(at))
		time.Sleep(10 * time.Millisecond)
	}
	return longest
}

// HF32: The cluster grows from one vote to three. Both standbys have an empty log and a slow link. They get
// no vote before they have caught up, so no write waits longer for them than one round trip.
func TestStandbyGetsNoVoteBeforeItHasTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2))
		c.Expect(harness.NodeFails)
		a, b := c.Peer(0), c.Peer(1)
		c.Until("node-2 stands by", func() error {
			if len(c.Journal.Find(`"change":"add standby"`, `"peer":"node-2"`)) == 0 {
				return errors.New("not yet")
			}
			return nil
		})
		c.Net.Cut(a.Host, b.Host)
		<-a.When(lost("node-2"))
		changes(t, c, 1000)
		for _, host := range []string{b.Host, "127.0.0.3"} {
			c.Net.Delay(a.Host, host, 100*time.Millisecond)
			c.Net.Delay(host, a.Host, 100*time.Millisecond)
		}
		c.Grow()
		c.Net.Heal(a.Host, b.Host)

		var voted, was uint64
		longest := make(chan time.Duration)
		go func() { longest <- changes(t, c, 1500) }()
		c.Until("node-2 votes", func() error {
			if !c.List()["node-2"].Voter {
				return errors.New("not yet")
			}
			voted, was = b.State().Index, a.State().Index
			return nil
		})
		pause := <-longest
		t.Logf("node-2 got its vote with %d of %d entries applied; the longest write took %s", voted, was,
			pause)
		assert.Less(t, was-voted, uint64(300), "it had the log")
		assert.LessOrEqual(t, pause, time.Second, "no write waited for it but for the way there and back")
		c.WaitVoters(3)
	})
}

// HF30: A refused removal leaves the votes as they are, although the leader adjusts the votes at the same
// time.
func TestRefusedRemovalLeavesTheVotes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3))
		c.WaitVoters(3)
		all := func(list map[string]client.NodeStatus) (votes int) {
			for _, n := range list {
				if n.Voter {
					votes++
				}
			}
			return votes
		}
		for round := range 2 {
			for _, node := range []string{"node-1", "node-2", "node-3"} {
				code, text := c.Do(http.MethodDelete, "/api/v1/nodes/"+node, "")
				assert.Equal(t, http.StatusConflict, code, text)
				for range 30 {
					assert.Equal(t, 3, all(c.List()), "round %d, %s", round, node)
					time.Sleep(100 * time.Millisecond)
				}
			}
			if round == 0 {
				c.Deploy(spread("a", 3))
				c.WaitStatus("a", "RUNNING")
			}
		}
	})
}
