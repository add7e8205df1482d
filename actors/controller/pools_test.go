package controller

import (
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

// pools are the two pools of the application pd, with so many independent ranks.
func pools(prefill, decode int) []*app.Application {
	var out []*app.Application
	for _, p := range []struct {
		name  string
		ranks int
	}{{app.PoolPrefill, prefill}, {app.PoolDecode, decode}} {
		a := sim("pd", p.ranks, app.Independent)
		a.Pool, a.Model.ID = p.name, "m"
		a.Routing.Policy = "random"
		a.Disaggregation = &app.Disaggregation{
			Transfer: app.TransferSim, Decide: app.DecideISL, Fallback: app.FallbackLocal,
		}
		out = append(out, a)
	}
	return out
}

// put deploys as the admin API does.
func (r *rig) put(t *testing.T, prune bool, apps ...*app.Application) (state.Result, []client.Change) {
	t.Helper()
	seen := r.store.State().Revision
	res, changes, err := r.Deploy(t.Context(), Deployment{Apps: apps, Seen: &seen, Prune: prune})
	require.NoError(t, err)
	synctest.Wait()
	return res, changes
}

// shown is the only status that users see.
func (r *rig) shown(t *testing.T) client.AppStatus {
	t.Helper()
	all := r.Status()
	require.Len(t, all, 1)
	return all[0]
}

func unitsOf(s *client.AppStatus) (out []string) {
	for i := range s.Units {
		out = append(out, s.Units[i].Unit)
	}
	return out
}

func TestPoolsAreDeployedShownAndDeletedAsOne(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		res, changes := r.put(t, false, pools(2, 3)...)
		assert.Equal(t, map[string]uint64{"pd": 1}, res.Apps)
		require.Len(t, changes, 1)
		assert.Equal(t, client.Change{
			App: "pd", Impact: client.Impact{Effect: client.EffectCreate, RanksAfter: 5},
		}, changes[0])
		assert.Equal(t, []string{"m"}, r.store.State().Apps["pd"].Names)

		s := r.shown(t)
		assert.Equal(t, []string{
			"pd.prefill/0/0", "pd.prefill/0/1", "pd.decode/0/0", "pd.decode/0/1", "pd.decode/0/2",
		}, unitsOf(&s))
		s.Units = nil
		assert.Equal(t, client.AppStatus{
			Name: "pd", Status: "RUNNING", Revision: 1, Model: "m", Kind: "sim", Coupling: "independent",
			Policy: "random", DPSize: 3, Groups: 2, Desired: 5, Ready: 5, Pools: []client.PoolStatus{
				{
					Pool: "prefill", Name: "pd.prefill", Status: "RUNNING", Policy: "random",
					Coupling: "independent", DPSize: 2, Groups: 1, Ready: 2, Desired: 2,
				},
				{
					Pool: "decode", Name: "pd.decode", Status: "RUNNING", Policy: "random",
					Coupling: "independent", DPSize: 3, Groups: 1, Ready: 3, Desired: 3,
				},
			},
		}, s)

		_, changes = r.put(t, true, pools(2, 3)...)
		require.Len(t, changes, 1)
		assert.Equal(t, client.EffectUnchanged, changes[0].Effect, "prune keeps both pools")
		assert.Equal(t, "RUNNING", r.shown(t).Status)

		_, err := r.Delete(t.Context(), "pd.prefill")
		require.ErrorContains(t, err, "pd.prefill is a pool of pd, and ends with it")
		assert.Equal(t, problem.Conflict, problem.CodeOf(err))
		_, err = r.Delete(t.Context(), "pd")
		require.NoError(t, err)
		synctest.Wait()
		assert.Empty(t, r.Status())
		assert.Empty(t, r.store.State().Apps)
		assert.Empty(t, r.store.State().Units)
	})
}

// A change of one pool is one of the application, and restarts no rank of the other.
func TestAChangeOfOnePool(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		r.put(t, false, pools(2, 3)...)
		next := pools(3, 3)
		next[0].Engine.Args = app.Args{{Name: "seed", Value: int64(7)}}
		next[0].Retries.Attempts, next[1].Retries.Attempts = 5, 5
		plan, err := r.Plan(next, false)
		require.NoError(t, err)
		seen := r.store.State().Revision
		res, changes := r.put(t, false, next...)
		require.Len(t, plan.Apps, 1)
		require.Len(t, changes, 1)
		assert.Equal(t, changes[0].Impact, plan.Apps[0].Impact)
		assert.Equal(t, client.EffectRestart, changes[0].Effect)
		assert.Equal(t, []string{"prefill.engine.args.seed"}, changes[0].Reasons)
		var paths []string
		for _, d := range changes[0].Diffs {
			paths = append(paths, d.Path)
		}
		assert.Equal(t, []string{
			"prefill.data_parallel.dp_size", "prefill.engine.args.seed", "prefill.num_replicas",
			"retries.attempts",
		}, paths)
		assert.Equal(t, []int{5, 6}, []int{changes[0].RanksBefore, changes[0].RanksAfter})
		assert.Equal(t, map[string]uint64{"pd": 2}, res.Apps)
		s := r.shown(t)
		assert.Equal(t, uint64(2), s.Revision)
		assert.Equal(t, "RUNNING", s.Status)
		for id, epoch := range map[string]uint64{
			"pd.prefill/0/0": 2, "pd.prefill/0/2": 1, "pd.decode/0/0": 1,
		} {
			assert.Equal(t, epoch, r.store.State().Epochs[id], id)
		}

		_, _, err = r.Deploy(t.Context(), Deployment{Apps: pools(2, 2), Seen: &seen})
		require.ErrorContains(t, err, "app pd has changed at revision")
		assert.Equal(t, problem.Conflict, problem.CodeOf(err))
	})
}

