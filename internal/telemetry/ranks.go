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
	Ejected     bool
	KV          *KVSample       // nil: the rank keeps no record of its engine's KV cache
	Transfer    *TransferSample // nil: its engine counts no transfers
}

// TransferSample is what a rank's engine counts of KV transfers between prefill and decode ranks, since its
// start.
type TransferSample struct {
	Count, Bytes, Failed, Expired, LateReads uint64
	Seconds                                  float64
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
	Unknown  uint64 // members of events that are not known
	Silent   bool   // the engine has traffic and sends no event
}

// AppIndex describes an ingress's index of the KV caches of an application.
type AppIndex struct {
	App     string
	Blocks  int
	Bytes   int
	Evicted uint64
}

// GroupSample describes the queue of a lockstep group at the ingress that has it. The counts are since the
// queue began.
type GroupSample struct {
	App                              string
	Group, Held, Open                int
	PaceMs, DecodeBalance            float64
	Cohorts, CohortRequests, OnRanks uint64
}

// groupDescs describe the series of a GroupSample.
type groupDescs struct{ held, open, pace, balance, cohorts, requests, ranks *prometheus.Desc }

func newGroupDescs() groupDescs {
	desc := func(name, help string) *prometheus.Desc { return newAppDesc(name, help, labelGroup) }
	return groupDescs{
		held:     desc("group_held", "Requests that wait in the queue of a lockstep group."),
		open:     desc("group_open", "Requests that the queue has released and that have not ended."),
		pace:     desc("group_pace_seconds", "Mean time between the tokens of a request; 0 = not known."),
		balance:  desc("group_decode_balance", "Mean decode time of the ranks over that of the slowest."),
		cohorts:  desc("group_cohorts_total", "Releases of prompts that enter the group together."),
		requests: desc("group_cohort_requests_total", "Requests of those cohorts."),
		ranks:    desc("group_cohort_ranks_total", "Ranks that got prompts, summed over those cohorts."),
	}
}

func (d *groupDescs) list() []*prometheus.Desc {
	return []*prometheus.Desc{d.held, d.open, d.pace, d.balance, d.cohorts, d.requests, d.ranks}
}

func (d *groupDescs) collect(ch chan<- prometheus.Metric, s *GroupSample) {
	labels := []string{s.App, strconv.Itoa(s.Group)}
	ch <- newGaugeSample(d.held, float64(s.Held), labels...)
	ch <- newGaugeSample(d.open, float64(s.Open), labels...)
	ch <- newGaugeSample(d.pace, s.PaceMs/1000, labels...)
	ch <- newGaugeSample(d.balance, s.DecodeBalance, labels...)
	ch <- newCounterSample(d.cohorts, s.Cohorts, labels...)
	ch <- newCounterSample(d.requests, s.CohortRequests, labels...)
	ch <- newCounterSample(d.ranks, s.OnRanks, labels...)
}

// rankCollector collects the samples of the last ShowRanks, so that a rank's series disappear with the rank.
type rankCollector struct {
	snapshot atomic.Pointer[rankSamples]

	inFlight, ejected                                 *prometheus.Desc
	blocks, bytes, orphans, evictions, events, silent *prometheus.Desc
	routerBlocks, routerBytes, routerEvicted          *prometheus.Desc
	transfer                                          transferDescs
	group                                             groupDescs
}

// transferDescs describe the series of a TransferSample.
type transferDescs struct{ count, seconds, bytes, failed, expired, lateReads *prometheus.Desc }

func newTransferDescs() transferDescs {
	return transferDescs{
		count: newRankDesc("kv_transfers_total",
			"KV transfers from prefill ranks that the rank's engine has counted."),
		seconds: newRankDesc("kv_transfer_seconds_total", "Time of those transfers, in all."),
		bytes:   newRankDesc("kv_transfer_bytes_total", "Bytes of those transfers."),
		failed: newRankDesc("kv_transfer_failures_total",
			"KV transfers that failed, handshakes included."),
		expired: newRankDesc("kv_leases_expired_total",
			"Prompts that the prefill rank dropped because no decode rank read them in time."),
		lateReads: newRankDesc("kv_late_reads_total",
			"Prompts that a decode rank read after the prefill rank's lease: their texts may be wrong."),
	}
}

