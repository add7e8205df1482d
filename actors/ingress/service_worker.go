package ingress

import (
	"context"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// BestWorker picks a rank for a prompt of token ids. With a request id, the rank admits it like a request and
// it counts until Free, at most Timers.Reservation; without one nothing changes. It never waits in the queue.
// Errors are *problem.Error.
func (in *Ingress) BestWorker(ctx context.Context, app string, q *msg.BestWorker) (msg.Worker, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return msg.Worker{}, err
	}
	query := &routeQuery{}
	if err := ar.readTokens(query, q.TokenIDs, q.Model); err != nil {
		return msg.Worker{}, err
	}
	if err := ar.applyOverrides(query, q.Worker, q.Override); err != nil {
		return msg.Worker{}, err
	}
	if q.RequestID != "" {
		return ar.reserve(ctx, query, q.RequestID)
	}
	ar.describeQuery(query)
	d := router.Explain(&query.query)
	if d.Kind != routing.Route {
		return msg.Worker{}, refusal(app, query, &d)
	}
	rk := ar.findRank(d.Ranked[0])
	if rk == nil {
		return msg.Worker{}, problem.New(problem.Unavailable, "rank %s of app %s is gone", d.Ranked[0],
			app).WithHint("ask again")
	}
	return query.worker(rk, d.Reason), nil
}

// worker describes a picked rank.
func (query *routeQuery) worker(rk *rank, reason string) msg.Worker {
	out := msg.Worker{
		Worker: rk.id.String(), Group: rk.id.Group(), DPRank: rk.id.Rank(),
		HitTokens: query.query.HitOn(rk.id), Reason: reason,
		Node: rk.node, URL: rk.target.URL, Addressing: rk.target.Addressing, Selector: rk.target.Selector,
	}
	if query.prompt.unit == kvindex.Tokens {
		out.BlockSize = query.prompt.size
		out.OverlapBlocks = out.HitTokens / query.prompt.size
	}
	return out
}

// PotentialLoads is the load that each rank would have with a prompt; without ids, its load now. Errors are
// *problem.Error.
func (in *Ingress) PotentialLoads(app string, ids []uint32) ([]msg.PotentialLoad, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return nil, err
	}
	query := &routeQuery{}
	if err := ar.readTokens(query, ids, ""); err != nil {
		return nil, err
	}
	ar.describeQuery(query)
	loads := router.PotentialLoads(&query.query)
	out := make([]msg.PotentialLoad, len(loads))
	for i, p := range loads {
		out[i] = msg.PotentialLoad{
			Worker: p.Rank.String(), Group: p.Rank.Group(), DPRank: p.Rank.Rank(),
			PrefillTokens: p.PrefillTokens, DecodeBlocks: p.DecodeBlocks,
		}
	}
	return out, nil
}
