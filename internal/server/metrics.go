package server

import (
	"net/http"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// kvMetrics collects the KV cache metrics of one scrape.
type kvMetrics struct {
	ranks []telemetry.RankKV
	apps  []telemetry.AppIndex
}

func (p *kvMetrics) addRank(app string, r *client.RankStatus) {
	kv := r.KV
	if kv == nil {
		return
	}
	out := telemetry.RankKV{
		App: app, Group: r.Group, Rank: r.Rank, Blocks: kv.Blocks, Bytes: kv.Bytes,
		Orphans: kv.Orphans, Evicted: kv.Evicted,
	}
	if e := kv.Events; e != nil {
		out.Events, out.Silent = true, e.State == client.EventsSilent
		out.Batches, out.Gaps, out.Restarts, out.Dropped = e.Batches, e.Gaps, e.Restarts, e.Dropped
	}
	p.ranks = append(p.ranks, out)
}

func (p *kvMetrics) addIndex(app string, ix *client.Index) {
	if ix != nil {
		p.apps = append(p.apps, telemetry.AppIndex{
			App: app, Blocks: ix.Blocks, Bytes: ix.Bytes,
			Evicted: ix.Evicted, Resyncs: ix.Resyncs,
		})
	}
}

// metricsHandler returns /metrics: it updates the gauges of ranks, KV caches and the lease, then answers.
func metricsHandler(n *Node) http.Handler {
	pages := n.metrics.Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, leads := n.leading.Current()
		n.nodeMetrics.Show(n.node.LeaseLeft().Seconds(), leads)
		var kv kvMetrics
		for unit, ranks := range n.node.RankStatuses() {
			name, _, _ := strings.Cut(unit, "/")
			for i := range ranks {
				k := &ranks[i]
				n.metrics.RankInflight(name, k.Group, k.Rank, k.InFlight)
				n.metrics.RankTripped(name, k.Group, k.Rank, k.Tripped)
				kv.addRank(name, k)
			}
		}
		if n.ingress != nil {
			for name := range n.store.State().Apps {
				kv.addIndex(name, n.ingress.Index(name))
			}
		}
		n.metrics.ShowKV(kv.ranks, kv.apps)
		pages.ServeHTTP(w, r)
	})
}
