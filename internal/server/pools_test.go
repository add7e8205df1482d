package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

const pairFile = `applications: [{name: pd, model: {id: pd}, engine: {kind: attach, family: vllm, ` +
	`ranks: [{url: "http://127.0.0.1:1", role: decode}]}}]`

// A prefill rank comes and goes at run time, and goes to the pool of its role. The last decode rank stays.
func TestPrefillRanksComeAndGo(t *testing.T) {
	b := newBackend(t, pairFile)
	add := func(name, rank string) (client.RankChange, error) {
		return b.AddRank(t.Context(), name, []byte(rank))
	}
	remove := func(name string, r app.RankRef) (client.RankChange, error) {
		zero := time.Duration(0)
		return b.RemoveRank(t.Context(), name, api.RankRemoval{Rank: r, Deadline: &zero})
	}
	a, err := b.App(t.Context(), "pd")
	require.NoError(t, err)
	require.Len(t, a.Pools, 2)
	assert.Zero(t, a.Pools[0].Desired)

	c, err := add("", `{"url": "http://127.0.0.1:2", "role": "prefill"}`)
	require.NoError(t, err)
	assert.Equal(t, client.RankChange{App: "pd", Pool: "prefill", URL: "http://127.0.0.1:2", Revision: 2}, c)
	c, err = add("pd", `{"url": "http://127.0.0.1:3"}`)
	require.NoError(t, err)
	assert.Equal(t, client.RankChange{
		App: "pd", Pool: "decode", Rank: 1, URL: "http://127.0.0.1:3", Revision: 3,
	}, c)
	a, err = b.App(t.Context(), "pd")
	require.NoError(t, err)
	assert.Equal(t, uint64(3), a.Revision)
	assert.Equal(t, []int{1, 2}, []int{a.Pools[0].Desired, a.Pools[1].Desired})
	pool, err := b.App(t.Context(), "pd.prefill")
	require.NoError(t, err)
	assert.Equal(t, "pd.prefill", pool.Name)
	assert.Equal(t, 1, pool.Desired)
	urls, err := b.Workers(t.Context(), "pd")
	require.NoError(t, err)
	assert.Equal(t, []string{"http://127.0.0.1:2", "http://127.0.0.1:1", "http://127.0.0.1:3"}, urls)

	refused := func(err error, code problem.Code, text string) {
		t.Helper()
		require.ErrorContains(t, err, text)
		assert.Equal(t, code, problem.CodeOf(err))
	}
	_, err = add("pd", `{"url": "http://127.0.0.1:1", "role": "prefill"}`)
	refused(err, problem.Conflict, "http://127.0.0.1:1 is attached already, as pd.decode/0/0")
	_, err = add("pd.prefill", `{"url": "http://127.0.0.1:4"}`)
	refused(err, problem.Conflict, "a rank with role both does not belong to pd.prefill")
	_, err = add("pd", `{"url": "http://127.0.0.1:4", "role": "prefill", "pd": {"bootstrap": "http://h:1"}}`)
	refused(err, problem.InvalidArgument, "transfer nixl takes no pd.bootstrap")
	_, err = remove("pd", app.RankRef{})
	refused(err, problem.InvalidArgument, "both pools of pd have a rank 0/0")
	_, err = remove("pd", app.RankRef{URL: "http://127.0.0.1:9"})
	refused(err, problem.NotFound, "there is no rank http://127.0.0.1:9 in pd")

	c, err = remove("pd", app.RankRef{Rank: 1})
	require.NoError(t, err, "only the decode pool has it")
	assert.Equal(t, "decode", c.Pool)
	c, err = remove("pd.prefill", app.RankRef{})
	require.NoError(t, err)
	assert.Equal(t, "http://127.0.0.1:2", c.URL)
	_, err = remove("pd", app.RankRef{URL: "http://127.0.0.1:1"})
	refused(err, problem.Conflict, "is the last one of pd.decode")

	res, err := b.Deploy(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte(pairFile)})
	require.NoError(t, err)
	require.Len(t, res.Changes, 1)
	assert.Equal(t, client.EffectUnchanged, res.Changes[0].Effect, "the ranks are those of the file again")
	require.Eventually(t, func() bool { return b.n.store.State().Units["pd.prefill/0/0"] == nil },
		30*time.Second, time.Millisecond, "its number is free again")
	_, err = add("pd", `{"url": "http://127.0.0.1:2", "role": "prefill"}`)
	require.NoError(t, err)
	res, err = b.Deploy(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte(pairFile)})
	require.NoError(t, err)
	assert.Equal(t, []string{"pd.prefill/0/0 http://127.0.0.1:2"}, res.Changes[0].Gone)
	assert.Equal(t, client.EffectScale, res.Changes[0].Effect)

	refused(b.Delete(t.Context(), "pd.decode"), problem.Conflict, "pd.decode is a pool of pd")
	require.NoError(t, b.Delete(t.Context(), "pd"))
	require.Eventually(t, func() bool { return len(b.n.store.State().Apps) == 0 }, 30*time.Second,
		time.Millisecond)
}