func (d *transferDescs) list() []*prometheus.Desc {
	return []*prometheus.Desc{d.count, d.seconds, d.bytes, d.failed, d.expired, d.lateReads}
}

func (d *transferDescs) collect(ch chan<- prometheus.Metric, s *TransferSample, labels ...string) {
	ch <- newCounterSample(d.count, s.Count, labels...)
	ch <- prometheus.MustNewConstMetric(d.seconds, prometheus.CounterValue, s.Seconds, labels...)
	ch <- newCounterSample(d.bytes, s.Bytes, labels...)
	ch <- newCounterSample(d.failed, s.Failed, labels...)
	ch <- newCounterSample(d.expired, s.Expired, labels...)
	ch <- newCounterSample(d.lateReads, s.LateReads, labels...)
}

type rankSamples struct {
	ranks  []RankSample
	apps   []AppIndex
	groups []GroupSample
}

func newRankCollector() *rankCollector {
	return &rankCollector{
		inFlight: newRankDesc("rank_inflight", "Requests the rank has in hand."),
		ejected: newRankDesc("rank_ejected",
			"1 while the rank's last answers have failed and no probe has succeeded."),
		blocks: newRankDesc("kv_index_blocks",
			"Blocks that the rank's KV index holds, by its engine's events or by the record of what it "+
				"was sent."),
		bytes: newRankDesc("kv_index_bytes", "Memory of the rank's KV index."),
		orphans: newRankDesc("kv_index_orphans",
			"Blocks in the rank's KV index whose parent is not there."),
		evictions: newRankDesc("kv_index_evictions_total",
			"Blocks dropped from the rank's KV index at its memory cap."),
		events: newRankDesc("kv_events_total",
			"What came of the engine's KV events: batches applied, gaps, engine restarts, events dropped, "+
				"members of events that are not known.",
			labelKind),
		silent: newRankDesc("kv_silent",
			"1 while the rank's engine should send KV events under traffic and does not."),
		routerBlocks: newAppDesc("router_index_blocks",
			"Blocks in this ingress's KV index, over all ranks."),
		routerBytes: newAppDesc("router_index_bytes", "Memory of this ingress's KV index."),
		routerEvicted: newAppDesc("router_index_evictions_total",
			"Blocks dropped from this ingress's KV index at its memory cap."),
		transfer: newTransferDescs(), group: newGroupDescs(),
	}
}

func newRankDesc(name, help string, more ...string) *prometheus.Desc {
	return newAppDesc(name, help, append([]string{labelGroup, labelRank}, more...)...)
}

func newAppDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help,
		append([]string{labelApp}, more...), nil)
}

// ShowRanks replaces the samples of ranks, and of the ingress's indexes and queues of lockstep groups. Call
// it before each scrape with all ranks of this node, all applications that have an index, and those queues.
func (m *Metrics) ShowRanks(ranks []RankSample, apps []AppIndex, groups []GroupSample) {
	m.ranks.snapshot.Store(&rankSamples{ranks, apps, groups})
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
		groups: slices.DeleteFunc(slices.Clone(old.groups),
			func(g GroupSample) bool { return g.App == app }),
	}
	c.snapshot.CompareAndSwap(old, &left)
}

// Describe implements prometheus.Collector.
func (c *rankCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range append(append(c.transfer.list(), c.group.list()...),
		c.inFlight, c.ejected, c.blocks, c.bytes, c.orphans, c.evictions, c.events, c.silent,
		c.routerBlocks, c.routerBytes, c.routerEvicted,
	) {
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
	}
	for i := range s.groups {
		c.group.collect(ch, &s.groups[i])
	}
}

func (c *rankCollector) rank(ch chan<- prometheus.Metric, r *RankSample) {
	group, rank := strconv.Itoa(r.Group), strconv.Itoa(r.Rank)
	ch <- newGaugeSample(c.inFlight, float64(r.InFlight), r.App, group, rank)
	ch <- newGaugeSample(c.ejected, boolGauge(r.Ejected), r.App, group, rank)
	if r.Transfer != nil {
		c.transfer.collect(ch, r.Transfer, r.App, group, rank)
	}
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
	ch <- newCounterSample(c.events, kv.Unknown, r.App, group, rank, "unknown_member")
}

func newGaugeSample(d *prometheus.Desc, v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func newCounterSample(d *prometheus.Desc, v uint64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}
