package inprocess

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// HF40: SIGTERM reaches a node that has a long stream on one rank. Its other ranks start elsewhere at once,
// the stream is not cut, and the node ends with it.
func TestNodeThatIsStoppedBesideALongStream(t *testing.T) {
	for _, leads := range []bool{false, true} {
		t.Run(fmt.Sprintf("leads %v", leads), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { stopBesideAStream(t, leads) })
		})
	}
}

func stopBesideAStream(t *testing.T, leads bool) {
	c := harness.New(t, harness.Nodes(3), harness.Slots(8))
	c.Expect(harness.NodeFails)
	c.WaitVoters(3)
	c.Deploy(simApp("a", 6, "independent", "sim_step_ms: 100, max_model_len: 65536",
		"placement_group_strategy: SPREAD",
		"graceful_shutdown_timeout_s: 600", "routing: {policy: direct}"))
	c.WaitStatus("a", "RUNNING")
	time.Sleep(5 * time.Second)
	leader := c.Leader()
	var stop, other *harness.Peer
	for _, p := range c.Peers() {
		if (p == leader) == leads && stop == nil {
			stop = p
		} else {
			other = p
		}
	}
	ranks := ranksOn(other, stop.ID)
	require.Len(t, ranks, 2)
	target := ""
	for k := range ranks {
		target = k
	}
	began, done := time.Now(), make(chan *harness.Stream, 1)
	go func() { done <- other.StreamChat(t.Context(), "a", 3000, "x-dpserve-rank", target) }() // 300 s
	time.Sleep(3 * time.Second)
	closed := make(chan struct{})
	go func() {
		stop.Close()
		close(closed)
	}()
	time.Sleep(5 * time.Second)
	left := ranksOn(other, stop.ID)
	assert.Equal(t, map[string]bool{target: true}, left, "only the rank with the stream is still there")
	st, _ := other.App("a")
	assert.Equal(t, 5, st.Ready)
	list := other.List()
	assert.Equal(t, "stopping", list[stop.ID].State)
	assert.Equal(t, "a/"+target+" is draining", list[stop.ID].Reason)
	s := <-done
	assert.True(t, s.OK(), "the stream was cut: %s", s)
	assert.Greater(t, time.Since(began), 4*time.Minute)
	<-closed
	other.Until("all ranks are ready elsewhere", func() error {
		if st, _ := other.App("a"); st.Status != "RUNNING" || st.Ready != 6 {
			return fmt.Errorf("%d ready: %s", st.Ready, st.Message)
		}
		return nil
	})
	assert.Empty(t, ranksOn(other, stop.ID))
}
