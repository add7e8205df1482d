package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// scrape returns dpserve's own lines of /metrics.
func scrape(t *testing.T, m *telemetry.Metrics) []string {
	t.Helper()
	req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, req)
	require.Equal(t, http.StatusOK, rec.Code)
	body, err := io.ReadAll(rec.Body)
	require.NoError(t, err)
	var out []string
	for line := range strings.Lines(string(body)) {
		if strings.Contains(line, "dpserve_") {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// series returns the sample lines only.
func series(t *testing.T, m *telemetry.Metrics) []string {
	t.Helper()
	var out []string
	for _, line := range scrape(t, m) {
		if !strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return out
}

// use touches every metric once.
func use(m *telemetry.Metrics) {
	a := m.App("demo", "power-of-two")
	a.Request("/v1/chat/completions", http.StatusOK, 2*time.Second, 20*time.Millisecond)
	a.Request("/v1/chat/completions", http.StatusBadGateway, time.Millisecond, 0)
	a.ITL("/v1/chat/completions", 20*time.Millisecond)
	a.SetGoals(2*time.Second, 50*time.Millisecond)
	a.Stream(http.StatusOK, time.Second, 20*time.Millisecond)
	a.Stream(http.StatusOK, time.Second, time.Second)
	a.Queue(3, 4096)
	a.QueueWait(time.Second)
	a.Tokens(100, 64, 7)
	a.Tokens(-1, -1, -1)
	a.Attempt("refused_connection", "free")
	a.Retry("engine_5xx", "drawn")
	a.Continued("unit_lost", "continued")
	a.Refusal("full")
	a.Decision(300 * time.Nanosecond)
	a.Pick(0, 3, "two_choices")
	a.Tokenize("hit")
	m.UnitPhase("demo", "demo/0", state.Starting)
	m.UnitPhase("demo", "demo/0", state.Ready)
	m.ShowRanks([]telemetry.RankSample{{App: "demo", Group: 0, Rank: 3, InFlight: 5, Ejected: true}}, nil,
		nil)
	m.RequestRefused(telemetry.RouteOther, http.StatusNotFound)
	m.RaftApply("node-1")(150 * time.Microsecond)
	usePair(m, "pd")
}

// useOnce touches the metrics that a process has once, and shows a rank, a group and an index with all of
// their series.
func useOnce(m *telemetry.Metrics) {
	n := m.Node("n1")
	n.Refused("tls")
	n.Unknown("field")
	n.Show(&telemetry.NodeSample{
		LeaseSeconds: 7.5, Leads: true, Voters: 3, VotersHeard: 2, CertificateExpiry: 1.8e9,
		DiskFree: 1 << 30, DiskSize: 1 << 40,
	})
	m.Streams("n1",
		func() telemetry.StreamCounts { return telemetry.StreamCounts{Gaps: 1, Dropped: 2, Lost: 3} })
	m.Ingress("n1", func() telemetry.IngressUsage {
		return telemetry.IngressUsage{
			BodyBytes: 4, BodyLimit: 5, MemoryBytes: 6, MemoryLimit: 7, Connections: 8,
		}
	})
	m.Traces()("exported", 5)
	a := m.Access()
	a.Used("alice")
	a.Refused(telemetry.KeyWrong)
	a.FileFailed(telemetry.FileTLS, true)
	a.CertificateExpires(1.9e9)
	ranks := []telemetry.RankSample{{
		App: "demo", Group: 0, Rank: 3, InFlight: 5, Ejected: true,
		KV: &telemetry.KVSample{Events: true}, Transfer: &telemetry.TransferSample{Count: 2},
	}}
	groups := []telemetry.GroupSample{{App: "demo", Group: 1, Held: 3}}
	m.ShowRanks(ranks, []telemetry.AppIndex{{App: "demo", Blocks: 9}}, groups)
	m.ShowPools([]telemetry.PoolSample{{
		App: "demo", Ready: 3, Desired: 4,
		Units: []telemetry.UnitSample{{Unit: "demo/0", Epoch: 2, Restarts: 1}},
	}})
}

// TestMetricNames pins every name, type, help text, label and bucket, because dashboards depend on them. Run
// it with DPSERVE_REWRITE=1 to write the file, then read the diff.
func TestMetricNames(t *testing.T) {
	m := telemetry.New()
	use(m)
	useOnce(m)
	got := strings.Join(scrape(t, m), "\n") + "\n"
	golden := filepath.Join("testdata", "metrics.txt")
	if os.Getenv("DPSERVE_REWRITE") != "" {
		require.NoError(t, os.MkdirAll("testdata", 0o750))
		require.NoError(t, os.WriteFile(golden, []byte(got), 0o600))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	assert.Equal(t, string(want), got)
}

func TestProcessCollectors(t *testing.T) {
	rec := httptest.NewRecorder()
	telemetry.New().Handler().ServeHTTP(rec,
		httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	assert.Contains(t, rec.Body.String(), "go_goroutines")
	assert.Contains(t, rec.Body.String(), "process_resident_memory_bytes")
}

func TestAppIsCached(t *testing.T) {
	m := telemetry.New()
	first, again, other := m.App("demo", "random"), m.App("demo", "random"), m.App("demo", "direct")
	assert.Same(t, first, again)
	assert.NotSame(t, first, other)
}

// No series of a deleted app remains, and a caller that still holds the App cannot recreate one.
func TestForgetApp(t *testing.T) {
	m := telemetry.New()
	use(m)
	old := m.App("demo", "power-of-two")
	m.App("other", "random").Refusal("full")
	m.ForgetApp("demo")
	for _, line := range series(t, m) {
		assert.NotContains(t, line, `app="demo"`)
	}
	old.Request("/new", http.StatusOK, time.Second, time.Second)
	old.ITL("/new", time.Second)
	old.Attempt("new", "free")
	old.Retry("new", "free")
	old.Refusal("new")
	old.Pick(9, 9, "new")
	old.Queue(1, 1)
	old.Tokens(1, 1, 1)
	joined := strings.Join(series(t, m), "\n")
	assert.NotContains(t, joined, `app="demo"`)
	assert.Contains(t, joined, `dpserve_refusals_total{app="other",code="full"} 1`)

	m.App("demo", "power-of-two").Refusal("full")
	assert.Contains(t, strings.Join(series(t, m), "\n"), `dpserve_refusals_total{app="demo",code="full"} 1`)
}

// The goals of an application are those of its last policy.
func TestTrafficHasTheGoalsOfTheLastPolicy(t *testing.T) {
	m := telemetry.New()
	for i := range 20 {
		m.App("demo", "policy-"+strconv.Itoa(i)).SetGoals(time.Duration(i)*time.Second, 50*time.Millisecond)
	}
	goals := m.Traffic("demo").Goodput
	assert.InDelta(t, 19, goals.TTFT, 1e-9)
	assert.InDelta(t, 0.05, goals.TPOT, 1e-9)
}

func TestUnitForget(t *testing.T) {
	m := telemetry.New()
	use(m)
	m.App("demo", "power-of-two").Pick(0, 1, "two_choices")
	m.ShowRanks([]telemetry.RankSample{{App: "demo", Group: 0, Rank: 1, InFlight: 2}}, nil, nil)
	m.UnitPhase("demo", "demo/1", state.Failed)

	m.UnitForget("demo", "demo/0")
	joined := strings.Join(series(t, m), "\n")
	assert.NotContains(t, joined, `dpserve_unit_state{app="demo",state="ready",unit="demo/0"}`)
	assert.Contains(t, joined, `dpserve_unit_state{app="demo",state="failed",unit="demo/1"} 1`)
	assert.Contains(t, joined, `dpserve_rank_inflight{app="demo",group="0",rank="1"} 2`)
}

// All methods run beside scrapes and deletions under the race detector.
func TestConcurrent(t *testing.T) {
	m := telemetry.New()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 50 {
				use(m)
				m.App("demo", "power-of-two").Pick(i, n, "two_choices")
				if n%10 == i {
					m.ForgetApp("demo")
				}
			}
		})
	}
	wg.Go(func() {
		for range 10 {
			m.Handler().ServeHTTP(httptest.NewRecorder(),
				httptest.NewRequestWithContext(context.Background(), http.MethodGet, "/", nil))
		}
	})
	wg.Wait()
	m.ForgetApp("demo")
	assert.NotContains(t, strings.Join(series(t, m), "\n"), `app="demo"`)
}

// The calls that a request or a chunk makes do not allocate.
func TestHitPathAllocatesNothing(t *testing.T) {
	m := telemetry.New()
	for name, call := range hitPath(m) {
		t.Run(name, func(t *testing.T) {
			call()
			assert.Zero(t, testing.AllocsPerRun(100, call))
		})
	}
}

func hitPath(m *telemetry.Metrics) map[string]func() {
	a := m.App("demo", "power-of-two")
	for r := range 64 {
		a.Pick(0, r, "two_choices")
	}
	return map[string]func(){
		"request":  func() { a.Request("/v1/chat/completions", 200, time.Second, time.Millisecond) },
		"itl":      func() { a.ITL("/v1/chat/completions", 20*time.Millisecond) },
		"queue":    func() { a.Queue(1, 100) },
		"wait":     func() { a.QueueWait(time.Millisecond) },
		"tokens":   func() { a.Tokens(100, 10, 5) },
		"attempt":  func() { a.Attempt("engine_5xx", "drawn") },
		"retry":    func() { a.Retry("engine_5xx", "drawn") },
		"refusal":  func() { a.Refusal("full") },
		"decision": func() { a.Decision(100 * time.Nanosecond) },
		"pick":     func() { a.Pick(0, 7, "two_choices") },
		"tokenize": func() { a.Tokenize("hit") },
	}
}

func BenchmarkHitPath(b *testing.B) {
	for name, call := range hitPath(telemetry.New()) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				call()
			}
		})
	}
}

