package telemetry

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/dpserve/dpserve/client"
)

// goodput counts the streams of an application by whether they met its goals.
type goodput struct{ met, missed prometheus.Counter }

// SetGoals sets the goals of a stream: the time to its first token, and its mean time per token after that.
func (a *App) SetGoals(ttft, tpot time.Duration) {
	a.vecs.goals.WithLabelValues(a.name, "ttft").Set(ttft.Seconds())
	a.vecs.goals.WithLabelValues(a.name, "tpot").Set(tpot.Seconds())
	a.ttftGoal.Store(int64(ttft))
	a.tpotGoal.Store(int64(tpot))
}

// Stream counts an ended stream against the goals: its HTTP status, the time to its first token (0: none
// came) and its mean time per token after that. A stream that the client ended, or that was refused for what
// the client sent, counts as neither.
func (a *App) Stream(code int, ttft, tpot time.Duration) {
	switch {
	case code >= http.StatusInternalServerError:
		a.streams.missed.Inc()
	case code >= http.StatusBadRequest || ttft <= 0:
	case int64(ttft) <= a.ttftGoal.Load() && int64(tpot) <= a.tpotGoal.Load():
		a.streams.met.Inc()
	default:
		a.streams.missed.Inc()
	}
}

// Traffic returns what the counters of an application hold, and nil without one. It reads the series of
// /metrics.
func (m *Metrics) Traffic(app string) *client.Traffic {
	m.mu.Lock()
	defer m.mu.Unlock()
	var a *App
	requests, routes := map[requestKey]prometheus.Counter{}, map[string]*routeTimes{}
	for key, of := range m.apps { // an App of each policy that it had
		if key.app == app {
			a = of
			of.requests.each(func(k requestKey, c prometheus.Counter) { requests[k] = c })
			of.routes.each(func(k string, t *routeTimes) { routes[k] = t })
		}
	}
	if a == nil {
		return nil
	}
	out := &client.Traffic{
		Prompt: read(a.prompt), Cached: read(a.cached), Generated: read(a.generated),
		Goodput: client.Goodput{
			Met: read(a.streams.met), Missed: read(a.streams.missed),
			TTFT: valueOf(a.vecs.goals.WithLabelValues(app, "ttft")),
			TPOT: valueOf(a.vecs.goals.WithLabelValues(app, "tpot")),
		},
	}
	for key, c := range requests {
		out.Requests += read(c)
		if key.code >= http.StatusInternalServerError {
			out.Failed += read(c)
		}
	}
	for _, t := range routes {
		out.TTFT.Add(readTimes(t.ttft))
		out.ITL.Add(readTimes(t.itl))
	}
	return out
}

// read returns the count of a counter.
func read(c prometheus.Counter) uint64 { return uint64(valueOf(c)) }

// valueOf returns the value of a counter or a gauge.
func valueOf(of prometheus.Metric) float64 {
	var m dto.Metric
	_ = of.Write(&m) // it fails for a metric that is not of one type alone
	return m.GetCounter().GetValue() + m.GetGauge().GetValue()
}

// readTimes returns the buckets of a histogram, each with its own count.
func readTimes(o prometheus.Observer) client.Histogram {
	var m dto.Metric
	if h, ok := o.(prometheus.Metric); ok {
		_ = h.Write(&m) // as above
	}
	var out client.Histogram
	before := uint64(0)
	for _, b := range m.GetHistogram().GetBucket() {
		out.Bounds = append(out.Bounds, b.GetUpperBound())
		out.Counts = append(out.Counts, b.GetCumulativeCount()-before)
		before = b.GetCumulativeCount()
	}
	out.Counts = append(out.Counts, m.GetHistogram().GetSampleCount()-before)
	return out
}
