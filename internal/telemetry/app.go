package telemetry

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// App counts for one application under one policy. All methods are safe for concurrent use, and lock-free and
// without allocation for a known label combination. Label strings must come from closed lists, because each
// new one is a new series.
type App struct {
	vecs *vectors
	name string

	queueLength, queueTokens  prometheus.Gauge
	queueWait, decision       prometheus.Observer
	prompt, cached, generated prometheus.Counter
	routes                    children[string, *routeTimes]
	requests                  counters[requestKey]
	attempts, retries         counters[causeKey]
	continued                 counters[continuedKey]
	refusals, tokenize        counters[string]
	picks                     counters[pickKey]

	streams            goodput
	ttftGoal, tpotGoal atomic.Int64 // ns
}

// routeTimes holds the histograms of one route.
type routeTimes struct{ total, ttft, itl prometheus.Observer }

type requestKey struct {
	route string
	code  int
}

type causeKey struct{ cause, budget string }

type continuedKey struct{ cause, result string }

type pickKey struct {
	group, rank int
	reason      string
}

func newApp(v *vectors, name, policy string) *App {
	return &App{
		vecs:        v,
		name:        name,
		queueLength: v.queueLength.WithLabelValues(name),
		queueTokens: v.queueTokens.WithLabelValues(name),
		queueWait:   v.queueWait.WithLabelValues(name),
		decision:    v.decision.WithLabelValues(name, policy),
		prompt:      v.tokens.WithLabelValues(name, "prompt"),
		cached:      v.tokens.WithLabelValues(name, "cached"),
		generated:   v.tokens.WithLabelValues(name, "generated"),
		streams: goodput{
			met: v.goodput.WithLabelValues(name, "met"), missed: v.goodput.WithLabelValues(name, "missed"),
		},
	}
}

// Request counts an answered request: its route, HTTP status (499: the client left), total duration, and time
// to the first byte with content (0: the server sent none).
func (a *App) Request(route string, code int, dur, ttft time.Duration) {
	a.requests.inc(requestKey{route, code}, func() prometheus.Counter {
		return a.vecs.requests.WithLabelValues(a.name, route, strconv.Itoa(code))
	})
	t, ok := a.route(route)
	if !ok {
		return
	}
	t.total.Observe(dur.Seconds())
	if ttft > 0 {
		t.ttft.Observe(ttft.Seconds())
	}
}

// ITL counts the time between two chunks of a stream.
func (a *App) ITL(route string, d time.Duration) {
	if t, ok := a.route(route); ok {
		t.itl.Observe(d.Seconds())
	}
}

func (a *App) route(route string) (*routeTimes, bool) {
	return a.routes.get(route, func() *routeTimes {
		return &routeTimes{
			total: a.vecs.requestSeconds.WithLabelValues(a.name, route),
			ttft:  a.vecs.ttft.WithLabelValues(a.name, route),
			itl:   a.vecs.itl.WithLabelValues(a.name, route),
		}
	})
}

// Queue sets the present length of the queue: requests, and their prompt tokens.
func (a *App) Queue(n int, tokens int64) {
	a.queueLength.Set(float64(n))
	a.queueTokens.Set(float64(tokens))
}

// QueueWait counts the time a request spent in the queue.
func (a *App) QueueWait(d time.Duration) { a.queueWait.Observe(d.Seconds()) }

// Tokens adds the counts of an answer's usage: prompt tokens (cached ones included), cached prompt tokens,
// generated tokens. It ignores negative numbers, which only a broken engine sends, because a counter cannot
// decrease.
func (a *App) Tokens(prompt, cached, generated int) {
	addTokens(a.prompt, prompt)
	addTokens(a.cached, cached)
	addTokens(a.generated, generated)
}

func addTokens(c prometheus.Counter, n int) {
	if n > 0 {
		c.Add(float64(n))
	}
}

// Attempt counts one dispatch to a rank by its outcome; cause and budget (free, drawn, empty) come from
// closed lists.
func (a *App) Attempt(cause, budget string) {
	a.attempts.inc(causeKey{cause, budget}, func() prometheus.Counter {
		return a.vecs.attempts.WithLabelValues(a.name, cause, budget)
	})
}

