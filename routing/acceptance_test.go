package routing

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RT2: ten in flight on one rank, none on the other, nothing polled: the idle one gets the next ten of ten.
func TestRT2IdleRankGetsTheNextTenOfTen(t *testing.T) {
	for _, name := range []string{"power-of-two", "least-loaded"} {
		t.Run(name, func(t *testing.T) {
			r := NewRouter(newPolicy(t, name), 1)
			r.Observe(up(ID(0, 0), 256))
			for i := range 10 {
				require.Equal(t, ID(0, 0), pick(r, Request{ID: uint64(i), Tokens: 5}).Ranked[0])
			}
			r.Observe(up(ID(0, 1), 256))
			for i := range 10 {
				require.Equal(t, ID(0, 1), pick(r, Request{ID: uint64(100 + i), Tokens: 5}).Ranked[0],
					"pick %d", i)
			}
		})
	}
}

// RT2: every policy counts work in flight.
func TestRT2EveryPolicyCountsInFlight(t *testing.T) {
	forEachPolicy(t, func(t *testing.T, p Policy) {
		r := routerWith(p, 3, 256)
		total := 0
		for i := range 30 {
			d := pick(r, Request{ID: uint64(i), Tokens: 7, Direct: ID(0, i%3), HasDirect: true})
			require.Equal(t, Route, d.Kind)
			total++
			sum := Load{}
			for _, rk := range r.Snapshot().Ranks {
				sum.W += rk.Load.W + rk.Load.F
				sum.Q += rk.Load.Q
				sum.Kq += rk.Load.Kq
			}
			require.Equal(t, Load{W: total, Q: int64(7 * total), Kq: int64(7 * total)}, sum)
		}
	})
}

// waiting is a dumb FIFO that is driven by OnRoom and by nothing else.
type waiting struct {
	r      *Router
	queue  []uint64
	served []uint64
	d      Decision
}

func newWaiting(r *Router) *waiting {
	w := &waiting{r: r}
	r.OnRoom = w.wake
	return w
}

func (w *waiting) arrive(id uint64) {
	w.queue = append(w.queue, id)
	w.wake()
}

func (w *waiting) wake() {
	for len(w.queue) > 0 {
		w.r.Pick(&Request{ID: w.queue[0], Tokens: 1}, &w.d)
		if w.d.Kind != Route {
			return
		}
		w.served = append(w.served, w.queue[0])
		w.queue = w.queue[1:]
	}
}

// RT3: no replica, then one: queued while a unit is on its way, served by RankUp itself.
func TestQueuedRequestIsWokenByRankUp(t *testing.T) {
	r := NewRouter(PowerOfTwo{}, 1)
	w := newWaiting(r)
	assert.Equal(t, Reject, pick(r, Request{ID: 9}).Kind)
	r.Observe(&Event{Kind: EvOnTheWay, N: 1})
	w.arrive(1)
	assert.Equal(t, Decision{Kind: Queue, Reason: ReasonOnTheWay, Ranked: w.d.Ranked}, w.d)
	r.Observe(up(ID(0, 0), 4))
	assert.Equal(t, []uint64{1}, w.served)
}

// RT3: full, then free; a hundred wait, each place that falls free takes the head, order is kept, nothing is
// left.
func TestRT3HundredWaitingAreServedInOrder(t *testing.T) {
	const room, all = 4, 100
	r := NewRouter(PowerOfTwo{}, 1)
	w := newWaiting(r)
	r.Observe(up(ID(0, 0), room))
	r.Observe(up(ID(0, 1), room))
	for id := range uint64(all) {
		w.arrive(id + 1)
	}
	require.Len(t, w.served, 2*room)
	assert.Equal(t, Queue, w.d.Kind)
	assert.Equal(t, ReasonNoRoom, w.d.Reason)
	seq := map[RankID]uint64{}
	for k := 0; k < all; k++ { // the k-th served runs through: ticket, records, end
		run(r, w.served[k], seq)
		require.Len(t, w.served, min(all, 2*room+k+1))
	}
	for k, id := range w.served {
		assert.Equal(t, uint64(k+1), id)
	}
	for _, rk := range r.Snapshot().Ranks {
		assert.Equal(t, Load{}, rk.Load, "pending 0 at the end")
	}
}

// run plays a replica's part for one request that is bumped somewhere.
func run(r *Router, id uint64, seq map[RankID]uint64) {
	for i := range r.accounts {
		rank := r.view.Ranks[i].ID
		if r.accounts[i].opens.get(id) == nil {
			continue
		}
		e := Event{Rank: rank, ReqID: id, Incarnation: 7, Tokens: 1}
		for _, kind := range []EventKind{EvTicket, EvAdmitted, EvFirstToken, EvFinished} {
			if e.Kind = kind; kind != EvAdmitted {
				seq[rank]++
			}
			e.Seq = seq[rank]
			r.Observe(&e)
		}
		return
	}
}

// RT3: an old "full" of a rank whose stream is silent never blocks: admission has the last word.
func TestRT3StaleFullNeverBlocks(t *testing.T) {
	for _, name := range []string{"power-of-two", "least-loaded", "round-robin", "random"} {
		t.Run(name, func(t *testing.T) {
			r := routerWith(newPolicy(t, name), 2, 1)
			w := newWaiting(r)
			for id := range uint64(3) {
				w.arrive(id)
			}
			require.Len(t, w.served, 2)
			r.Observe(&Event{Kind: EvSilent, Rank: ID(0, 1), Silent: true})
			assert.Equal(t, []uint64{0, 1, 2}, w.served)
			assert.Equal(t, ReasonSilentFallback, w.d.Reason)
		})
	}
}

// A silent rank is taken only when no other has room.
func TestSilentIsLastResort(t *testing.T) {
	forEachPolicy(t, func(t *testing.T, p Policy) {
		r := routerWith(p, 3, 4)
		r.Observe(&Event{Kind: EvSilent, Rank: ID(0, 1), Silent: true})
		for i := range 8 {
			d := pick(r, Request{ID: uint64(i), HasDirect: true, Direct: ID(0, 2*(i%2))})
			require.Equal(t, Route, d.Kind)
			assert.NotContains(t, d.Ranked, ID(0, 1))
		}
	})
}
