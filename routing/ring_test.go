package routing

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Golden values of MurmurHash3 x64 128, low half, seed 0xF9B4CA77, computed with an independent
// implementation.
func TestRingHashIsMurmur3(t *testing.T) {
	for key, want := range map[string]uint64{
		"": 0xf909160d05c35c01, "session-42": 0x96692c1ffc363c65, "0/3:17": 0x9529bbc7daab98ff,
		"a session key that is longer than one block": 0xb4ca3ab4e27d6803,
	} {
		assert.Equal(t, want, hashString(key), key)
		assert.Equal(t, want, hashBytes([]byte(key)), key)
	}
}

// The ring equals a sorted list of all points, however its ranks came and went.
func TestRingMatchesTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const nodes = 5
		v := View{}
		r := newRing(&v, nodes)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			id := ID(0, rapid.IntRange(0, 6).Draw(t, "rank"))
			i, found := v.Find(id)
			e := Event{Kind: EvRankUp, Rank: id}
			if found && rapid.Bool().Draw(t, "down") {
				e.Kind = EvRankDown
				v.Ranks = slices.Delete(v.Ranks, i, i+1)
			} else if !found {
				v.Ranks = slices.Insert(v.Ranks, i, Rank{ID: id})
			}
			r.observe(&e)
			var want []ringPoint
			for _, rk := range v.Ranks {
				for n := range nodes {
					want = append(want, ringPoint{hashString(fmt.Sprintf("%d/%d:%d", rk.ID.Group(),
						rk.ID.Rank(), n)), rk.ID})
				}
			}
			slices.SortFunc(want, comparePoints)
			require.Equal(t, want, slices.Clip(append([]ringPoint(nil), r.points...)))
			checkWalk(t, r, &v, want, rapid.Uint64().Draw(t, "key"))
		}
	})
}

func checkWalk(t *rapid.T, r *ring, v *View, points []ringPoint, key uint64) {
	var got, want []RankID
	r.walk(v, key, make([]int64, len(v.Ranks)), func(row int) bool {
		got = append(got, v.Ranks[row].ID)
		return true
	})
	first := 0
	for first < len(points) && points[first].hash <= key {
		first++
	}
	for k := range points {
		if id := points[(first+k)%len(points)].rank; !slices.Contains(want, id) {
			want = append(want, id)
		}
	}
	require.Equal(t, want, got)
}

// A rank that leaves moves its own sessions and no others.
func TestSessionsOfOtherRanksStayWhenOneLeaves(t *testing.T) {
	r := routerWith(newPolicy(t, "session-affinity"), 8, 1<<20)
	home := map[string]RankID{}
	for i := range 500 {
		s := fmt.Sprintf("s%d", i)
		home[s] = pick(r, Request{ID: uint64(i), Session: s}).Ranked[0]
		require.Equal(t, home[s], pick(r, Request{ID: uint64(1000 + i), Session: s}).Ranked[0])
	}
	r.Observe(&Event{Kind: EvRankDown, Rank: ID(0, 3)})
	moved := 0
	for s, id := range home {
		if now := pick(r, Request{ID: 9999, Session: s}).Ranked[0]; now != id {
			assert.Equal(t, ID(0, 3), id)
			moved++
		}
	}
	assert.Positive(t, moved)
}

func TestSessionAffinityFallsBackAlongTheRing(t *testing.T) {
	r := routerWith(SessionAffinity{Nodes: 100, Fallbacks: 2}, 6, 1)
	q := Request{Session: "s", Tokens: 10}
	var order []RankID
	for i := range 3 {
		q.ID = uint64(i)
		d := pick(r, q)
		assert.Equal(t, ReasonRing, d.Reason)
		order = append(order, d.Ranked[0])
	}
	assert.Len(t, slices.Compact(slices.Sorted(slices.Values(order))), 3, "the home and its two successors")
	q.ID = 9
	d := pick(r, q)
	assert.Equal(t, ReasonRingFallback, d.Reason, "then the shortest queue of the rest")
	assert.NotContains(t, order, d.Ranked[0])
}

func TestSessionTableForgetsIdleSessions(t *testing.T) {
	r := routerWith(SessionAffinity{Table: true, TTL: 300 * time.Second}, 4, 100)
	ask := func(id uint64, s string, now time.Duration) Decision {
		return pick(r, Request{ID: id, Session: s, Now: now})
	}
	first := ask(1, "s", time.Second)
	assert.Equal(t, ReasonNewSession, first.Reason)
	again := ask(2, "s", 300*time.Second)
	assert.Equal(t, ReasonSession, again.Reason)
	assert.Equal(t, first.Ranked, again.Ranked)
	assert.Equal(t, ReasonSession, ask(3, "s", 600*time.Second).Reason, "renewed by each request")
	assert.Equal(t, ReasonNewSession, ask(4, "s", 901*time.Second).Reason)
	r.Observe(&Event{Kind: EvRankDown, Rank: ask(5, "s", 902*time.Second).Ranked[0]})
	assert.Equal(t, ReasonNewSession, ask(6, "s", 903*time.Second).Reason)
}

func TestSessionTableIsBounded(t *testing.T) {
	var s sessions
	for i := range uint64(maxSessions + 100) {
		s.put(spread(i), ID(0, int(i%7)), time.Duration(i))
	}
	assert.Len(t, s.list, maxSessions)
	assert.Equal(t, maxSessions, s.at.n)
	_, ok := s.get(spread(50), 0)
	assert.False(t, ok, "the oldest went")
	id, ok := s.get(spread(150), 0)
	assert.True(t, ok)
	assert.Equal(t, ID(0, 150%7), id)
}

// chwbl keeps a key on its rank until that is over the bound, and never goes over it.
func TestCHWBLBoundsTheLoad(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := CHWBL{Factor: rapid.Float64Range(1, 3).Draw(t, "c"), Nodes: 64}
		n := rapid.IntRange(1, 8).Draw(t, "ranks")
		r := routerWith(p, n, 1<<20)
		for i := range rapid.IntRange(1, 100).Draw(t, "requests") {
			before := r.Snapshot()
			sum := 0
			for _, rk := range before.Ranks {
				sum += rk.Load.O()
			}
			d := pick(r, Request{ID: uint64(i), Tokens: 100, Text: drawText(t)})
			row, _ := before.Find(d.Ranked[0])
			require.LessOrEqual(t, float64(before.Ranks[row].Load.O()), p.Factor*float64(sum+1)/float64(n))
		}
	})
}

func TestFirstCharsCountsCharacters(t *testing.T) {
	assert.Equal(t, "äö", string(firstChars([]byte("äöü"), 2)))
	assert.Equal(t, "\xff\xfea", string(firstChars([]byte("\xff\xfeab"), 3)))
	assert.Equal(t, "a", string(firstChars([]byte("a"), 100)))
}
