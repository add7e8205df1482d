package telemetry

import (
	"strconv"
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
	requests                  children[requestKey, prometheus.Counter]
	attempts, retries         children[causeKey, prometheus.Counter]
	refusals                  children[string, prometheus.Counter]
	picks                     children[pickKey, prometheus.Counter]
	prompts                   promptCounters
}

// routeTimes holds the histograms of one route.
type routeTimes struct{ total, ttft, itl prometheus.Observer }

type requestKey struct {
	route string
	code  int
}

type causeKey struct{ cause, budget string }

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
		prompts:     promptCounters{gaps: v.prompts.indexGaps.WithLabelValues(name)},
	}
}

// Request counts an answered request: its route, HTTP status (499: the client left), total duration, and time
// to the first byte with content (0: the server sent none).
func (a *App) Request(route string, code int, dur, ttft time.Duration) {
	if c, ok := a.requests.get(requestKey{route, code}, func() prometheus.Counter {
		return a.vecs.requests.WithLabelValues(a.name, route, strconv.Itoa(code))
	}); ok {
		c.Inc()
	}
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
	if c, ok := a.attempts.get(causeKey{cause, budget}, func() prometheus.Counter {
		return a.vecs.attempts.WithLabelValues(a.name, cause, budget)
	}); ok {
		c.Inc()
	}
}

// Retry counts a failed dispatch that was repeated on another rank.
func (a *App) Retry(cause, budget string) {
	if c, ok := a.retries.get(causeKey{cause, budget}, func() prometheus.Counter {
		return a.vecs.retries.WithLabelValues(a.name, cause, budget)
	}); ok {
		c.Inc()
	}
}

// Refusal counts a rank's refusal by its code.
func (a *App) Refusal(code string) {
	if c, ok := a.refusals.get(code, func() prometheus.Counter {
		return a.vecs.refusals.WithLabelValues(a.name, code)
	}); ok {
		c.Inc()
	}
}

// Decision observes the time of one routing decision.
func (a *App) Decision(d time.Duration) { a.decision.Observe(d.Seconds()) }

// Pick counts a picked rank by the policy's reason.
func (a *App) Pick(group, rank int, reason string) {
	if c, ok := a.picks.get(pickKey{group, rank, reason}, func() prometheus.Counter {
		return a.vecs.picks.WithLabelValues(a.name, strconv.Itoa(group), strconv.Itoa(rank), reason)
	}); ok {
		c.Inc()
	}
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
	a.refusals.close()
	a.picks.close()
	a.prompts.tokenize.close()
}

// promptVectors count how prompts are identified, and how often the ingress's view of a rank's cache was
// incomplete.
type promptVectors struct {
	tokenize, indexGaps *prometheus.CounterVec
}

func newPromptVectors() promptVectors {
	return promptVectors{
		tokenize: counter("tokenize_total",
			"Text prompts to be identified by tokens: hit (known), miss (an engine was asked), fallback "+
				"(identified by text).",
			labelApp, labelResult),
		indexGaps: counter("router_index_gaps_total",
			"Times a rank's cache was hidden from routing because a record of its stream was missed.",
			labelApp),
	}
}

func (v *promptVectors) list() []forgetter {
	return []forgetter{v.tokenize, v.indexGaps}
}

// promptCounters are the prompt counters of one application.
type promptCounters struct {
	tokenize children[string, prometheus.Counter]
	gaps     prometheus.Counter
}

// Tokenize counts a text prompt to be identified by tokens; result is hit, miss or fallback.
func (a *App) Tokenize(result string) {
	if c, ok := a.prompts.tokenize.get(result,
		func() prometheus.Counter { return a.vecs.prompts.tokenize.WithLabelValues(a.name, result) }); ok {
		c.Inc()
	}
}

// IndexGap counts a rank whose cache was hidden from routing because a record of its stream was missed.
func (a *App) IndexGap() { a.prompts.gaps.Inc() }
