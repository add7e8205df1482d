package ingress

import (
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/tracing"
)

// endSpan ends the span of a request that is answered with a status.
func (req *request) endSpan(code int) {
	if req.spans == nil {
		return
	}
	end := tracing.RequestEnd{
		ID: req.id, Code: code, FirstByte: req.firstByte,
		Prompt: req.usage.PromptTokens, Cached: req.usage.CachedTokens, Generated: req.outputTokens(),
	}
	if req.app != nil {
		end.App = req.app.app.Name
	}
	req.spans.End(&end)
}

// endLeg ends the span of a leg on a rank of a pool.
func (req *request) endLeg(leg *tracing.Leg, pool *appRouter, a *attempt, number uint32, why dispatch.Cause) {
	if leg == nil {
		return
	}
	leg.End(&tracing.LegEnd{
		Pool: pool.name, Unit: a.rank.Unit, Node: a.rank.Node,
		Group: a.rank.ID.Group(), Rank: a.rank.ID.Rank(),
		Number: int(number), Cause: why.String(), Failed: why.Row().Done == dispatch.DoneFailed,
		FirstToken: a.firstToken,
	})
}

// legName names the span of a leg that the request has alone.
func (req *request) legName() string {
	if req.kept.isResumed {
		return "leg that continues"
	}
	return "leg"
}

// countWait counts a wait for a rank of a pool that ends now.
func (req *request) countWait(pool *appRouter, began time.Time) {
	pool.metrics.Load().QueueWait(time.Since(began))
	req.spans.Waited(began)
}
