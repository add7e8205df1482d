// Package telemetry declares dpserve's metrics and its logger. Metrics are typed methods, so no other package
// imports Prometheus. Label children are resolved once and cached, so a call on the request path takes no
// allocation and no lock. Series are deleted with the application, unit or rank that they describe, so a
// scrape does not grow without bound. Prompts, answers, keys and token ids must not become label values or
// log fields.
package telemetry

import (
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/dpserve/dpserve/internal/state"
)

// namespace is the prefix of all series of dpserve.
const namespace = "dpserve"

// maxScrapes bounds concurrent scrapes, because each scrape formats every series and a scraper may retry
// before its last scrape has ended.
const maxScrapes = 4

// scrapeTimeout ends a scrape that a slow collector delays.
const scrapeTimeout = 10 * time.Second

// Metrics owns a private registry and all vectors. Safe for concurrent use. It starts no goroutine and needs
// no Close.
type Metrics struct {
	registry  *prometheus.Registry
	vecs      *vectors
	pairVecs  *pairVectors
	ranks     *rankCollector
	pools     *poolCollector
	raftApply *prometheus.HistogramVec

	mu    sync.Mutex
	apps  map[appKey]*App  // guarded by mu; an App's hot methods do not use the map
	pairs map[string]*Pair // guarded by mu, likewise
}

// appKey identifies an App: a changed policy gets an App of its own.
type appKey struct{ app, policy string }

