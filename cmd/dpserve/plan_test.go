package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// somePlan has one application of every effect.
func somePlan() client.Plan {
	unit := func(name string, effect client.Effect, ranks int) client.UnitPlan {
		return client.UnitPlan{Unit: name, Effect: effect, Seats: make([]client.SeatPlan, ranks)}
	}
	plan := func(app string, impact client.Impact, units ...client.UnitPlan) client.AppPlan {
		return client.AppPlan{Change: client.Change{App: app, Impact: impact}, Units: units}
	}
	return client.Plan{
		Revision: 7, Changes: true, Fits: true,
		Apps: []client.AppPlan{
			plan("new", client.Impact{Effect: client.EffectCreate, RanksAfter: 1},
				unit("new/0/0", client.EffectCreate, 1)),
			plan("slow", client.Impact{
				Effect: client.EffectScale, RanksBefore: 2, RanksAfter: 3,
				Diffs: []client.FieldDiff{{Path: "data_parallel.dp_size", Old: "2", New: "3"}},
			}, unit("slow/0/0", client.EffectUnchanged, 1), unit("slow/0/1", client.EffectUnchanged, 1),
				unit("slow/0/2", client.EffectCreate, 1)),
			plan("gang", client.Impact{
				Effect: client.EffectRestart, Reasons: []string{"KV events go on"},
				RanksBefore: 4, RanksAfter: 4,
				Diffs: []client.FieldDiff{{Path: "routing.policy", Old: `"random"`, New: `"kv"`}},
			}, unit("gang/0", client.EffectRestart, 4)),
			plan("calm", client.Impact{
				Effect: client.EffectUpdate,
				Diffs:  []client.FieldDiff{{Path: "model.id", Old: `"a model with a long name"`, New: `"b"`}},
			}),
			plan("same", client.Impact{Effect: client.EffectUnchanged}),
			plan("old", client.Impact{Effect: client.EffectDelete, RanksBefore: 1},
				unit("old/0/0", client.EffectDelete, 1)),
		},
	}
}

func TestPlanShowsDevicesThatWereFound(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.plan = client.Plan{Fits: true, Nodes: []client.NodePlan{
		{Node: "a", Slots: 64, SlotsFree: 64},
		{
			Node: "b", Slots: 64, SlotsFree: 64, GPUs: 2, GPUsFree: 1, GPUsNeed: 1,
			Devices: []client.DeviceModel{{Name: "NVIDIA H100", MemoryMiB: 81920, Devices: []int{0, 1}}},
		},
	}}
	require.Zero(t, c.run([]string{"plan", file(t, tiny)}), c.stderr())
	assert.Contains(t, c.stdout(), "NODE  SLOTS  FREE  NEED  GPUS  FREE  NEED  DEVICES")
	assert.Contains(t, c.stdout(), "b     64     64    0     2     1     1     2 x NVIDIA H100 80.0 GiB")
}

// HF77: with the share of each rank, what is left, and the flag that the engines get.
func TestPlanShowsSharedDevices(t *testing.T) {
	c := newCLI(t)
	seat := func(rank int) []client.SeatPlan {
		return []client.SeatPlan{{Rank: rank, Node: "a", Devices: []int{1}, Share: 0.25}}
	}
	c.cluster.nodes.plan = client.Plan{
		Changes: true, Fits: true, Apps: []client.AppPlan{{
			Change: created("chat"),
			Units: []client.UnitPlan{
				{Unit: "chat/0/0", Effect: client.EffectCreate, Seats: seat(0)},
				{Unit: "chat/0/1", Effect: client.EffectCreate, Seats: seat(1)},
			},
		}}, Nodes: []client.NodePlan{{
			Node: "a", GPUs: 2, GPUsFree: 1.5, GPUsNeed: 0.5,
			Shared: []client.SharedDevice{
				{Device: 1, Used: 0.75, Ranks: []string{"chat/0/0", "chat/0/1", "old/0/0"}},
			},
		}},
	}
	path := file(t, `applications:
  - name: chat
    model: {id: m}
    engine: {kind: vllm}
    num_replicas: 2
    resources: {gpus: 0.25}
`)
	require.Zero(t, c.run([]string{"plan", path}), c.stderr())
	for _, line := range []string{
		"chat/0/1  + create  1      a     0.25 of 1\n",
		"a     0      0     0     2     1.5   0.5\n",
		"device 1 of a: 0.75 of it for chat/0/0, chat/0/1, old/0/0\n",
		"chat: its engines get --gpu-memory-utilization 0.225, nine tenths of their share; engine.args may " +
			"name another value\n",
	} {
		assert.Contains(t, c.stdout(), line)
	}
}

