package inprocess

import (
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/test/harness"
)

// changes makes a number of changes of the state and gives the longest that one took.
func changes(t *testing.T, c *harness.Cluster, n int) (longest time.Duration) {
	t.Helper()
	for range n {
		at := time.Now()
		code, text := c.Do(http.MethodPost, "/api/v1/join-tokens?ttl=1s&uses=1", "")
		require.Equal(t, http.StatusCreated, code, text)
		longest = max(longest, time.Since(at))
		time.Sleep(10 * time.Millisecond)
	}
	return longest
}

// Growth from one vote to three: the standby that would be next by its name has an empty log and a slow link. It gets no vote until
// it has caught up, so that no write waits for it.
func TestStandbyGetsNoVoteBeforeItHasTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2))
		a, b := c.Peer(0), c.Peer(1)
		c.Until("node-2 stands by", func() error {
			if len(c.Journal.Find(`"change":"add standby"`, `"peer":"node-2"`)) == 0 {
				return fmt.Errorf("not yet")
			}
			return nil
		})
		c.Net.Cut(a.Host, b.Host)
		<-a.When(lost("node-2"))
		changes(t, c, 1500)
		c.Join()
		for _, way := range [][2]string{{a.Host, b.Host}, {b.Host, a.Host}} {
			c.Net.Delay(way[0], way[1], 400*time.Millisecond)
		}
		c.Net.Heal(a.Host, b.Host)

		var voted, was, last uint64
		longest := time.Duration(0)
		for range 600 {
			longest = max(longest, changes(t, c, 1))
			if votes := c.List()["node-2"].Voter; votes && voted == 0 {
				voted, was = b.State().Index, a.State().Index
			}
			last = a.State().Index
			time.Sleep(50 * time.Millisecond)
		}
		t.Logf("node-2 got its vote with %d of %d entries applied, %d in the end; the longest write took %s", voted, was, last, longest)
		require.NotZero(t, voted, "it votes in the end")
		assert.Less(t, was-voted, uint64(200), "it had the log")
		assert.Less(t, longest, time.Second, "no write waited for it")
		c.WaitVoters(3)
	})
}

// A removal that is refused leaves the votes as they are, whatever the leader's care for the votes does meanwhile.
func TestRefusedRemovalLeavesTheVotes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3))
		c.WaitVoters(3)
		all := func(list map[string]msg.NodeStatus) (votes int) {
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
