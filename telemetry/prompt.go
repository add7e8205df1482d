package telemetry

import "github.com/prometheus/client_golang/prometheus"

// promptVectors count how prompts are identified, and what the ingress's picture of the ranks' caches missed.
type promptVectors struct {
	tokenize, indexGaps *prometheus.CounterVec
}

func newPromptVectors() promptVectors {
	return promptVectors{
		tokenize: counter("tokenize_total", "Text prompts to be identified by tokens: hit (known), miss (an engine was asked), fallback (identified by text).",
			labelApp, labelResult),
		indexGaps: counter("router_index_gaps_total", "Times a rank's cache was hidden from routing because a record of its stream was missed.", labelApp),
	}
}

func (v *promptVectors) list() []forgetter {
	return []forgetter{v.tokenize, v.indexGaps}
}

// promptCounters are those of one application.
type promptCounters struct {
	tokenize children[string, prometheus.Counter]
	gaps     prometheus.Counter
}

// Tokenize counts a text prompt to be identified by tokens; result is hit, miss or fallback.
func (a *App) Tokenize(result string) {
	if c, ok := a.prompts.tokenize.get(result, func() prometheus.Counter { return a.vecs.prompts.tokenize.WithLabelValues(a.name, result) }); ok {
		c.Inc()
	}
}

// IndexGap counts a rank whose cache was hidden because a record of its stream was missed.
func (a *App) IndexGap() { a.prompts.gaps.Inc() }
