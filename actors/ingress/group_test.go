package ingress

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// cohortsOf are the sizes of the groups of requests that came to the ranks within a time of each other, from
// an instant on.
func cohortsOf(at []arrival, from time.Time, within time.Duration) (sizes []int) {
	first := time.Time{}
	for _, a := range at {
		switch {
		case a.at.Before(from):
		case len(sizes) > 0 && a.at.Sub(first) <= within:
			sizes[len(sizes)-1]++
		default:
			sizes, first = append(sizes, 1), a.at
		}
	}
	return sizes
}

// spread sends requests of one length to all ingresses in turn.
func (g *groupRig) spread(tokens int) func(i int) (string, string) {
	return func(i int) (string, string) { return g.nodes[i%len(g.nodes)].node, promptOf(tokens) }
}

// allAnswered requires that each request has reached one rank, once, and was answered in time.
func (g *groupRig) allAnswered(replies []reply, most time.Duration) {
	g.t.Helper()
	for i, r := range replies {
		require.NoError(g.t, r.err, "request %d", i)
		assert.Equal(g.t, http.StatusOK, r.status, r.body)
		assert.LessOrEqual(g.t, r.took, most, "request %d", i)
		assert.Contains(g.t, r.body, "[DONE]")
	}
	times := map[string]int{}
	for _, a := range g.engine.arrivals() {
		times[a.id]++
	}
	assert.Len(g.t, times, len(replies))
	for id, n := range times {
		assert.Equal(g.t, 1, n, id)
	}
}

// LG20, LG21: while a lockstep group decodes, the prompts of four ingresses wait in one queue, that of the
// node with the group's first rank, until there is one for every rank, and enter the group together, one on
// each rank. All ingresses know its owner.
func TestOneQueueForAllIngresses(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 4, ingresses: 4, max: 100}, func(t *testing.T, g *groupRig) {
		g.engine.gap, g.engine.tokens = 60*time.Millisecond, 100
		began := time.Now()
		g.allAnswered(g.load(100, 50*time.Millisecond, g.spread(3000)), time.Second)
		sizes := cohortsOf(g.engine.arrivals(), began.Add(3*time.Second), 5*time.Millisecond)
		for _, n := range sizes[:len(sizes)-1] {
			assert.Equal(t, 4, n, "%v", sizes)
		}
		ranks := map[int]int{}
		for _, a := range g.engine.arrivals() {
			ranks[a.rank]++
		}
		assert.Equal(t, map[int]int{0: 25, 1: 25, 2: 25, 3: 25}, ranks)
		for _, in := range g.nodes {
			for _, s := range in.findAppRouter("demo").groups.state() {
				assert.Equal(t, "n1", s.Owner, in.node)
			}
		}
	})
}

// LG22: the owner of the queue is not reached any more, because it has died, or because one direction is cut.
// What waits goes to the next owner, keeps its place in time, and is answered once. When the owner is back,
// it has the queue again.
func TestTheOwnerIsLost(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string][2]string{
		"to the owner": {"n2", "n1"}, "from the owner": {"n1", "n2"},
	} {
		t.Run(name, func(t *testing.T) {
			inGroupRig(t, groupOptions{ranks: 4, ingresses: 3, max: 4}, func(t *testing.T, g *groupRig) {
				g.engine.prefill, g.engine.tokens = 400*time.Millisecond, 20 // more than the ranks can do
				time.AfterFunc(700*time.Millisecond, func() { g.links.fail(cut[0], cut[1]) })
				time.AfterFunc(2900*time.Millisecond, func() { g.links.mend(cut[0], cut[1]) })
				g.allAnswered(g.load(60, 50*time.Millisecond, g.spread(3000)), 9*time.Second)
			})
		})
	}
}
