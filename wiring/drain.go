package wiring

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/dpserve/dpserve/app"
)

// longestGrace returns the longest drain time of all applications. Each unit still ends with the time of its
// own application.
func (n *Node) longestGrace() time.Duration {
	var longest time.Duration
	for _, a := range n.store.State().Apps {
		var spec app.Application
		if json.Unmarshal(a.Spec, &spec) == nil {
			longest = max(longest, app.Seconds(spec.GracefulShutdownTimeout))
		}
	}
	return longest
}

// metricsHandler updates the gauges of ranks, KV caches and the lease, then serves /metrics.
func (n *Node) metricsHandler() http.Handler {
	pages := n.metrics.Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.nodeMetrics.Show(n.node.LeaseLeft().Seconds(), n.leading.Load() != nil)
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