func TestNewLogger(t *testing.T) {
	var buf bytes.Buffer
	level := new(slog.LevelVar)
	log := telemetry.NewLogger(&buf, telemetry.FormatJSON, level)
	log.Debug("unseen")
	level.Set(slog.LevelDebug)
	log.Debug("seen", "epoch", 3)
	var line struct {
		Level, Msg string
		Epoch      int
	}
	require.NoError(t, json.Unmarshal(buf.Bytes(), &line))
	assert.Equal(t, "DEBUG seen 3",
		strings.Join([]string{line.Level, line.Msg, strconv.Itoa(line.Epoch)}, " "))

	buf.Reset()
	telemetry.NewLogger(&buf, telemetry.FormatText, slog.LevelInfo).Info("unit ready", "unit", "demo/0")
	assert.Contains(t, buf.String(), `level=INFO msg="unit ready" unit=demo/0`)
}

func TestBuildInfo(t *testing.T) {
	m := telemetry.New()
	m.BuildInfo("v1.2.3")
	assert.Equal(t, []string{`dpserve_build_info{goversion="` + runtime.Version() + `",version="v1.2.3"} 1`},
		series(t, m))
}

// Refused requests belong to no application, so their series stay.
func TestRefusedRequestsOutliveApplications(t *testing.T) {
	m := telemetry.New()
	m.RequestRefused(telemetry.RouteOther, http.StatusNotFound)
	m.App("demo", "random").Request("chat", http.StatusOK, time.Second, 0)
	m.ForgetApp("demo")
	assert.Equal(t, []string{`dpserve_requests_total{app="",code="404",route="other"} 1`}, series(t, m))
}

