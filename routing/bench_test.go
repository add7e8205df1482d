package routing

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// cycle is one request's whole life in a Router: pick, ticket and four records.
type cycle struct {
	r   *Router
	d   Decision
	q   Request
	e   Event
	seq map[RankID]uint64
}

func newCycle(r *Router) *cycle { return &cycle{r: r, seq: map[RankID]uint64{}} }

func (c *cycle) pick() {
	c.q.ID++
	c.q.Tokens = 100
	c.q.HasDirect, c.q.Direct = true, ID(0, int(c.q.ID%4))
	c.r.Pick(&c.q, &c.d)
}

func (c *cycle) send(kind EventKind, seq uint64) {
	c.e = Event{Kind: kind, Rank: c.d.Ranked[0], ReqID: c.q.ID, Incarnation: 7, Seq: seq, Tokens: 100, Out: 7}
	c.r.Observe(&c.e)
}

func (c *cycle) records() {
	n := c.seq[c.d.Ranked[0]]
	c.send(EvTicket, n+1)
	c.send(EvAdmitted, n+1)
	c.send(EvFirstToken, n+2)
	c.send(EvProgress, n+3)
	c.send(EvFinished, n+4)
	c.seq[c.d.Ranked[0]] = n + 4
}

func TestPickAndObserveDoNotAllocate(t *testing.T) {
	forEachPolicy(t, func(t *testing.T, p Policy) {
		c := newCycle(routerWith(p, 64, 256))
		live := 0
		step := func() {
			c.pick()
			if live++; live%2 == 0 { // half of them stay open for a while
				c.records()
				return
			}
			c.send(EvUndo, 0)
		}
		for range 2000 {
			step()
		}
		assert.InDelta(t, 0, testing.AllocsPerRun(2000, step), 0)
	})
}

func TestRankTableDoesNotAllocateOverALongDay(t *testing.T) {
	var table opens
	key := uint64(0)
	step := func() {
		key++
		table.add(open{key: key, phase: bumped})
		if key > 300 {
			table.remove(key - 300)
		}
	}
	for range 1000 {
		step()
	}
	assert.InDelta(t, 0, testing.AllocsPerRun(20000, step), 0)
	assert.Equal(t, 300, table.n)
}

// loaded is a Router in the middle of its day: 64 ranks, about 32 open requests each.
func loaded(p Policy) *cycle {
	c := newCycle(routerWith(p, 64, 256))
	for range 64 * 32 {
		c.pick()
	}
	return c
}

// benchmarkPick times picks in batches of picksPerBatch; the undo between them is not timed.
func benchmarkPick(b *testing.B, p Policy) (nsPerPick float64) {
	const batch = 512
	c := loaded(p)
	ranks := make([]RankID, batch)
	var spent time.Duration
	picks := 0
	b.ReportAllocs()
	for b.Loop() {
		first := c.q.ID
		begun := time.Now()
		for i := range batch {
			c.q.ID++
			c.r.Pick(&c.q, &c.d)
			ranks[i] = c.d.Ranked[0]
		}
		spent += time.Since(begun)
		picks += batch
		for i, rank := range ranks {
			c.e = Event{Kind: EvUndo, Rank: rank, ReqID: first + 1 + uint64(i)}
			c.r.Observe(&c.e)
		}
	}
	return float64(spent.Nanoseconds()) / float64(picks)
}

// baseline is the least a pick can be: a lock and one random number.
func baseline() float64 {
	const n = 1 << 20
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(1, 2))
	v := make([]Rank, 64)
	sum := 0
	begun := time.Now()
	for range n {
		mu.Lock()
		sum += v[r.IntN(len(v))].Load.O()
		mu.Unlock()
	}
	if sum != 0 {
		return 0
	}
	return float64(time.Since(begun).Nanoseconds()) / n
}

func report(b *testing.B, nsPerPick float64) {
	base := baseline()
	b.ReportMetric(nsPerPick, "ns/pick")
	b.ReportMetric(base, "ns/baseline")
	b.ReportMetric(nsPerPick/base, "x/baseline")
}

func BenchmarkPickPowerOfTwo64(b *testing.B)  { report(b, benchmarkPick(b, PowerOfTwo{})) }
func BenchmarkPickRandom64(b *testing.B)      { report(b, benchmarkPick(b, Random{})) }
func BenchmarkPickLeastLoaded64(b *testing.B) { report(b, benchmarkPick(b, LeastLoaded{})) }
func BenchmarkPickRoundRobin64(b *testing.B)  { report(b, benchmarkPick(b, RoundRobin{})) }

// BenchmarkObserve is one request's ticket and four records, per event.
func BenchmarkObserve(b *testing.B) {
	c := loaded(PowerOfTwo{})
	var spent time.Duration
	events := 0
	b.ReportAllocs()
	for b.Loop() {
		c.pick()
		begun := time.Now()
		c.records()
		spent += time.Since(begun)
		events += 5
	}
	b.ReportMetric(float64(spent.Nanoseconds())/float64(events), "ns/event")
}
