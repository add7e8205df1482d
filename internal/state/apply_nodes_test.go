package state

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

func node(id string, roles ...Role) Node {
	if roles == nil {
		roles = []Role{RoleControl, RoleWorker, RoleIngress}
	}
	return Node{
		ID: id, UID: "uid-" + id, Address: id + ":7947", Roles: roles,
		Resources: Resources{Slots: 8, PortLo: 20000, PortHi: 29999},
	}
}

func putNode(n Node) Command { return Command{PutNode: &PutNode{Node: n}} }

func nodeRef(id string) *NodeRef {
	return &NodeRef{Node: id, UID: "uid-" + id, Reason: "silent for 12s"}
}

// withNodes returns a state with nodes a, b and so on, of all roles.
func withNodes(t testing.TB, ids ...string) *machine {
	m := newMachine(t)
	for _, id := range ids {
		m.must(putNode(node(id)))
	}
	return m
}

func TestPutNodeUpdatesItsOwnRecordOnly(t *testing.T) {
	m := withNodes(t, "a", "b")
	moved := node("a")
	moved.Address, moved.Resources.Labels = "elsewhere:7947", map[string]string{"zone": "1"}
	assert.False(t, m.must(putNode(moved)).Unchanged)
	assert.Equal(t, moved, *m.Nodes["a"])

	other := node("a")
	other.UID = "uid-x"
	err := m.refused(putNode(other), ErrNodeTaken, problem.Conflict)
	require.EqualError(t, err, `put node: node name taken: "a" is held by another node`)
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Contains(t, p.Hint, "--node-id")
	renamed := node("c")
	renamed.UID = "uid-a"
	err = m.refused(putNode(renamed), ErrNodeTaken, problem.Conflict)
	require.EqualError(t, err, `put node: node name taken: this data dir belongs to node "a", not "c"`)
}

func TestPutNodeThatSaysTheSameChangesNothing(t *testing.T) {
	m := withNodes(t, "a")
	before := m.Nodes["a"]
	same := node("a")
	same.Resources.Devices, same.Resources.Labels = []int{}, map[string]string{}
	assert.True(t, m.must(putNode(same)).Unchanged)
	assert.Same(t, before, m.Nodes["a"])
}

func TestPutNodeLeavesWhatTheClusterDecided(t *testing.T) {
	m := withNodes(t, "a", "b")
	m.must(Command{NodeLost: nodeRef("a")})
	m.must(Command{DrainNode: &DrainNode{Node: "a", By: 7}})
	again := node("a")
	again.Version = "2"
	m.must(putNode(again))
	n := m.Nodes["a"]
	assert.True(t, n.Lost && n.Draining && n.DrainBy == 7 && n.Version == "2")
	fresh := node("c")
	fresh.Lost, fresh.Draining, fresh.DrainBy, fresh.Reason = true, true, 9, "r"
	m.must(putNode(fresh))
	assert.Equal(t, node("c"), *m.Nodes["c"], "not the node's to say")
}

func TestPutNodeRefusesWhatIsNotWhole(t *testing.T) {
	for name, change := range map[string]func(*Node){
		"no name":         func(n *Node) { n.ID = "" },
		"no uid":          func(n *Node) { n.UID = "" },
		"no role":         func(n *Node) { n.Roles = nil },
		"negative slots":  func(n *Node) { n.Resources.Slots = -1 },
		"negative device": func(n *Node) { n.Resources.Devices = []int{-1} },
		"port below":      func(n *Node) { n.Resources.PortLo = -1 },
		"port above":      func(n *Node) { n.Resources.PortHi = 65536 },
	} {
		t.Run(name, func(t *testing.T) {
			n := node("a")
			change(&n)
			newMachine(t).refused(putNode(n), ErrBadCommand, problem.InvalidArgument)
		})
	}
}

