package telemetry

import (
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// RankSample describes one rank of this node at a scrape.
type RankSample struct {
	App         string
	Group, Rank int
	InFlight    int
	Tripped     bool
	KV          *KVSample // nil: the rank keeps no record of its engine's KV cache
}

// KVSample describes one rank's record of its engine's KV cache.
type KVSample struct {
	Blocks   int
	Bytes    int
	Orphans  int
	Evicted  uint64
	Events   bool   // the rank subscribes to its engine's events; the fields below are valid
	Batches  uint64 // event batches applied
	Gaps     uint64 // sequence jumps
	Restarts uint64 // engine restarts, detected by the sequence numbers
	Dropped  uint64 // malformed, unknown or contradictory events
	Silent   bool   // the engine has traffic and sends no event
}

// AppIndex describes an ingress's index of the KV caches of an application.
type AppIndex struct {
	App     string
	Blocks  int
	Bytes   int
	Evicted uint64
	Resyncs uint64
}

// rankCollector collects the samples of the last ShowRanks, so that a rank's series disappear with the rank.
type rankCollector struct {
	snapshot atomic.Pointer[rankSamples]

	inFlight, tripped                                  *prometheus.Desc
	blocks, bytes, orphans, evictions, events, silent  *prometheus.Desc
	routerBlocks, routerBytes, routerEvicted, resynced *prometheus.Desc
}

type rankSamples struct {
	ranks []RankSample
	apps  []AppIndex
}

func newRankCollector() *rankCollector {
	return &rankCollector{
		inFlight: newRankDesc("rank_inflight", "Requests the rank has in hand."),
		tripped: newRankDesc("rank_tripped",
			"1 while the rank's answers have failed in a row and no canary has come back."),
		blocks: newRankDesc("kv_index_blocks",
			"Blocks that the rank's KV index holds, by its engine's events or by the record of what it "+
				"was sent."),
		bytes: newRankDesc("kv_index_bytes", "Memory of the rank's KV index."),
		orphans: newRankDesc("kv_index_orphans",
			"Blocks in the rank's KV index whose parent is not there."),
		evictions: newRankDesc("kv_index_evictions_total",
			"Blocks dropped from the rank's KV index at its memory cap."),
		events: newRankDesc("kv_events_total",
			"What came of the engine's KV events: batches applied, gaps, engine restarts, events dropped.",
			labelKind),
		silent: newRankDesc("kv_silent",
			"1 while the rank's engine should send KV events under traffic and does not."),
		routerBlocks: newAppDesc("router_index_blocks",
			"Blocks in this ingress's KV index, over all ranks."),
		routerBytes: newAppDesc("router_index_bytes", "Memory of this ingress's KV index."),
		routerEvicted: newAppDesc("router_index_evictions_total",
			"Blocks dropped from this ingress's KV index at its memory cap."),
		resynced: newAppDesc("router_index_resyncs_total",
			"Columns of this ingress's KV index that were asked for again after a gap."),
	}
}

func newRankDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help,
		append([]string{labelApp, labelGroup, labelRank}, more...), nil)
}

func newAppDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, []string{labelApp}, nil)
}

// ShowRanks replaces the samples of ranks and of the ingress's indexes. Call it before each scrape with all
// ranks of this node and all applications that have an index.
func (m *Metrics) ShowRanks(ranks []RankSample, apps []AppIndex) {
	m.ranks.snapshot.Store(&rankSamples{ranks, apps})
}

// forget drops the samples of an application. When a ShowRanks comes in between, its samples stay: they are
// replaced before the next scrape.
func (c *rankCollector) forget(app string) {
	old := c.snapshot.Load()
	if old == nil {
		return
	}
	left := rankSamples{
		ranks: slices.DeleteFunc(slices.Clone(old.ranks), func(r RankSample) bool { return r.App == app }),
		apps:  slices.DeleteFunc(slices.Clone(old.apps), func(a AppIndex) bool { return a.App == app }),
	}
	c.snapshot.CompareAndSwap(old, &left)
}

// Describe implements prometheus.Collector.
func (c *rankCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.inFlight, c.tripped, c.blocks, c.bytes, c.orphans, c.evictions, c.events, c.silent,
		c.routerBlocks, c.routerBytes, c.routerEvicted, c.resynced,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *rankCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.snapshot.Load()
	if s == nil {
		return
	}
	for i := range s.ranks {
		c.rank(ch, &s.ranks[i])
	}
	for i := range s.apps {
		a := &s.apps[i]
		ch <- newGaugeSample(c.routerBlocks, float64(a.Blocks), a.App)
		ch <- newGaugeSample(c.routerBytes, float64(a.Bytes), a.App)
		ch <- newCounterSample(c.routerEvicted, a.Evicted, a.App)
		ch <- newCounterSample(c.resynced, a.Resyncs, a.App)
	}
}

func (c *rankCollector) rank(ch chan<- prometheus.Metric, r *RankSample) {
	group, rank := strconv.Itoa(r.Group), strconv.Itoa(r.Rank)
	ch <- newGaugeSample(c.inFlight, float64(r.InFlight), r.App, group, rank)
	ch <- newGaugeSample(c.tripped, boolGauge(r.Tripped), r.App, group, rank)
	kv := r.KV
	if kv == nil {
		return
	}
	ch <- newGaugeSample(c.blocks, float64(kv.Blocks), r.App, group, rank)
	ch <- newGaugeSample(c.bytes, float64(kv.Bytes), r.App, group, rank)
	ch <- newGaugeSample(c.orphans, float64(kv.Orphans), r.App, group, rank)
	ch <- newCounterSample(c.evictions, kv.Evicted, r.App, group, rank)
	if !kv.Events {
		return
	}
	ch <- newGaugeSample(c.silent, boolGauge(kv.Silent), r.App, group, rank)
	ch <- newCounterSample(c.events, kv.Batches, r.App, group, rank, "batch")
	ch <- newCounterSample(c.events, kv.Gaps, r.App, group, rank, "gap")
	ch <- newCounterSample(c.events, kv.Restarts, r.App, group, rank, "restart")
	ch <- newCounterSample(c.events, kv.Dropped, r.App, group, rank, "dropped")
}

func newGaugeSample(d *prometheus.Desc, v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func newCounterSample(d *prometheus.Desc, v uint64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}
