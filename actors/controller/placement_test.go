package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

func groups(name string, n, dp int) *app.Application {
	a := sim(name, dp, app.Lockstep)
	a.NumGroups, a.NumReplicas = n, n*dp
	a.PlacementGroupStrategy = "STRICT_PACK"
	return a
}

// What fits runs. The third gang waits, and starts when a node joins.
func TestRG7ThreeGangsOnTenSlots(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 6))
	c.deploy(groups("moe", 3, 4))
	c.run(4 * time.Second)
	assert.Equal(t, "DEPLOYING", c.status("moe"))
	assert.Equal(t, 8, c.ready("moe"))
	assert.Equal(t, state.Pending, c.phase("moe/2"))
	assert.Contains(t, view{c.core}.Status()[0].Message,
		"moe/2 is pending: place moe/2: 2 of 4 ranks can be placed")
	c.join(newHost("c", 4))
	c.renew("c")
	assert.Equal(t, 12, c.ready("moe"))
	assert.Equal(t, "RUNNING", c.status("moe"))
	assert.Equal(t, uint64(1), c.state.Epochs["moe/0"])
}

func TestNodeThatJoinsGivesFailedUnitsAnotherChance(t *testing.T) {
	a := newHost("a", 1)
	a.slow = true
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent))
	for range 3 {
		a.crash("chat/0/0")
		c.run(3 * time.Second)
	}
	require.Equal(t, state.Failed, c.phase("chat/0/0"))
	a.cut = true
	c.run(15 * time.Second)
	a.cut = false
	c.run(5 * time.Second)
	require.Equal(t, state.Failed, c.phase("chat/0/0"), "a node that comes back is no new one")
	c.join(newHost("b", 1))
	assert.Equal(t, "b:0", c.where("chat/0/0"), "at once")
	assert.Equal(t, 1, c.state.Units["chat/0/0"].Attempt)
}

// The app goes from 4 to 2 to 8 groups; groups that stay keep their epoch.
func TestPL3WholeGroupsOnly(t *testing.T) {
	c := newFleet(t, newHost("a", 12), newHost("b", 12), newHost("c", 12))
	for _, n := range []int{4, 2, 8} {
		c.deploy(groups("moe", n, 4))
		for i := n; i < 8; i++ {
			c.drained(fmt.Sprint("moe/", i))
		}
		c.run(2 * time.Second)
		require.Equal(t, "RUNNING", c.status("moe"))
		require.Equal(t, n*4, c.ready("moe"))
		require.Len(t, c.state.Units, n)
		for id, rec := range c.state.Units {
			require.Len(t, rec.Ranks, 4, id)
		}
		require.Equal(t, uint64(1), c.state.Epochs["moe/0"])
		require.Equal(t, uint64(1), c.state.Epochs["moe/1"])
	}
	assert.Equal(t, uint64(2), c.state.Epochs["moe/2"])
}

// Two groups of 8 over two nodes of 8, then one group of 16.
func TestRG1RanksInConsecutiveBlocks(t *testing.T) {
	for range 20 {
		c := newFleet(t, newHost("a", 8), newHost("b", 8))
		c.deploy(groups("moe", 2, 8))
		c.renew("a", "b")
		require.Equal(t, "a:0,1,2,3,4,5,6,7", c.where("moe/0"))
		require.Equal(t, "b:0,1,2,3,4,5,6,7", c.where("moe/1"))
		c.delete("moe")
		c.drained("moe/0")
		c.drained("moe/1")
		c.deploy(sim("big", 16, app.Lockstep))
		c.renew("a", "b")
		require.Equal(t, "a:0,1,2,3,4,5,6,7 b:8,9,10,11,12,13,14,15", c.where("big/0"))
		require.Equal(t, "RUNNING", c.status("big"))
	}
}

