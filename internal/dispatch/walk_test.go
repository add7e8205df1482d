package dispatch

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/routing"
)

// walk sends requests through a proxy while engines and the proxy are stopped, killed and restarted at
// random.
func walk(t *testing.T, cfg Config, seed uint64, requests int, what walkFaults) *world {
	w := &world{
		walkFaults: what, rnd: rand.New(rand.NewPCG(seed, 1)), cfg: cfg, known: map[*fakeRank]uint64{},
		flights: map[*flight]bool{}, results: map[Result]int{}, ways: map[Way]int{}, notes: map[Note]int{},
	}
	w.rate = 0.92 + 0.16*w.rnd.Float64()
	for s, n := range [...]int{3, 4} {
		for i := range n {
			r := &fakeRank{
				w: w, side: Side(s), id: routing.ID(0, i), incarnation: 1, isAlive: true,
				legs: map[*fakeLeg]bool{}, cache: map[int]int{},
			}
			w.ranks[s] = append(w.ranks[s], r)
			w.known[r] = 1
		}
	}
	sent := 0
	var send, watch, others, ticks, faults func()
	send = func() {
		if sent++; sent > requests {
			return
		}
		w.proxy(0, func(Instant) { w.send() })
		w.after(time.Duration(w.rnd.ExpFloat64()*float64(25*time.Millisecond)), send)
	}
	isOpen := func() bool { return sent <= requests || len(w.flights) > 0 || len(w.deferred) > 0 }
	watch = func() {
		if isOpen() {
			w.proxy(0, func(Instant) {})
			w.after(WatchPeriod, watch)
		}
	}
	others = func() { // of other proxies: free memory gets their prompts
		if isOpen() {
			for _, r := range w.ranks[Prefill] {
				for _, s := range r.slots {
					if s.owner == nil && w.chance(50) {
						s.content = -1
					}
				}
			}
			w.after(100*time.Millisecond, others)
		}
	}
	ticks = func() { // late ones: timers are not exact
		if isOpen() {
			w.proxy(0, func(at Instant) {
				for _, f := range w.open() {
					if due, ok := f.plan.Deadline(); ok && due <= at.Now {
						f.step(at, Event{Kind: EvTick})
						if due, ok = f.plan.Deadline(); ok && due <= at.Now {
							w.overdue++
						}
					}
				}
			})
			w.after(w.between(10*time.Millisecond, 400*time.Millisecond), ticks)
		}
	}
	faults = func() {
		if sent > requests {
			return
		}
		side := w.ranks[w.rnd.IntN(2)]
		r := side[w.rnd.IntN(len(side))]
		switch n := w.rnd.IntN(8); {
		case n < 2 && w.stalls:
			w.freezeProxy(w.between(50*time.Millisecond, 50*time.Second))
		case n >= 2 && n < 4 && w.engines:
			if r.isAlive && w.now >= r.frozenUntil {
				r.frozenUntil = w.now + w.between(100*time.Millisecond, 45*time.Second)
			}
		default:
			r.kill()
		}
		w.after(w.between(200*time.Millisecond, 6*time.Second), faults)
	}
	send()
	watch()
	others()
	ticks()
	faults()
	for w.due.Len() > 0 {
		e := heap.Pop(&w.due).(worldEvent)
		w.now = max(w.now, e.at)
		e.do()
		require.Less(t, w.now, 24*time.Hour, "requests do not end: %d", len(w.flights))
	}
	return w
}

// send begins a request.
func (w *world) send() {
	f := &flight{
		w: w, plan: &Plan{}, prompt: 1 + w.rnd.IntN(300), isBad: w.chance(1), began: w.now,
		legs: map[uint32]*fakeLeg{}, tickets: map[uint32]int{}, params: map[uint64]*fakeParams{},
		written: map[uint32][2]int{}, pushed: map[uint32]*fakeLeg{}, ranks: map[uint32]*fakeRank{},
	}
	f.plan.Begin(&w.cfg, false)
	f.isPoison = w.poison > 0 && w.chance(w.poison)
	w.flights[f] = true
	w.all = append(w.all, f)
	f.step(w.instant(), Event{Kind: EvStart})
	if w.chance(3) {
		w.proxy(w.between(0, 2*time.Second), func(at Instant) {
			if w.flights[f] {
				f.step(at, Event{Kind: EvClientGone})
			}
		})
	}
}

