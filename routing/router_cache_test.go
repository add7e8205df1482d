package routing

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Dispatch bumps what the rank must really compute: Q by the uncached tokens, Kq by all of them.
func TestBumpCountsUncachedWork(t *testing.T) {
	r := routerWith(LPWL{}, 2, 9)
	rank := ID(0, 1)
	pick(r, Request{ID: 1, Tokens: 100, Hits: []Hit{{Rank: rank, Tokens: 64}}})
	assert.Equal(t, Load{F: 1, Q: 36, Kq: 100}, loadOf(r, rank))
	r.Observe(&Event{Kind: EvAdmitted, Rank: rank, ReqID: 1, Incarnation: 7, Seq: 1, Tokens: 102, Hit: 80})
	assert.Equal(t, Load{F: 1, Q: 22, Kq: 102}, loadOf(r, rank), "the replica's account stands")
	v := r.Snapshot()
	assert.Equal(t, int64(22*22+2*22*80), v.Ranks[1].Pairs)
}

// A reservation is told by its caller: prefill complete, then free.
func TestReservationLivesByItsCallersWord(t *testing.T) {
	r := routerWith(KV{Weight: 1}, 1, 9)
	rank := ID(0, 0)
	pick(r, Request{ID: 1, Tokens: 32})
	assert.Equal(t, []PotentialLoad{{rank, 32, 2}}, r.PotentialLoads(&Request{}))
	r.Observe(&Event{Kind: EvPrefillDone, Rank: rank, ReqID: 1})
	assert.Equal(t, Load{R: 1, K: 32}, loadOf(r, rank))
	assert.Equal(t, []PotentialLoad{{rank, 0, 2}}, r.PotentialLoads(&Request{}))
	r.Observe(&Event{Kind: EvUndo, Rank: rank, ReqID: 1})
	assert.Equal(t, []PotentialLoad{{rank, 0, 0}}, r.PotentialLoads(&Request{}))
	assert.Equal(t, Load{}, loadOf(r, rank))
}

// A forced rank is taken or refused under every policy, and is accounted like any other pick.
func TestForceHoldsUnderEveryPolicy(t *testing.T) {
	for _, p := range allPolicies(t) {
		r := routerWith(p, 3, 1)
		force := func(id RankID) Decision {
			return pick(r, Request{ID: uint64(id) + 1, Tokens: 5, HasDirect: true, Direct: id, Force: true})
		}
		require.Equal(t, []RankID{ID(0, 2)}, force(ID(0, 2)).Ranked)
		require.Equal(t, 1, loadOf(r, ID(0, 2)).O())
		require.Equal(t, ReasonRankUnavailable, force(ID(0, 2)).Reason)
		require.Equal(t, ReasonUnknownRank, force(ID(0, 7)).Reason)
		r.Observe(&Event{Kind: EvRankDown, Rank: ID(0, 1)})
		require.Equal(t, ReasonRankUnavailable, force(ID(0, 1)).Reason)
	}
}

func TestResetForgetsHistoryAndBumps(t *testing.T) {
	r := routerWith(KV{Weight: 1}, 2, 9)
	rooms := 0
	r.OnRoom = func() { rooms++ }
	r.Observe(&Event{Kind: EvAdmitted, Rank: ID(0, 0), ReqID: 50, Incarnation: 7, Seq: 1, Tokens: 160})
	pick(r, Request{ID: 1, Tokens: 320})
	r.Reset()
	assert.Equal(t, 1, rooms)
	assert.Equal(t, Load{F: 1, Q: 160, Kq: 160}, loadOf(r, ID(0, 0)))
	assert.Equal(t, Load{}, loadOf(r, ID(0, 1)))
	assert.Equal(t, []PotentialLoad{{ID(0, 0), 160, 10}, {ID(0, 1), 0, 0}}, r.PotentialLoads(&Request{}))
	tree := routerWith(newPolicy(t, "prefix-aware"), 2, 9)
	pick(tree, Request{ID: 1, Tokens: 300, Text: make([]byte, 1200)})
	tree.Reset()
	assert.Zero(t, tree.state.(*textState).tree.chars)
}

func TestStatusReportsAreChecked(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 9)
	for _, u := range []float64{-0.1, 1.1, math.NaN(), math.Inf(1)} {
		r.Observe(&Event{Kind: EvStatus, KVUsage: u})
	}
	assert.Equal(t, uint64(4), r.dropped)
	r.Observe(&Event{Kind: EvStatus, KVUsage: 0.4, Capacity: 1000, BlockSize: 32})
	r.Observe(&Event{Kind: EvStatus, KVUsage: 0.3})
	v := r.Snapshot()
	assert.Equal(t, []any{0.3, int64(1000), 32},
		[]any{v.Ranks[0].Usage(), v.Ranks[0].Capacity, v.Ranks[0].BlockSize})
	r.Observe(up(ID(0, 0), 9)) // a snapshot after a gap: the same incarnation
	assert.InDelta(t, 0.3, r.Snapshot().Ranks[0].Usage(), 0)
	r.Observe(&Event{Kind: EvRankUp, Epoch: 2, Incarnation: 8, MaxOngoing: 9})
	assert.Zero(t, r.Snapshot().Ranks[0].Usage())
	r.Observe(&Event{Kind: EvConfigured})
	assert.Equal(t, uint64(5), r.dropped)
}

// Engines that report no usage are judged by what they were sent.
func TestUsageWithoutReports(t *testing.T) {
	rk := Rank{Capacity: 1000, Load: Load{K: 300, Kq: 100}}
	assert.InDelta(t, 0.4, rk.Usage(), 1e-12)
	rk.Load.K = 5000
	assert.InDelta(t, 1, rk.Usage(), 0)
	threshold := 0.5
	r := NewRouter(LPWL{}, 1)
	r.Observe(&Event{Kind: EvConfigured, Config: &Config{BusyThreshold: &threshold}})
	for i := range 2 {
		e := up(ID(0, i), 99)
		e.Capacity = 1000
		r.Observe(e)
	}
	for i := range uint64(12) {
		require.Equal(t, Route, pick(r, Request{ID: i, Tokens: 100}).Kind)
	}
	assert.Equal(t, ReasonAllBusy, pick(r, Request{ID: 99, Tokens: 100}).Reason)
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 0})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 1), ReqID: 0})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 1})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 1), ReqID: 1})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 2})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 1), ReqID: 2})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 3})
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 1), ReqID: 3})
	assert.Equal(t, Route, pick(r, Request{ID: 99, Tokens: 100}).Kind)
}

// RP10: A rank whose engine reports no more is judged by its own account, and its queue is woken.
func TestUsageThatIsNotKnownAnyMoreFreesTheRank(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 9)
	half, woken := 0.5, 0
	r.Observe(&Event{Kind: EvConfigured, Config: &Config{BusyThreshold: &half}})
	r.Observe(&Event{Kind: EvStatus, KVUsage: 0.9, Capacity: 1000})
	assert.Equal(t, ReasonAllBusy, pick(r, Request{ID: 1, Tokens: 10}).Reason)
	r.OnRoom = func() { woken++ }
	r.Observe(&Event{Kind: EvStatus, NoKVUsage: true})
	assert.Equal(t, 1, woken)
	assert.Equal(t, Route, pick(r, Request{ID: 1, Tokens: 10}).Kind)
	assert.InDelta(t, 0.01, r.Snapshot().Ranks[0].Usage(), 1e-9)
}
