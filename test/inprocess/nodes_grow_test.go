package inprocess

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// Times of a cluster that grows, and of a node that returns. ACCEPTANCE MB1, RG7 and MB4.
const (
	growthPause = time.Second
	gangReady   = 10 * time.Second
	backIn      = 5 * time.Second
)

// MB1: control grows from one node to three while a client writes all the time.
func TestGrowthPausesWritesShortly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Grows())
		first := c.Peer(0)
		stop, longest := make(chan struct{}), make(chan time.Duration, 1)
		go func() {
			var most time.Duration
			defer func() { longest <- most }()
			for {
				began := time.Now()
				code, text := first.Do(http.MethodPost, "/api/v1/join-tokens?ttl=1h&uses=1", "")
				assert.Less(t, code, http.StatusMultipleChoices, text)
				most = max(most, time.Since(began))
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		}()
		for range 2 {
			time.Sleep(time.Second)
			c.Grow()
		}
		c.WaitVoters(3)
		time.Sleep(time.Second)
		close(stop)
		most := <-longest
		assert.LessOrEqual(t, most, growthPause)
		t.Logf("the longest write took %s", most)
	})
}

// RG7: two of three gangs of 4 serve on 10 slots; the third serves within 10 s of the start of one more node.
func TestThirdGangServesAfterANodeJoins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Slots(5))
		code, text := c.Do(http.MethodPut, "/api/v1/apps?file=app.yaml&partial=true", simApp("gangs", 4, "lockstep", "sim_step_ms: 10", "num_groups: 3"))
		require.Equal(t, http.StatusAccepted, code, text)
		time.Sleep(time.Minute)
		st, _ := c.App("gangs")
		require.Equal(t, 8, st.Ready)
		require.Equal(t, "DEPLOYING", st.Status)

		began := time.Now()
		c.Grow()
		c.Until("all three gangs", func() error { return allReady(c, "gangs", 12) })
		took := time.Since(began)
		assert.LessOrEqual(t, took, gangReady)
		t.Logf("12 ranks %s after the start of a third node", took)
	})
}

// MB4: a node ends and comes back on its data dir under another address.
func TestNodeReturnsUnderANewAddress(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(4), harness.DataDirs(t))
		c.Expect(harness.NodeFails)
		c.WaitVoters(3)
		c.Deploy(spread("a", 6))
		c.WaitStatus("a", "RUNNING")
		old := c.Peer(2)
		wasLost := c.Peer(0).When(lost(old.ID))
		old.Close()
		<-wasLost
		c.Until("all ranks elsewhere", func() error { return allReady(c, "a", 6) })

		began := time.Now()
		again := c.Return(old)
		c.Until("alive at its new address", func() error {
			for _, p := range c.Running() {
				if n := p.List()[old.ID]; n.State != "alive" || !strings.HasPrefix(n.Address, again.Host+":") {
					return fmt.Errorf("for %s it is %q at %s: %s", p.ID, n.State, n.Address, n.Reason)
				}
			}
			return nil
		})
		took := time.Since(began)
		assert.LessOrEqual(t, took, backIn)
		t.Logf("alive for all nodes %s after its start", took)
		s := again.StreamChat(t.Context(), "a", 5)
		assert.True(t, s.OK(), s)
		c.Quiet()
	})
}
