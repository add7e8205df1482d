package routing

import (
	"cmp"
	"container/heap"
	"container/list"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/steptime"
)

const (
	fleetRanks    = 8
	agentBlock    = 512             // tokens per KV block of the ranks that agentTurns are for
	fleetCapacity = 1366            // blocks of a rank's cache
	fleetSLO      = 2 * time.Second // of a first token
	fleetToken    = 25 * time.Millisecond
	fleetRoom     = 1 << 20
)

// fleetTurn is one request of an agent session.
type fleetTurn struct {
	at      time.Duration
	session string
	chain   []uint64 // hashes of the prompt's blocks
	text    []byte   // 16 bytes a block
	output  int
}

// agentTurns are the requests of agent sessions: 20 system prompts of 4 to 23 blocks, of which some are much
// more popular than others; 1 + Exp(10) turns; per turn 1 + Exp(3) new blocks and an output of 20 + Exp(250)
// tokens, which the next prompt repeats; the next turn comes 1 s + 20 ms per output token + Exp(6 s) later;
// no prompt beyond 200 blocks.
func agentTurns(seed uint64, perSecond float64, span time.Duration) []fleetTurn {
	rnd := seeded(seed)
	systems := make([]int, 20)
	for i := range systems {
		systems[i] = 4 + rnd.IntN(20)
	}
	var turns []fleetTurn
	resetDecision := time.Duration(0)
	for session := uint64(1); ; session++ {
		resetDecision += time.Duration(rnd.ExpFloat64() / perSecond * float64(time.Second))
		if resetDecision > span {
			slices.SortStableFunc(turns, func(a, b fleetTurn) int { return cmp.Compare(a.at, b.at) })
			return turns
		}
		var chain []uint64
		var text []byte
		grow := func(of uint64, n int) {
			for range n {
				chain = append(chain, spread(of<<32|uint64(len(chain))))
				text = fmt.Appendf(text, "%016x", chain[len(chain)-1])
			}
		}
		system := int(20 * math.Pow(rnd.Float64(), 2.2))
		grow(uint64(1<<30+system), systems[system])
		at := resetDecision
		for range 1 + int(10*rnd.ExpFloat64()) {
			grow(session, 1+int(3*rnd.ExpFloat64()))
			if len(chain) > 200 {
				break
			}
			turn := fleetTurn{at: at, session: fmt.Sprint(session), output: 20 + int(250*rnd.ExpFloat64())}
			turn.chain, turn.text = slices.Clone(chain), slices.Clone(text)
			turns = append(turns, turn)
			grow(session, (turn.output+agentBlock/2)/agentBlock)
			pause := 1 + 0.02*float64(turn.output) + 6*rnd.ExpFloat64()
			at += time.Duration(pause * float64(time.Second))
		}
	}
}

// fleet plays requests on ranks behind one Router or several, event by event. A rank computes one prompt
// after the other at the speed of the cost model, decodes at one speed, and keeps the blocks that it used
// last. Requests take the Routers in turn. Their hits are what each rank was sent, at once. Tickets come at
// once, the ranks' records to every Router after lag.
type fleet struct {
	t       require.TestingT
	block   int // tokens
	routers []*Router
	ranks   []*fleetRank
	lag     time.Duration
	now     time.Duration
	due     fleetQueue
	events  uint64
	jobs    uint64
	choice  Decision

	homes          map[string]RankID // session → rank of its turn before
	turns, good    int
	returns, stays int // turns behind a first one, and those of them on the rank of the turn before
	sent           []fleetSent
}

type fleetSent struct {
	at   time.Duration
	rank RankID
}

type fleetRank struct {
	id    RankID
	up    bool
	epoch uint64
	seq   uint64
	queue []*fleetJob // the first is being prefilled
	cache *fleetCache // what it has computed
	sent  *fleetCache // what it was sent
}