// Retry counts a failed dispatch that was repeated on another rank.
func (a *App) Retry(cause, budget string) {
	a.retries.inc(causeKey{cause, budget}, func() prometheus.Counter {
		return a.vecs.retries.WithLabelValues(a.name, cause, budget)
	})
}

// Continued counts a stream that broke after its first byte, by cause and by what became of it: continued, or
// lost.
func (a *App) Continued(cause, result string) {
	a.continued.inc(continuedKey{cause, result}, func() prometheus.Counter {
		return a.vecs.continued.WithLabelValues(a.name, cause, result)
	})
}

// Refusal counts a rank's refusal by its code.
func (a *App) Refusal(code string) {
	a.refusals.inc(code, func() prometheus.Counter { return a.vecs.refusals.WithLabelValues(a.name, code) })
}

// Decision observes the time of one routing decision.
func (a *App) Decision(d time.Duration) { a.decision.Observe(d.Seconds()) }

// Pick counts a picked rank by the policy's reason.
func (a *App) Pick(group, rank int, reason string) {
	a.picks.inc(pickKey{group, rank, reason}, func() prometheus.Counter {
		return a.vecs.picks.WithLabelValues(a.name, strconv.Itoa(group), strconv.Itoa(rank), reason)
	})
}

// keepRanks deletes the picks of the ranks that exists does not know.
func (a *App) keepRanks(exists func(group, rank int) bool) {
	a.picks.drop(func(k pickKey) bool {
		if exists(k.group, k.rank) {
			return false
		}
		a.vecs.picks.DeleteLabelValues(a.name, strconv.Itoa(k.group), strconv.Itoa(k.rank), k.reason)
		return true
	})
}

// forget closes all caches, so that a late caller cannot recreate deleted series.
func (a *App) forget() {
	a.routes.close()
	a.requests.close()
	a.attempts.close()
	a.retries.close()
	a.continued.close()
	a.refusals.close()
	a.picks.close()
	a.tokenize.close()
}

// Tokenize counts a text prompt to be identified by tokens; result is hit, miss or fallback.
func (a *App) Tokenize(result string) {
	a.tokenize.inc(result, func() prometheus.Counter {
		return a.vecs.tokenize.WithLabelValues(a.name, result)
	})
}

// The ways of a request to an application with a prefill and a decode pool.
const (
	WayNone     = "none"     // it reached no engine
	WayRemote   = "remote"   // a prefill rank computed the prompt
	WayLocal    = "local"    // the decode rank computed the prompt, as was decided
	WayFallback = "fallback" // the decode rank computed the prompt, because no prefill rank could
)

// Pair counts for one application with a prefill and a decode pool. All methods are safe for concurrent use,
// and lock-free and without allocation for a known label combination. Label strings must come from closed
// lists, because each new one is a new series.
type Pair struct {
	vecs *pairVectors
	name string

	met, all                   prometheus.Gauge
	requests, legs             counters[pairKey]
	decisions, notes, notSplit counters[string]
	parts                      children[string, prometheus.Observer]
	remote, local, fallback    atomic.Uint64 // requests, for PairCounts
}

// pairKey holds the values of the two labels behind app.
type pairKey struct{ first, second string }

// PairCounts are ended requests by their way.
type PairCounts struct{ Remote, Local, Fallback uint64 }

func newPair(v *pairVectors, app string) *Pair {
	return &Pair{
		vecs: v, name: app,
		met: v.pairs.WithLabelValues(app, "connected"), all: v.pairs.WithLabelValues(app, "all"),
	}
}

// Request counts an ended request by its way and outcome: ok, rejected, failed, stream_lost, deadline or
// client_gone.
func (p *Pair) Request(way, outcome string) {
	switch way {
	case WayRemote:
		p.remote.Add(1)
	case WayLocal:
		p.local.Add(1)
	case WayFallback:
		p.fallback.Add(1)
	}
	p.requests.inc(pairKey{way, outcome}, func() prometheus.Counter {
		return p.vecs.requests.WithLabelValues(p.name, way, outcome)
	})
}

