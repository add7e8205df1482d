package wiring

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/app"
)

// longestGrace is the drain of the app that asks for the most; each unit still ends with its own app's.
func (n *Node) longestGrace() time.Duration {
	var longest time.Duration
	for _, a := range n.cluster.State().Apps {
		var spec app.Application
		if json.Unmarshal(a.Spec, &spec) == nil {
			longest = max(longest, app.Seconds(spec.GracefulShutdownTimeout))
		}
	}
	return longest
}

// scrape refreshes the gauges that nobody pushes, then serves /metrics: the replicas' own accounts.
func (n *Node) scrape() http.Handler {
	pages := n.metrics.Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var kv kvPage
		ranks := n.node.RankStatuses()
		for _, a := range n.control.Status() {
			for i := range a.Units {
				u := &a.Units[i]
				merge(u, ranks[u.Unit])
				for j := range u.Ranks {
					k := &u.Ranks[j]
					n.metrics.RankInflight(a.Name, k.Group, k.Rank, k.InFlight)
					kv.rank(a.Name, k)
				}
			}
			kv.index(a.Name, n.ingress.Index(a.Name))
		}
		n.metrics.ShowKV(kv.ranks, kv.apps)
		pages.ServeHTTP(w, r)
	})
}