// The old units end, in either direction, and the revisions go on.
func TestAnApplicationTurnsIntoTwoPoolsAndBack(t *testing.T) {
	rigged(t, nil, func(t *testing.T, r *rig) {
		one := sim("pd", 6, app.Independent)
		one.Model.ID = "m"
		r.put(t, false, one)
		plan, err := r.Plan(pools(2, 4), false)
		require.NoError(t, err)
		require.True(t, plan.Fits, "what ends makes room")
		require.Len(t, plan.Apps, 1)
		assert.Len(t, plan.Apps[0].Units, 12)
		assert.Equal(t, client.Impact{
			Effect: client.EffectRestart, Reasons: []string{"it has prefill and decode ranks from now on"},
			RanksBefore: 6, RanksAfter: 6,
		}, plan.Apps[0].Impact)

		res, changes := r.put(t, false, pools(2, 4)...)
		require.Len(t, changes, 1)
		assert.Equal(t, plan.Apps[0].Impact, changes[0].Impact)
		assert.Equal(t, map[string]uint64{"pd": 2}, res.Apps)
		s := r.shown(t)
		assert.Equal(t, "RUNNING", s.Status)
		assert.Equal(t, 6, s.Ready)
		assert.Len(t, s.Units, 6)

		res, changes = r.put(t, false, one)
		require.Len(t, changes, 1)
		assert.Equal(t, []string{"it has one pool from now on"}, changes[0].Reasons)
		assert.Equal(t, map[string]uint64{"pd": 3}, res.Apps)
		s = r.shown(t)
		assert.Equal(t, "RUNNING", s.Status)
		assert.Empty(t, s.Pools)
		assert.Equal(t, "pd/0/0", s.Units[0].Unit)
		assert.Len(t, r.store.State().Apps, 1)
	})
}

func TestPoolsBesideAndApart(t *testing.T) {
	for colocate, want := range map[string][2]string{
		app.ColocatePrefer: {"b:0", "b:0"}, app.ColocateNo: {"a:0", "b:0"}, "": {"a:0", "b:0"},
	} {
		c := newFleet(t, newHost("a", 2), newHost("b", 6))
		apps := pools(1, 4)
		for _, a := range apps {
			a.Disaggregation.Colocate = colocate
		}
		c.deploy(apps...)
		c.renew("a", "b")
		assert.Equal(t, want, [2]string{c.where("pd.prefill/0/0"), c.where("pd.decode/0/0")}, "%q", colocate)
	}
	c := newFleet(t, newHost("a", 8))
	apps := pools(1, 2)
	for _, a := range apps {
		a.Disaggregation.Colocate = app.ColocateNo
	}
	c.deploy(apps...)
	c.renew("a")
	s := view{c.core}.Status()[0]
	assert.Equal(t, "DEPLOYING", s.Status)
	assert.Contains(t, s.Message, "pd.prefill/0/0 is pending: place pd.prefill/0: 0 of 1 rank can be placed")
	assert.Contains(t, s.Message, "node a: has ranks of pd.decode, which are kept apart")
	fresh := newFleet(t, newHost("a", 8))
	d, err := newDryRun(fresh.state, nil, apps, false)
	require.NoError(t, err)
	assert.Equal(t, problem.Unplaceable, problem.CodeOf(d.noRoom))
	require.ErrorContains(t, d.noRoom, "place pd.prefill/0")
}

// One pool that is not well is the application's state, and does not change what is said of the other one.
func TestStatusOfPools(t *testing.T) {
	c := newFleet(t, newHost("a", 8))
	apps := pools(1, 2)
	c.deploy(apps...)
	c.run(4 * time.Second)
	shown := func(unreachable map[string]string) []string {
		s := view{c.core}.StatusWithout(unreachable)[0]
		return []string{s.Status, s.Pools[0].Status, s.Pools[1].Status}
	}
	assert.Equal(t, []string{"RUNNING", "RUNNING", "RUNNING"}, shown(nil))
	assert.Equal(t, []string{"UNHEALTHY", "UNHEALTHY", "UNHEALTHY"}, shown(map[string]string{"a": "silent"}))
	c.hosts["a"].crash("pd.decode/0/1")
	c.renew("a")
	assert.Equal(t, []string{"UNHEALTHY", "RUNNING", "UNHEALTHY"}, shown(nil))
	s := view{c.core}.Status()[0]
	decode, _ := s.OfPool("pd.decode")
	assert.Equal(t, []int{1, 2, 2}, []int{decode.Ready, decode.Desired, len(decode.Units)})
	assert.Contains(t, decode.Message, "pd.decode/0/1 is")
	prefill, ok := s.OfPool("pd.prefill")
	assert.True(t, ok)
	assert.Empty(t, prefill.Message)
}