func TestPlanSaysWhatHappens(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.plan = somePlan()
	path := file(t, tiny)
	require.Zero(t, c.run([]string{"plan", path}), c.stderr())
	assert.Equal(t, `APP   CHANGE                          FIELDS
new   + create
slow  ~ scale 2 -> 3                  data_parallel.dp_size 2 -> 3
gang  -/+ restart  # KV events go on  routing.policy "random" -> "kv"
calm  ~ update                        model.id
same  no change
old   - delete

UNIT      CHANGE       RANKS  NODE  GPUS
new/0/0   + create     0
slow/0/2  + create     0
gang/0    -/+ restart  0
old/0/0   - delete     0

NODE  SLOTS  FREE  NEED  GPUS  FREE  NEED  NOTE

ranks: 2 to start, 4 to restart, 1 to end, 2 not touched
gang has one unit alone: its requests wait, or are refused, until it has restarted
to do this: dpserve deploy `+path+` --revision 7
`, c.stdout())

	c = newCLI(t)
	c.cluster.nodes.plan = somePlan()
	require.Zero(t, c.run([]string{"plan", path, "-o", "name"}))
	assert.Equal(t, "new\nslow\ngang\ncalm\nold\n", c.stdout())
}

// A lockstep unit is lost whole with one of its nodes.
func TestPlanSaysWhatTheDeathOfANodeTakes(t *testing.T) {
	path := file(t, `applications:
  - name: chat
    model: {id: chat}
    engine: {kind: sim}
    num_replicas: 3
  - name: moe
    route_prefix: /moe
    model: {id: moe}
    engine: {kind: sim}
    data_parallel: {dp_size: 3, coupling: lockstep}
    num_groups: 2
  - name: pd
    route_prefix: /pd
    model: {id: pd}
    engine: {kind: sim}
    disaggregation: {transfer: nixl}
    prefill: {num_replicas: 1}
    decode: {num_replicas: 2}
  - name: far
    route_prefix: /far
    model: {id: far}
    engine: {kind: attach, ranks: [{url: "http://127.0.0.1:8001"}, {url: "http://127.0.0.1:8002"}]}
`)
	unit := func(name string, effect client.Effect, nodes ...string) client.UnitPlan {
		u := client.UnitPlan{Unit: name, Effect: effect}
		for i, node := range nodes {
			u.Seats = append(u.Seats, client.SeatPlan{Rank: i, Node: node})
		}
		return u
	}
	pool := func(pool string, u client.UnitPlan) client.UnitPlan {
		u.Pool = pool
		return u
	}
	plan := client.Plan{Changes: true, Fits: true, Apps: []client.AppPlan{
		{Change: created("chat"), Units: []client.UnitPlan{
			unit("chat/0/0", client.EffectUnchanged, "a"), unit("chat/0/1", client.EffectCreate, "b"),
			unit("chat/0/2", client.EffectCreate, "b"), unit("chat/0/3", client.EffectDelete, "a"),
		}},
		{Change: created("moe"), Units: []client.UnitPlan{
			unit("moe/0", client.EffectCreate, "a", "a", "b"),
			unit("moe/1", client.EffectCreate, "b", "b", "b"),
		}},
		{Change: created("pd"), Units: []client.UnitPlan{
			pool("prefill", unit("pd.prefill/0/0", client.EffectCreate, "a")),
			pool("decode", unit("pd.decode/0/0", client.EffectCreate, "a")),
			pool("decode", unit("pd.decode/0/1", client.EffectCreate, "b")),
		}},
		{Change: created("far"), Units: []client.UnitPlan{unit("far/0/0", client.EffectCreate, "a")}},
	}}
	output := func(nodes ...client.NodePlan) string {
		plan.Nodes = nodes
		c := newCLI(t)
		c.cluster.nodes.plan = plan
		require.Zero(t, c.run([]string{"plan", path}), c.stderr())
		return c.stdout()
	}
	assert.NotContains(t, output(client.NodePlan{Node: "a"}), "the death of", "there is no other node")
	both := output(client.NodePlan{Node: "a"}, client.NodePlan{Node: "b"})
	assert.Contains(t, both, `
chat: the death of one node takes at most 2 of 3 ranks (b)
moe: the death of one node takes at most 6 of 6 ranks (b)
pd.prefill: the death of one node takes at most 1 of 1 rank (a)
pd.decode: the death of one node takes at most 1 of 2 ranks (a)
`)
	assert.NotContains(t, both, "far: the death", "dpserve does not start these engines")
}