// fleetCache is the blocks of a rank that were used last.
type fleetCache struct {
	blocks map[uint64]*list.Element
	used   *list.List // of block hashes, used last in front
}

func newFleetCache() *fleetCache { return &fleetCache{map[uint64]*list.Element{}, list.New()} }

type fleetJob struct {
	id   uint64
	turn *fleetTurn
}

func newFleet(t require.TestingT, p Policy, block, routers int, lag time.Duration) *fleet {
	f := &fleet{t: t, block: block, lag: lag, homes: map[string]RankID{}}
	for i := range routers {
		f.routers = append(f.routers, NewRouter(p, uint64(i)+1))
	}
	for i := range fleetRanks {
		f.ranks = append(f.ranks, &fleetRank{id: ID(0, i)})
		f.start(i)
	}
	return f
}

// start brings a rank up, with nothing in its cache.
func (f *fleet) start(i int) {
	rk := f.ranks[i]
	rk.up, rk.seq, rk.queue, rk.cache, rk.sent = true, 0, nil, newFleetCache(), newFleetCache()
	rk.epoch++
	for _, r := range f.routers {
		r.Observe(&Event{
			Kind: EvRankUp, Rank: rk.id, Epoch: rk.epoch, Incarnation: rk.epoch, MaxOngoing: fleetRoom,
			Now:      f.now,
			Capacity: int64(fleetCapacity * f.block), BlockSize: f.block,
		})
	}
}

// kill ends a rank. What it has not answered comes again.
func (f *fleet) kill(i int) {
	rk := f.ranks[i]
	rk.up = false
	for _, r := range f.routers {
		r.Observe(&Event{Kind: EvRankDown, Rank: rk.id, Incarnation: rk.epoch, Now: f.now})
	}
	for _, job := range rk.queue {
		f.arrive(job.turn)
	}
}

// after does something later; of what is due at the same time, what was asked for first comes first.
func (f *fleet) after(d time.Duration, do func()) {
	f.events++
	heap.Push(&f.due, fleetEvent{f.now + d, f.events, do})
}

func (f *fleet) play(turns []fleetTurn) {
	for i := range turns {
		f.after(turns[i].at, func() { f.turns++; f.arrive(&turns[i]) })
	}
	for len(f.due) > 0 {
		e, ok := heap.Pop(&f.due).(fleetEvent)
		require.True(f.t, ok)
		f.now = e.at
		e.do()
	}
}

func (f *fleet) arrive(turn *fleetTurn) {
	f.jobs++
	job := &fleetJob{id: f.jobs, turn: turn}
	router := f.routers[int(job.id)%len(f.routers)]
	q := Request{
		ID: job.id, Now: f.now, Tokens: len(turn.chain) * f.block, Text: turn.text, Session: turn.session,
		Hits: f.hits(turn.chain),
	}
	router.Pick(&q, &f.choice)
	require.Equal(f.t, Route, f.choice.Kind)
	rk := f.ranks[f.choice.Ranked[0].Rank()]
	if home, ok := f.homes[turn.session]; ok {
		f.returns++
		if home == rk.id {
			f.stays++
		}
	}
	f.homes[turn.session] = rk.id
	f.sent = append(f.sent, fleetSent{f.now, rk.id})
	f.tell(rk, Event{
		Kind: EvAdmitted, ReqID: job.id, Tokens: q.Tokens, Hit: q.HitOn(rk.id),
		Session: SessionKey(q.Session),
	})
	router.Observe(&Event{Kind: EvTicket, Rank: rk.id, ReqID: job.id, Incarnation: rk.epoch, Seq: rk.seq})
	rk.sent.keep(turn.chain)
	if rk.queue = append(rk.queue, job); len(rk.queue) == 1 {
		f.prefill(rk)
	}
}

// tell sends the next record of a rank's stream.
func (f *fleet) tell(rk *fleetRank, e Event) {
	rk.seq++
	e.Rank, e.Incarnation, e.Seq = rk.id, rk.epoch, rk.seq
	f.after(f.lag, func() {
		e.Now = f.now
		for _, r := range f.routers {
			r.Observe(&e)
		}
	})
}

