package telemetry_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/telemetry"
)

// TestKVGoesWithItsRank: what the next ShowKV does not name is gone; a rank without events has no event series.
func TestKVGoesWithItsRank(t *testing.T) {
	m := telemetry.New()
	assert.NotContains(t, strings.Join(series(t, m), "\n"), "dpserve_kv_")
	m.ShowKV([]telemetry.RankKV{
		{App: "demo", Group: 0, Rank: 1, Blocks: 5, Bytes: 320, Orphans: 1, Evicted: 2},
		{App: "demo", Group: 1, Rank: 0, Events: true, Batches: 7, Gaps: 1, Restarts: 1, Dropped: 3, Silent: true},
	}, []telemetry.AppIndex{{App: "demo", Blocks: 9, Bytes: 1024, Evicted: 4, Resyncs: 5}})
	assert.Equal(t, []string{
		`dpserve_kv_events_total{app="demo",group="1",kind="batch",rank="0"} 7`,
		`dpserve_kv_events_total{app="demo",group="1",kind="dropped",rank="0"} 3`,
		`dpserve_kv_events_total{app="demo",group="1",kind="gap",rank="0"} 1`,
		`dpserve_kv_events_total{app="demo",group="1",kind="restart",rank="0"} 1`,
		`dpserve_kv_index_blocks{app="demo",group="0",rank="1"} 5`,
		`dpserve_kv_index_blocks{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_index_bytes{app="demo",group="0",rank="1"} 320`,
		`dpserve_kv_index_bytes{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_index_evictions_total{app="demo",group="0",rank="1"} 2`,
		`dpserve_kv_index_evictions_total{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_index_orphans{app="demo",group="0",rank="1"} 1`,
		`dpserve_kv_index_orphans{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_silent{app="demo",group="1",rank="0"} 1`,
		`dpserve_router_index_blocks{app="demo"} 9`,
		`dpserve_router_index_bytes{app="demo"} 1024`,
		`dpserve_router_index_evictions_total{app="demo"} 4`,
		`dpserve_router_index_resyncs_total{app="demo"} 5`,
	}, series(t, m))

	m.ShowKV([]telemetry.RankKV{{App: "demo", Group: 0, Rank: 1, Blocks: 6}}, nil)
	joined := strings.Join(series(t, m), "\n")
	assert.Contains(t, joined, `dpserve_kv_index_blocks{app="demo",group="0",rank="1"} 6`)
	assert.NotContains(t, joined, `group="1"`)
	assert.NotContains(t, joined, "dpserve_router_index")
}