func TestLastControlNodeStays(t *testing.T) {
	m := withNodes(t, "a", "b")
	m.must(putNode(node("w", RoleWorker)))
	m.must(Command{NodeLost: nodeRef("b")})
	m.refused(Command{RemoveNode: &RemoveNode{Node: "a"}}, ErrLastControl, problem.Conflict)
	m.refused(Command{PutNode: &PutNode{Node: node("a", RoleWorker), AnyRoles: true}}, ErrLastControl,
		problem.Conflict)
	m.must(Command{RemoveNode: &RemoveNode{Node: "b"}})
	m.must(Command{RemoveNode: &RemoveNode{Node: "w"}})
	m.must(putNode(node("b2")))
	m.must(Command{RemoveNode: &RemoveNode{Node: "a"}})
}

func TestLostAndBackAreIdempotent(t *testing.T) {
	m := withNodes(t, "a")
	assert.True(t, m.must(Command{NodeBack: nodeRef("a")}).Unchanged)
	assert.False(t, m.must(Command{NodeLost: nodeRef("a")}).Unchanged)
	later := nodeRef("a")
	later.Reason = "again"
	assert.True(t, m.must(Command{NodeLost: later}).Unchanged)
	assert.Equal(t, "silent for 12s", m.Nodes["a"].Reason)
	assert.False(t, m.must(Command{NodeBack: nodeRef("a")}).Unchanged)
	assert.Equal(t, node("a"), *m.Nodes["a"])
	for _, r := range []*NodeRef{
		{Node: "z", UID: "uid-z"},
		{Node: "a", UID: "uid-of-its-predecessor"},
		{Node: "a"},
	} {
		m.refused(Command{NodeLost: r}, ErrUnknownNode, problem.NotFound)
		m.refused(Command{NodeBack: r}, ErrUnknownNode, problem.NotFound)
	}
}

func TestDrainAndUndo(t *testing.T) {
	m := withNodes(t, "a")
	m.refused(Command{DrainNode: &DrainNode{Node: "z"}}, ErrUnknownNode, problem.NotFound)
	m.must(Command{DrainNode: &DrainNode{Node: "a", By: 5}})
	assert.True(t, m.Nodes["a"].Draining)
	assert.True(t, m.must(Command{DrainNode: &DrainNode{Node: "a", By: 5}}).Unchanged)
	m.must(Command{DrainNode: &DrainNode{Node: "a", By: 9}})
	assert.Equal(t, int64(9), m.Nodes["a"].DrainBy)
	m.must(Command{DrainNode: &DrainNode{Node: "a", By: 3, Undo: true}})
	assert.Equal(t, node("a"), *m.Nodes["a"])
}

