package wiring

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/dpserve/dpserve/app"
)

// longestGrace is the drain of the app that asks for the most; each unit still ends with its own app's.
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

// scrape refreshes the gauges that nobody pushes, then serves /metrics: the accounts of this node's replicas.
func (n *Node) scrape() http.Handler {
	pages := n.metrics.Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.here.Show(n.node.LeaseLeft().Seconds(), n.leads.Load() != nil)
		var kv kvPage
		for unit, ranks := range n.node.RankStatuses() {
			name, _, _ := strings.Cut(unit, "/")
			for i := range ranks {
				k := &ranks[i]
				n.metrics.RankInflight(name, k.Group, k.Rank, k.InFlight)
				n.metrics.RankTripped(name, k.Group, k.Rank, k.Tripped)
				kv.rank(name, k)
			}
		}
		if n.ingress != nil {
			for name := range n.store.State().Apps {
				kv.index(name, n.ingress.Index(name))
			}
		}
		n.metrics.ShowKV(kv.ranks, kv.apps)
		pages.ServeHTTP(w, r)
	})
}
