package telemetry

import "github.com/prometheus/client_golang/prometheus"

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