// Leg counts an ended leg of a request: side is prefill or decode.
func (p *Pair) Leg(side, ending string) {
	p.legs.inc(pairKey{side, ending}, func() prometheus.Counter {
		return p.vecs.legs.WithLabelValues(p.name, side, ending)
	})
}

// Decision counts a pair decision by its reason, which is one of package routing's.
func (p *Pair) Decision(reason string) { p.count(&p.decisions, p.vecs.decisions, reason) }

// Note counts what happened to a request on its way, or to a pair: redo, prefill_failed, null_params,
// params_late, kv_failure, decode_late, fallback, stood_still or alarm.
func (p *Pair) Note(note string) { p.count(&p.notes, p.vecs.notes, note) }

// NotSplit counts a request that goes to one rank because it cannot be split, by package transfer's reason.
func (p *Pair) NotSplit(reason string) { p.count(&p.notSplit, p.vecs.notSplit, reason) }

func (p *Pair) count(cache *counters[string], vec *prometheus.CounterVec, label string) {
	cache.inc(label, func() prometheus.Counter { return vec.WithLabelValues(p.name, label) })
}

// Part observes a part of the time to the first token: queue, prefill, transfer or decode.
func (p *Pair) Part(part string, d time.Duration) {
	if o, ok := p.parts.get(part, func() prometheus.Observer {
		return p.vecs.ttft.WithLabelValues(p.name, part)
	}); ok {
		o.Observe(d.Seconds())
	}
}

// Pairs sets the number of pairs of ready ranks, and how many of them have met.
func (p *Pair) Pairs(met, all int) {
	p.met.Set(float64(met))
	p.all.Set(float64(all))
}

// Counts returns what status shows. The numbers are read one by one.
func (p *Pair) Counts() PairCounts {
	return PairCounts{Remote: p.remote.Load(), Local: p.local.Load(), Fallback: p.fallback.Load()}
}

// NoPair counts nothing.
func NoPair() *Pair {
	p := &Pair{vecs: &pairVectors{}}
	p.forget()
	return p
}

// forget closes all caches, so that a late caller cannot recreate deleted series.
func (p *Pair) forget() {
	p.requests.close()
	p.legs.close()
	p.decisions.close()
	p.notes.close()
	p.notSplit.close()
	p.parts.close()
}

// pairVectors hold the series of all Pairs.
type pairVectors struct {
	requests, decisions, legs, notes, notSplit *prometheus.CounterVec
	ttft                                       *prometheus.HistogramVec
	pairs                                      *prometheus.GaugeVec
}

func newPairVectors() *pairVectors {
	return &pairVectors{
		requests: counter("pd_requests_total",
			"Requests ended, by where the prompt was computed (none: nowhere) and by how they ended.",
			labelApp, labelWay, labelOutcome),
		decisions: counter("pd_decisions_total",
			"Decisions between a prefill rank and the decode rank alone, by reason.", labelApp, labelReason),
		legs: counter("pd_legs_total", "Legs to prefill and decode ranks, by how they ended.", labelApp,
			labelSide, labelEnding),
		notes: counter("pd_notes_total",
			"What went another way than planned: prefills done again, fall-backs, late parameters, alarms.",
			labelApp, labelNote),
		ttft: histogram("pd_ttft_seconds",
			"Time to the first token of requests with a prefill rank, in parts.", pairBuckets(), labelApp,
			labelPart),
		notSplit: counter("pd_not_split_total",
			"Requests that go to one rank because they cannot be split, by reason.", labelApp, labelReason),
		pairs: gauge("pd_pairs",
			"Pairs of a ready prefill rank and a ready decode rank: all, and those that are connected.",
			labelApp, labelState),
	}
}

func (v *pairVectors) list() []forgetter {
	return []forgetter{v.requests, v.decisions, v.legs, v.notes, v.ttft, v.notSplit, v.pairs}
}

// pairBuckets range from the hand-off between two ranks (1 ms) to the first-token deadline of 300 s. Seconds.
func pairBuckets() []float64 {
	return []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}
}
