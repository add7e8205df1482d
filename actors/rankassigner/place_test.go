package rankassigner

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// newState is a state with these nodes and an application of each name.
func newState(t *testing.T, nodes []state.Node, apps ...string) *state.State {
	s := state.New()
	apply(t, s, state.Command{PutApps: &state.PutApps{}})
	for _, n := range nodes {
		apply(t, s, state.Command{PutNode: &state.PutNode{Node: n}})
	}
	for _, name := range apps {
		apply(t, s, state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{{
			Name: name, Spec: []byte("{}"),
		}}}})
	}
	return s
}

func apply(t *testing.T, s *state.State, c state.Command) {
	_, err := s.Apply(s.Index+1, &c)
	require.NoError(t, err)
}

func slots(ranks []state.RankGrant) (out []int) {
	for i := range ranks {
		out = append(out, ranks[i].Slot)
	}
	return out
}

func TestPlaceNumbersAndSeatsAGroup(t *testing.T) {
	s := newState(t, []state.Node{node("a", 2), node("b", 2)}, "chat")
	m := wanted(application("chat", 4, app.Independent), 0, "a", "b")
	grant, noRoom := Place(s, m, nil)
	assert.Empty(t, noRoom)
	require.Len(t, grant.Units, 4)
	for i, want := range []state.RankGrant{
		{Rank: 0, Node: "a"},
		{Rank: 1, Node: "a", Slot: 1},
		{Rank: 2, Node: "b"},
		{Rank: 3, Node: "b", Slot: 1},
	} {
		assert.Equal(t, []state.RankGrant{want}, grant.Units[i].Ranks)
		assert.Len(t, grant.Units[i].Blocks, 1)
	}
	assert.Empty(t, m.Grant.Units[0].Ranks, "the request stays as it is")
	again, _ := Place(s, m, nil)
	assert.Equal(t, grant, again)
	apply(t, s, state.Command{GrantGroup: &grant})
}

// HF68: units get no ports that another program on their node holds.
func TestPlaceLeavesTakenPortsOut(t *testing.T) {
	n := node("a", 2)
	lo := n.Resources.PortLo
	n.Resources.Taken = []state.PortRange{{Lo: lo + 3, Hi: lo + 40}}
	s := newState(t, []state.Node{n}, "chat")
	grant, noRoom := Place(s, wanted(application("chat", 2, app.Independent), 0, "a"), nil)
	require.Empty(t, noRoom)
	assert.Equal(t, lo+48, grant.Units[0].Blocks[0].Base)
	assert.Equal(t, lo+64, grant.Units[1].Blocks[0].Base)
}

func TestPlaceSaysWhyAGroupFindsNoRoom(t *testing.T) {
	s := newState(t, []state.Node{node("a", 2), node("b", 2)}, "chat")
	m := wanted(application("chat", 8, app.Lockstep), 0, "a", "b")
	grant, noRoom := Place(s, m, nil)
	assert.Empty(t, grant.Units)
	assert.Equal(t, map[string]string{"chat/0": "place chat/0: 4 of 8 ranks can be placed (PACK): " +
		"short of slots; " +
		"need: 8 ranks of 1 slot each, PACK; " +
		"node a: 2 of 2 slots free, 0 of 0 devices free, room for 2 ranks by its slots; " +
		"node b: 2 of 2 slots free, 0 of 0 devices free, room for 2 ranks by its slots; " +
		"hint: add nodes or slots, ask for fewer ranks, or delete an application"}, noRoom)
}

func TestPlaceUsesOnlyUsableNodesAndFreeSeats(t *testing.T) {
	s := newState(t, []state.Node{node("a", 4), node("b", 4)}, "chat", "other")
	m := wanted(application("chat", 2, app.Lockstep), 0, "b")
	first, _ := Place(s, m, nil)
	assert.Equal(t, []string{"b", "b"}, nodesOf(first.Units[0].Ranks), "a is not usable")

	other := wanted(application("other", 1, app.Lockstep), 0, "b")
	second, _ := Place(s, other, []*state.GrantGroup{&first})
	assert.Equal(t, []int{2}, slots(second.Units[0].Ranks), "the first grant is under way")
	assert.NotEqual(t, first.Units[0].Blocks, second.Units[0].Blocks)

	other.Reserved = first.Units
	third, _ := Place(s, other, nil)
	assert.Equal(t, []int{2}, slots(third.Units[0].Ranks), "its seats are reserved")

	apply(t, s, state.Command{GrantGroup: &first})
	other.Reserved = nil
	fourth, _ := Place(s, other, nil)
	assert.Equal(t, []int{2}, slots(fourth.Units[0].Ranks), "it is granted")
}