func TestPlanJSON(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.plan = somePlan()
	require.Zero(t, c.run([]string{"plan", file(t, tiny), "-o", "json"}), c.stderr())
	var doc struct {
		Apps []map[string]any `json:"apps"`
	}
	require.NoError(t, json.Unmarshal([]byte(c.stdout()), &doc))
	slow := doc.Apps[1]
	assert.Equal(t, "scale", slow["effect"])
	assert.InDelta(t, 3, slow["ranks_after"], 0)
	diff := map[string]any{"path": "data_parallel.dp_size", "old": "2", "new": "3"}
	assert.Equal(t, []any{diff}, slow["diffs"])
	assert.Equal(t, "restart", doc.Apps[2]["units"].([]any)[0].(map[string]any)["effect"])
}

// CC15: plan prints the advice under its tables and has it in its JSON; its exit codes stay.
func TestPlanAdvises(t *testing.T) {
	unchanged := client.Plan{Fits: true, Apps: []client.AppPlan{{Change: client.Change{App: "demo"}}}}
	unfit := client.Plan{Changes: true, Apps: []client.AppPlan{{Change: client.Change{App: "demo"}}}}
	for code, p := range map[int]client.Plan{0: unchanged, 3: somePlan(), 5: unfit} {
		p.Apps[0].Advice = []string{"demo: its one rank"}
		c := newCLI(t)
		c.cluster.nodes.plan = p
		assert.Equal(t, code, c.run([]string{"plan", file(t, tiny), "--exit-code"}), c.stderr())
		assert.Contains(t, c.stdout(), "advice: demo: its one rank\n")
		assert.Equal(t, code, c.run([]string{"plan", file(t, tiny), "--exit-code", "-o", "json"}))
		assert.Regexp(t, `"advice": \[\s+"demo: its one rank"`, c.stdout())
	}
}

func TestJoinSome(t *testing.T) {
	assert.Equal(t, "a, b, c", joinSome([]string{"a", "b", "c"}))
	assert.Equal(t, "a, b, c and 2 more", joinSome([]string{"a", "b", "c", "d", "e"}))
	assert.Empty(t, joinSome(nil))
}

// Another deploy of the application ends the wait of the first one.
func TestDeployEndsWhenAnotherRevisionReplacesIt(t *testing.T) {
	c := newCLI(t)
	c.cluster.script = [][]client.AppStatus{
		{demo(client.StatusDeploying, 2, state.Starting)},
		{demo(client.StatusRunning, 3, state.Ready, state.Ready, state.Ready)},
	}
	assert.Equal(t, 1, c.run([]string{"deploy", file(t, tiny)}))
	assert.Contains(t, c.stderr(),
		"dpserve: demo: revision 2 was replaced by revision 3 while it was rolled out\n"+
			"hint: it was deployed again meanwhile; `dpserve status demo` shows what runs now\n")
	assert.Empty(t, c.stdout())

	// a rank that is attached meanwhile is a revision too
	attached := demo(client.StatusRunning, 3, state.Ready, state.Ready)
	attached.Kind = "attach"
	c = newCLI(t)
	c.cluster.script = [][]client.AppStatus{{attached}}
	assert.Zero(t, c.run([]string{"deploy", file(t, tiny)}), c.stderr())
}

func TestDeployDetachedPrintsWhatWasApplied(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run([]string{"deploy", "--detach", file(t, tiny), "-o", "json"}), c.stderr())
	doc := decode[client.DeployResult](t, c.stdout())
	assert.Equal(t, map[string]uint64{"demo": 2}, doc.Apps)
	assert.Equal(t, client.EffectRestart, doc.Changes[0].Effect)
}
