package api

import (
	"context"

	"github.com/dpserve/dpserve/actors/msg"
)

// Routers is what the admin API needs of a node's Routers. Safe for concurrent use; a method ends when its ctx does. Errors are
// *problem.Error: NotFound for an application, worker or request id that is not there, InvalidArgument for a request that
// cannot be read, Overloaded when no rank has room, Unavailable when none is ready.
type Routers interface {
	// Explain decides for q as the live path would, and changes nothing.
	Explain(ctx context.Context, app string, q *msg.RouteQuery) (*msg.Explanation, error)
	// Reset drops what the Router remembers and asks every rank for its state anew; requests in flight are not touched.
	Reset(ctx context.Context, app string) (msg.ResetResult, error)
	// Router describes the Router.
	Router(ctx context.Context, app string) (msg.RouterInfo, error)
	// BestWorker says where a prompt should go; with a request id it is reserved there.
	BestWorker(ctx context.Context, app string, q *msg.BestWorker) (msg.Worker, error)
	// PotentialLoads says what each rank would have in hand with this prompt; none is the load as it is.
	PotentialLoads(ctx context.Context, app string, ids []uint32) ([]msg.PotentialLoad, error)
	// MarkPrefillComplete turns a reservation from prefill into decode.
	MarkPrefillComplete(ctx context.Context, app, requestID string) error
	// Free ends a reservation.
	Free(ctx context.Context, app, requestID string) error
	// DumpEvents hands out the index, run by run; truncated says that it holds more than one dump gives. A run is the callee's
	// again when emit returns.
	DumpEvents(ctx context.Context, app string, emit func(*msg.KVRun) error) (truncated bool, err error)
	// Generate picks, sends and accounts, and hands out the tokens as they come. An error of emit ends it.
	Generate(ctx context.Context, app string, q *msg.Generate, emit func(*msg.Generated) error) error
}