// LG45, RP31: Ranks that the next ShowRanks does not contain lose their series; a rank without events has no
// event series.
func TestSeriesGoWithTheirRank(t *testing.T) {
	m := telemetry.New()
	assert.NotContains(t, strings.Join(series(t, m), "\n"), "dpserve_kv_")
	m.ShowRanks([]telemetry.RankSample{
		{
			App: "demo", Group: 0, Rank: 1, InFlight: 3,
			KV: &telemetry.KVSample{Blocks: 5, Bytes: 320, Orphans: 1, Evicted: 2},
		},
		{
			App: "demo", Group: 1, Rank: 0, Ejected: true,
			KV: &telemetry.KVSample{
				Events: true, Batches: 7, Gaps: 1, Restarts: 1, Dropped: 3, Unknown: 2, Silent: true,
			},
		},
		{App: "demo", Group: 1, Rank: 1},
	}, []telemetry.AppIndex{
		{App: "demo", Blocks: 9, Bytes: 1024, Evicted: 4},
	}, []telemetry.GroupSample{{
		App: "demo", Group: 1, Held: 3, Open: 60, PaceMs: 37.5, DecodeBalance: .98, Cohorts: 4,
		CohortRequests: 30, OnRanks: 29,
	}})
	assert.Equal(t, []string{
		`dpserve_group_cohort_ranks_total{app="demo",group="1"} 29`,
		`dpserve_group_cohort_requests_total{app="demo",group="1"} 30`,
		`dpserve_group_cohorts_total{app="demo",group="1"} 4`,
		`dpserve_group_decode_balance{app="demo",group="1"} 0.98`,
		`dpserve_group_held{app="demo",group="1"} 3`,
		`dpserve_group_open{app="demo",group="1"} 60`,
		`dpserve_group_pace_seconds{app="demo",group="1"} 0.0375`,
		`dpserve_kv_events_total{app="demo",group="1",kind="batch",rank="0"} 7`,
		`dpserve_kv_events_total{app="demo",group="1",kind="dropped",rank="0"} 3`,
		`dpserve_kv_events_total{app="demo",group="1",kind="gap",rank="0"} 1`,
		`dpserve_kv_events_total{app="demo",group="1",kind="restart",rank="0"} 1`,
		`dpserve_kv_events_total{app="demo",group="1",kind="unknown_member",rank="0"} 2`,
		`dpserve_kv_index_blocks{app="demo",group="0",rank="1"} 5`,
		`dpserve_kv_index_blocks{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_index_bytes{app="demo",group="0",rank="1"} 320`,
		`dpserve_kv_index_bytes{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_index_evictions_total{app="demo",group="0",rank="1"} 2`,
		`dpserve_kv_index_evictions_total{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_index_orphans{app="demo",group="0",rank="1"} 1`,
		`dpserve_kv_index_orphans{app="demo",group="1",rank="0"} 0`,
		`dpserve_kv_silent{app="demo",group="1",rank="0"} 1`,
		`dpserve_rank_ejected{app="demo",group="0",rank="1"} 0`,
		`dpserve_rank_ejected{app="demo",group="1",rank="0"} 1`,
		`dpserve_rank_ejected{app="demo",group="1",rank="1"} 0`,
		`dpserve_rank_inflight{app="demo",group="0",rank="1"} 3`,
		`dpserve_rank_inflight{app="demo",group="1",rank="0"} 0`,
		`dpserve_rank_inflight{app="demo",group="1",rank="1"} 0`,
		`dpserve_router_index_blocks{app="demo"} 9`,
		`dpserve_router_index_bytes{app="demo"} 1024`,
		`dpserve_router_index_evictions_total{app="demo"} 4`,
	}, series(t, m))

	m.ShowRanks([]telemetry.RankSample{
		{App: "demo", Group: 0, Rank: 1, KV: &telemetry.KVSample{Blocks: 6}},
	}, nil, nil)
	joined := strings.Join(series(t, m), "\n")
	assert.Contains(t, joined, `dpserve_kv_index_blocks{app="demo",group="0",rank="1"} 6`)
	assert.NotContains(t, joined, `group="1"`)
	assert.NotContains(t, joined, "dpserve_router_index")
}