// New returns metrics without series, with the collectors of the Go runtime and the process.
func New() *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(), vecs: newVectors(), pairVecs: newPairVectors(),
		ranks: newRankCollector(), pools: newPoolCollector(),
		apps: map[appKey]*App{}, pairs: map[string]*Pair{},
		raftApply: histogram("raft_apply_seconds", "Time from proposing a command to its durable result.",
			raftBuckets(), labelNode),
	}
	for _, vec := range append(m.vecs.list(), m.pairVecs.list()...) {
		m.registry.MustRegister(vec)
	}
	m.registry.MustRegister(
		m.ranks, m.pools, m.raftApply,
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

// App returns the metrics of one application under one routing policy. Callers keep the result: the lookup
// takes a lock.
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

// ForgetApp deletes all series of an application. A request that still holds an *App may use it; its counts
// are dropped.
func (m *Metrics) ForgetApp(app string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, a := range m.apps {
		if key.app == app {
			a.forget()
			delete(m.apps, key)
		}
	}
	m.ranks.forget(app)
	forget(m.vecs.list(), prometheus.Labels{labelApp: app})
}

// Pair returns the metrics of an application with a prefill and a decode pool. app is its name without the
// pool. Callers keep the result: the lookup takes a lock.
func (m *Metrics) Pair(app string) *Pair {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p, ok := m.pairs[app]; ok {
		return p
	}
	p := newPair(m.pairVecs, app)
	m.pairs[app] = p
	return p
}

// ForgetPair deletes all series of Pair(app). A request that still holds the *Pair may use it; its counts are
// dropped.
func (m *Metrics) ForgetPair(app string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p, ok := m.pairs[app]; ok {
		p.forget()
		delete(m.pairs, app)
	}
	forget(m.pairVecs.list(), prometheus.Labels{labelApp: app})
}

// KeepRanks deletes the series of an application's ranks that exists does not know: a rank that was removed
// for good would otherwise keep them as long as its application.
func (m *Metrics) KeepRanks(app string, exists func(group, rank int) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, a := range m.apps {
		if key.app == app {
			a.keepRanks(exists)
		}
	}
}

// RouteOther is the route label of requests for unknown paths.
const RouteOther = "other"

// RequestRefused counts a request that was refused before its application was known. The route is one of the
// router's closed list, or RouteOther; a client's text never becomes a label.
func (m *Metrics) RequestRefused(route string, code int) {
	m.vecs.requests.WithLabelValues("", route, strconv.Itoa(code)).Inc()
}

// BuildInfo sets dpserve_build_info; call it once.
func (m *Metrics) BuildInfo(version string) {
	info := gauge("build_info", "1, with the versions of dpserve and of Go.", labelVersion, labelGoVersion)
	m.registry.MustRegister(info)
	info.WithLabelValues(version, runtime.Version()).Set(1)
}

// RaftApply returns the observer of dpserve_raft_apply_seconds of a node: the time from proposing a command
// to its result.
func (m *Metrics) RaftApply(node string) func(time.Duration) {
	h := m.raftApply.WithLabelValues(node)
	return func(d time.Duration) { h.Observe(d.Seconds()) }
}

// phases lists the unit states; each has a series.
func phases() [9]state.Phase {
	return [...]state.Phase{
		state.Pending, state.Starting, state.Ready, state.Fenced, state.Killing,
		state.Backoff, state.Draining, state.Failed, state.Gone,
	}
}

// UnitPhase sets the state of a unit: one series per state, 1 or 0.
func (m *Metrics) UnitPhase(app, unit string, phase state.Phase) {
	for _, p := range phases() {
		m.vecs.unitState.WithLabelValues(app, unit, string(p)).Set(boolGauge(p == phase))
	}
}

func boolGauge(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// UnitForget deletes the series of a released unit.
func (m *Metrics) UnitForget(app, unit string) {
	forget(m.vecs.list(), prometheus.Labels{labelApp: app, labelUnit: unit})
}

// Node holds the metrics of this node as a member of its cluster.
type Node struct {
	refused *prometheus.CounterVec
	unknown *prometheus.CounterVec
	gauges  [len(nodeGauges)]prometheus.Gauge // by nodeGauges
}

// NodeSample is the health of a node. What it does not know is 0.
type NodeSample struct {
	LeaseSeconds      float64 // that are left
	Leads             bool    // it leads the cluster
	Voters            int     // of the cluster, as a node with role control knows them
	VotersHeard       int     // those of them that answer, this node included
	CertificateExpiry int64   // Unix seconds: of its certificate for other nodes
	DiskFree          uint64  // bytes that its data dir may take
	DiskSize          uint64
}

var nodeGauges = [...]struct {
	name, help string
	read       func(s *NodeSample) float64
}{
	{
		"lease_seconds_left", "How long this node's lease still lasts; 0 = it has none.",
		func(s *NodeSample) float64 { return s.LeaseSeconds },
	},
	{
		"raft_leader", "1 on the node that leads the cluster.",
		func(s *NodeSample) float64 { return boolGauge(s.Leads) },
	},
	{
		"raft_voters", "Voters of the cluster, at nodes with role control; 0 elsewhere.",
		func(s *NodeSample) float64 { return float64(s.Voters) },
	},
	{
		"raft_voters_heard", "Voters that this node hears, itself included; 0 on nodes without role control.",
		func(s *NodeSample) float64 { return float64(s.VotersHeard) },
	},
	{
		"node_certificate_expiry_seconds",
		"Unix time at which the node's certificate for other nodes expires; 0 = it has none.",
		func(s *NodeSample) float64 { return float64(s.CertificateExpiry) },
	},
	{
		"data_dir_free_bytes", "Free bytes of the file system of the data dir; 0 = not known.",
		func(s *NodeSample) float64 { return float64(s.DiskFree) },
	},
	{
		"data_dir_size_bytes", "Size of the file system of the data dir; 0 = not known.",
		func(s *NodeSample) float64 { return float64(s.DiskSize) },
	},
}

// Node makes the series of this node; call it once.
func (m *Metrics) Node(name string) *Node {
	n := &Node{
		refused: counter("nodeport_refused_total",
			"Connections that the node port turned away before it read a byte of a protocol.", labelNode,
			labelReason),
		unknown: counter("unknown_messages_total",
			"What other nodes sent and this version does not know: methods, fields and posts to ranks. It "+
				"was passed over.", labelNode, labelKind),
	}
	m.registry.MustRegister(n.refused, n.unknown)
	self := prometheus.Labels{labelNode: name}
	n.refused, n.unknown = n.refused.MustCurryWith(self), n.unknown.MustCurryWith(self)
	for i, g := range nodeGauges {
		vec := gauge(g.name, g.help, labelNode)
		m.registry.MustRegister(vec)
		n.gauges[i] = vec.With(self)
	}
	return n
}

// Refused counts a refused connection.
func (n *Node) Refused(reason string) { n.refused.WithLabelValues(reason).Inc() }

// Unknown counts a message or field that this version does not know and ignored.
func (n *Node) Unknown(kind string) { n.unknown.WithLabelValues(kind).Inc() }

// Show sets the node's gauges. Call it before each scrape.
func (n *Node) Show(s *NodeSample) {
	for i, g := range nodeGauges {
		n.gauges[i].Set(g.read(s))
	}
}

// Traces returns what counts the spans of traces by what became of them; call it once.
func (m *Metrics) Traces() func(result string, spans int) {
	spans := counter("trace_spans_total",
		"Spans by what became of them: exported, failed (the collector did not take them) or dropped (too "+
			"many waited for it).", labelResult)
	m.registry.MustRegister(spans)
	return func(result string, n int) { spans.WithLabelValues(result).Add(float64(n)) }
}

// StreamCounts are the counts of the ranks' streams between this node and others.
type StreamCounts struct {
	Gaps    uint64 // a reader of this node's ranks was too slow, and listed them again
	Dropped uint64 // streams of other nodes with a malformed record, and records of a later version
	Lost    uint64 // messages to ranks of other nodes that found no room or no node
}

// Streams reads the counts of this node's streams at every scrape; call it once.
func (m *Metrics) Streams(node string, read func() StreamCounts) {
	self := prometheus.Labels{labelNode: node}
	add := func(name, help string, value func(StreamCounts) uint64) {
		m.registry.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{
				Namespace: namespace, Name: name, Help: help, ConstLabels: self,
			}, func() float64 { return float64(value(read())) }))
	}
	add("stream_gaps_total", "Times that a reader of this node's ranks was too slow, and listed them again.",
		func(c StreamCounts) uint64 { return c.Gaps })
	add("stream_dropped_total",
		"Streams of other nodes' ranks that ended with a malformed record, and records of a later version.",
		func(c StreamCounts) uint64 { return c.Dropped })
	add("stream_posts_lost_total", "Messages to ranks of other nodes that found no room, or no node.",
		func(c StreamCounts) uint64 { return c.Lost })
}

