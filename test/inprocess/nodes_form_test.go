package inprocess

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// Three nodes form: three votes, one app over all of them, and every ingress serves every rank.
func TestThreeNodesForm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(2))
		c.WaitVoters(3)
		c.Peer(1).Deploy(simApp("a", 6, "independent", "sim_step_ms: 10", "routing: {policy: direct}"))
		st := c.WaitStatus("a", "RUNNING")
		require.Equal(t, 6, st.Ready)
		for id, n := range c.List() {
			assert.Equal(t, "alive", n.State, id)
			assert.Equal(t, 2, n.Ranks, id)
		}
		for _, p := range c.Peers() {
			for rank := range 6 {
				s := p.StreamChat(t.Context(), "a", 20, "x-dpserve-rank", fmt.Sprintf("0/%d", rank))
				require.True(t, s.OK(), "%s rank %d: %s", p.ID, rank, s)
				assert.Equal(t, fmt.Sprintf("0/%d", rank), s.Rank)
				assert.Equal(t, 20, s.Chunks)
			}
		}
		for rank := range 6 { // the Router as a service says whose view a URL is, and reaches every rank too
			r, name := c.Router("a"), fmt.Sprintf("0/%d", rank)
			w, err := r.BestWorker(t.Context(), client.BestWorkerRequest{
				TokenIDs: []uint32{1, 2, 3},
				Worker:   name,
			})
			require.NoError(t, err)
			assert.Contains(t, ranksOn(c.Peer(0), w.Node), name)
			for part, err := range r.Generate(t.Context(), client.GenerateRequest{
				TokenIDs: []uint32{1, 2, 3},
				Worker:   name, Sampling: map[string]any{"max_tokens": 2},
			}) {
				require.NoError(t, err)
				assert.Contains(t, []string{"", name}, part.Worker)
			}
		}
		c.Quiet()
	})
}

// A deploy that changes the policy alone starts no engine anew, and no request notices: not at an ingress
// either that hears of the ranks from afar.
func TestPolicyChangesUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(3), harness.Slots(2), harness.Roles(2, "ingress"))
		for _, p := range c.Peers()[:2] {
			c.Net.Delay(p.Host, c.Peer(2).Host, 5*time.Millisecond)
		}
		app := func(policy string) string {
			return simApp("a", 4, "independent", "sim_step_ms: 10", "routing: {policy: "+policy+"}")
		}
		c.Deploy(app("power-of-two"))
		c.WaitStatus("a", "RUNNING")
		c.Peer(2).WaitStatus("a", "RUNNING")
		// direct asks for it, the others pass it over
		near := ask(t, c.Peer(0), "a", time.Millisecond, 3, "x-dpserve-rank", "0/1")
		far := ask(t, c.Peer(2), "a", time.Millisecond, 3, "x-dpserve-rank", "0/3")
		for _, policy := range []string{"least-loaded", "direct", "power-of-two", "random"} {
			time.Sleep(100 * time.Millisecond)
			c.Deploy(app(policy))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Zero(t, clean(t, append(near.end(), far.end()...)))
		for _, u := range c.Peer(0).State().Units {
			assert.Equal(t, uint64(1), u.Epoch, u.ID)
		}
		c.Quiet()
	})
}
