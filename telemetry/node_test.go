package telemetry_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/telemetry"
)

func TestNodeMetrics(t *testing.T) {
	m := telemetry.New()
	n := m.Node("n1")
	n.Refused("tls")
	n.Unknown("field")
	n.Show(7.5, true)
	m.Streams("n1", func() telemetry.StreamCounts { return telemetry.StreamCounts{Gaps: 1, Dropped: 2, Lost: 3} })
	m.Ingress("n1", func() telemetry.IngressUsage {
		return telemetry.IngressUsage{BodyBytes: 4, BodyLimit: 5, MemoryBytes: 6, MemoryLimit: 7, Connections: 8}
	})
	page := strings.Join(scrape(t, m), "\n")
	for _, want := range []string{
		`dpserve_nodeport_refused_total{node="n1",reason="tls"} 1`, `dpserve_unknown_messages_total{kind="field",node="n1"} 1`,
		`dpserve_lease_seconds_left{node="n1"} 7.5`, `dpserve_raft_leader{node="n1"} 1`,
		`dpserve_stream_gaps_total{node="n1"} 1`, `dpserve_stream_dropped_total{node="n1"} 2`, `dpserve_stream_posts_lost_total{node="n1"} 3`,
		`dpserve_body_bytes{node="n1"} 4`, `dpserve_body_limit_bytes{node="n1"} 5`, `dpserve_memory_used_bytes{node="n1"} 6`,
		`dpserve_memory_limit_bytes{node="n1"} 7`, `dpserve_client_connections{node="n1"} 8`,
	} {
		assert.Contains(t, page, want)
	}
	n.Show(0, false)
	assert.Contains(t, strings.Join(scrape(t, m), "\n"), `dpserve_raft_leader{node="n1"} 0`)
}
