package inprocess

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// drained drains a node and waits until it could be removed.
func drained(t *testing.T, c *harness.Cluster, node string) {
	t.Helper()
	code, text := c.Do(http.MethodPost, "/api/v1/nodes/"+node+"/drain", "")
	require.Equal(t, http.StatusAccepted, code, text)
	c.Until(node+" is drained", func() error {
		if s := c.List()[node].State; s != "drained" {
			return fmt.Errorf("it is %s", s)
		}
		return nil
	})
}

// A node that was removed is named in the logs as long as consensus still has to do with it, although the
// state has forgotten it.
func TestARemovedNodeHasANameInTheLogs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(4))
		c.Expect(harness.NodeRemoved)
		c.WaitVoters(3)
		leaves := c.Peer(1)
		uid := leaves.State().Nodes[leaves.ID].UID
		drained(t, c, leaves.ID)
		code, text := c.Do(http.MethodDelete, "/api/v1/nodes/"+leaves.ID, "")
		require.Equal(t, http.StatusAccepted, code, text)
		said := func(texts ...string) func() error {
			return func() error {
				if len(c.Journal.Find(texts...)) == 0 {
					return errors.New("not yet")
				}
				return nil
			}
		}
		c.Until("it ends", said("this node is no member of its cluster any more"))
		leaves.Close()
		c.Until("consensus goes on without it", said(`"change":"remove"`))
		time.Sleep(20 * time.Second)
		assert.Empty(t, c.Journal.Find(uid), "lines with the node's UID")
	})
}

// A control node and a worker are cut off and removed meanwhile. When the network is back, the others refuse
// them; they end their ranks, which run elsewhere by now, and themselves.
func TestHF64ACutOffNodeHearsThatItWasRemoved(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(4), harness.Slots(8), harness.Roles(3, "worker"))
		c.Expect(harness.NodeRemoved, harness.RanksMove)
		c.WaitVoters(3)
		c.Deploy(spread("a", 8))
		c.WaitStatus("a", "RUNNING")
		removed := []*harness.Peer{c.Peer(1), c.Peer(3)}
		for _, p := range removed {
			require.NotEmpty(t, c.Engines.On(p.Host))
			p.Silence()
		}
		for _, p := range removed {
			c.Until(p.ID+" is removed", func() error {
				code, text := c.Do(http.MethodDelete, "/api/v1/nodes/"+p.ID, "")
				if code == http.StatusAccepted {
					return nil
				}
				return errors.New(text)
			})
		}
		c.Until("the ranks are elsewhere", func() error { return allReady(c, "a", 8) })
		for _, p := range removed {
			require.False(t, p.HasEnded())
			require.NotEmpty(t, c.Engines.On(p.Host), "it serves on")
		}
		healed := time.Now()
		c.Reconnect()
		for _, p := range removed {
			c.Until(p.ID+" ends", func() error {
				if !p.HasEnded() {
					return errors.New("not yet")
				}
				return nil
			})
			assert.LessOrEqual(t, time.Since(healed), 10*time.Second)
			assert.Empty(t, c.Engines.On(p.Host))
			assert.Len(t, c.Journal.Find(`"node":"`+p.ID+`"`, "this node is no member of its cluster"), 1)
			p.Close()
		}
		assert.Len(t, c.Engines.Live(), 8)
	})
}