func TestRemoveNodeWaitsForItsUnits(t *testing.T) {
	m := withNodes(t, "a", "b")
	m.must(put(spec("x", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	m.must(grant("x", 1, 1, 1, 0))
	err := m.refused(Command{RemoveNode: &RemoveNode{Node: "a"}}, ErrUnitsLeft, problem.Conflict)
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, []string{"x/0/0", "x/0/1"}, p.Details)
	assert.Contains(t, p.Hint, "dpserve drain a")
	m.must(Command{Release: ref("x/0/1", 1)})
	m.must(Command{UnitFailed: ref("x/0/0", 1)})
	require.Len(t, m.Freed, 2)
	m.must(Command{RemoveNode: &RemoveNode{Node: "a"}})
	assert.Empty(t, m.Freed, "ports of a machine that is not there")
	assert.Equal(t, []string{"uid-a"}, m.Removed)
	m.refused(Command{RemoveNode: &RemoveNode{Node: "a"}}, ErrUnknownNode, problem.NotFound)
	m.refused(putNode(node("a")), ErrNodeRemoved, problem.PermissionDenied)
	successor := node("a")
	successor.UID = "uid-new"
	m.must(putNode(successor))
}

func TestLostNodeIsRemovedWithItsUnits(t *testing.T) {
	m := withNodes(t, "a", "b")
	m.must(put(spec("x", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	m.must(Command{NodeLost: nodeRef("a")})
	m.must(Command{RemoveNode: &RemoveNode{Node: "a"}})
	m.must(Command{Release: ref("x/0/0", 1)})
}

// TestRecoverKeepsWhatLives: the other control nodes go with their ranks and never come back. What runs
// elsewhere keeps its epoch; whatever is granted later gets one that the lost voters cannot have given.
func TestRecoverKeepsWhatLives(t *testing.T) {
	m := withNodes(t, "a", "b")
	m.must(putNode(node("w", RoleWorker)))
	m.must(put(spec("x", "1")))
	on := func(rank int, node string) Command {
		c := grant("x", 1, rank, rank, 0)
		u := &c.GrantGroup.Units[0]
		u.Ranks[0].Node, u.Blocks[0].Node = node, node
		return c
	}
	m.must(on(0, "a"))
	m.must(on(1, "w"))
	require.ErrorContains(t, Recover(m.State, "uid-w", 1), "no control node")
	require.NoError(t, Recover(m.State, "uid-b", 1))
	assert.Equal(t, []string{"uid-a"}, m.Removed)
	assert.Equal(t, []string{"b", "w"}, slices.Sorted(maps.Keys(m.Nodes)))
	assert.Nil(t, m.Units["x/0/0"])
	assert.Equal(t, uint64(1), m.Units["x/0/1"].Epoch, "it runs on")
	assert.Equal(t, 1, CountRanks(m.State, "w"))
	m.refused(putNode(node("a")), ErrNodeRemoved, problem.PermissionDenied)

	again := on(0, "w")
	again.GrantGroup.Units[0].ExpectEpoch = 1
	assert.Equal(t, uint64(1002), m.must(again).Epochs["x/0/0"])
	assert.Equal(t, uint64(1002), m.must(on(2, "w")).Epochs["x/0/2"], "also of what this copy does not know")
	encoded, err := m.Encode()
	require.NoError(t, err)
	_, err = Decode(encoded)
	require.NoError(t, err, "the state is whole")
}

// TestRemovedNodeIsRememberedAsLongAsItsCertificateLives: the state forgets a removed node after 4096 later
// removals, but not before its certificate has expired. A removal without room is refused.
func TestRemovedNodeIsRememberedAsLongAsItsCertificateLives(t *testing.T) {
	m := withNodes(t, "a")
	day := (24 * time.Hour).Milliseconds()
	m.RemovedAt = map[string]int64{}
	for i := range maxRemoved {
		uid := fmt.Sprint("u", i)
		m.Removed, m.RemovedAt[uid] = append(m.Removed, uid), 100*day
	}
	m.must(putNode(node("b")))
	err := m.refused(Command{RemoveNode: &RemoveNode{Node: "b", Now: 130 * day}}, ErrTooManyRemoved,
		problem.Conflict)
	require.ErrorContains(t, err, "4096 since 1970-04-11T00:00:00Z")
	assert.NotNil(t, m.Nodes["b"])
	assert.Equal(t, "u0", m.Removed[0])
	m.must(Command{RemoveNode: &RemoveNode{Node: "b", Now: 131 * day}})
	require.Len(t, m.Removed, maxRemoved)
	require.Len(t, m.RemovedAt, maxRemoved)
	assert.Equal(t, "u1", m.Removed[0])
	assert.Equal(t, "uid-b", m.Removed[maxRemoved-1])
	assert.Equal(t, 131*day, m.RemovedAt["uid-b"])
}

// HF21: a known node cannot be put with other roles or another key.
func TestPutNodeChangesNeitherRolesNorKey(t *testing.T) {
	m := withNodes(t, "a")
	edge := node("b", RoleIngress, RoleWorker)
	m.must(putNode(edge))
	edge.Key = "k1"
	m.must(putNode(edge))
	edge.Key, edge.Roles = "", []Role{RoleWorker, RoleIngress}
	m.must(putNode(edge))
	assert.Equal(t, "k1", m.Nodes["b"].Key, "a node does not have to name its key")
	claim := edge
	claim.Roles = []Role{RoleControl, RoleWorker, RoleIngress}
	m.refused(putNode(claim), ErrRolesFixed, problem.Conflict)
	other := edge
	other.Key = "k2"
	m.refused(putNode(other), ErrNodeTaken, problem.Conflict)
	assert.Equal(t, "k1", m.Nodes["b"].Key)
}

func TestGrantsGoToNodesThatTakeRanks(t *testing.T) {
	m := withNodes(t, "b")
	m.must(put(spec("x", "1")))
	err := m.refused(grant("x", 1, 0, 0, 0), ErrNodeGone, problem.Conflict)
	require.EqualError(t, err,
		"grant group: node takes no ranks: rank 0 of x/0/0 on node a, which is not known")
	m.must(putNode(node("a", RoleControl)))
	m.refused(grant("x", 1, 0, 0, 0), ErrNodeGone, problem.Conflict)
	m.must(Command{PutNode: &PutNode{Node: node("a"), AnyRoles: true}})
	m.must(Command{DrainNode: &DrainNode{Node: "a"}})
	m.refused(grant("x", 1, 0, 0, 0), ErrNodeGone, problem.Conflict)
	m.must(Command{DrainNode: &DrainNode{Node: "a", Undo: true}})
	m.must(Command{NodeLost: nodeRef("a")})
	m.refused(grant("x", 1, 0, 0, 0), ErrNodeGone, problem.Conflict)
	m.must(Command{NodeBack: nodeRef("a")})
	m.must(grant("x", 1, 0, 0, 0))
}

func TestPublicHidesWhatOnlyControlNodesMayKnow(t *testing.T) {
	m := withNodes(t, "a")
	m.must(Command{Init: &Init{Cluster: "c", Secret: []byte("s"), Secrets: Secrets{GossipKey: []byte("g")}}})
	m.must(token("h", 100, 1))
	p := m.Public()
	assert.Equal(t, Secrets{}, p.Secrets)
	assert.Empty(t, p.Tokens)
	assert.Equal(t, []byte("s"), p.Secret)
	assert.Equal(t, m.Nodes, p.Nodes)
	assert.Len(t, m.Tokens, 1, "the state itself stays as it is")
	b, err := p.Encode()
	require.NoError(t, err)
	assert.NotContains(t, string(b), "gossip_key")
	_, err = Decode(b)
	require.NoError(t, err)
}

func TestSnapshotOfBeforeNodesIsRead(t *testing.T) {
	for _, in := range []string{
		`{"index":7,"cluster":"c","apps":{},"units":{},"epochs":{},"revisions":{}}`,
		`{"nodes":null,"tokens":null}`,
	} {
		s, err := Decode([]byte(in))
		require.NoError(t, err)
		c := putNode(node("a"))
		_, err = s.Apply(8, &c)
		require.NoError(t, err)
		c = token("h", 1, 1)
		_, err = s.Apply(9, &c)
		require.NoError(t, err)
	}
}

// TestCheckRemoval: what a person may remove is less than what Apply accepts, and the check changes nothing.
func TestCheckRemoval(t *testing.T) {
	s := New()
	put := func(id string, roles ...Role) {
		_, err := s.Apply(s.Index+1, &Command{PutNode: &PutNode{Node: Node{
			ID: id, UID: "uid-" + id,
			Roles: roles,
		}}})
		require.NoError(t, err)
	}
	put("a", RoleControl)
	put("b", RoleControl, RoleWorker)
	put("w", RoleWorker)
	for _, c := range []struct {
		name  string
		node  string
		alter func(s *State)
		want  error // nil = accepted
		leave error // of CheckLeave
	}{
		{"unknown", "x", nil, ErrUnknownNode, ErrUnknownNode},
		{"in use", "w", nil, ErrNodeInUse, nil},
		{"drained", "w", func(s *State) { s.Nodes["w"].Draining = true }, nil, nil},
		{"lost", "w", func(s *State) { s.Nodes["w"].Lost = true }, nil, nil},
		{"control, in use", "b", nil, ErrNodeInUse, nil},
		{
			"the last living control node", "b", func(s *State) { s.Nodes["a"].Lost = true }, ErrLastControl,
			ErrLastControl,
		},
		{
			"ranks are left", "w",
			func(s *State) { s.Nodes["w"].Draining = true; s.Units["u"] = unitOn("w") },
			ErrUnitsLeft, nil,
		},
		{
			"lost with its ranks", "w",
			func(s *State) { s.Nodes["w"].Lost = true; s.Units["u"] = unitOn("w") },
			nil, nil,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			was, err := s.Encode()
			require.NoError(t, err)
			now, err := Decode(was)
			require.NoError(t, err)
			if c.alter != nil {
				c.alter(now)
			}
			before, err := now.Encode()
			require.NoError(t, err)
			require.ErrorIs(t, now.CheckLeave(c.node), c.leave)
			require.ErrorIs(t, now.CheckRemoval(c.node), c.want)
			after, err := now.Encode()
			require.NoError(t, err)
			assert.Equal(t, string(before), string(after))
			if c.want == nil {
				_, err := now.Apply(now.Index+1, &Command{RemoveNode: &RemoveNode{Node: c.node}})
				require.NoError(t, err, "what the check accepts, Apply accepts")
			}
		})
	}
}

// unitOn is a unit with a rank on a node.
func unitOn(node string) *Unit {
	return &Unit{App: "demo", Phase: Ready, Epoch: 1, Ranks: []RankGrant{{Node: node}}}
}

func TestRotateGossipKey(t *testing.T) {
	first, second := bytes.Repeat([]byte{1}, GossipKeySize), bytes.Repeat([]byte{2}, GossipKeySize)
	m := withNodes(t, "a", "b")
	rotate := func(next []byte) Command { return Command{RotateGossipKey: &RotateGossipKey{Next: next}} }
	m.refused(rotate(first), ErrBadCommand, problem.Conflict)
	m.must(Command{Init: &Init{Cluster: "c1", Secrets: Secrets{GossipKey: first}}})
	assert.Equal(t, []string{"a", "b"}, m.NodesBehind())
	m.refused(rotate(first), ErrBadCommand, problem.InvalidArgument)
	m.refused(rotate(second[:31]), ErrBadCommand, problem.InvalidArgument)

	a := node("a")
	a.GossipSum = GossipKeySum(first)
	m.must(putNode(a))
	assert.Equal(t, []string{"b"}, m.NodesBehind())
	m.must(rotate(second))
	assert.Equal(t, []string{"a", "b"}, m.NodesBehind())
	a.GossipSum = GossipKeySum(second)
	m.must(putNode(a))
	m.must(Command{NodeLost: nodeRef("b")})
	assert.Empty(t, m.NodesBehind(), "a lost node gets it later")
	assert.Empty(t, m.Public().Secrets)
}

func TestLeasesLastAsLongAsTheFirstInitSays(t *testing.T) {
	m := newMachine(t)
	m.must(Command{Init: &Init{Cluster: "c"}})
	m.must(Command{Init: &Init{Cluster: "c", LeaseTTL: 4000}})
	m.must(Command{Init: &Init{Cluster: "c", LeaseTTL: 1000}})
	assert.Equal(t, int64(4000), m.LeaseTTL)
	m.refused(Command{Init: &Init{Cluster: "c", LeaseTTL: -1}}, ErrBadCommand, problem.InvalidArgument)
}