// prefill computes the first prompt of the rank's queue.
func (f *fleet) prefill(rk *fleetRank) {
	job, epoch, model := rk.queue[0], rk.epoch, steptime.Reference()
	chain := job.turn.chain
	hit := int64(min(rk.cache.holds(chain), len(chain)-1) * f.block)
	ms := model.FixedMS + model.Prefill(len(chain)*f.block-int(hit), int(hit))
	f.after(time.Duration(ms*float64(time.Millisecond)), func() {
		if !rk.up || rk.epoch != epoch {
			return // it has come again elsewhere
		}
		rk.cache.keep(chain)
		if f.now-job.turn.at <= fleetSLO {
			f.good++
		}
		f.tell(rk, Event{Kind: EvFirstToken, ReqID: job.id})
		f.after(time.Duration(job.turn.output)*fleetToken, func() {
			if rk.up && rk.epoch == epoch {
				f.tell(rk, Event{Kind: EvFinished, ReqID: job.id})
			}
		})
		if rk.queue = rk.queue[1:]; len(rk.queue) > 0 {
			f.prefill(rk)
		}
	})
}

// hits is what the ranks hold of a prompt now.
func (f *fleet) hits(chain []uint64) []Hit {
	var hits []Hit
	for _, rk := range f.ranks {
		if n := rk.sent.holds(chain); rk.up && n > 0 {
			hits = append(hits, Hit{Rank: rk.id, Tokens: int32(n * f.block)})
		}
	}
	return hits
}

// holds is how many leading blocks of a chain are in the cache.
func (c *fleetCache) holds(chain []uint64) int {
	n := 0
	for n < len(chain) && c.blocks[chain[n]] != nil {
		n++
	}
	return n
}

// keep enters a prompt's blocks, the last first, so that a chain loses its end before its beginning.
func (c *fleetCache) keep(chain []uint64) {
	for _, hash := range slices.Backward(chain) {
		if e := c.blocks[hash]; e != nil {
			c.used.MoveToFront(e)
			continue
		}
		c.blocks[hash] = c.used.PushFront(hash)
	}
	for c.used.Len() > fleetCapacity {
		delete(c.blocks, c.used.Remove(c.used.Back()).(uint64))
	}
}

// goodput is the share of requests whose first token came in time.
func (f *fleet) goodput() float64 { return float64(f.good) / float64(f.turns) }

// stability is the share of later turns that went to the rank of the turn before.
func (f *fleet) stability() float64 { return float64(f.stays) / float64(f.returns) }

// share is a rank's part of what was sent in a span of time.
func (f *fleet) share(id RankID, from, to time.Duration) float64 {
	n, all := 0.0, 0.0
	for _, s := range f.sent {
		if s.at >= from && s.at < to {
			all++
			if s.rank == id {
				n++
			}
		}
	}
	return n / all
}

type fleetEvent struct {
	at    time.Duration
	order uint64
	do    func()
}

// fleetQueue is what is to come, the next first.
type fleetQueue []fleetEvent

func (q fleetQueue) Len() int { return len(q) }
func (q fleetQueue) Less(i, k int) bool {
	return q[i].at < q[k].at || q[i].at == q[k].at && q[i].order < q[k].order
}
func (q fleetQueue) Swap(i, k int) { q[i], q[k] = q[k], q[i] }
func (q *fleetQueue) Push(x any)   { *q = append(*q, x.(fleetEvent)) }
func (q *fleetQueue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	*q = (*q)[:last]
	return e
}

