package routing

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRouterWakesOnlyForWhatCanChangeAnAnswer(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 2)
	rooms := 0
	r.OnRoom = func() { rooms++ }
	rank := ID(0, 0)
	pick(r, Request{ID: 1, Tokens: 5})
	steps := []struct {
		what string
		e    Event
		wake bool
	}{
		{"ticket", Event{Kind: EvTicket, ReqID: 1, Incarnation: 7, Seq: 1}, false},
		{"admitted", Event{Kind: EvAdmitted, ReqID: 1, Incarnation: 7, Seq: 1, Tokens: 5}, false},
		{"first token", Event{Kind: EvFirstToken, ReqID: 1, Incarnation: 7, Seq: 2}, false},
		{"finished", Event{Kind: EvFinished, ReqID: 1, Incarnation: 7, Seq: 3}, true},
		{"finished of a stranger", Event{Kind: EvFinished, ReqID: 8, Incarnation: 7, Seq: 4}, false},
		{"undo of nothing", Event{Kind: EvUndo, ReqID: 1}, false},
		{"an older incarnation", Event{Kind: EvFinished, ReqID: 1, Incarnation: 6, Seq: 9}, false},
		{"more room", Event{Kind: EvMaxOngoing, N: 3}, true},
		{"the same room", Event{Kind: EvMaxOngoing, N: 3}, false},
		{"not accepting", Event{Kind: EvAccepting}, true},
		{"accepting", Event{Kind: EvAccepting, Accepting: true}, true},
		{"silent", Event{Kind: EvSilent, Silent: true}, true},
		{"on the way", Event{Kind: EvOnTheWay, N: 1}, true},
		{"still on the way", Event{Kind: EvOnTheWay, N: 1}, false},
		{"none on the way", Event{Kind: EvOnTheWay}, true},
		{"up", Event{Kind: EvRankUp, Epoch: 1, Incarnation: 9, MaxOngoing: 3}, true},
		{"down of the old one", Event{Kind: EvRankDown, Incarnation: 7}, false},
		{"down", Event{Kind: EvRankDown, Incarnation: 9}, true},
	}
	for _, s := range steps {
		before := rooms
		s.e.Rank = rank
		r.Observe(&s.e)
		assert.Equal(t, s.wake, rooms > before, s.what)
	}
	assert.Equal(t, uint64(2), r.dropped)
}

func TestRouterUndoWakesAndIsIdempotent(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 1)
	rooms := 0
	r.OnRoom = func() { rooms++ }
	pick(r, Request{ID: 1, Tokens: 5})
	assert.Equal(t, Queue, pick(r, Request{ID: 2}).Kind)
	for range 3 {
		r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 1})
	}
	assert.Equal(t, 1, rooms)
	assert.Equal(t, Load{}, loadOf(r, ID(0, 0)))
}

func TestUndoAfterAdmissionLeavesTheReplicasAccountAlone(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 4)
	rank := ID(0, 0)
	pick(r, Request{ID: 1, Tokens: 5})
	r.Observe(&Event{Kind: EvAdmitted, Rank: rank, ReqID: 1, Incarnation: 7, Seq: 1, Tokens: 6})
	r.Observe(&Event{Kind: EvUndo, Rank: rank, ReqID: 1}) // given up before the ticket arrived
	assert.Equal(t, Load{F: 1, Q: 6, Kq: 6}, loadOf(r, rank))
	r.Observe(&Event{Kind: EvFinished, Rank: rank, ReqID: 1, Incarnation: 7, Seq: 2})
	assert.Equal(t, Load{}, loadOf(r, rank))
}

func TestLoadMovesWithTheRequest(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 4)
	rank := ID(0, 0)
	pick(r, Request{ID: 1, Tokens: 50})
	steps := []struct {
		e    Event
		want Load
	}{
		{Event{Kind: EvAdmitted, Tokens: 52}, Load{F: 1, Q: 52, Kq: 52}},
		{Event{Kind: EvAdmitted, ReqID: 99, Tokens: 8}, Load{W: 1, F: 1, Q: 60, Kq: 60}}, // another ingress's
		{Event{Kind: EvFirstToken}, Load{F: 1, R: 1, Q: 8, Kq: 8, K: 52}},
		{Event{Kind: EvProgress, Out: 10}, Load{F: 1, R: 1, Q: 8, Kq: 8, K: 62}},
		{Event{Kind: EvProgress, Out: 4}, Load{F: 1, R: 1, Q: 8, Kq: 8, K: 62}},
		{Event{Kind: EvProgress, ReqID: 99, Out: 2}, Load{R: 2, K: 72}},
		{Event{Kind: EvFinished}, Load{R: 1, K: 10}},
		{Event{Kind: EvFinished, ReqID: 99}, Load{}},
	}
	for i, s := range steps {
		s.e.Rank, s.e.Incarnation, s.e.Seq = rank, 7, uint64(i+1)
		if s.e.ReqID == 0 {
			s.e.ReqID = 1
		}
		r.Observe(&s.e)
		require.Equal(t, s.want, loadOf(r, rank), "%+v", s.e)
	}
}