// Groups of one rank go to the nodes with the fewest ranks of the application: in a plan and in the deploy,
// and also when the application grows.
func TestGroupsOfOneRankAreSpread(t *testing.T) {
	c := newFleet(t, newHost("a", 16), newHost("b", 8), newHost("c", 4))
	for _, step := range []struct {
		groups int
		want   []string // the node of each group
	}{
		{3, []string{"a", "b", "c"}},
		{5, []string{"a", "b", "c", "a", "b"}},
	} {
		chat := sim("chat", 1, app.Independent)
		chat.NumGroups, chat.NumReplicas, chat.PlacementGroupStrategy = step.groups, step.groups, "SPREAD"
		plan := c.plan(false, chat)
		require.True(t, plan.Fits)
		c.deploy(chat)
		c.renew(c.ids()...)
		for i, node := range step.want {
			assert.Equal(t, node+":0", c.where(fmt.Sprintf("chat/%d/0", i)))
			assert.Equal(t, node, plan.Apps[0].Units[i].Seats[0].Node, "as planned")
		}
	}
}

// plan computes a plan and checks that it changed nothing.
func (c *fleet) plan(prune bool, apps ...*app.Application) client.Plan {
	before, _ := c.state.Encode()
	p, err := planOf(c.state, nil, apps, prune)
	require.NoError(c.t, err)
	after, _ := c.state.Encode()
	require.Equal(c.t, string(before), string(after))
	return p
}

// HF77: free and needed shares of each node, and which ranks share which device, with those of applications
// that the plan is not about. Sums are exact.
func TestPlanAndNodesShowShares(t *testing.T) {
	a := newHost("a", 8)
	a.node.Resources.Devices = []int{0, 1}
	c := newFleet(t, a)
	tenths := sim("tenths", 3, app.Independent)
	tenths.Resources.GPUs = 0.1
	c.deploy(tenths)
	c.renew("a")
	whole := sim("whole", 1, app.Independent)
	whole.RoutePrefix, whole.Resources.GPUs = "/w", 1
	half := sim("half", 1, app.Independent)
	half.RoutePrefix, half.Resources.GPUs = "/h", 0.5
	p := c.plan(false, half, whole)
	require.True(t, p.Fits)
	require.Len(t, p.Nodes, 1)
	n := p.Nodes[0]
	assert.Equal(t, []any{2, 1.7, 1.5}, []any{n.GPUs, n.GPUsFree, n.GPUsNeed})
	assert.Equal(t, []client.SharedDevice{
		{Device: 0, Used: 0.8, Ranks: []string{"half/0/0", "tenths/0/0", "tenths/0/1", "tenths/0/2"}},
	}, n.Shared)
	assert.Equal(t, []client.SeatPlan{{Rank: 0, Node: "a", Devices: []int{0}, Share: 0.5}},
		p.Apps[0].Units[0].Seats)
	assert.Equal(t, []client.SeatPlan{{Rank: 0, Node: "a", Devices: []int{1}}}, p.Apps[1].Units[0].Seats)

	status := view{c.core}.nodeStatus(c.now, c.state.Nodes["a"], "a")
	assert.InDelta(t, 0.3, status.GPUsUsed, 0)
	assert.Equal(t, []client.SharedDevice{
		{Device: 0, Used: 0.3, Ranks: []string{"tenths/0/0", "tenths/0/1", "tenths/0/2"}},
	}, status.Shared)
	assert.InDelta(t, 0.1, view{c.core}.Status()[0].Units[1].Ranks[0].Share, 0)

	half.Resources.GPUs = 0.8
	p = c.plan(false, half, whole)
	assert.False(t, p.Fits)
	assert.Contains(t, p.Apps[1].Units[0].Why, "need: 1 rank of 1 slot and 1 device each")
}

func TestPlanOfAFirstDeploy(t *testing.T) {
	c := newFleet(t, newHost("a", 8), newHost("b", 8))
	p := c.plan(false, sim("moe", 12, app.Lockstep))
	require.Len(t, p.Apps, 1)
	assert.True(t, p.Fits)
	assert.True(t, p.Changes)
	assert.Zero(t, p.Revision)
	assert.Equal(t, client.EffectCreate, p.Apps[0].Effect)
	require.Len(t, p.Apps[0].Units, 1)
	u := p.Apps[0].Units[0]
	assert.Equal(t, client.EffectCreate, u.Effect)
	require.Len(t, u.Seats, 12)
	assert.Equal(t, client.SeatPlan{Rank: 11, Node: "b"}, u.Seats[11])
	need := map[string]int{}
	for _, n := range p.Nodes {
		assert.Equal(t, 8, n.SlotsFree)
		need[n.Node] = n.SlotsNeed
	}
	assert.Equal(t, 12, need["a"]+need["b"])

	c.deploy(sim("moe", 12, app.Lockstep))
	for i, r := range c.state.Units["moe/0"].Ranks {
		assert.Equal(t, u.Seats[i].Node, r.Node, "what is planned is what is done")
	}
}