// IngressUsage is the memory and the connections that an ingress uses.
type IngressUsage struct {
	BodyBytes   int64 // memory of request bodies
	BodyLimit   int64 // the limit of BodyBytes
	MemoryBytes int64 // the memory that is compared with the limit; 0 without a limit
	MemoryLimit int64
	Connections int // of clients
}

// Ingress reads this node's ingress usage at every scrape; call it once.
func (m *Metrics) Ingress(node string, read func() IngressUsage) {
	self := prometheus.Labels{labelNode: node}
	add := func(name, help string, value func(IngressUsage) int64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(
			prometheus.GaugeOpts{
				Namespace: namespace, Name: name, Help: help, ConstLabels: self,
			}, func() float64 { return float64(value(read())) }))
	}
	add("body_bytes", "Memory of request bodies, from their first byte to that of their answers.",
		func(u IngressUsage) int64 { return u.BodyBytes })
	add("body_limit_bytes", "Memory of request bodies above which requests are refused.",
		func(u IngressUsage) int64 { return u.BodyLimit })
	add("memory_used_bytes", "Memory that the process needs, without garbage; 0 without a limit.",
		func(u IngressUsage) int64 { return u.MemoryBytes })
	add("memory_limit_bytes",
		"Memory limit of the process: requests are refused above 85 % of it, connections above 95 %; 0 = it "+
			"has none.", func(u IngressUsage) int64 { return u.MemoryLimit })
	add("client_connections", "Connections of clients.",
		func(u IngressUsage) int64 { return int64(u.Connections) })
}

// The log formats.
const (
	FormatText = "text" // key=value lines for people
	FormatJSON = "json" // one object a line for collectors
)

// NewLogger returns the process's logger: JSON for FormatJSON, else text. Recurring fields have fixed names:
// node, room, app, unit, group, rank, epoch, incarnation, request_id, ingress, attempt, cause, code, dur_ms,
// err.
func NewLogger(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == FormatJSON {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
