package controller

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// storedApps is a state with these applications, as a deploy stored them.
func storedApps(t *testing.T, apps ...*app.Application) *state.State {
	t.Helper()
	st := state.New()
	put := &state.PutApps{}
	for _, a := range apps {
		spec, err := encodeSpec(a)
		require.NoError(t, err)
		put.Apps = append(put.Apps, spec)
	}
	_, err := st.Apply(1, &state.Command{PutApps: put})
	require.NoError(t, err)
	return st
}

// What a deploy says it changes is what a plan of it says.
func TestDeployAndPlanNameTheSameChanges(t *testing.T) {
	old, same, gone := sim("old", 2, app.Independent), sim("same", 1, app.Independent),
		sim("gone", 1, app.Independent)
	old.RoutePrefix, same.RoutePrefix, gone.RoutePrefix = "/old", "/same", "/gone"
	st := storedApps(t, old, same, gone)
	next := *old
	next.NumReplicas, next.DataParallel.DPSize = 3, 3
	fresh := sim("fresh", 1, app.Independent)
	fresh.RoutePrefix = "/fresh"
	apps := []*app.Application{&next, same, fresh}
	changes, err := appChanges(st, apps, true)
	require.NoError(t, err)
	plan, err := planOf(st, nil, apps, true)
	require.NoError(t, err)
	planned := map[string]client.Change{}
	for _, a := range plan.Apps {
		planned[a.App] = client.Change{
			App: a.App, Action: client.Action(a.Action), Impact: a.Impact, Fields: a.Fields,
		}
	}
	require.Len(t, changes, 4)
	for i, name := range []string{"old", "same", "fresh", "gone"} {
		assert.Equal(t, name, changes[i].App, "as listed, then what is deleted")
		assert.Equal(t, planned[name], changes[i])
	}
	assert.Equal(t, client.EffectScale, changes[0].Effect)
	changes, err = appChanges(st, apps, false)
	require.NoError(t, err)
	assert.Len(t, changes, 3)
}

func TestExpectedRevisionsRefuseWhatChangedMeanwhile(t *testing.T) {
	a := sim("a", 1, app.Independent)
	st := storedApps(t, a)
	b := sim("b", 1, app.Independent)
	apps := []*app.Application{a, b}
	expect, err := expectedRevisions(st, apps, nil)
	require.NoError(t, err)
	assert.Nil(t, expect)
	seen := st.Revision
	expect, err = expectedRevisions(st, apps, &seen)
	require.NoError(t, err)
	assert.Equal(t, map[string]uint64{"a": 1, "b": 0}, expect)
	for _, seen := range []uint64{st.Revision - 1, st.Revision + 1} {
		_, err = expectedRevisions(st, apps, &seen)
		assert.Equal(t, problem.Conflict, problem.CodeOf(err), seen)
	}
}

// A draining rank keeps its number.
func TestRankNumberIsFreeAfterItsUnitIsReleased(t *testing.T) {
	st := state.New()
	held := isNumberTaken(st, "edge")
	assert.False(t, held(1))
	st.Units["edge/0/1"] = &state.Unit{ID: "edge/0/1", App: "edge", Phase: state.Ready}
	assert.True(t, held(1))
	assert.False(t, held(0))
}
