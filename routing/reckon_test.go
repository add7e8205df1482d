package routing

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/steptime"
)

// modelOf is how long the cost model gives a prompt on a rank that decodes nothing, stretched by the rank's
// slowness.
func modelOf(tokens, hit int, slowness float64) time.Duration {
	model := steptime.Reference()
	return time.Duration(slowness * model.Prefill(tokens-hit, hit) * model.Stretch(0, 0,
		stepTokens) * float64(time.Millisecond))
}

// told is one rank and the time at which its records are told.
type told struct {
	r    *Router
	rank RankID
	seq  uint64
	now  time.Duration
}

func newTold(p Policy) *told { return &told{r: routerWith(p, 1, 1000), rank: ID(0, 0)} }

func (s *told) tell(kind EventKind, key uint64, tokens, hit int) {
	s.seq++
	s.r.Observe(&Event{
		Kind: kind, Rank: s.rank, ReqID: key, Tokens: tokens, Hit: hit, Out: 1, Incarnation: 7,
		Seq: s.seq, Now: s.now,
	})
}

// work is the rank's row as a pick at now would see it.
func (s *told) work(now time.Duration) (q, pairs int64) {
	_, v := s.r.Why(&Request{Now: now})
	return v.Ranks[0].Load.Q, v.Ranks[0].Pairs
}

// While a prompt is being computed its work goes down as the cost model says, to nothing and not below; those
// behind it wait until its end is told, however late that is.
func TestWorkGoesDownWhileAPromptIsComputed(t *testing.T) {
	const first, second, hit = 40_000, 9_000, 1_000
	s := newTold(LPWL{})
	s.now = time.Second
	s.tell(EvAdmitted, 1, first, 0)
	s.now += 100 * time.Millisecond
	s.tell(EvAdmitted, 2, second, hit)
	takes := modelOf(first, 0, 1)
	for _, at := range []float64{0, 0.25, 0.5, 1, 3} {
		q, pairs := s.work(time.Second + time.Duration(at*float64(takes)))
		left := first * max(0, 1-at)
		if at == 0 {
			// the Router's time does not go back
			left = first * (1 - float64(100*time.Millisecond)/float64(takes))
		}
		assert.InDelta(t, left+second-hit, float64(q), 2, "%v of the prefill", at)
		assert.InDelta(t, left*left+2*left*(first-left)+float64(attention(second-hit, hit)), float64(pairs),
			4*first, "%v of the prefill", at)
	}
	s.now = time.Second + takes
	s.tell(EvFirstToken, 1, 0, 0)
	q, _ := s.work(s.now)
	assert.Equal(t, int64(second-hit), q, "its turn comes now")
	q, _ = s.work(s.now + modelOf(second, hit, 1)/2)
	assert.InDelta(t, (second-hit)/2, float64(q), 50, "beside one decode")
	assert.Equal(t, Load{F: 1, R: 1, Q: second - hit, K: first, Kq: second}, loadOf(s.r, s.rank))
}

// RA1: The prompt that is first counts as being prefilled, the others as waiting: least-loaded then is vLLM's
// 4·W + (F+R).
func TestTheFirstPromptIsPrefilling(t *testing.T) {
	s := newTold(LeastLoaded{})
	for key := range uint64(4) {
		s.tell(EvAdmitted, key+1, 100, 0)
	}
	assert.Equal(t, []int{3, 1, 0},
		[]int{loadOf(s.r, s.rank).W, loadOf(s.r, s.rank).F, loadOf(s.r, s.rank).R})
	s.tell(EvFirstToken, 1, 0, 0)
	assert.Equal(t, []int{2, 1, 1},
		[]int{loadOf(s.r, s.rank).W, loadOf(s.r, s.rank).F, loadOf(s.r, s.rank).R})
	d := s.r.Explain(&Request{})
	assert.InDelta(t, 4*2+(1+1), d.Terms[0].Value+d.Terms[1].Value, 0)
	for key := range uint64(4) {
		s.tell(EvFinished, key+1, 0, 0)
	}
	assert.Equal(t, Load{}, loadOf(s.r, s.rank))
}

// RA1: A rank's prompts go down at the speed that the rank has shown: five times slower, or by a cost model
// that is 30 % wrong.
func TestWorkGoesDownAtTheRanksOwnSpeed(t *testing.T) {
	const tokens = 4096
	for _, slowness := range []float64{0.1, 0.7, 1, 1.3, 5} {
		t.Run(fmt.Sprint(slowness), func(t *testing.T) {
			s := newTold(LPWL{})
			takes := modelOf(tokens, 0, slowness)
			for key := uint64(1); key <= 60; key++ {
				s.tell(EvAdmitted, key, tokens, 0)
				s.now += takes
				s.tell(EvFirstToken, key, 0, 0)
				s.tell(EvFinished, key, 0, 0)
			}
			s.tell(EvAdmitted, 99, tokens, 0)
			q, _ := s.work(s.now + takes/2)
			assert.InEpsilon(t, tokens/2, float64(q), 0.1)
			s.r.Observe(&Event{
				Kind: EvRankUp, Rank: s.rank, Epoch: 2, Incarnation: 8, MaxOngoing: 9,
				Snapshot: []Open{{ReqID: 99, Tokens: tokens}},
			})
			q, _ = s.work(s.now + takes/2)
			assert.InEpsilon(t, tokens/2, float64(q), 0.2,
				"another incarnation is taken to be as the application's ranks are")
		})
	}
}