func TestNewIncarnationBeginsAnewAndGhostsStayOut(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 1, 4)
	rank := ID(0, 0)
	pick(r, Request{ID: 1, Tokens: 5})
	r.Observe(&Event{
		Kind: EvRankUp, Rank: rank, Epoch: 2, Incarnation: 8, MaxOngoing: 4, Seq: 3,
		Snapshot: []Open{{ReqID: 5, Tokens: 9, Decoding: true, Out: 1}},
	})
	assert.Equal(t, Load{R: 1, K: 10}, loadOf(r, rank))
	r.Observe(&Event{Kind: EvRankDown, Rank: rank})
	r.Observe(up(rank, 4)) // epoch 1, late
	assert.Empty(t, r.Snapshot().Ranks)
	assert.Equal(t, uint64(1), r.dropped)
	r.Observe(&Event{Kind: EvRankUp, Rank: rank, Epoch: 3, Incarnation: 9, MaxOngoing: 4})
	assert.Equal(t, Load{}, loadOf(r, rank))
}

func TestSnapshotIsACopy(t *testing.T) {
	r := routerWith(PowerOfTwo{}, 2, 4)
	v := r.Snapshot()
	v.Ranks[0].Ready = false
	assert.True(t, r.Snapshot().Ranks[0].Ready)
}

func TestMaxMean(t *testing.T) {
	r := routerWith(Direct{}, 4, 9)
	assert.InDelta(t, 1, r.MaxMean(), 0)
	for i, rank := range []int{0, 0, 0, 1} {
		pick(r, Request{ID: uint64(i), HasDirect: true, Direct: ID(0, rank)})
	}
	assert.InDelta(t, 3, r.MaxMean(), 1e-9)
}

func TestExplainChangesNothing(t *testing.T) {
	forEachPolicy(t, func(t *testing.T, p Policy) {
		a, b := routerWith(p, 5, 256), routerWith(p, 5, 256)
		for i := range 50 {
			q := Request{ID: uint64(i), HasDirect: true, Direct: ID(0, i%5)}
			told := a.Explain(&q)
			assert.NotEmpty(t, told.Terms)
			want := pick(b, q)
			assert.Equal(t, want.Ranked, told.Ranked)
			assert.Equal(t, want.Ranked, pick(a, q).Ranked)
		}
	})
}

// The same seed and the same log give the same decisions, bit for bit.
func TestReplayGivesTheSameDecisions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		seed := rapid.Uint64().Draw(t, "seed")
		a, b := NewRouter(p, seed), NewRouter(p, seed)
		for i := range rapid.IntRange(0, 100).Draw(t, "length") {
			if rapid.Bool().Draw(t, "pick") {
				q := Request{ID: uint64(i), HasDirect: true, Direct: ID(0, i%2), Tokens: i}
				require.Equal(t, pick(a, q), pick(b, q))
				continue
			}
			e := drawEvent(t, uint64(i))
			a.Observe(&e)
			b.Observe(&e)
		}
		require.Equal(t, a.Snapshot(), b.Snapshot())
	})
}

// Many goroutines dispatch and end requests; run with -race. All bumps come back.
func TestRouterIsSafeForConcurrentUse(t *testing.T) {
	const workers, each = 8, 300
	r := routerWith(PowerOfTwo{}, 4, 3)
	var woken sync.Map
	r.OnRoom = func() { woken.Store(1, true) }
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			var d Decision
			for i := range each {
				id := uint64(w*each + i)
				r.Pick(&Request{ID: id, Tokens: 1}, &d)
				if d.Kind == Route {
					r.Observe(&Event{Kind: EvUndo, Rank: d.Ranked[0], ReqID: id})
				}
				r.Explain(&Request{ID: id})
				r.MaxMean()
			}
		})
	}
	wg.Wait()
	for _, rk := range r.Snapshot().Ranks {
		assert.Equal(t, Load{}, rk.Load)
	}
	_, any := woken.Load(1)
	assert.True(t, any)
}