// Units that start again keep their seats, although others of their group find no room.
func TestPlaceKeepsSeats(t *testing.T) {
	s := newState(t, []state.Node{node("a", 4)}, "chat", "other")
	small := wanted(application("chat", 2, app.Independent), 0, "a")
	grant, _ := Place(s, small, nil)
	apply(t, s, state.Command{GrantGroup: &grant})
	fill, _ := Place(s, wanted(application("other", 2, app.Lockstep), 0, "a"), nil)
	apply(t, s, state.Command{GrantGroup: &fill})

	grown := wanted(application("chat", 3, app.Independent), 1, "a")
	grown.Grant.Units[2].ExpectEpoch = 0
	again, noRoom := Place(s, grown, nil)
	require.Len(t, again.Units, 2)
	assert.Equal(t, grant.Units[1].Ranks, again.Units[1].Ranks)
	assert.NotEqual(t, grant.Units[0].Blocks, again.Units[0].Blocks, "ports are new")
	assert.Contains(t, noRoom["chat/0/2"], "place chat/0: 0 of 1 rank can be placed (PACK)")

	grown.Nodes = nil
	none, noRoom := Place(s, grown, nil)
	assert.Empty(t, none.Units, "the node of the seats is not usable")
	assert.Len(t, noRoom, 3)
}

// HF51: TestPlaceLeavesAvoidedNodes where others have room: one unit after the other, a group as a whole.
func TestPlaceLeavesAvoidedNodes(t *testing.T) {
	for name, c := range map[string]struct {
		nodes []state.Node
		app   *app.Application
		avoid []string
		want  [][]string // nodes by unit: at the first grant, then with avoid
	}{
		"room elsewhere": {
			[]state.Node{node("a", 2), node("b", 3)},
			application("chat", 2, app.Independent),
			[]string{"a"},
			[][]string{{"a"}, {"a"}, {"b"}, {"b"}},
		},
		"room for one": {
			[]state.Node{node("a", 3), node("b", 1)},
			application("chat", 3, app.Independent),
			[]string{"a"},
			[][]string{{"a"}, {"a"}, {"a"}, {"b"}, {"a"}, {"a"}},
		},
		"no room": {
			[]state.Node{node("a", 2), node("b", 0)},
			application("chat", 2, app.Independent),
			[]string{"a"},
			[][]string{{"a"}, {"a"}, {"a"}, {"a"}},
		},
		"one of two nodes of a group": {
			[]state.Node{node("a", 2), node("b", 2), node("c", 2)},
			application("chat", 4, app.Lockstep),
			[]string{"a"},
			[][]string{{"a", "a", "b", "b"}, {"b", "b", "c", "c"}},
		},
		"both are avoided, the other one less": {
			[]state.Node{node("a", 2), node("b", 3)},
			application("chat", 2, app.Independent),
			[]string{"a", "b"},
			[][]string{{"a"}, {"a"}, {"b"}, {"b"}},
		},
		"both are avoided, the other one more": {
			[]state.Node{node("a", 2), node("b", 3)},
			application("chat", 2, app.Independent),
			[]string{"b", "a"},
			[][]string{{"a"}, {"a"}, {"a"}, {"a"}},
		},
		"another node": {
			[]state.Node{node("a", 2), node("b", 3)},
			application("chat", 2, app.Independent),
			[]string{"b"},
			[][]string{{"a"}, {"a"}, {"a"}, {"a"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newState(t, c.nodes, "chat")
			var got [][]string
			for expect := range uint64(2) {
				m := wanted(c.app, expect, "a", "b", "c")
				if expect > 0 {
					m.Avoid = c.avoid
				}
				grant, noRoom := Place(s, m, nil)
				require.Empty(t, noRoom)
				for _, u := range grant.Units {
					got = append(got, nodesOf(u.Ranks))
				}
				apply(t, s, state.Command{GrantGroup: &grant})
			}
			assert.Equal(t, c.want, got)
		})
	}
}

// Groups are placed in the order of their requests. A grant is in use before the state shows it.
func TestGroupsDoNotShareSeats(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("one", 40, app.Lockstep)
		r.deploy("two", 40, app.Lockstep)
		r.store.mu.Lock()
		gate := make(chan struct{})
		r.store.gate = gate
		r.store.mu.Unlock()
		answers := map[string]chan msg.GroupAssigned{}
		for _, name := range []string{"one", "two"} {
			answer := make(chan msg.GroupAssigned, 1)
			answers[name] = answer
			r.AssignGroup(wanted(application(name, 40, app.Lockstep), 0, "a"),
				func(out msg.GroupAssigned) { answer <- out })
		}
		out := <-answers["two"]
		assert.Contains(t, out.NoRoom["two/0"], "24 of 40 ranks can be placed")
		close(gate)
		out = <-answers["one"]
		require.NoError(t, out.Err)
		assert.Equal(t, uint64(1), out.Result.Epochs["one/0"])
	})
}

