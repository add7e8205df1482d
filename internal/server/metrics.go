package server

import (
	"net/http"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// rankMetrics collects the ranks and indexes of one scrape.
type rankMetrics struct {
	ranks []telemetry.RankSample
	apps  []telemetry.AppIndex
}

func (p *rankMetrics) addRank(app string, r *client.RankStatus) {
	out := telemetry.RankSample{
		App: app, Group: r.Group, Rank: r.Rank, InFlight: r.InFlight, Tripped: r.Tripped,
	}
	if kv := r.KV; kv != nil {
		out.KV = &telemetry.KVSample{
			Blocks: kv.Blocks, Bytes: kv.Bytes, Orphans: kv.Orphans, Evicted: kv.Evicted,
		}
		if e := kv.Events; e != nil {
			out.KV.Events, out.KV.Silent = true, e.State == client.EventsSilent
			out.KV.Batches, out.KV.Gaps, out.KV.Restarts, out.KV.Dropped = e.Batches, e.Gaps, e.Restarts,
				e.Dropped
		}
	}
	if t := r.Transfer; t != nil {
		out.Transfer = &telemetry.TransferSample{
			Count: t.Count, Bytes: t.Bytes, Failed: t.Failed, Expired: t.Expired, LateReads: t.LateReads,
			Seconds: t.TotalMs / 1000,
		}
	}
	p.ranks = append(p.ranks, out)
}

func (p *rankMetrics) addIndex(app string, ix *client.Index) {
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
		var shown rankMetrics
		for unit, ranks := range n.node.RankStatuses() {
			name, _, _ := strings.Cut(unit, "/")
			for i := range ranks {
				shown.addRank(name, &ranks[i])
			}
		}
		if n.ingress != nil {
			for name := range n.store.State().Apps {
				shown.addIndex(name, n.ingress.Index(name))
			}
		}
		n.metrics.ShowRanks(shown.ranks, shown.apps)
		pages.ServeHTTP(w, r)
	})
}