// RA4: Every Router measures the prefill work of all ingresses, each request once: η is the same for one
// Router and for each of sixteen.
func TestPrefillUtilisationIsThatOfAllIngresses(t *testing.T) {
	turns := agentTurns(3, 0.4, time.Minute)
	turns = slices.DeleteFunc(turns, func(turn fleetTurn) bool { return turn.at > time.Minute })
	eta := func(r *Router) float64 {
		_, v := r.Why(&Request{ID: 1 << 40, Tokens: 1000})
		return delay(v.Rho)
	}
	alone := 0.0
	for _, k := range []int{1, 4, 16} {
		// Records come at once, and requests go where they go with one Router.
		f := newFleet(t, newPolicy(t, "mex"), agentBlock, k, 0)
		for i := range turns {
			f.after(turns[i].at, func() {
				f.jobs++
				rk := f.ranks[i%fleetRanks]
				tokens := len(turns[i].chain) * agentBlock
				q := Request{
					ID: f.jobs, Now: f.now, Tokens: tokens, HasDirect: true, Direct: rk.id,
					Force: true,
				}
				r := f.routers[i%k]
				r.Pick(&q, &f.choice)
				f.tell(rk, Event{Kind: EvAdmitted, ReqID: q.ID, Tokens: q.Tokens})
				// one that comes twice counts once
				f.tell(rk, Event{Kind: EvAdmitted, ReqID: q.ID, Tokens: q.Tokens})
				r.Observe(&Event{
					Kind: EvTicket, Rank: rk.id, ReqID: q.ID, Incarnation: rk.epoch,
					Seq: rk.seq,
				})
			})
		}
		f.play(nil)
		if k == 1 {
			alone = eta(f.routers[0])
			require.Greater(t, alone, 0.1)
			require.Less(t, alone, 5.0, "below its bound")
		}
		for i, r := range f.routers {
			require.InDelta(t, alone, eta(r), 1e-9, "Router %d of %d", i, k)
		}
	}
}

// RA5: Homes are kept behind several Routers as behind one: the ranks' streams tell each Router where the
// others sent a session, and what the others' prompts left on the ranks.
func TestSessionsKeepTheirRankBehindSeveralRouters(t *testing.T) {
	span := 4 * time.Minute
	if testing.Short() {
		span = 2 * time.Minute
	}
	turns := agentTurns(11, 1, span)
	for _, p := range []Policy{
		newPolicy(t, "session-affinity"), tuned(t, "prefix-aware"), newPolicy(t, "prefix-aware"),
		newPolicy(t, "cache-aware"),
	} {
		t.Run(fmt.Sprintf("%+v", p), func(t *testing.T) {
			one := newFleet(t, p, agentBlock, 1, 20*time.Millisecond)
			one.play(turns)
			t.Logf("1 Router, 20 ms: goodput %.3f, stability %.3f", one.goodput(), one.stability())
			for _, c := range []struct {
				routers int
				lag     time.Duration
			}{{2, 20 * time.Millisecond}, {4, 100 * time.Millisecond}} {
				many := newFleet(t, p, agentBlock, c.routers, c.lag)
				many.play(turns)
				t.Logf("%d Routers, %v: goodput %.3f, stability %.3f", c.routers, c.lag, many.goodput(),
					many.stability())
				require.GreaterOrEqual(t, many.goodput(), one.goodput()-0.03)
				require.GreaterOrEqual(t, many.stability(), one.stability()-0.03)
			}
		})
	}
}

// RA6: A rank that dies and comes back empty gets requests within a minute, and nobody pays for it.
func TestAReturnedRankIsUsedWithinAMinute(t *testing.T) {
	const dies, returns, end = 300 * time.Second, 420 * time.Second, 540 * time.Second
	turns := agentTurns(12, 1, end)
	for _, routers := range []int{1, 4} {
		t.Run(fmt.Sprint(routers), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t, newPolicy(t, "mex"), agentBlock, routers, 100*time.Millisecond)
			f.after(dies, func() { f.kill(3) })
			f.after(returns, func() { f.start(3) })
			f.play(turns)
			share := f.share(ID(0, 3), returns, returns+time.Minute)
			t.Logf("goodput %.3f, share %.3f in 10 s, %.3f in 60 s, %.3f later", f.goodput(),
				f.share(ID(0, 3), returns, returns+10*time.Second), share,
				f.share(ID(0, 3), returns+time.Minute, end))
			require.GreaterOrEqual(t, share, 0.04)
			require.LessOrEqual(t, share, 0.25)
			require.GreaterOrEqual(t, f.goodput(), 0.99)
		})
	}
}