// Prompts that end in one step are told at once, one after the other: together they show the speed.
func TestSpeedOfPromptsThatShareAStep(t *testing.T) {
	s := newTold(LPWL{})
	for key := uint64(1); key <= 80; key += 4 {
		for k := range uint64(4) {
			s.tell(EvAdmitted, key+k, 2048, 0)
		}
		s.now += modelOf(2048, 0, 4*2)
		for k := range uint64(4) {
			s.tell(EvFirstToken, key+k, 0, 0)
			s.tell(EvFinished, key+k, 0, 0)
		}
	}
	assert.InDelta(t, 2, s.r.accounts[0].queue.speed.slowness(1), 0.35)
}

// A request that is given up while its prompt is computed gives its turn to the next one; one that waits
// takes none away.
func TestTheTurnPassesOnWhenARequestIsGivenUp(t *testing.T) {
	s := newTold(LPWL{})
	for key := range uint64(3) {
		s.tell(EvAdmitted, key+1, 10_000, 0)
	}
	takes := modelOf(10_000, 0, 1)
	s.now = takes / 2
	s.tell(EvFinished, 2, 0, 0)
	q, _ := s.work(s.now)
	assert.InDelta(t, 15_000, float64(q), 2)
	s.tell(EvFinished, 1, 0, 0)
	q, _ = s.work(s.now)
	assert.Equal(t, int64(10_000), q)
	q, _ = s.work(s.now + takes/4)
	assert.InDelta(t, 7_500, float64(q), 2)
}

// checkReckoned reports that every row is within its account: what is taken off is of the first prompt, and
// no more than it.
func checkReckoned(t *rapid.T, r *Router) {
	r.reckon(r.view.Now)
	for i := range r.accounts {
		a, rk := &r.accounts[i], &r.view.Ranks[i]
		whole, pairs, n := int64(0), int64(0), 0
		for k := range a.opens.cells {
			if o := &a.opens.cells[k]; o.phase != free && o.hasPrefill() {
				whole, pairs, n = whole+o.uncached(), pairs+o.pairs(), n+1
				require.Equal(t, []int32{o.tokens, o.hit},
					[]int32{a.queue.at(o.slot).tokens, a.queue.at(o.slot).hit})
			} else if o.phase != free {
				require.Zero(t, o.slot)
			}
		}
		first := int64(0)
		if a.queue.first != 0 {
			f := a.queue.at(a.queue.first)
			first = int64(f.tokens - f.hit)
		}
		require.GreaterOrEqual(t, rk.Load.Q, whole-first)
		require.LessOrEqual(t, rk.Load.Q, whole)
		require.GreaterOrEqual(t, rk.Pairs, int64(0))
		require.LessOrEqual(t, rk.Pairs, pairs)
		queued, before := 0, int32(0)
		for slot := a.queue.first; slot != 0; slot = a.queue.at(slot).next {
			require.Equal(t, before, a.queue.at(slot).prev)
			queued, before = queued+1, slot
		}
		require.Equal(t, before, a.queue.last)
		require.Equal(t, n, queued)
		require.Equal(t, []int{min(n, 1), max(n-1, 0)}, []int{rk.Load.F, rk.Load.W})
	}
}

// RA1: Whatever comes in whatever order at whatever time: the work left is neither negative nor more than the
// whole, goes down while nothing comes, and is exactly zero when all has ended.
func TestReckonedWorkIsWithinTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := NewRouter(LPWL{}, 1)
		now, seq := time.Duration(0), uint64(1)
		for range rapid.IntRange(1, 120).Draw(t, "length") {
			now += time.Duration(rapid.Int64Range(0, int64(2*time.Second)).Draw(t, "later"))
			e := drawEvent(t, seq)
			e.Now, e.Tokens, e.Hit = now, e.Tokens*1000, e.Hit*500
			if rapid.IntRange(0, 9).Draw(t, "early") == 0 {
				e.Now = 0
			}
			seq = max(seq, e.Seq)
			r.Observe(&e)
			checkReckoned(t, r)
			if rapid.Bool().Draw(t, "explained") {
				q := Request{ID: 1 << 50, Tokens: 100, Now: now +
					time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "ahead"))}
				before := r.Snapshot()
				_, later := r.Why(&q)
				for i := range later.Ranks {
					require.LessOrEqual(t, later.Ranks[i].Load.Q, before.Ranks[i].Load.Q)
					require.LessOrEqual(t, later.Ranks[i].Pairs, before.Ranks[i].Pairs)
				}
				require.Equal(t, before, r.Snapshot(), "explaining changes nothing")
			}
		}
		for i := range r.view.Ranks {
			rk := &r.view.Ranks[i]
			for key := range uint64(41) {
				r.Observe(&Event{
					Kind: EvFinished, Rank: rk.ID, ReqID: key, Incarnation: rk.Incarnation,
					Seq: seq + 10, Now: now + time.Second,
				})
			}
		}
		for _, rk := range r.Snapshot().Ranks {
			require.Equal(t, Load{}, rk.Load)
			require.Zero(t, rk.Pairs)
		}
	})
}

