package state

import (
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/share"
)

// drawCommand makes commands that are often right and often wrong.
func drawCommand(t *rapid.T, s *State) Command {
	name := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "app")
	pool := rapid.SampledFrom([]string{"", app.PoolPrefill, app.PoolDecode}).Draw(t, "pool")
	unit := fmt.Sprintf("%s/0/%d", app.PoolName(name, pool), rapid.IntRange(0, 2).Draw(t, "rank"))
	epoch := s.Epochs[unit]
	if rapid.IntRange(0, 5).Draw(t, "stale") == 0 {
		epoch += uint64(rapid.IntRange(0, 2).Draw(t, "off"))
	}
	switch rapid.IntRange(0, 13).Draw(t, "kind") {
	case 10, 11, 12:
		return drawNodeCommand(t)
	case 13:
		return drawTokenCommand(t)
	case 0:
		return Command{PutApps: &PutApps{
			Apps: []AppSpec{spec(name, rapid.SampledFrom([]string{"1", "2"}).Draw(t, "v"),
				rapid.SampledFrom([]string{"m", "n"}).Draw(t, "model"))},
			Prune: rapid.IntRange(0, 9).Draw(t, "prune") == 0,
		}}
	case 1:
		return Command{DeleteApp: &DeleteApp{Name: name}}
	case 2:
		return Command{ForgetApp: &ForgetApp{Name: name}}
	case 3:
		return Command{UnitReady: ref(unit, epoch)}
	case 4:
		return Command{UnitFenced: ref(unit, epoch)}
	case 5:
		return Command{UnitFailed: ref(unit, epoch)}
	case 6:
		return Command{Release: ref(unit, epoch)}
	default:
		return drawGrant(t, s, name, pool)
	}
}

func drawNodeCommand(t *rapid.T) Command {
	id := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "node")
	uid := fmt.Sprint(id, rapid.IntRange(0, 2).Draw(t, "uid"))
	switch rapid.IntRange(0, 6).Draw(t, "kind") {
	case 0:
		return Command{NodeLost: &NodeRef{Node: id, UID: uid}}
	case 1:
		return Command{NodeBack: &NodeRef{Node: id, UID: uid}}
	case 2:
		return Command{DrainNode: &DrainNode{Node: id, Undo: rapid.Bool().Draw(t, "undo")}}
	case 3:
		return Command{RemoveNode: &RemoveNode{Node: id}}
	default:
		n := node(id, rapid.SliceOfNDistinct(rapid.SampledFrom([]Role{RoleControl, RoleWorker}), 0, 2,
			rapid.ID[Role]).Draw(t, "roles")...)
		n.UID, n.Resources.Slots = uid, rapid.IntRange(-1, 3).Draw(t, "slots")
		return putNode(n)
	}
}

func drawTokenCommand(t *rapid.T) Command {
	hash, at := rapid.SampledFrom([]string{"g", "h"}).Draw(t, "hash"), rapid.Int64Range(1, 3).Draw(t, "at")
	switch rapid.IntRange(0, 8).Draw(t, "token command") {
	case 0, 1:
		return token(hash, at+1, rapid.IntRange(0, 2).Draw(t, "uses"))
	case 2:
		return revoke(hash)
	}
	return use(hash, fmt.Sprint("u", rapid.IntRange(0, 3).Draw(t, "uid")), at)
}

func drawGrant(t *rapid.T, s *State, name, pool string) Command {
	g := &GrantGroup{App: name, Pool: pool, AppRevision: 1}
	if a := s.Apps[name]; a != nil {
		g.AppRevision = a.Revision
	}
	if rapid.Bool().Draw(t, "lockstep") {
		id := g.PoolName() + "/0"
		u := UnitGrant{Unit: id, ExpectEpoch: s.Epochs[id], Attempt: 1, Blocks: drawBlock(t)}
		for r := range rapid.IntRange(1, 3).Draw(t, "ranks") {
			u.Ranks = append(u.Ranks, drawRank(t, r))
		}
		g.Units = []UnitGrant{u}
		return Command{GrantGroup: g}
	}
	for _, r := range rapid.SliceOfNDistinct(rapid.IntRange(0, 2), 1, 3, rapid.ID[int]).Draw(t, "units") {
		id := fmt.Sprintf("%s/0/%d", g.PoolName(), r)
		g.Units = append(g.Units, UnitGrant{
			Unit: id, ExpectEpoch: s.Epochs[id], Attempt: 1, Ranks: []RankGrant{drawRank(t, r)},
			Blocks: drawBlock(t),
		})
	}
	return Command{GrantGroup: g}
}

func drawRank(t *rapid.T, rank int) RankGrant {
	r := RankGrant{
		Rank: rank, Node: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "node"),
		Slot: rapid.IntRange(-1, 4).Draw(t, "slot"),
	}
	if rapid.Bool().Draw(t, "gpu") {
		r.Devices = []int{rapid.IntRange(0, 3).Draw(t, "device")}
		r.Share = rapid.SampledFrom([]int{0, 0, 3333, 5000}).Draw(t, "share")
	}
	return r
}

func drawBlock(t *rapid.T) []Block {
	return []Block{{
		Node: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "node"),
		Base: 20000 + 8*rapid.IntRange(0, 20).Draw(t, "base"), Size: 16,
	}}
}