func TestPlanOfAChange(t *testing.T) {
	c := newFleet(t, newHost("a", 8))
	c.deploy(sim("chat", 3, app.Independent), sim("old", 2, app.Independent))
	c.renew("a")
	p := c.plan(false, sim("chat", 3, app.Independent))
	assert.False(t, p.Changes)
	assert.Equal(t, uint64(1), p.Revision)
	assert.Equal(t, client.EffectUnchanged, p.Apps[0].Units[2].Effect)
	assert.Equal(t, []client.SeatPlan{{Rank: 2, Node: "a"}}, p.Apps[0].Units[2].Seats)
	assert.Equal(t, 3, p.Nodes[0].SlotsFree)
	assert.Zero(t, p.Nodes[0].SlotsNeed)

	next := sim("chat", 2, app.Independent)
	next.Model.Source = "m2"
	p = c.plan(true, next)
	require.Len(t, p.Apps, 2)
	assert.Equal(t, client.EffectRestart, p.Apps[0].Effect)
	assert.True(t, slices.ContainsFunc(p.Apps[0].Diffs,
		func(d client.FieldDiff) bool { return d.Path == "model.source" }))
	var did []string
	for _, u := range p.Apps[0].Units {
		did = append(did, u.Unit+" "+string(u.Effect))
	}
	assert.Equal(t, []string{"chat/0/0 restart", "chat/0/1 restart", "chat/0/2 delete"}, did)
	assert.Equal(t, client.EffectDelete, p.Apps[1].Effect)
	assert.Equal(t, "old", p.Apps[1].App)
	require.Len(t, p.Apps[1].Units, 2)
	assert.Zero(t, p.Nodes[0].SlotsNeed, "they get what they give")
}

func TestPlanSaysWhyItDoesNotFit(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	spread := sim("one", 2, app.Independent)
	spread.PlacementGroupStrategy = "SPREAD"
	c.deploy(spread)
	p := c.plan(false, groups("gang", 2, 3))
	assert.True(t, p.Fits, "3 and 3")
	p = c.plan(false, groups("gang", 1, 4))
	assert.False(t, p.Fits)
	u := p.Apps[0].Units[0]
	assert.Contains(t, u.Why, "3 of 4 ranks can be placed")
	assert.Regexp(t, `^moving one/0/(0 from a to b|1 from b to a) would make room$`, u.Hint)
	assert.Empty(t, u.Seats)

	d, err := newDryRun(c.state, nil, []*app.Application{groups("gang", 1, 4)}, false)
	require.NoError(t, err)
	assert.Contains(t, rankassigner.Explain(d.noRoom), "3 of 4")
}

func TestPlanShowsNodesThatAreLeftOut(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4), newHost("c", 4))
	_, err := c.apply(state.Command{NodeLost: &state.NodeRef{Node: "b", UID: "uid-b", Reason: "silent"}})
	require.NoError(t, err)
	c.drain("c", c.now)
	p := c.plan(false, sim("moe", 6, app.Lockstep))
	assert.False(t, p.Fits)
	require.Len(t, p.Nodes, 3)
	assert.Equal(t, []string{"", "lost: silent", "draining"},
		[]string{p.Nodes[0].Note, p.Nodes[1].Note, p.Nodes[2].Note})
}

func TestPlanIsRefusedAsTheDeployWouldBe(t *testing.T) {
	c := newFleet(t, newHost("a", 4))
	c.deploy(sim("chat", 1, app.Independent))
	twin := sim("twin", 1, app.Independent)
	twin.Model.ID = "chat"
	_, err := planOf(c.state, nil, []*app.Application{twin}, false)
	require.ErrorIs(t, err, state.ErrNameTaken)
	_, err = planOf(c.state, nil, []*app.Application{twin}, true)
	require.NoError(t, err)
}
