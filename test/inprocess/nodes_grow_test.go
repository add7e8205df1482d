package inprocess

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// Times of a cluster that grows. test/acceptance.md, rows MB1 and RG7.
const (
	growthPause = time.Second
	gangReady   = 10 * time.Second
)

// MB1: control grows from one node to three while a client writes all the time.
func TestGrowthPausesWritesShortly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Grows())
		for _, pair := range [][2]string{{"1", "2"}, {"1", "3"}, {"2", "3"}} {
			c.Net.Delay("127.0.0."+pair[0], "127.0.0."+pair[1], 5*time.Millisecond)
		}
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

// RG7: two of three groups of 4 serve on 10 slots; the third serves within 10 s of the start of one more
// node.
func TestThirdGangServesAfterANodeJoins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Slots(5))
		code, text := c.Do(http.MethodPut, "/api/v1/apps?file=app.yaml&partial=true",
			simApp("gangs", 4, "lockstep", "sim_step_ms: 10", "num_groups: 3"))
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
