package ingress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// LG44: the last minute is that of the clock, in spans of ten seconds.
func TestCohortLogForgets(t *testing.T) {
	t.Parallel()
	var log cohortLog
	release := func(rank int, work float64) routing.GroupRelease {
		return routing.GroupRelease{Rank: routing.ID(0, rank), Work: work}
	}
	log.count(nil, 0)
	log.count([]routing.GroupRelease{release(0, 0)}, 0) // it had nothing to compute: no cohort
	log.count([]routing.GroupRelease{release(0, 5), release(1, 5), release(0, 5), release(2, 0)}, time.Second)
	log.count([]routing.GroupRelease{release(3, 5)}, 45*time.Second)
	assert.Equal(t, client.Cohorts{Count: 2, Requests: 4, Ranks: 3}, log.all)
	assert.Equal(t, log.all, log.lastMinute(59*time.Second))
	assert.Equal(t, client.Cohorts{Count: 1, Requests: 1, Ranks: 1}, log.lastMinute(61*time.Second))
	log.count([]routing.GroupRelease{release(3, 5)}, 65*time.Second) // in the place of the first
	assert.Equal(t, client.Cohorts{Count: 2, Requests: 2, Ranks: 2}, log.lastMinute(65*time.Second))
	assert.Zero(t, log.lastMinute(3*time.Minute))
	assert.Equal(t, client.Cohorts{Count: 3, Requests: 5, Ranks: 4}, log.all)
}

// LG43: the node that has the queue says what waits there and why, and the cohort that a request would go
// with. Another node says where the queue is.
func TestHeldRequestsAreShown(t *testing.T) {
	t.Parallel()
	inGroupRig(t, groupOptions{ranks: 4, ingresses: 2, max: 100}, func(t *testing.T, g *groupRig) {
		g.engine.gap, g.engine.tokens = 60*time.Millisecond, 100 // slower than the goal
		explain := func(i int) []string {
			body := promptOf(3000)
			x, err := g.nodes[i].ExplainRoute(t.Context(), "demo", &client.Query{
				Request: []byte(body), Route: "/v1/chat/completions",
			})
			require.NoError(t, err)
			return x.Notes
		}
		assert.Contains(t, explain(0), "the queue of group 0 would release it now; it would go to rank 0/0, "+
			"with 0 others")
		var seen [2]client.Info
		var errs [2]error
		var notes [2][]string
		// two requests of a cohort wait: the third comes with the explanation, and no fourth
		time.AfterFunc(4930*time.Millisecond, func() {
			for i, in := range g.nodes {
				seen[i], errs[i] = in.RouterInfo("demo")
				notes[i] = explain(i)
			}
		})
		g.allAnswered(g.load(100, 50*time.Millisecond, g.spread(3000)), time.Second)
		require.Equal(t, [2]error{}, errs)
		require.Len(t, seen[0].Groups, 1)
		q := seen[0].Groups[0]
		assert.Equal(t, client.GroupQueue{
			Group: 0, Owner: "n1", Waiting: 1, IsHere: true, Held: 2, Why: q.Why, Open: q.Open, PaceMs: 60,
			Rate: q.Rate, Ranks: 4, DecodeBalance: q.DecodeBalance, Cohorts: q.Cohorts,
			LastMinute: q.LastMinute,
		}, q)
		assert.Regexp(t, `^waits for 2 more or 4\d\d ms$`, q.Why)
		assert.InDelta(t, 97, q.Open, 4)
		assert.Greater(t, q.DecodeBalance, .9)
		assert.Equal(t, q.Cohorts, q.LastMinute)
		assert.Equal(t, q.Cohorts.Requests, q.Cohorts.Ranks, "no cohort had two prompts for a rank")
		assert.Regexp(t, `^the queue of group 0 would hold it: the oldest of 3 waits for 1 more or `+
			`4\d\d ms; it would go to rank 0/\d, with 2 others$`, notes[0][len(notes[0])-1])
		assert.Equal(t, []client.GroupQueue{{Group: 0, Owner: "n1", Waiting: 1}}, seen[1].Groups)
		assert.Contains(t, notes[1], "node n1 has the queue of group 0: ask it for the cohort")
	})
}
