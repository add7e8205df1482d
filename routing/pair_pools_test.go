package routing

import (
	"container/heap"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/steptime"
)

// pools plays single requests on a prefill pool and a decode pool behind a PairRouter: as many clients as
// there is concurrency, each of which sends its next request when it has the answer. A prefill rank computes
// one prompt after the other; a decode rank does so with prompts that it was given whole, beside decoding.
// Tickets and records come at once.
type pools struct {
	t        require.TestingT
	r        *PairRouter
	p, d     *Router
	model    steptime.Coefficients
	now      time.Duration
	due      poolQueue
	seq      map[*Router]map[RankID]uint64
	free     map[*Router]map[RankID]time.Duration // when the rank has computed all its prompts
	requests int
	served   map[RankID]int // requests by decode rank
	remote   int
}

type poolEvent struct {
	at time.Duration
	n  int
	do func()
}

type poolQueue []poolEvent

func (q poolQueue) Len() int { return len(q) }
func (q poolQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].n < q[j].n
}
func (q poolQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *poolQueue) Push(x any)   { *q = append(*q, x.(poolEvent)) }
func (q *poolQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func (s *pools) after(wait time.Duration, do func()) {
	heap.Push(&s.due, poolEvent{s.now + wait, s.requests*8 + len(s.due)%8, do})
}

func (s *pools) observe(r *Router, kind EventKind, id RankID, req uint64, tokens, hit, out int) {
	s.seq[r][id]++
	r.Observe(&Event{
		Kind: kind, Rank: id, ReqID: req, Incarnation: 7, Seq: s.seq[r][id], Tokens: tokens, Hit: hit,
		Out: out, Now: s.now,
	})
}

// compute is when the rank has computed a prompt that it gets now.
func (s *pools) compute(r *Router, id RankID, tokens int) time.Duration {
	took := time.Duration(s.model.Prefill(tokens, 0) * float64(time.Millisecond))
	s.free[r][id] = max(s.free[r][id], s.now) + took
	return s.free[r][id] - s.now
}

// send sends a request of one client.
func (s *pools) send(tokens, answer int, next func()) {
	s.requests++
	req := uint64(s.requests)
	pq := Request{ID: req, Tokens: tokens, Now: s.now}
	dq := pq
	var choice PairDecision
	s.r.Pick(&pq, &dq, false, &choice)
	require.Equal(s.t, Route, choice.Kind)
	d, hit := choice.Decode, 0
	s.served[d]++
	wait := time.Duration(0)
	if choice.Remote {
		s.remote++
		hit = tokens - 1
		p := choice.Prefill
		s.observe(s.p, EvAdmitted, p, req, tokens, 0, 0)
		wait = s.compute(s.p, p, tokens)
		s.after(wait, func() {
			s.observe(s.p, EvFirstToken, p, req, 0, 0, 0)
			s.observe(s.p, EvFinished, p, req, 0, 0, 1)
		})
		wait += 30 * time.Millisecond // the transfer
	} else {
		wait = s.compute(s.d, d, tokens)
	}
	s.observe(s.d, EvAdmitted, d, req, tokens, hit, 0)
	s.after(wait, func() { s.observe(s.d, EvFirstToken, d, req, 0, 0, 0) })
	s.after(wait+time.Duration(answer)*fleetToken, func() {
		s.observe(s.d, EvFinished, d, req, 0, 0, answer)
		next()
	})
}

func playPools(t require.TestingT, policy, decide string, prefills, decodes, clients, requests int,
	length func() (tokens, answer int),
) *pools {
	s := &pools{t: t, model: steptime.Reference(), served: map[RankID]int{}}
	s.p, s.d = pairPools(t, prefills, decodes, policy, policy)
	s.r = NewPairRouter(s.p, s.d, pairRule(t, decide), false, 5)
	s.seq = map[*Router]map[RankID]uint64{s.p: {}, s.d: {}}
	s.free = map[*Router]map[RankID]time.Duration{s.p: {}, s.d: {}}
	rnd := seeded(9)
	var client func()
	client = func() {
		if s.requests < requests {
			tokens, answer := length()
			s.send(tokens, answer, client)
		}
	}
	for range clients {
		s.after(time.Duration(rnd.ExpFloat64()*float64(time.Second)), client)
	}
	for len(s.due) > 0 {
		e := heap.Pop(&s.due).(poolEvent)
		s.now = max(s.now, e.at)
		e.do()
	}
	for _, r := range []*Router{s.p, s.d} {
		for _, rk := range r.Snapshot().Ranks {
			require.Equal(t, 0, rk.Load.O(), "what was counted on a rank has ended")
			require.Zero(t, rk.Load.Q)
		}
	}
	return s
}

// RT5: one prefill rank and five decode ranks. However the requests are decided, each decode rank gets 15 to
// 25 % of requests of about one length. Of requests of very different lengths every rank has its part too. It
// may be smaller: mex gives short prompts to ranks that decode much and long ones to those that decode
// little.
func TestPairSharesOfUnequalPools(t *testing.T) {
	for _, policy := range []string{"power-of-two", "least-loaded", "round-robin", "kv", "mex"} {
		for _, decide := range []string{"isl", "always", "prefill-load", "mex"} {
			for _, clients := range []int{256, 512} {
				t.Run(fmt.Sprintf("%s %s %d", policy, decide, clients), func(t *testing.T) {
					rnd := seeded(11)
					about := func(n int) int { return n*9/10 + rnd.IntN(n/5) }
					similar := func() (tokens, answer int) { return about(3000), about(200) }
					mixed := func() (tokens, answer int) {
						return 500 + int(3000*rnd.ExpFloat64()), 20 + int(200*rnd.ExpFloat64())
					}
					s := playPools(t, policy, decide, 1, 5, clients, 3000, similar)
					assert.Positive(t, s.remote)
					checkShares(t, s, 0.15, 0.25)
					checkShares(t, playPools(t, policy, decide, 1, 5, clients, 3000, mixed), 0.05, 0.5)
				})
			}
		}
	}
}

func checkShares(t *testing.T, s *pools, least, most float64) {
	for rank := range 5 {
		share := float64(s.served[ID(0, rank)]) / float64(s.requests)
		assert.GreaterOrEqual(t, share, least, "rank %d", rank)
		assert.LessOrEqual(t, share, most, "rank %d", rank)
	}
}

// TestPickOneSide: another rank of one pool is chosen among those that have met the rank that stays, and
// counts there. Pairs that have met stay so for other Routers, leases do not.
func TestPickOneSide(t *testing.T) {
	p, d := pairPools(t, 2, 2, "round-robin", "round-robin")
	r := NewPairRouter(p, d, pairRule(t, "always"), true, 1)
	first, second := p.Snapshot().Ranks, d.Snapshot().Ranks
	r.Update(func(t *PairTable) {
		t.SetMet(RefOf(&first[1]), RefOf(&second[0]))
		t.Lease(RefOf(&first[1]), 1000)
	})
	var got Decision
	for range 3 {
		r.PickPrefill(&Request{ID: 1, Tokens: 100}, RefOf(&second[0]), &got)
		require.Equal(t, Route, got.Kind)
		assert.Equal(t, first[1].ID, got.Ranked[0])
		p.Observe(&Event{Kind: EvUndo, Rank: first[1].ID, ReqID: 1})
		r.PickDecode(&Request{ID: 2, Tokens: 100}, RefOf(&first[1]), &got)
		require.Equal(t, Route, got.Kind)
		assert.Equal(t, second[0].ID, got.Ranked[0])
		assert.EqualValues(t, 1, d.Snapshot().Ranks[0].Load.Q, "it computes the last token")
		assert.Equal(t, 1, d.Snapshot().Ranks[0].Load.O())
		d.Observe(&Event{Kind: EvUndo, Rank: second[0].ID, ReqID: 2})
	}
	r.PickPrefill(&Request{ID: 1, Tokens: 100}, RefOf(&second[1]), &got)
	assert.NotEqual(t, Route, got.Kind, "it has met nobody")
	r.PickPrefill(&Request{ID: 1, Tokens: 100, Tried: []RankID{first[1].ID}}, RefOf(&second[0]), &got)
	assert.NotEqual(t, Route, got.Kind)

	next := r.Next(p, d, pairRule(t, "isl"), 2)
	next.Update(func(table *PairTable) {
		assert.True(t, table.HasMet(RefOf(&first[1]), RefOf(&second[0])))
		assert.False(t, table.HasMet(RefOf(&first[0]), RefOf(&second[0])))
		assert.Zero(t, table.Leased(&first[1]))
	})
	a, b := next.Routers()
	assert.True(t, a == p && b == d)
}

// A millisecond of prefill delays requests that are still to come alike in both pools: by the share of the
// time of all their ranks that prefill takes.
func TestPairsHaveOneUtilisation(t *testing.T) {
	d := decidePair(t, "mex", 8000, func(c *pairCase) { c.p.Rho, c.d.Rho = .8, .1 })
	want := delay((2*.8+4*.1)/6) * steptime.Reference().Prefill(8000, 0)
	for _, c := range d.Candidates {
		for _, term := range c.Terms {
			if term.Name == "later_arrivals" {
				assert.InEpsilon(t, want, term.Value, 1e-9, "remote: %v", c.Remote)
			}
		}
	}
}
