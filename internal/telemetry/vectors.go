package telemetry

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// The label names. Values come from closed lists or from names in an app file, never from a request.
const (
	labelApp    = "app"
	labelRoute  = "route"
	labelCode   = "code"
	labelGroup  = "group"
	labelRank   = "rank"
	labelUnit   = "unit"
	labelState  = "state"
	labelKind   = "kind"
	labelKey    = "key"
	labelFile   = "file"
	labelCause  = "cause"
	labelBudget = "budget"
	labelPolicy = "policy"
	labelReason = "reason"
	labelNode   = "node"
	labelResult = "result"
	labelGoal   = "goal"

	labelWay     = "way"
	labelOutcome = "outcome"
	labelSide    = "side"
	labelEnding  = "ending"
	labelNote    = "note"
	labelPart    = "part"

	labelVersion   = "version"
	labelGoVersion = "goversion"
)

// vectors holds the vectors with the label app, but for those of a pair of pools.
type vectors struct {
	requests, tokens, attempts, retries, continued, refusals, picks *prometheus.CounterVec
	tokenize, goodput                                               *prometheus.CounterVec
	requestSeconds, ttft, itl, queueWait, decision                  *prometheus.HistogramVec
	queueLength, queueTokens, unitState, goals                      *prometheus.GaugeVec
}

// forgetter is a vector whose series can be deleted.
type forgetter interface {
	prometheus.Collector
	DeletePartialMatch(labels prometheus.Labels) int
}

func newVectors() *vectors {
	v := &vectors{}
	v.addRequests()
	v.addRouting()
	v.unitState = gauge("unit_state", "1 for the state the unit is in, 0 for the others, at the leader.",
		labelApp, labelUnit, labelState)
	return v
}

func (v *vectors) addRequests() {
	v.requests = counter("requests_total", "Requests answered, by HTTP status (499: the client left).",
		labelApp, labelRoute, labelCode)
	v.requestSeconds = histogram("request_seconds",
		"Time from the request's arrival to the last byte of its answer.", requestBuckets(),
		labelApp, labelRoute)
	v.ttft = histogram("ttft_seconds", "Time from the request's arrival to the first byte with content.",
		requestBuckets(), labelApp, labelRoute)
	v.itl = histogram("itl_seconds", "Time between two chunks of a stream.", tokenBuckets(),
		labelApp, labelRoute)
	v.tokens = counter("tokens_total", "Tokens as the engines report them in usage.", labelApp, labelKind)
	v.goodput = counter("goodput_requests_total",
		"Streams ended, by whether first token and time per token met the goals; failed ones missed them.",
		labelApp, labelResult)
	v.goals = gauge("goal_seconds", "Goals of a stream: time to the first token, mean time per token.",
		labelApp, labelGoal)
	v.queueLength = gauge("queue_length", "Requests waiting in this ingress's queue.", labelApp)
	v.queueTokens = gauge("queue_tokens",
		"Prompt tokens (partly estimated) waiting in this ingress's queue.", labelApp)
	v.queueWait = histogram("queue_wait_seconds", "Time a request waited in the queue.",
		requestBuckets(), labelApp)
}

func (v *vectors) addRouting() {
	v.attempts = counter("attempts_total", "Dispatches of requests to ranks, by how they ended.", labelApp,
		labelCause, labelBudget)
	v.retries = counter("retries_total", "Failed dispatches that were tried again on another rank, by cause.",
		labelApp, labelCause, labelBudget)
	v.continued = counter("continued_total",
		"Streams that broke after their first byte, by cause: continued (from another rank) or lost.",
		labelApp, labelCause, labelResult)
	v.refusals = counter("refusals_total", "Typed refusals by ranks asked for a ticket.", labelApp, labelCode)
	v.decision = histogram("router_decision_seconds", "Time of one routing decision, lock included.",
		decisionBuckets(), labelApp, labelPolicy)
	v.picks = counter("router_picks_total", "Ranks picked, by the policy's reason.", labelApp, labelGroup,
		labelRank, labelReason)
	v.tokenize = counter("tokenize_total",
		"Text prompts to be identified by tokens: hit (known), miss (an engine was asked), fallback "+
			"(identified by text).", labelApp, labelResult)
}

