package ingress

import (
	"fmt"
	"slices"

	"github.com/dpserve/dpserve/routing"
)

// rankExplainer explains for each rank whether a request could go there. It restates the rules of
// routing.Eligible and of the Router's tiers; TestExplainRows keeps both equal.
type rankExplainer struct {
	query      *routing.Request
	view       *routing.View
	anyOpen    bool // some rank has room and a live stream
	draining   map[routing.RankID]bool
	fullReason map[routing.RankID]string // why a rank counts as full whatever its numbers say
}

func (ar *appRouter) newRankExplainer(query *routeQuery, v *routing.View) *rankExplainer {
	j := &rankExplainer{query: &query.query, view: v, draining: map[routing.RankID]bool{},
		fullReason: map[routing.RankID]string{}}
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		j.anyOpen = j.anyOpen || !rk.Silent && routing.HasRoom(rk) && routing.Eligible(&query.query, rk)
	}
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for id, r := range ar.ranks {
		j.draining[id] = r.draining
		switch {
		case r.busy:
			j.fullReason[id] = "its engine said that it is busy"
		case r.full && r.turn != "" && r.offered == 0:
			j.fullReason[id] = "its free room is for another ingress, which waits as well"
		case r.full:
			j.fullReason[id] = "it said that it is full"
		}
	}
	return j
}

// explain returns the rank's state, the reason in words ("" if it may be picked), and whether it could be
// picked.
func (j *rankExplainer) explain(rk *routing.Rank) (state, why string, eligible bool) {
	switch {
	case slices.Contains(j.query.Tried, rk.ID):
		return "tried", "it failed this request already", false
	case !rk.Ready && j.draining[rk.ID]:
		return "draining", "it takes nothing new and lets its requests end", false
	case !rk.Ready:
		return "not-ready", "its unit is not ready, or its engine does not accept", false
	case rk.LeftOut:
		return "tripped", "its answers failed in a row, and no canary has come back yet", false
	case rk.Busy:
		return "busy", fmt.Sprintf("KV usage %.2f, busy_threshold %.2f", rk.Usage(), j.view.BusyThreshold),
			false
	case rk.Silent && j.anyOpen:
		return "silent", "its stream is silent, and others are not", false
	case rk.Silent:
		return "silent", "", true // admission decides
	case j.fullReason[rk.ID] != "" && !routing.HasRoom(rk):
		return "full", j.fullReason[rk.ID], false
	case !routing.HasRoom(rk):
		return "full", fmt.Sprintf("%d of %d requests in flight", rk.Load.O(), rk.MaxOngoing), false
	}
	return "ok", "", true
}
