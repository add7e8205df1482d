package controller

import (
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// An engine that registers itself stays attached while it does so again in time, without a change of the
// state; its rank leaves when it does not, and the others stay. The last rank of an application stays.
func TestAnEngineThatDoesNotRegisterAgainLeaves(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		r.deploy(t, attachedTo("http://a:1"))
		ranks := AttachedRanks{r.Controller}
		register := func(text string) (client.RankChange, error) {
			return ranks.Add(t.Context(), "ext", []byte(text))
		}
		urls := func() []string {
			synctest.Wait()
			out, err := AttachedURLs(r.store.State(), "ext")
			require.NoError(t, err)
			return out
		}
		const worker = `{"url": "http://b:1", "ttl_s": 30}`
		first, err := register(worker)
		require.NoError(t, err)
		assert.Equal(t, 1, first.Rank)
		for range 3 {
			time.Sleep(20 * time.Second)
			again, err := register(worker)
			require.NoError(t, err)
			assert.Equal(t, first, again, "it is the same rank, and nothing has changed")
		}
		time.Sleep(20 * time.Second)
		assert.Equal(t, []string{"http://a:1", "http://b:1"}, urls())
		_, err = register(`{"url": "http://b:1"}`)
		assert.Equal(t, problem.Conflict, problem.CodeOf(err), "without a lease it is one rank too many")
		time.Sleep(12 * time.Second)
		assert.Equal(t, []string{"http://a:1"}, urls())

		_, err = register(worker)
		require.NoError(t, err)
		_, err = ranks.Remove(t.Context(), "ext", app.RankRef{URL: "http://a:1"}, nil)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"http://b:1"}, urls())
	})
}

// A new leader, and one that stood still, give every lease its whole time again.
func TestLeasesAfterALeaderStoodStill(t *testing.T) {
	a := attachedTo("http://a:1", "http://b:1")
	a.Engine.Ranks[1].TTLS = 10
	spec, err := json.Marshal([]*app.Application{a})
	require.NoError(t, err)
	st := &state.State{Apps: map[string]*state.App{"ext": {Name: "ext", Spec: spec}}}
	leases, begin := rankLeases{until: map[leasedRank]time.Time{}}, time.Unix(1000, 0)
	for _, c := range []struct{ after, over int }{
		{0, 0}, {4, 0}, {8, 0}, // seconds
		{70, 0}, {74, 0}, {78, 0}, // nobody looked for a minute
		{80, 1},
	} {
		over, has := leases.look(st, begin.Add(time.Duration(c.after)*time.Second))
		assert.Len(t, over, c.over, c.after)
		assert.True(t, has)
	}
	st.Apps["ext"].Deleting = true
	_, has := leases.look(st, begin)
	assert.False(t, has)
}
