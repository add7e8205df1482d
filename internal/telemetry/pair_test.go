package telemetry_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/telemetry"
)

// usePair touches every metric of a Pair once.
func usePair(m *telemetry.Metrics, app string) {
	p := m.Pair(app)
	p.Request(telemetry.WayRemote, "ok")
	p.Request(telemetry.WayNone, "rejected")
	p.Decision("long_prefill")
	p.Leg("prefill", "ok")
	p.Leg("decode", "cut")
	p.Note("redo")
	p.NotSplit("several choices")
	p.Part("transfer", 3*time.Millisecond)
	p.Pairs(7, 8)
}

func TestPairIsCached(t *testing.T) {
	m := telemetry.New()
	first, again, other := m.Pair("pd"), m.Pair("pd"), m.Pair("pd2")
	assert.Same(t, first, again)
	assert.NotSame(t, first, other)
}

func TestPairSeries(t *testing.T) {
	m := telemetry.New()
	usePair(m, "pd")
	var lines []string
	for _, line := range series(t, m) {
		if !strings.Contains(line, "_bucket{") {
			lines = append(lines, line)
		}
	}
	assert.Equal(t, []string{
		`dpserve_pd_decisions_total{app="pd",reason="long_prefill"} 1`,
		`dpserve_pd_legs_total{app="pd",ending="cut",side="decode"} 1`,
		`dpserve_pd_legs_total{app="pd",ending="ok",side="prefill"} 1`,
		`dpserve_pd_not_split_total{app="pd",reason="several choices"} 1`,
		`dpserve_pd_notes_total{app="pd",note="redo"} 1`,
		`dpserve_pd_pairs{app="pd",state="all"} 8`,
		`dpserve_pd_pairs{app="pd",state="connected"} 7`,
		`dpserve_pd_requests_total{app="pd",outcome="ok",way="remote"} 1`,
		`dpserve_pd_requests_total{app="pd",outcome="rejected",way="none"} 1`,
		`dpserve_pd_ttft_seconds_sum{app="pd",part="transfer"} 0.003`,
		`dpserve_pd_ttft_seconds_count{app="pd",part="transfer"} 1`,
	}, lines)
}

// What status shows is what the series count.
func TestPairCounts(t *testing.T) {
	p := telemetry.New().Pair("pd")
	for way, n := range map[string]int{
		telemetry.WayRemote: 3, telemetry.WayLocal: 2, telemetry.WayFallback: 1, telemetry.WayNone: 5,
	} {
		for range n {
			p.Request(way, "ok")
		}
	}
	assert.Equal(t, telemetry.PairCounts{Remote: 3, Local: 2, Fallback: 1}, p.Counts())
}

// No series of a forgotten Pair remains, a caller that still holds it cannot recreate one, and the pools of
// the application and other applications keep theirs.
func TestForgetPair(t *testing.T) {
	m := telemetry.New()
	usePair(m, "pd")
	usePair(m, "other")
	m.App("pd.decode", "kv").Refusal("full")
	old := m.Pair("pd")
	m.ForgetPair("pd")
	old.Request("new", "new")
	old.Decision("new")
	old.Leg("new", "new")
	old.Note("new")
	old.NotSplit("new")
	old.Part("new", time.Second)
	old.Pairs(1, 1)
	joined := strings.Join(series(t, m), "\n")
	assert.NotContains(t, joined, `app="pd"`)
	assert.Contains(t, joined, `dpserve_refusals_total{app="pd.decode",code="full"} 1`)
	assert.Contains(t, joined, `dpserve_pd_pairs{app="other",state="connected"} 7`)
	m.ForgetPair("pd")

	m.Pair("pd").Note("redo")
	assert.Contains(t, strings.Join(series(t, m), "\n"), `dpserve_pd_notes_total{app="pd",note="redo"} 1`)
}

// All methods run beside each other and deletions under the race detector.
func TestPairConcurrent(t *testing.T) {
	m := telemetry.New()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 50 {
				usePair(m, "pd")
				_ = m.Pair("pd").Counts()
				if n%10 == i {
					m.ForgetPair("pd")
				}
			}
		})
	}
	wg.Wait()
	m.ForgetPair("pd")
	assert.NotContains(t, strings.Join(series(t, m), "\n"), `app="pd"`)
}

// The calls that a request makes do not allocate.
func TestPairAllocatesNothing(t *testing.T) {
	m := telemetry.New()
	usePair(m, "pd")
	assert.Zero(t, testing.AllocsPerRun(100, func() { usePair(m, "pd") }))
}

// A rank whose engine counts transfers has their series as long as it is shown.
func TestTransferSeries(t *testing.T) {
	m := telemetry.New()
	m.ShowRanks([]telemetry.RankSample{
		{App: "pd.decode", Group: 0, Rank: 1, Transfer: &telemetry.TransferSample{
			Count: 2, Bytes: 65536, Failed: 3, Expired: 4, LateReads: 5, Seconds: 0.25,
		}},
		{App: "pd.decode", Group: 0, Rank: 2},
	}, nil, nil)
	var lines []string
	for _, line := range series(t, m) {
		if strings.HasPrefix(line, "dpserve_kv_") {
			lines = append(lines, line)
		}
	}
	assert.Equal(t, []string{
		`dpserve_kv_late_reads_total{app="pd.decode",group="0",rank="1"} 5`,
		`dpserve_kv_leases_expired_total{app="pd.decode",group="0",rank="1"} 4`,
		`dpserve_kv_transfer_bytes_total{app="pd.decode",group="0",rank="1"} 65536`,
		`dpserve_kv_transfer_failures_total{app="pd.decode",group="0",rank="1"} 3`,
		`dpserve_kv_transfer_seconds_total{app="pd.decode",group="0",rank="1"} 0.25`,
		`dpserve_kv_transfers_total{app="pd.decode",group="0",rank="1"} 2`,
	}, lines)
	m.ForgetApp("pd.decode")
	assert.Empty(t, series(t, m))
}

// LG45: docs/metrics.md names every metric, and names no other.
func TestEveryMetricIsDocumented(t *testing.T) {
	m := telemetry.New()
	use(m)
	useOnce(m)
	m.BuildInfo("v1")
	exported := map[string]bool{}
	for _, line := range scrape(t, m) {
		if name, ok := strings.CutPrefix(line, "# TYPE "); ok {
			exported[strings.Fields(name)[0]] = true
		}
	}
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "metrics.md"))
	require.NoError(t, err)
	documented := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		row := strings.Split(line, "|")
		if len(row) < 2 || !strings.HasPrefix(row[1], " `dpserve_") || strings.ContainsAny(row[1], "{(<=>") {
			continue // no row of the table of metrics
		}
		for _, name := range metricName.FindAllString(row[1], -1) {
			documented[name] = true
		}
	}
	assert.Equal(t, exported, documented)
}

var metricName = regexp.MustCompile(`dpserve_[a-z_]+`)