// The picks of a rank that was removed for good lose their series; a later pick of a rank with its number
// counts from 0.
func TestPicksGoWithTheirRank(t *testing.T) {
	m := telemetry.New()
	a := m.App("demo", "random")
	for range 2 {
		a.Pick(0, 1, "random")
		a.Pick(0, 2, "random")
		m.App("demo", "direct").Pick(0, 2, "named_by_caller")
	}
	m.App("other", "random").Pick(0, 2, "random")
	m.KeepRanks("demo", func(group, rank int) bool { return group == 0 && rank == 1 })
	kept := []string{
		`dpserve_router_picks_total{app="demo",group="0",rank="1",reason="random"} 2`,
		`dpserve_router_picks_total{app="other",group="0",rank="2",reason="random"} 1`,
	}
	assert.Equal(t, kept, picks(t, m))
	a.Pick(0, 2, "random")
	assert.Contains(t, picks(t, m),
		`dpserve_router_picks_total{app="demo",group="0",rank="2",reason="random"} 1`)
}

// picks returns the samples of dpserve_router_picks_total.
func picks(t *testing.T, m *telemetry.Metrics) []string {
	t.Helper()
	return slices.DeleteFunc(series(t, m), func(line string) bool {
		return !strings.HasPrefix(line, "dpserve_router_picks_total")
	})
}