// checkState is the dumb oracle: it counts everything that units hold.
func checkState(t require.TestingT, s *State) {
	held, parts := map[string]string{}, map[string]int{}
	hold := func(unit, what string) {
		require.Empty(t, held[what], "%s is held by %s and %s", what, held[what], unit)
		held[what] = unit
	}
	for id, u := range s.Units {
		require.Equal(t, s.Epochs[id], u.Epoch)
		if u.Phase == Failed {
			continue
		}
		for _, r := range u.Ranks {
			hold(id, fmt.Sprint("rank ", u.PoolName(), u.Group, "/", r.Rank))
			if r.Slot >= 0 {
				hold(id, fmt.Sprint("slot ", r.Node, r.Slot))
			}
			for _, d := range r.Devices {
				device := fmt.Sprint("device ", r.Node, d)
				parts[device] += share.On(r.Share)
				require.LessOrEqual(t, parts[device], share.Whole, "%s is overbooked", device)
			}
		}
		for _, b := range u.Blocks {
			for p := b.Base; p < b.Base+b.Size; p++ {
				hold(id, fmt.Sprint("port ", b.Node, p))
			}
		}
	}
	checkNodesOf(t, s)
	models := map[string]string{}
	for name, a := range s.Apps {
		for _, m := range a.Names {
			if !a.Deleting {
				require.Empty(t, models[m])
				models[m] = name
			}
		}
	}
}

// checkRevisions says that revisions only grow.
func checkRevisions(t *rapid.T, before, after *State) {
	for name, a := range after.Apps {
		was := before.Apps[name]
		if was == nil {
			require.Greater(t, a.Revision, before.lastRevision(name), name)
		} else {
			require.GreaterOrEqual(t, a.Revision, was.Revision, name)
		}
	}
}

// checkNodesOf holds names and UIDs one to one and tokens within their uses.
func checkNodesOf(t require.TestingT, s *State) {
	holder := map[string]string{}
	for id, n := range s.Nodes {
		require.Equal(t, id, n.ID)
		require.Empty(t, holder[n.UID], "%s has two names", n.UID)
		holder[n.UID] = id
		require.NotContains(t, s.Removed, n.UID)
	}
	for hash, k := range s.Tokens {
		require.Equal(t, hash, k.Hash)
		require.GreaterOrEqual(t, k.Uses, 0)
	}
}

// checkHosts says that a grant went to nodes that take ranks, that only units of a lost node may be without
// it, and that the last control node stays.
func checkHosts(t *rapid.T, before, after *State, c *Command) {
	if g := c.GrantGroup; g != nil && len(before.Nodes) > 0 {
		for _, u := range g.Units {
			for _, r := range u.Ranks {
				require.True(t, before.Nodes[r.Node].Takes(), "a grant on node %s", r.Node)
			}
		}
	}
	control := 0
	for _, n := range after.Nodes {
		if n.Has(RoleControl) {
			control++
		}
	}
	for id, n := range before.Nodes {
		if n.Has(RoleControl) {
			require.Positive(t, control)
		}
		if after.Nodes[id] == nil && !n.Lost {
			require.Empty(t, after.UnitsOn(id))
		}
	}
}

// HF76: nothing is held twice, epochs only grow, by one per grant, refusals change nothing, an older clone
// stays as it was, and a replay of the encoded log from a snapshot in the middle gives the same bytes.
func TestAnyCommandsKeepTheInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := New()
		var log [][]byte
		var middle []byte
		n := rapid.IntRange(1, 60).Draw(t, "commands")
		first := rapid.SampledFrom([][]string{nil, {"a", "b"}}).Draw(t, "nodes")
		for i := range n {
			c := drawCommand(t, s)
			if i < len(first) {
				c = putNode(node(first[i]))
			}
			b, err := EncodeCommand(&c)
			require.NoError(t, err)
			log = append(log, b)
			before, encoded := s.Clone(), mustEncode(t, s)
			r, err := s.Apply(uint64(i+1), &c)
			checkState(t, s)
			require.Equal(t, encoded, mustEncode(t, before), "a clone changed")
			checkEpochs(t, before, s, r, err)
			if err == nil {
				checkHosts(t, before, s, &c)
				checkRevisions(t, before, s)
			}
			if i == n/2 {
				middle = mustEncode(t, s)
			}
		}
		replay, err := Decode(middle)
		require.NoError(t, err)
		for i, b := range log {
			if i > n/2 {
				c, err := DecodeCommand(b)
				require.NoError(t, err)
				_, _ = replay.Apply(uint64(i+1), c)
			}
		}
		require.JSONEq(t, string(mustEncode(t, s)), string(mustEncode(t, replay)))
	})
}

func checkEpochs(t *rapid.T, before, after *State, r Result, err error) {
	if err != nil || r.Unchanged {
		want := before.Clone()
		want.Index = after.Index
		require.Equal(t, want, after, "a refusal changed something")
		return
	}
	want := maps.Clone(before.Epochs)
	for u, e := range r.Epochs {
		want[u]++
		require.Equal(t, want[u], e)
	}
	require.Equal(t, want, after.Epochs)
}

func mustEncode(t *rapid.T, s *State) []byte {
	b, err := s.Encode()
	require.NoError(t, err)
	return b
}
