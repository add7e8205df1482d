package remote

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
)

// errUnsent is in the chain beside ErrUnreachable if the node has not received the call.
var errUnsent = errors.New("not sent")

// callNode calls a node, for at most limit, and returns its answer or its error as an in-process call would:
// typed refusals, ErrUnreachable, context.DeadlineExceeded (problem.Timeout) after limit, and the cause of
// ctx if that ended first.
func callNode[R any](ctx context.Context, conns *Conns, node string, limit time.Duration,
	do func(context.Context, *grpc.ClientConn, ...grpc.CallOption) (R, error)) (R, error) {
	var none R
	conn, err := conns.Get(node)
	if err != nil {
		return none, addUnreachable(err, errUnsent)
	}
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var at peer.Peer
	r, err := do(inner, conn, append(callOptions(), grpc.Peer(&at))...)
	switch {
	case err == nil:
		return r, nil
	case hasEnded(ctx):
		return none, fmt.Errorf("ask node %s: %w", node, context.Cause(ctx))
	}
	err = fromStatus(node, err)
	if at.Addr == nil && mayRetryElsewhere(err) {
		err = addUnreachable(err, errUnsent)
	}
	return none, err
}

// hasEnded says whether ctx has ended. If its deadline has passed it waits for the end: the node that was
// called has the same deadline, and may have reached it a moment earlier.
func hasEnded(ctx context.Context) bool {
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		<-ctx.Done()
	}
	return ctx.Err() != nil
}

// addUnreachable adds ErrUnreachable and the errors of is to the chain of err.
func addUnreachable(err error, is ...error) error {
	e := problem.New(problem.CodeOf(err), "%w",
		&wireError{text: err.Error(), is: append([]error{err, ErrUnreachable}, is...)})
	var inner *problem.Error
	if errors.As(err, &inner) {
		e.Hint = inner.Hint
	}
	return e
}

// mayRetryElsewhere says whether an error comes from the node that was asked, and not from the question:
// another node, or the next leader, may answer it.
func mayRetryElsewhere(err error) bool {
	for _, e := range []error{ErrUnreachable, cluster.ErrNotLeader, cluster.ErrClosed, inbox.ErrStopped,
		context.DeadlineExceeded} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
