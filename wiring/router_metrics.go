package wiring

import (
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/telemetry"
)

// kvMetrics collects the KV cache metrics of one scrape.
type kvMetrics struct {
	ranks []telemetry.RankKV
	apps  []telemetry.AppIndex
}

func (p *kvMetrics) addRank(app string, r *msg.RankStatus) {
	kv := r.KV
	if kv == nil {
		return
	}
	out := telemetry.RankKV{App: app, Group: r.Group, Rank: r.Rank, Blocks: kv.Blocks, Bytes: kv.Bytes,
		Orphans: kv.Orphans, Evicted: kv.Evicted}
	if e := kv.Events; e != nil {
		out.Events, out.Silent = true, e.State == msg.EventsSilent
		out.Batches, out.Gaps, out.Restarts, out.Dropped = e.Batches, e.Gaps, e.Restarts, e.Dropped
	}
	p.ranks = append(p.ranks, out)
}

func (p *kvMetrics) addIndex(app string, ix *msg.IndexStatus) {
	if ix != nil {
		p.apps = append(p.apps, telemetry.AppIndex{App: app, Blocks: ix.Blocks, Bytes: ix.Bytes,
			Evicted: ix.Evicted, Resyncs: ix.Resyncs})
	}
}
