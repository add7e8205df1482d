package server

import (
	"context"
	"fmt"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
)

// eventRouterReset is the kind of the event that records a router reset.
const eventRouterReset = "router-reset"

// routers implements api.Routers with the node's ingress.
type routers struct{ n *Node }

var _ api.Routers = (*routers)(nil)

// newRouters returns the Routers of a node with role ingress, and nil on other nodes.
func newRouters(n *Node) api.Routers {
	if n.ingress == nil {
		return nil
	}
	return &routers{n}
}

// Explain implements api.Routers.
func (r *routers) Explain(ctx context.Context, app string, q *client.Query) (*client.Explanation, error) {
	return r.n.ingress.ExplainRoute(ctx, app, q)
}

// Reset implements api.Routers. It resets the router on every ingress of the cluster.
func (r *routers) Reset(ctx context.Context, app string) (client.ResetResult, error) {
	if _, err := r.n.ingress.RouterInfo(app); err != nil {
		return client.ResetResult{}, err
	}
	views, _ := (&backend{r.n}).views()
	ranks, err := views.ResetRouters(ctx, app)
	if l, leads := r.n.leading.Current(); err == nil && leads {
		l.control.Note(app, eventRouterReset, fmt.Sprintf("%d ranks asked for a snapshot", ranks))
	}
	return client.ResetResult{App: app, Ranks: ranks}, err
}

// Router implements api.Routers.
func (r *routers) Router(_ context.Context, app string) (client.Info, error) {
	return r.n.ingress.RouterInfo(app)
}

// BestWorker implements api.Routers.
func (r *routers) BestWorker(ctx context.Context, app string, q *client.BestWorkerRequest) (client.Worker,
	error,
) {
	return r.n.ingress.BestWorker(ctx, app, q)
}

// PotentialLoads implements api.Routers.
func (r *routers) PotentialLoads(_ context.Context, app string, ids []uint32) ([]client.PotentialLoad,
	error,
) {
	return r.n.ingress.PotentialLoads(app, ids)
}

// MarkPrefillComplete implements api.Routers.
func (r *routers) MarkPrefillComplete(_ context.Context, app, requestID string) error {
	return r.n.ingress.MarkPrefillComplete(app, requestID)
}

// Free implements api.Routers.
func (r *routers) Free(_ context.Context, app, requestID string) error {
	return r.n.ingress.Free(app, requestID)
}

// DumpEvents implements api.Routers.
func (r *routers) DumpEvents(ctx context.Context, app string, emit func(*client.Run) error) (truncated bool,
	err error,
) {
	return r.n.ingress.DumpEvents(ctx, app, emit)
}

// Generate implements api.Routers.
func (r *routers) Generate(ctx context.Context, app string, q *msg.Generate,
	emit func(*client.Part) error,
) error {
	return r.n.ingress.Generate(ctx, app, q, emit)
}