// RA7: A short question behind a system prompt of 2,048 tokens, 300 of them a second, cold caches: policies
// that weigh work use all ranks, scoring keeps to the rank that was warm first, whatever waits there.
// docs/routing-reference.md has these numbers.
func TestASharedSystemPromptPinsScoring(t *testing.T) {
	const block, requests, perSecond = 256, 4000, 300
	rnd, at := seeded(7), time.Duration(0)
	var turns []fleetTurn
	for i := range uint64(requests) {
		turn := fleetTurn{at: at, session: fmt.Sprint(i), output: 10}
		for k := range uint64(9) {
			hash := spread(k + 1)
			if k == 8 {
				hash = spread(i<<8 + 1<<40)
			}
			turn.chain, turn.text = append(turn.chain, hash), fmt.Appendf(turn.text, "%016x", hash)
		}
		turns = append(turns, turn)
		at += time.Duration(rnd.ExpFloat64() / perSecond * float64(time.Second))
	}
	// the shortest queue among the ranks that have the prompt, ties drawn
	limits := map[string]float64{namePrefixAware: 2}
	pinned := map[string]bool{nameScoring: true}
	for _, p := range []Policy{
		LMetric{},
		LPWL{},
		newPolicy(t, "mex"),
		tuned(t, "kv"),
		tuned(t, "cache-aware"),
		tuned(t, "least-kv"), tuned(t, "prefix-aware"), newPolicy(t, "scoring"),
	} {
		t.Run(fmt.Sprintf("%+v", p), func(t *testing.T) {
			f := newFleet(t, p, block, 1, 20*time.Millisecond)
			f.play(turns)
			most := 0.0
			for _, rk := range f.ranks {
				most = max(most, f.share(rk.id, 0, at))
			}
			t.Logf("%s: max/mean %.2f, goodput %.3f", p.Name(), most*fleetRanks, f.goodput())
			if pinned[p.Name()] {
				require.Less(t, f.goodput(), 0.2)
				return
			}
			require.Less(t, most*fleetRanks, max(1.3, limits[p.Name()]))
			require.Greater(t, f.goodput(), 0.95)
		})
	}
}

// BenchmarkAgentsBehindRouters plays ten minutes of agent sessions and reports goodput, here the share of
// requests whose first token came within 2 s, in percent. docs/routing-reference.md has the numbers.
func BenchmarkAgentsBehindRouters(b *testing.B) {
	turns := agentTurns(11, 1, 10*time.Minute)
	const ms = time.Millisecond
	for _, p := range []Policy{
		newPolicy(b, "mex"),
		LMetric{},
		LPWL{},
		tuned(b, "kv"), newPolicy(b, "scoring"),
		tuned(b, "cache-aware"), newPolicy(b, "cache-aware"), newPolicy(b, "prefix-aware"),
		tuned(b, "prefix-aware"),
		newPolicy(b, "session-affinity"), newPolicy(b, "least-loaded"),
	} {
		for _, c := range []struct {
			routers int
			lag     time.Duration
		}{{1, 20 * ms}, {4, 20 * ms}, {4, 100 * ms}, {4, 500 * ms}, {16, 500 * ms}} {
			b.Run(fmt.Sprintf("%+v/%d/%v", p, c.routers, c.lag), func(b *testing.B) {
				for b.Loop() {
					f := newFleet(b, p, agentBlock, c.routers, c.lag)
					f.play(turns)
					b.ReportMetric(100*f.goodput(), "goodput%")
					b.ReportMetric(f.stability(), "stability")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
