package routing

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDirectRoutesOrSaysWhyNot(t *testing.T) {
	r := routerWith(Direct{}, 3, 1)
	named := func(rank int, tried ...RankID) Request {
		return Request{ID: uint64(100 + rank), Direct: ID(0, rank), HasDirect: true, Tried: tried}
	}
	ask := func(q Request) (Kind, string) { d := pick(r, q); return d.Kind, d.Reason }
	expect := func(kind Kind, reason string, q Request) {
		t.Helper()
		k, why := ask(q)
		assert.Equal(t, kind, k)
		assert.Equal(t, reason, why)
	}
	expect(Reject, ReasonNoRankGiven, Request{ID: 1})
	expect(Route, ReasonNamedByCaller, named(1))
	expect(Reject, ReasonRankUnavailable, named(1)) // full
	expect(Reject, ReasonUnknownRank, named(3))
	expect(Reject, ReasonAllTried, named(2, ID(0, 2)))
	r.Observe(&Event{Kind: EvSilent, Rank: ID(0, 1), Silent: true})
	expect(Route, ReasonSilentFallback, named(1)) // the old "full" does not block
	r.Observe(&Event{Kind: EvAccepting, Rank: ID(0, 0)})
	expect(Reject, ReasonRankUnavailable, named(0))
	r.Observe(&Event{Kind: EvRankDown, Rank: ID(0, 0)})
	expect(Reject, ReasonRankUnavailable, named(0)) // it was there once
	r.Observe(&Event{Kind: EvOnTheWay, N: 1})
	expect(Reject, ReasonRankUnavailable, named(3)) // it may be the one that is starting
}

// A request goes to none but the ranks that have what it needs, under every policy. It waits for one that is
// full or not ready, though others are free, and is refused where every one of them was tried.
func TestOnlyTheRanksThatHaveWhatARequestNeeds(t *testing.T) {
	for name, policy := range map[string]Policy{
		"round-robin": RoundRobin{}, "random": Random{}, "two": PowerOfTwo{},
	} {
		r := routerWith(policy, 3, 1)
		ask := func(id uint64, only []RankID, tried ...RankID) Decision {
			return pick(r, Request{ID: id, Only: only, Tried: tried})
		}
		d := ask(1, []RankID{ID(0, 1)})
		assert.Equal(t, []RankID{ID(0, 1)}, d.Ranked[:1], name)
		assert.Equal(t, Queue, ask(2, []RankID{ID(0, 1)}).Kind, name) // full
		assert.Equal(t, ReasonAllTried, ask(3, []RankID{ID(0, 1)}, ID(0, 1)).Reason, name)
		assert.NotEqual(t, Route, ask(4, []RankID{}).Kind, name)
		assert.Equal(t, Route, ask(5, nil).Kind, name)
	}
}