// The limits of a group hold although the grant of another of its units is under way.
func TestPlaceCountsTheGroupsGrantsUnderWay(t *testing.T) {
	s := newState(t, []state.Node{node("a", 4)}, "chat")
	m := wanted(application("chat", 2, app.Independent), 0, "a")
	m.App.MaxRanksPerNode = 1
	first, second := m.Grant.Units[:1], m.Grant.Units[1:]
	m.Grant.Units = first
	grant, _ := Place(s, m, nil)
	require.Len(t, grant.Units, 1)
	m.Grant.Units = second
	none, noRoom := Place(s, m, []*state.GrantGroup{&grant})
	assert.Empty(t, none.Units)
	assert.Len(t, noRoom, 1)
}

// Ranks of two pools that are kept apart never share a node, whether the other pool's ranks run, are on their
// way, or will move there.
func TestPlaceKeepsPoolsApart(t *testing.T) {
	s := newState(t, []state.Node{node("a", 4), node("b", 4)}, "pd")
	pool := func(pool string) *msg.AssignGroup {
		a := application("pd", 2, app.Lockstep)
		a.Pool, a.Disaggregation = pool, &app.Disaggregation{Colocate: app.ColocateNo}
		m := wanted(a, 0, "a", "b")
		m.Grant.AppRevision = s.Apps[a.Name].Revision
		return m
	}
	decode, _ := Place(s, pool(app.PoolDecode), nil)
	require.Equal(t, []string{"a", "a"}, nodesOf(decode.Units[0].Ranks))
	prefill, _ := Place(s, pool(app.PoolPrefill), []*state.GrantGroup{&decode})
	assert.Equal(t, []string{"b", "b"}, nodesOf(prefill.Units[0].Ranks), "the grant is under way")

	m := pool(app.PoolPrefill)
	m.Reserved = decode.Units
	prefill, _ = Place(s, m, nil)
	assert.Equal(t, []string{"b", "b"}, nodesOf(prefill.Units[0].Ranks), "the seats are reserved")

	apply(t, s, state.Command{GrantGroup: &decode})
	m = pool(app.PoolPrefill)
	prefill, _ = Place(s, m, nil)
	assert.Equal(t, []string{"b", "b"}, nodesOf(prefill.Units[0].Ranks), "it is granted")
	m.Nodes = []string{"a"}
	_, noRoom := Place(s, m, nil)
	assert.Contains(t, noRoom["pd.prefill/0"], "node a: has ranks of pd.decode, which are kept apart")
	m.App.Disaggregation.Colocate = app.ColocatePrefer
	m.Nodes = []string{"a", "b"}
	prefill, _ = Place(s, m, nil)
	assert.Equal(t, []string{"a", "a"}, nodesOf(prefill.Units[0].Ranks))
}
