package controller

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
		spec, err := encodeSpec([]*app.Application{a})
		require.NoError(t, err)
		put.Apps = append(put.Apps, spec)
	}
	_, err := st.Apply(1, &state.Command{PutApps: put})
	require.NoError(t, err)
	return st
}

// A deploy lists the applications that it puts, then those that it ends.
func TestChangesOfADeploy(t *testing.T) {
	old, same, gone := sim("old", 2, app.Independent), sim("same", 1, app.Independent),
		sim("gone", 1, app.Independent)
	old.RoutePrefix, same.RoutePrefix, gone.RoutePrefix = "/old", "/same", "/gone"
	st := storedApps(t, old, same, gone)
	next := *old
	next.NumReplicas, next.DataParallel.DPSize = 3, 3
	fresh := sim("fresh", 1, app.Independent)
	fresh.RoutePrefix = "/fresh"
	apps := []*app.Application{&next, same, fresh}
	listed := [][2]string{{"fresh", "create"}, {"old", "scale"}, {"same", "unchanged"}}
	for prune, want := range map[bool][][2]string{
		false: listed, true: append(slices.Clone(listed), [2]string{"gone", "delete"}),
	} {
		d, err := newDryRun(st, nil, apps, prune)
		require.NoError(t, err)
		var got [][2]string
		for _, c := range d.changes() {
			got = append(got, [2]string{c.App, string(c.Effect)})
		}
		assert.Equal(t, want, got)
	}
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
	held := isNumberTaken(st, &app.Application{Name: "edge"})
	assert.False(t, held(1))
	st.Units["edge/0/1"] = &state.Unit{ID: "edge/0/1", App: "edge", Phase: state.Ready}
	assert.True(t, held(1))
	assert.False(t, held(0))
}
