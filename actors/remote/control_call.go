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

// errUnsent says on top of ErrUnreachable that the node has not seen the call.
var errUnsent = errors.New("not sent")

// call asks a node, for at most limit, and gives its answer or its error, both as an in-process call would: typed refusals,
// ErrUnreachable, context.DeadlineExceeded (problem.Timeout) after limit, and the cause of ctx where that ended first.
func call[R any](ctx context.Context, conns *Conns, node string, limit time.Duration, do func(context.Context, *grpc.ClientConn, ...grpc.CallOption) (R, error)) (R, error) {
	var none R
	conn, err := conns.Get(node)
	if err != nil {
		return none, unreached(err, errUnsent)
	}
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var at peer.Peer
	r, err := do(inner, conn, append(callOptions(), grpc.Peer(&at))...)
	switch {
	case err == nil:
		return r, nil
	case over(ctx):
		return none, fmt.Errorf("ask node %s: %w", node, context.Cause(ctx))
	}
	err = fromStatus(node, err)
	if at.Addr == nil && elsewhere(err) {
		err = unreached(err, errUnsent)
	}
	return none, err
}

// over says that ctx has ended. It waits for that where its deadline has passed: the node that was asked has the same deadline, and
// may have seen it a moment before.
func over(ctx context.Context) bool {
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		<-ctx.Done()
	}
	return ctx.Err() != nil
}

// unreached adds to an error of the way what is known about it.
func unreached(err error, is ...error) error {
	e := problem.New(problem.CodeOf(err), "%w", &wireError{text: err.Error(), is: append([]error{err, ErrUnreachable}, is...)})
	var inner *problem.Error
	if errors.As(err, &inner) {
		e.Hint = inner.Hint
	}
	return e
}

// elsewhere says that an error is about the node that was asked, not about the question: another node, or the next leader, may
// answer it.
func elsewhere(err error) bool {
	for _, e := range []error{ErrUnreachable, cluster.ErrNotLeader, cluster.ErrClosed, inbox.ErrStopped, context.DeadlineExceeded} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
