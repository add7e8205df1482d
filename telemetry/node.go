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
		unknown: counter("unknown_messages_total", "What other nodes sent and this version does not know: methods and fields. It was passed over.", labelNode, labelKind),
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
