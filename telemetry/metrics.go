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

	"github.com/dpserve/dpserve/state"
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

// phases is the closed list of unit states that get a series each.
func phases() [9]state.Phase {
	return [...]state.Phase{
		state.Pending, state.Starting, state.Ready, state.Fenced, state.Killing,
		state.Backoff, state.Draining, state.Failed, state.Gone,
	}
}

// UnitPhase shows the state of a unit (one series per state, 1 or 0) and its epoch.
func (m *Metrics) UnitPhase(app, unit string, phase state.Phase, epoch uint64) {
	for _, p := range phases() {
		m.vecs.unitState.WithLabelValues(app, unit, string(p)).Set(oneIf(p == phase))
	}
	m.vecs.unitEpoch.WithLabelValues(app, unit).Set(float64(epoch))
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// UnitRestart counts a start of a unit after its first.
func (m *Metrics) UnitRestart(app, unit string) { m.vecs.restarts.WithLabelValues(app, unit).Inc() }

// UnitForget deletes the series of a released unit.
func (m *Metrics) UnitForget(app, unit string) {
	m.vecs.forget(prometheus.Labels{labelApp: app, labelUnit: unit})
}

// AppRanks shows how many ranks of an application are ready, and how many its present revision wants.
func (m *Metrics) AppRanks(app string, ready, desired int) {
	m.vecs.readyRanks.WithLabelValues(app).Set(float64(ready))
	m.vecs.desiredRanks.WithLabelValues(app).Set(float64(desired))
}

// AppRanksForget deletes the series of AppRanks: the application is gone, or this node does not lead any
// more.
func (m *Metrics) AppRanksForget(app string) {
	m.vecs.readyRanks.DeleteLabelValues(app)
	m.vecs.desiredRanks.DeleteLabelValues(app)
}

// rankKey names a rank over all applications.
type rankKey struct {
	app         string
	group, rank int
}

// RankInflight shows how many requests a rank has in hand.
func (m *Metrics) RankInflight(app string, group, rank, n int) {
	g, _ := m.ranks.get(rankKey{app, group, rank}, func() prometheus.Gauge { // never closed: always found
		return m.vecs.rankInflight.WithLabelValues(app, strconv.Itoa(group), strconv.Itoa(rank))
	})
	g.Set(float64(n))
}

// RankTripped shows whether a rank's answers have failed in a row.
func (m *Metrics) RankTripped(app string, group, rank int, tripped bool) {
	n := 0.0
	if tripped {
		n = 1
	}
	m.vecs.rankTripped.WithLabelValues(app, strconv.Itoa(group), strconv.Itoa(rank)).Set(n)
}

// RankForget deletes the series of a released rank, its picks included.
func (m *Metrics) RankForget(app string, group, rank int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ranks.drop(func(k rankKey) bool { return k == rankKey{app, group, rank} })
	for key, a := range m.apps {
		if key.app == app {
			a.picks.drop(func(k pickKey) bool { return k.group == group && k.rank == rank })
		}
	}
	m.vecs.forget(prometheus.Labels{labelApp: app, labelGroup: strconv.Itoa(group), labelRank: strconv.Itoa(rank)})
}

// Node is the metrics of this node as a member of its cluster.
type Node struct {
	refused *prometheus.CounterVec
	unknown *prometheus.CounterVec
	lease   prometheus.Gauge
	leader  prometheus.Gauge
}

// Node makes the series of this node; call it once.
func (m *Metrics) Node(name string) *Node {
	n := &Node{
		refused: counter("nodeport_refused_total", "Connections that the node port turned away before it read a byte of a protocol.", labelNode, labelReason),
		unknown: counter("unknown_messages_total", "What other nodes sent and this version does not know: methods, fields and posts to ranks. It was passed over.", labelNode, labelKind),
	}
	lease := gauge("lease_seconds_left", "How long this node's lease still lasts; 0 = it has none.", labelNode)
	leader := gauge("raft_leader", "1 on the node that leads the cluster.", labelNode)
	m.registry.MustRegister(n.refused, n.unknown, lease, leader)
	self := prometheus.Labels{labelNode: name}
	n.refused, n.unknown = n.refused.MustCurryWith(self), n.unknown.MustCurryWith(self)
	n.lease, n.leader = lease.With(self), leader.With(self)
	return n
}

// Refused counts a connection that was turned away.
func (n *Node) Refused(reason string) { n.refused.WithLabelValues(reason).Inc() }

// Unknown counts a message or field that was passed over.
func (n *Node) Unknown(kind string) { n.unknown.WithLabelValues(kind).Inc() }

// Show sets the gauges: seconds that the lease lasts, and whether this node leads.
func (n *Node) Show(leaseSeconds float64, leads bool) {
	n.lease.Set(leaseSeconds)
	n.leader.Set(0)
	if leads {
		n.leader.Set(1)
	}
}

// StreamCounts is what happened to the ranks' streams between this node and others.
type StreamCounts struct {
	Gaps    uint64 // a reader of this node's ranks was too slow, and got snapshots
	Dropped uint64 // records of other nodes that were malformed, or of a later version
	Lost    uint64 // messages to ranks of other nodes that found no room or no node
}

// Streams shows the counts of this node's streams at every scrape; call it once.
func (m *Metrics) Streams(node string, read func() StreamCounts) {
	self := prometheus.Labels{labelNode: node}
	add := func(name, help string, value func(StreamCounts) uint64) {
		m.registry.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help, ConstLabels: self}, func() float64 { return float64(value(read())) }))
	}
	add("stream_gaps_total", "Times that a reader of this node's ranks was too slow and got snapshots.", func(c StreamCounts) uint64 { return c.Gaps })
	add("stream_dropped_total", "Records of other nodes' ranks that were malformed or of a later version.", func(c StreamCounts) uint64 { return c.Dropped })
	add("stream_posts_lost_total", "Messages to ranks of other nodes that found no room, or no node.", func(c StreamCounts) uint64 { return c.Lost })
}

// IngressUsage is what an ingress holds at a moment.
type IngressUsage struct {
	BodyBytes   int64 // memory of request bodies
	BodyLimit   int64 // the most of it
	MemoryBytes int64 // what the process needs, as compared with its limit; 0: it has none
	MemoryLimit int64
	Connections int // of clients
}

// Ingress shows what this node's ingress holds at every scrape; call it once.
func (m *Metrics) Ingress(node string, read func() IngressUsage) {
	self := prometheus.Labels{labelNode: node}
	add := func(name, help string, value func(IngressUsage) int64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(
			prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help, ConstLabels: self}, func() float64 { return float64(value(read())) }))
	}
	add("body_bytes", "Memory of request bodies, from their first byte to that of their answers.", func(u IngressUsage) int64 { return u.BodyBytes })
	add("body_limit_bytes", "Memory of request bodies above which requests are refused.", func(u IngressUsage) int64 { return u.BodyLimit })
	add("memory_used_bytes", "Memory that the process needs, without garbage; 0 without a limit.", func(u IngressUsage) int64 { return u.MemoryBytes })
	add("memory_limit_bytes", "Memory limit of the process: requests are refused above 85 % of it, connections above 95 %; 0 = it has none.", func(u IngressUsage) int64 { return u.MemoryLimit })
	add("client_connections", "Connections of clients.", func(u IngressUsage) int64 { return int64(u.Connections) })
}
