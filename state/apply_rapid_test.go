package state

import (
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawCommand makes commands that are often right and often wrong.
func drawCommand(t *rapid.T, s *State) Command {
	name := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "app")
	unit := fmt.Sprintf("%s/0/%d", name, rapid.IntRange(0, 2).Draw(t, "rank"))
	epoch := s.Epochs[unit]
	if rapid.IntRange(0, 5).Draw(t, "stale") == 0 {
		epoch += uint64(rapid.IntRange(0, 2).Draw(t, "off"))
	}
	switch rapid.IntRange(0, 9).Draw(t, "kind") {
	case 0:
		return Command{PutApps: &PutApps{
			Apps:  []AppSpec{spec(name, rapid.SampledFrom([]string{"1", "2"}).Draw(t, "v"), rapid.SampledFrom([]string{"m", "n"}).Draw(t, "model"))},
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
		return drawGrant(t, s, name)
	}
}

func drawGrant(t *rapid.T, s *State, name string) Command {
	g := &GrantGroup{App: name, AppRevision: 1}
	if a := s.Apps[name]; a != nil {
		g.AppRevision = a.Revision
	}
	if rapid.Bool().Draw(t, "lockstep") {
		u := UnitGrant{Unit: name + "/0", ExpectEpoch: s.Epochs[name+"/0"], Attempt: 1, Blocks: drawBlock(t)}
		for r := range rapid.IntRange(1, 3).Draw(t, "ranks") {
			u.Ranks = append(u.Ranks, drawRank(t, r))
		}
		g.Units = []UnitGrant{u}
		return Command{GrantGroup: g}
	}
	for _, r := range rapid.SliceOfNDistinct(rapid.IntRange(0, 2), 1, 3, rapid.ID[int]).Draw(t, "units") {
		id := fmt.Sprintf("%s/0/%d", name, r)
		g.Units = append(g.Units, UnitGrant{
			Unit: id, ExpectEpoch: s.Epochs[id], Attempt: 1, Ranks: []RankGrant{drawRank(t, r)}, Blocks: drawBlock(t),
		})
	}
	return Command{GrantGroup: g}
}

func drawRank(t *rapid.T, rank int) RankGrant {
	r := RankGrant{Rank: rank, Node: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "node"), Slot: rapid.IntRange(-1, 4).Draw(t, "slot")}
	if rapid.Bool().Draw(t, "gpu") {
		r.Devices = []int{rapid.IntRange(0, 3).Draw(t, "device")}
	}
	return r
}

func drawBlock(t *rapid.T) []Block {
	return []Block{{
		Node: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "node"), Base: 20000 + 8*rapid.IntRange(0, 20).Draw(t, "base"), Size: 16,
	}}
}

// checkState is the dumb oracle: it counts everything that units hold.
func checkState(t require.TestingT, s *State) {
	held := map[string]string{}
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
			hold(id, fmt.Sprint("rank ", u.App, u.Group, "/", r.Rank))
			if r.Slot >= 0 {
				hold(id, fmt.Sprint("slot ", r.Node, r.Slot))
			}
			for _, d := range r.Devices {
				hold(id, fmt.Sprint("device ", r.Node, d))
			}
		}
		for _, b := range u.Blocks {
			for p := b.Base; p < b.Base+b.Size; p++ {
				hold(id, fmt.Sprint("port ", b.Node, p))
			}
		}
	}
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

// TestAnyCommandsKeepTheInvariants: nothing is held twice, epochs only grow, by one per grant, refusals change nothing, an
// older clone stays as it was, and a replay of the encoded log from a snapshot in the middle gives the same bytes.
func TestAnyCommandsKeepTheInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := New()
		var log [][]byte
		var middle []byte
		n := rapid.IntRange(1, 60).Draw(t, "commands")
		for i := range n {
			c := drawCommand(t, s)
			b, err := EncodeCommand(&c)
			require.NoError(t, err)
			log = append(log, b)
			before, encoded := s.Clone(), mustEncode(t, s)
			r, err := s.Apply(uint64(i+1), &c)
			checkState(t, s)
			require.Equal(t, encoded, mustEncode(t, before), "a clone changed")
			checkEpochs(t, before, s, r, err)
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
	if err != nil {
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