// check holds what no fault may change.
func check(t *testing.T, w *world, requests int) {
	assert.Zero(t, w.wrong, "wrong texts")
	assert.Zero(t, w.twice, "parameters or ids that were used twice")
	assert.Zero(t, w.badRelease, "tickets that were returned twice, or never taken")
	assert.Zero(t, w.unfair, "charges for another's fault")
	assert.Zero(t, w.overdue, "legs beyond their limit")
	assert.Zero(t, w.waitsForDead, "legs that wait for a rank which is known to be gone")
	ended := 0
	for _, n := range w.results {
		ended += n
	}
	assert.Equal(t, requests, ended, "every request ends once")
	assert.Empty(t, w.flights)
	assert.LessOrEqual(t, w.mostDeaths, 2, "engines that died of one request")
	assert.Zero(t, w.leaked, "tickets that were not returned")
	assert.Greater(t, w.passed, requests/2, "most requests get their answer")
}

// RP29: 10,000 requests under random kills, stops, restarts and late clocks of both sides and the proxy, and
// as many in the other orders.
func TestWalk(t *testing.T) {
	for _, o := range []Order{PrefillFirst, DecodeFirst, Together} {
		for seed := range uint64(2) {
			t.Run(fmt.Sprintf("order %d seed %d", o, seed), func(t *testing.T) {
				t.Parallel()
				cfg := testConfig(o)
				cfg.FallbackFails = seed == 1
				w := walk(t, cfg, seed, 2000, walkFaults{engines: true, stalls: true})
				check(t, w, 2000)
				t.Logf("passed on %d, outcomes %v, ways %v, notes %v, alarms %d, longest %v", w.passed,
					w.results,
					w.ways, w.notes, w.alarms, w.longest)
			})
		}
	}
}

// TestWalkBounds: without a proxy that stands still, a request ends within the limits of its legs; and if
// engines only die, it waits for no limit at all: the longest streams have 3 s, and so has the wait for a
// decode rank.
func TestWalkBounds(t *testing.T) {
	for _, o := range []Order{PrefillFirst, DecodeFirst, Together} {
		for seed := range uint64(1) {
			cfg := testConfig(o)
			limits := 2*cfg.PrefillLimit + 2*cfg.DecodeLimit + time.Duration(cfg.Attempts+1)*cfg.LocalLimit
			w := walk(t, cfg, seed, 2000, walkFaults{engines: true})
			check(t, w, 2000)
			assert.Less(t, w.longest, limits)
			w = walk(t, cfg, seed, 2000, walkFaults{})
			check(t, w, 2000)
			assert.Less(t, w.longest, 12*time.Second)
		}
	}
}

// RP23, RP24: every engine dies that gets one of a few requests.
func TestWalkOfDeaths(t *testing.T) {
	for _, o := range []Order{PrefillFirst, DecodeFirst, Together} {
		for seed := range uint64(2) {
			cfg := testConfig(o)
			w := walk(t, cfg, seed, 1500, walkFaults{poison: 0.4})
			check(t, w, 1500)
			assert.Equal(t, 2, w.mostDeaths)
			cfg.FallbackFails = true
			check(t, walk(t, cfg, seed, 1500, walkFaults{poison: 0.4}), 1500)
		}
	}
}

// RP24: a shell that takes dead engines for such that refuse connections kills more of them. So the walk is
// able to see it.
func TestWalkSeesDeaths(t *testing.T) {
	w := walk(t, testConfig(Together), 1, 1500, walkFaults{poison: 0.4, hides: true})
	assert.Greater(t, w.mostDeaths, 2)
}

// TestWalkSeesWrongTexts: a proxy that believes in longer leases than the engines keep, and does not notice
// that it stood still, passes wrong texts on. So the walk is able to see them.
func TestWalkSeesWrongTexts(t *testing.T) {
	cfg := testConfig(PrefillFirst)
	cfg.Lease, cfg.DecodeLimit = time.Hour, time.Minute
	wrong := 0
	for seed := range uint64(5) {
		wrong += walk(t, cfg, seed, 2000, walkFaults{engines: true, stalls: true, isBlind: true}).wrong
	}
	assert.Positive(t, wrong)
}
