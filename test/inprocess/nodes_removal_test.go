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
		c.Until("it ends", said("this node was removed from its cluster"))
		leaves.Close()
		c.Until("consensus goes on without it", said(`"change":"remove"`))
		time.Sleep(20 * time.Second)
		assert.Empty(t, c.Journal.Find(uid), "lines with the node's UID")
	})
}
