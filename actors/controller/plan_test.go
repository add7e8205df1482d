package controller

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// plan computes a plan and checks that it changed nothing.
func (c *fleet) plan(prune bool, apps ...*app.Application) msg.Plan {
	before, _ := c.state.Encode()
	p, err := planOf(c.state, apps, prune)
	require.NoError(c.t, err)
	after, _ := c.state.Encode()
	require.Equal(c.t, string(before), string(after))
	return p
}

func TestPlanOfAFirstDeploy(t *testing.T) {
	c := newFleet(t, newHost("a", 8), newHost("b", 8))
	p := c.plan(false, sim("moe", 12, app.Lockstep))
	require.Len(t, p.Apps, 1)
	assert.True(t, p.Fits)
	assert.True(t, p.Changes)
	assert.Zero(t, p.Revision)
	assert.Equal(t, "create", p.Apps[0].Action)
	require.Len(t, p.Apps[0].Units, 1)
	u := p.Apps[0].Units[0]
	assert.Equal(t, "create", u.Action)
	require.Len(t, u.Seats, 12)
	assert.Equal(t, msg.SeatPlan{Rank: 11, Node: "b"}, u.Seats[11])
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
	assert.Equal(t, "unchanged", p.Apps[0].Units[2].Action)
	assert.Equal(t, []msg.SeatPlan{{Rank: 2, Node: "a"}}, p.Apps[0].Units[2].Seats)
	assert.Equal(t, 3, p.Nodes[0].SlotsFree)
	assert.Zero(t, p.Nodes[0].SlotsNeed)

	next := sim("chat", 2, app.Independent)
	next.Model.Source = "m2"
	p = c.plan(true, next)
	require.Len(t, p.Apps, 2)
	assert.Equal(t, "replace", p.Apps[0].Action)
	assert.Contains(t, p.Apps[0].Fields, "model.source")
	var did []string
	for _, u := range p.Apps[0].Units {
		did = append(did, u.Unit+" "+u.Action)
	}
	assert.Equal(t, []string{"chat/0/0 replace", "chat/0/1 replace", "chat/0/2 delete"}, did)
	assert.Equal(t, "delete", p.Apps[1].Action)
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

	err := checkPlaceable(c.state, []*app.Application{groups("gang", 1, 4)}, false)
	require.Error(t, err)
	assert.Contains(t, explain(err), "3 of 4")
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
	_, err := planOf(c.state, []*app.Application{twin}, false)
	require.ErrorIs(t, err, state.ErrNameTaken)
	_, err = planOf(c.state, []*app.Application{twin}, true)
	require.NoError(t, err)
}