// RA1: What explain shows is what a pick at the same instant sees, while prompts are under way.
func TestExplainShowsTheReckonedWork(t *testing.T) {
	for _, p := range allPolicies(t) {
		r := routerWith(p, 3, 100)
		for i := range 3 {
			r.Observe(&Event{
				Kind: EvAdmitted, Rank: ID(0, i), ReqID: uint64(i) + 1, Incarnation: 7, Seq: 1,
				Tokens: 20_000 * (i + 1), Now: time.Second,
			})
		}
		q := Request{ID: 9, Tokens: 500, HasDirect: true, Direct: ID(0, 1), Now: 2 * time.Second}
		want, d := r.Explain(&q), Decision{Explain: true}
		r.Pick(&q, &d)
		require.True(t, slices.Equal(want.Terms, d.Terms), "%+v", p)
		require.Equal(t, want.Ranked, d.Ranked, "%+v", p)
	}
}

// A policy for which nothing is reckoned decides alike whatever the prefill work is; for all others some work
// makes a difference.
func TestPoliciesThatDoNotReadWorkAreNamed(t *testing.T) {
	for _, p := range allPolicies(t) {
		t.Run(fmt.Sprintf("%+v", p), func(t *testing.T) {
			reads := false
			rapid.Check(t, func(t *rapid.T) {
				v := drawView(t)
				q := drawRequest(t, &v)
				other := v
				other.Ranks = slices.Clone(v.Ranks)
				for i := range other.Ranks {
					other.Ranks[i].Load.Q, other.Ranks[i].Pairs = rapid.Int64Range(0, 1<<20).Draw(t, "work"),
						rapid.Int64Range(0, 1<<20).Draw(t, "pairs")
				}
				a, b := Decision{Explain: true}, Decision{Explain: true}
				p.Decide(&q, &v, p.NewState(&v, seeded(3)), seeded(4), &a)
				p.Decide(&q, &other, p.NewState(&other, seeded(3)), seeded(4), &b)
				reads = reads || !slices.Equal(a.Terms, b.Terms) || !slices.Equal(a.Ranked, b.Ranked)
			})
			assert.Equal(t, readsWork(p), reads)
		})
	}
}

func TestReckoningDoesNotAllocate(t *testing.T) {
	c := newCacheCycle(LMetric{}, 8)
	now := time.Duration(0)
	step := func() {
		now += time.Millisecond
		c.q.Now = now
		c.step()
	}
	for range 1000 {
		step()
	}
	assert.InDelta(t, 0, testing.AllocsPerRun(1000, step), 0)
}

// BenchmarkReckon is what a pick costs more over ranks of which each has prompts under way: all of them are
// reckoned, and one of them has changed since the last pick.
func BenchmarkReckon(b *testing.B) {
	for _, ranks := range []int{8, 64, 1024} {
		b.Run(fmt.Sprintf("ranks=%d", ranks), func(b *testing.B) {
			r, now := newCacheCycle(LMetric{}, ranks).r, time.Duration(0)
			b.ReportAllocs()
			for b.Loop() {
				now += time.Microsecond
				r.accounts[0].queue.front.rate = 0
				r.reckon(now)
			}
		})
	}
}

// A snapshot lists requests in the order of their admission: the first of them that has no token yet is the
// one that is computed.
func TestASnapshotsFirstPromptIsComputedFirst(t *testing.T) {
	s := newTold(LPWL{})
	s.r.Observe(&Event{
		Kind: EvRankUp, Rank: s.rank, Epoch: 2, Incarnation: 8, MaxOngoing: 9,
		Now: time.Minute, Snapshot: []Open{
			{ReqID: 5, Tokens: 500, Decoding: true, Out: 3},
			{ReqID: 2, Tokens: 30_000},
			{ReqID: 1, Tokens: 1000},
		},
	})
	q, _ := s.work(time.Minute)
	assert.Equal(t, int64(31_000), q)
	q, _ = s.work(time.Minute + time.Hour)
	assert.Equal(t, int64(1000), q)
}

// A first token that nobody has seen ends a prompt, and says nothing of the rank's speed.
func TestAnAssumedFirstTokenMeasuresNothing(t *testing.T) {
	s := newTold(LPWL{})
	for key := uint64(1); key <= 60; key++ {
		s.tell(EvAdmitted, key, 4096, 0)
		s.now += modelOf(4096, 0, 5)
		s.seq++
		s.r.Observe(&Event{
			Kind: EvFirstToken, Rank: s.rank, ReqID: key, Assumed: true, Incarnation: 7,
			Seq: s.seq, Now: s.now,
		})
		assert.Equal(t, Load{R: 1, K: 4096}, loadOf(s.r, s.rank))
		s.tell(EvFinished, key, 0, 0)
	}
	assert.InDelta(t, 1, s.r.accounts[0].queue.speed.slowness(1), 1e-9)
}
