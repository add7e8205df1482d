// Package telemetry declares dpserve's metrics and its logger, once. Metrics are typed methods, so no other room knows
// Prometheus; label children are resolved once and cached, so a call on the request path takes no allocation and no lock
// (TRAPS 19); series go away with the application, unit or rank they describe, so scrapes do not grow without end.
// No prompt, answer, key or token id may become a label value or a log field.
package telemetry

import (
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// namespace is the prefix of every series of dpserve itself.
const namespace = "dpserve"

// maxScrapes bounds concurrent scrapes: each one formats every series, and a scraper that retries must not pile up.
const maxScrapes = 4

// scrapeTimeout ends a scrape that a slow collector holds up.
const scrapeTimeout = 10 * time.Second

// Metrics owns the private registry and every vector. Safe for concurrent use. It starts no goroutine and needs no Close.
type Metrics struct {
	registry *prometheus.Registry
	vecs     *vectors
	kv       *kvCollector
	ranks    children[rankKey, prometheus.Gauge]

	mu   sync.Mutex
	apps map[appKey]*App // guarded by mu; the hit path of an App never comes here
}

// appKey names an App: a changed policy gets children of its own.
type appKey struct{ app, policy string }

// New makes an empty set of metrics with the Go runtime's and the process's own collectors.
func New() *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), vecs: newVectors(), kv: newKVCollector(), apps: map[appKey]*App{}}
	m.registry.MustRegister(m.vecs.all()...)
	m.registry.MustRegister(m.kv)
	m.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

// Handler serves the metrics in Prometheus' text formats.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             scrapeTimeout,
	})
}

// App gives the metrics of one application under one routing policy. The result is cached; keep it, do not ask per request.
func (m *Metrics) App(app, policy string) *App {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := appKey{app, policy}
	if a, ok := m.apps[key]; ok {
		return a
	}
	a := newApp(m.vecs, app, policy)
	m.apps[key] = a
	return a
}

// ForgetApp deletes every series of an application. An *App still held by a request that is ending may be used, and counts nowhere.
func (m *Metrics) ForgetApp(app string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, a := range m.apps {
		if key.app == app {
			a.forget()
			delete(m.apps, key)
		}
	}
	m.ranks.drop(func(k rankKey) bool { return k.app == app })
	m.vecs.forget(prometheus.Labels{labelApp: app})
}

// RouteOther is the route of requests for paths that are not served.
const RouteOther = "other"

// RequestRefused counts a request that was refused before its application was known. The route is one of the
// closed list of the router's table, or RouteOther: what a client sent is never a label.
func (m *Metrics) RequestRefused(route string, code int) {
	m.vecs.requests.WithLabelValues("", route, strconv.Itoa(code)).Inc()
}

// BuildInfo shows which dpserve this is; call it once.
func (m *Metrics) BuildInfo(version string) {
	info := gauge("build_info", "1, with the versions of dpserve and of Go.", labelVersion, labelGoVersion)
	m.registry.MustRegister(info)
	info.WithLabelValues(version, runtime.Version()).Set(1)
}

// RaftApply gives the observer of dpserve_raft_apply_seconds of a node: time from proposing a command to its result.
func (m *Metrics) RaftApply(node string) func(time.Duration) {
	h := m.vecs.raftApply.WithLabelValues(node)
	return func(d time.Duration) { h.Observe(d.Seconds()) }
}
