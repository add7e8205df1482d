package inprocess

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// RP6: as many clients at each ingress as would fill the ranks alone. Ingresses beside the ranks and far from
// them get equal shares.
func TestIngressesShareAFullRank(t *testing.T) {
	for _, c := range []struct {
		ingresses, ranks, slots int
		far                     time.Duration
	}{
		{2, 1, 2, 5 * time.Millisecond},
		{2, 1, 2, 30 * time.Millisecond},
		{4, 1, 2, 5 * time.Millisecond},
		{4, 3, 2, 5 * time.Millisecond},
		{2, 1, 8, 5 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%d ingresses, %d ranks of %d, %s away", c.ingresses, c.ranks, c.slots, c.far),
			func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					options := []harness.Option{harness.Nodes(c.ingresses), harness.Slots(c.ranks)}
					for i := 1; i < c.ingresses; i++ {
						options = append(options, harness.Roles(i, "ingress"))
					}
					n := harness.New(t, options...)
					for _, p := range n.Peers()[1:] {
						n.Net.Delay(n.Peer(0).Host, p.Host, c.far)
						n.Net.Delay(p.Host, n.Peer(0).Host, c.far)
					}
					n.Deploy(simApp("a", c.ranks, "independent", "sim_step_ms: 20",
						fmt.Sprintf("max_ongoing_requests: %d", c.slots)))
					n.WaitStatus("a", "RUNNING")
					for _, p := range n.Peers()[1:] {
						p.WaitStatus("a", "RUNNING")
					}
					answered := served(t, n, "a", 8*c.ranks*c.slots/2, 30*time.Second)
					sum := 0
					for _, k := range answered {
						sum += k
					}
					fair := float64(sum) / float64(len(answered))
					for i, k := range answered {
						assert.InDelta(t, fair, float64(k), 0.2*fair, "ingress %d of %v", i, answered)
					}
					// Ten tokens of 20 ms hold a place for 200 ms, and what is held for a far ingress is free
					// for two ways.
					most := 30.0 * float64(c.ranks*c.slots) / (0.2 + 4*c.far.Seconds())
					assert.Greater(t, float64(sum), 0.7*most, "the places are used")
					t.Log(answered, most)
					n.Quiet()
				})
			})
	}
}

// served counts what each ingress has answered after a while, with so many clients each that ask again as
// soon as they have their answer.
func served(t *testing.T, c *harness.Cluster, app string, clients int, long time.Duration) []int {
	counts := make([]atomic.Int64, len(c.Peers()))
	var running sync.WaitGroup
	end := time.Now().Add(long)
	for i, p := range c.Peers() {
		for range clients {
			running.Go(func() {
				for time.Now().Before(end) {
					s := p.StreamChat(t.Context(), app, 10)
					if !assert.True(t, s.OK(), s) {
						return
					}
					counts[i].Add(1)
				}
			})
		}
	}
	running.Wait()
	out := make([]int, len(counts))
	for i := range counts {
		out[i] = int(counts[i].Load())
	}
	require.NotEmpty(t, out)
	return out
}
