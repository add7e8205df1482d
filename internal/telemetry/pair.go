package telemetry

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

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
	requests, legs             children[pairKey, prometheus.Counter]
	decisions, notes, notSplit children[string, prometheus.Counter]
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
		met: v.pairs.WithLabelValues(app, "met"), all: v.pairs.WithLabelValues(app, "all"),
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
	if c, ok := p.requests.get(pairKey{way, outcome}, func() prometheus.Counter {
		return p.vecs.requests.WithLabelValues(p.name, way, outcome)
	}); ok {
		c.Inc()
	}
}

// Leg counts an ended leg of a request: side is prefill or decode.
func (p *Pair) Leg(side, ending string) {
	if c, ok := p.legs.get(pairKey{side, ending}, func() prometheus.Counter {
		return p.vecs.legs.WithLabelValues(p.name, side, ending)
	}); ok {
		c.Inc()
	}
}

// Decision counts a pair decision by its reason, which is one of package routing's.
func (p *Pair) Decision(reason string) { p.count(&p.decisions, p.vecs.decisions, reason) }

// Note counts what happened to a request on its way, or to a pair: redo, prefill_failed, null_params,
// params_late, kv_failure, decode_late, fallback, stood_still or alarm.
func (p *Pair) Note(note string) { p.count(&p.notes, p.vecs.notes, note) }

// NotSplit counts a request that goes to one rank because it cannot be split, by package transfer's reason.
func (p *Pair) NotSplit(reason string) { p.count(&p.notSplit, p.vecs.notSplit, reason) }

func (p *Pair) count(cache *children[string, prometheus.Counter], vec *prometheus.CounterVec, label string) {
	if c, ok := cache.get(label,
		func() prometheus.Counter { return vec.WithLabelValues(p.name, label) }); ok {
		c.Inc()
	}
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

// forget closes all caches, so that a late caller cannot recreate deleted series.
func (p *Pair) forget() {
	p.requests.close()
	p.legs.close()
	p.decisions.close()
	p.notes.close()
	p.notSplit.close()
	p.parts.close()
}

// pairTable holds the Pair of each application. The caller serializes all calls.
type pairTable struct {
	pairs map[string]*Pair
	vecs  *pairVectors
}

func newPairTable() pairTable { return pairTable{pairs: map[string]*Pair{}, vecs: newPairVectors()} }

func (t *pairTable) get(app string) *Pair {
	if p, ok := t.pairs[app]; ok {
		return p
	}
	p := newPair(t.vecs, app)
	t.pairs[app] = p
	return p
}

func (t *pairTable) forget(app string) {
	if p, ok := t.pairs[app]; ok {
		p.forget()
		delete(t.pairs, app)
	}
	for _, vec := range t.vecs.list() {
		vec.DeletePartialMatch(prometheus.Labels{labelApp: app})
	}
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
			"Pairs of a ready prefill rank and a ready decode rank: all, and those that have met.", labelApp,
			labelState),
	}
}

func (v *pairVectors) list() []forgetter {
	return []forgetter{v.requests, v.decisions, v.legs, v.notes, v.ttft, v.notSplit, v.pairs}
}

// pairBuckets range from the hand-off between two ranks (1 ms) to the first-token deadline of 300 s. Seconds.
func pairBuckets() []float64 {
	return []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}
}
