package routing

import (
	"cmp"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// RP11: whatever happens to the ranks, those ejected first are left out, at most 30 % of the ready ones
// or one, and never the last.
func TestLawEjectedRanksAreLeftOutUpToTheCap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := NewRouter(LeastLoaded{}, 1)
		for i := range rapid.IntRange(1, 14).Draw(t, "ranks") {
			r.Observe(up(ID(0, i), 4))
		}
		order := 0
		for range rapid.IntRange(1, 60).Draw(t, "length") {
			id := ID(0, rapid.IntRange(0, 13).Draw(t, "rank"))
			switch rapid.IntRange(0, 5).Draw(t, "kind") {
			case 0:
				r.Observe(&Event{Kind: EvRankDown, Rank: id})
			case 1:
				r.Observe(up(id, 4))
			case 2:
				r.Observe(&Event{Kind: EvAccepting, Rank: id, Accepting: rapid.Bool().Draw(t, "accepting")})
			case 3:
				r.Observe(&Event{Kind: EvEjected, Rank: id})
			default:
				order++
				r.Observe(&Event{Kind: EvEjected, Rank: id, N: order})
			}
			checkLeftOut(t, r.Snapshot())
		}
	})
}

// checkLeftOut compares with the rule said plainly.
func checkLeftOut(t *rapid.T, v View) {
	var ready, ejected []Rank
	for _, rk := range v.Ranks {
		if rk.Ready {
			ready = append(ready, rk)
		}
		if rk.Ready && rk.Ejected > 0 {
			ejected = append(ejected, rk)
		}
	}
	slices.SortFunc(ejected, func(a, b Rank) int { return cmp.Compare(a.Ejected, b.Ejected) })
	most := max(1, len(ready)*3/10)
	if most == len(ready) {
		most = 0
	}
	for i, rk := range ejected {
		require.Equal(t, i < most, rk.LeftOut, "%s of %d ready ranks", rk.ID, len(ready))
	}
	for _, rk := range v.Ranks {
		require.True(t, !rk.LeftOut || rk.Ready && rk.Ejected > 0)
	}
	if len(ready) == 0 {
		return
	}
	d := pick(routerOf(v), Request{ID: 1})
	require.Equal(t, Route, d.Kind, "an application with a ready rank routes: %s", d.Reason)
}

// routerOf is a router with the view v.
func routerOf(v View) *Router {
	r := NewRouter(Random{}, 1)
	r.view, r.width, r.accounts = v, 16, make([]account, len(v.Ranks))
	for i := range r.accounts {
		r.accounts[i].clock = &r.view.Now
	}
	return r
}

func TestAnEjectionThatChangesWhoIsLeftOutWakesTheQueue(t *testing.T) {
	r := routerWith(LeastLoaded{}, 3, 1)
	woken := 0
	r.OnRoom = func() { woken++ }
	for i, id := range []RankID{ID(0, 2), ID(0, 0), ID(0, 1)} {
		r.Observe(&Event{Kind: EvEjected, Rank: id, N: i + 1})
	}
	leftOut := func() (out []RankID) {
		for _, rk := range r.Snapshot().Ranks {
			if rk.LeftOut {
				out = append(out, rk.ID)
			}
		}
		return out
	}
	assert.Equal(t, []RankID{ID(0, 2)}, leftOut())
	woken = 0
	r.Observe(&Event{Kind: EvEjected, Rank: ID(0, 2)})
	assert.Equal(t, []RankID{ID(0, 0)}, leftOut(), "the next that was ejected")
	assert.Equal(t, 1, woken)
	r.Observe(&Event{Kind: EvRankUp, Rank: ID(0, 0), Epoch: 1, Incarnation: 7, MaxOngoing: 1})
	assert.Equal(t, []RankID{ID(0, 0)}, leftOut(), "a snapshot of the same incarnation changes nothing")
	r.Observe(&Event{Kind: EvRankUp, Rank: ID(0, 0), Epoch: 2, Incarnation: 8, MaxOngoing: 1})
	assert.Equal(t, []RankID{ID(0, 1)}, leftOut(), "another incarnation is not ejected")
}
