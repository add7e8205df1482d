package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// pairFile is an application with two pools.
const pairFile = `applications:
  - name: pd
    model: {id: m}
    engine: {kind: vllm}
    prefill: {data_parallel: {dp_size: 2, coupling: independent}}
    decode: {data_parallel: {dp_size: 4, coupling: independent}}
`

// pairStatus is its status: one rank of each pool, of which the prefill rank has no room.
func pairStatus() client.AppStatus {
	unit := func(id, phase, reason string) client.UnitStatus {
		return client.UnitStatus{
			Unit: id, Phase: phase, Reason: reason, Ranks: []client.RankStatus{{Node: "n1", Phase: phase}},
		}
	}
	const why = "place pd.prefill/0: 0 of 1 rank can be placed (PACK); node n1: full"
	return client.AppStatus{
		Name: "pd", Status: client.StatusDeploying, Model: "m", Kind: "sim", Policy: "mex", Groups: 2,
		Ready: 1, Desired: 2, Message: "pd.prefill/0/0 is pending: " + why + "\npd.decode/0/0 is slow: x",
		Units: []client.UnitStatus{
			unit("pd.prefill/0/0", string(state.Pending), why),
			unit("pd.decode/0/0", string(state.Ready), ""),
		},
		Pools: []client.PoolStatus{
			{
				Pool: client.PoolPrefill, Name: "pd.prefill", Status: client.StatusDeploying, Policy: "mex",
				Groups: 1, Desired: 1,
			},
			{
				Pool: client.PoolDecode, Name: "pd.decode", Status: client.StatusRunning, Policy: "random",
				Groups: 1, Ready: 1, Desired: 1,
			},
		},
	}
}

func TestStatusShowsPools(t *testing.T) {
	c := newCLI(t)
	c.cluster.script = [][]client.AppStatus{{pairStatus()}}
	require.Zero(t, c.run([]string{"status"}), c.stderr())
	lines := strings.Split(c.stdout(), "\n")
	for i, want := range []string{
		"APP STATUS RANKS GROUPS MODEL KIND POLICY QUEUED MESSAGE",
		"pd DEPLOYING 1/2 2 m sim mex 0 pd.prefill/0/0",
		"prefill DEPLOYING 0/1 1 mex", "decode RUNNING 1/1 1 random",
	} {
		assert.True(t, strings.HasPrefix(strings.Join(strings.Fields(lines[i]), " "), want), lines[i])
	}
	assert.Contains(t, c.stdout(), "\npd.prefill/0/0  pending")
	assert.Contains(t, c.stdout(), "\npd.decode/0/0   ready")
	assert.Contains(t, c.stdout(), "0 of 1 rank can be placed (PACK)\n", "the message has the rest")

	c = newCLI(t)
	c.cluster.script = [][]client.AppStatus{{pairStatus()}}
	require.Zero(t, c.run([]string{"status", "pd.decode"}), c.stderr())
	assert.Contains(t, c.stdout(), "pd.decode  RUNNING  1/1    1       m      sim   random  0       "+
		"pd.decode/0/0 is slow: x\n")
	assert.NotContains(t, c.stdout(), "prefill")
	assert.Equal(t, 1, c.run([]string{"status", "pd.other"}))
}

func TestAPairIsOneApplication(t *testing.T) {
	path := file(t, pairFile)
	c := newCLI(t)
	require.Zero(t, c.run([]string{"validate", path, "-o", "name"}), c.stderr())
	assert.Equal(t, "pd\n", c.stdout())
	c = newCLI(t)
	require.Zero(t, c.run([]string{"validate", path}), c.stderr())
	assert.Contains(t, c.stderr(), " is sound: 1 application\n")

	c = newCLI(t)
	c.cluster.script = [][]client.AppStatus{{pairStatus()}}
	require.Zero(t, c.run([]string{"deploy", path, "--engine", "sim", "--prune", "--detach"}), c.stderr())
	assert.NotContains(t, c.stderr(), "--prune deletes", "the file lists it")
	assert.Contains(t, c.stderr(), "pd.decode: disaggregation.transfer: nixl → sim\n")
	require.Len(t, c.cluster.deployed, 1)
	assert.Contains(t, string(c.cluster.deployed[0].Text), "      transfer: sim\n    prefill:\n")
}

func TestPlanSaysThatAllRanksEndFirst(t *testing.T) {
	c := newCLI(t)
	unit := func(id, pool string, e client.Effect) client.UnitPlan {
		return client.UnitPlan{Unit: id, Pool: pool, Effect: e, Seats: []client.SeatPlan{{}}}
	}
	c.cluster.nodes.plan = client.Plan{Changes: true, Fits: true, Apps: []client.AppPlan{
		{
			Change: client.Change{App: "pd", Impact: client.Impact{Effect: client.EffectRestart}},
			Units: []client.UnitPlan{
				unit("pd.decode/0/0", "decode", client.EffectCreate), unit("pd/0/0", "", client.EffectDelete),
			},
		},
		{
			Change: client.Change{App: "two", Impact: client.Impact{Effect: client.EffectRestart}},
			Units: []client.UnitPlan{
				unit("two.prefill/0/0", "prefill", client.EffectUnchanged),
				unit("two.decode/0/0", "decode", client.EffectRestart),
			},
		},
	}}
	require.Zero(t, c.run([]string{"plan", file(t, tiny)}), c.stderr())
	assert.Contains(t, c.stdout(), "pd ends all its ranks before new ones start: its requests wait")
	assert.Contains(t, c.stdout(), "two has one unit alone")
	assert.NotContains(t, c.stdout(), "pd has one unit alone")
}

func TestRanksAddOfAPrefillRank(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run(strings.Fields("ranks add pd http://h:1 --role prefill --pd-engine-id e "+
		"--pd-side-channel h:5600 --pd-tp-size 2 --pd-bootstrap http://h:8998")), c.stderr())
	assert.Equal(t, []string{
		`pd {"url":"http://h:1","role":"prefill","pd":{"engine_id":"e","side_channel":"h:5600","tp_size":2,` +
			`"bootstrap":"http://h:8998"}}`,
	}, c.cluster.added)
	change := client.RankChange{App: "pd", Pool: "decode", URL: "http://h:1"}
	status := pairStatus()
	assert.Equal(t, string(state.Ready), rankPhase(&status, &change))
	change.Pool = "prefill"
	assert.Equal(t, string(state.Pending), rankPhase(&status, &change))
}