func (v *vectors) list() []forgetter {
	return []forgetter{
		v.requests, v.tokens, v.attempts, v.retries, v.continued, v.refusals, v.picks, v.tokenize,
		v.goodput, v.goals,
		v.requestSeconds, v.ttft, v.itl, v.queueWait, v.decision,
		v.queueLength, v.queueTokens, v.unitState,
	}
}

// forget deletes every series of the vectors that has all of these labels.
func forget(list []forgetter, labels prometheus.Labels) {
	for _, vec := range list {
		vec.DeletePartialMatch(labels)
	}
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(
		prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(
		prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
}

// requestBuckets range from a cached answer of a few ms to a request that uses a first-token deadline of 300
// s. Seconds.
func requestBuckets() []float64 {
	return []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}
}

// tokenBuckets range from a decode step of batch 1 to a stream at its between-tokens deadline (30 s).
// Seconds.
func tokenBuckets() []float64 {
	return []float64{.001, .0025, .005, .01, .02, .03, .05, .075, .1, .2, .5, 1, 5, 30}
}

// decisionBuckets range from power-of-two at 64 ranks (0.1 µs) to a decision that clients would notice (1
// ms). Seconds.
func decisionBuckets() []float64 {
	return []float64{1e-7, 2.5e-7, 5e-7, 1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 1e-4, 1e-3}
}

// raftBuckets range from a memory disk (50 µs) to a disk that makes elections fail (1 s). Seconds.
func raftBuckets() []float64 {
	return []float64{5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, .01, .025, .05, .1, .25, 1}
}

// children caches label children by key. Readers take no lock and allocate nothing: they read an immutable
// map, which writers copy, change and swap. Writes are rare, because keys come from closed lists or app
// files. A sync.Map would convert each struct key to an interface, which allocates.
type children[K comparable, V any] struct {
	table atomic.Pointer[map[K]V]

	mu     sync.Mutex
	closed bool // no key may be added; guarded by mu
}

// get returns a child and makes it at its first use. ok is false when the key is unknown and the cache is
// closed.
func (c *children[K, V]) get(key K, make func() V) (v V, ok bool) {
	if t := c.table.Load(); t != nil {
		if v, ok = (*t)[key]; ok {
			return v, true
		}
	}
	return c.add(key, make)
}

func (c *children[K, V]) add(key K, make func() V) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.copy()
	if v, ok = next[key]; ok {
		return v, true
	}
	if c.closed {
		return v, false
	}
	v = make()
	next[key] = v
	c.table.Store(&next)
	return v, true
}

// each calls do for every child that there is.
func (c *children[K, V]) each(do func(K, V)) {
	if t := c.table.Load(); t != nil {
		for k, v := range *t {
			do(k, v)
		}
	}
}

// drop removes the keys for which gone is true. No key is added meanwhile, so gone may delete their series.
func (c *children[K, V]) drop(gone func(K) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.copy()
	maps.DeleteFunc(next, func(k K, _ V) bool { return gone(k) })
	c.table.Store(&next)
}

// close empties the cache and refuses new keys, so that a late caller cannot recreate deleted series.
func (c *children[K, V]) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.table.Store(&map[K]V{})
}

// counters caches the counters of a vector by their labels.
type counters[K comparable] struct {
	children[K, prometheus.Counter]
}

// inc counts one, unless the key is unknown and the cache is closed.
func (c *counters[K]) inc(key K, make func() prometheus.Counter) {
	if v, ok := c.get(key, make); ok {
		v.Inc()
	}
}

// copy clones the table; the caller holds mu.
func (c *children[K, V]) copy() map[K]V {
	if t := c.table.Load(); t != nil {
		return maps.Clone(*t)
	}
	return map[K]V{}
}
