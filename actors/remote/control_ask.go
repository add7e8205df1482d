package remote

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
)

// Pauses between two rounds of a question that nobody could answer.
const (
	roundPauseMin = 50 * time.Millisecond
	roundPauseMax = 500 * time.Millisecond // the share in "grants accepted again within 3 s"
)

// fairWait is how long a node must have been asked before its silence says something about it. One that is asked with what another
// node left of the caller's time is not to blame.
const fairWait = 100 * time.Millisecond

// question is what the leader is asked, in-process (nil = never) or over the wire.
type question[R any] struct {
	limit  time.Duration // for one node
	once   bool          // a node that may have heard it is the last to be asked
	any    bool          // every control node may answer it
	local  func(msg.Leader, msg.Assigner) (R, error)
	remote func(context.Context, dpservev1.ControlClient, ...grpc.CallOption) (R, error)
}

// ask is one round: this node if it leads, else each control node until one answers. A node that does not lead names who does,
// and that is asked next.
func ask[R any](ctx context.Context, c *LeaderClient, q question[R]) (R, error) {
	var none R
	last := error(&notLeaderError{})
	if leader, assigner, ok := c.cfg.Leading(); ok && q.local != nil {
		r, err := q.local(leader, assigner)
		if err == nil || ctx.Err() != nil || !elsewhere(err) {
			return r, err
		}
		last = err
	}
	tried := map[string]bool{}
	for node, ok := c.next(tried); ok; node, ok = c.next(tried) {
		tried[node] = true
		r, err := at(ctx, c, node, q)
		if err == nil || ctx.Err() != nil || !elsewhere(err) || errors.Is(err, cluster.ErrOutcomeUnknown) {
			return r, err
		}
		last = err
	}
	return none, problem.New(problem.Unavailable, "no leader answers: %w", last).
		WithHint("wait for the election; if it does not end, look at `dpserve nodes`: most control nodes must be alive")
}

// at asks one node.
func at[R any](ctx context.Context, c *LeaderClient, node string, q question[R]) (R, error) {
	began := time.Now()
	r, err := call(ctx, c.cfg.Conns, node, q.limit, func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (R, error) {
		return q.remote(ctx, dpservev1.NewControlClient(conn), opts...)
	})
	if !q.any {
		c.judge(ctx, node, err, time.Since(began))
	}
	if q.once && unanswered(err) {
		return r, problem.New(problem.Unavailable, "propose at %s: %w", node, cluster.ErrOutcomeUnknown).WithHint("look at the state, then try again")
	}
	return r, err
}

// judge keeps what came of asking a node for so long. One that was silent until the caller's own patience was over is no better than
// one that was silent for the limit.
func (c *LeaderClient) judge(ctx context.Context, node string, err error, asked time.Duration) {
	switch {
	case err == nil:
		c.learn(node, nil)
	case errors.Is(ctx.Err(), context.Canceled): // the caller left
	case errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil:
		if asked >= fairWait {
			c.learn(node, context.DeadlineExceeded)
		}
	default:
		c.learn(node, err)
	}
}

// unanswered says that a node may have taken a call that it did not answer.
func unanswered(err error) bool {
	return err != nil && !errors.Is(err, errUnsent) && elsewhere(err) && !errors.Is(err, cluster.ErrNotLeader)
}

// persist asks round after round until there is a leader that answers, or ctx ends; without a deadline after persistLimit.
func persist[R any](ctx context.Context, c *LeaderClient, q question[R]) (R, error) {
	ctx, cancel := context.WithTimeout(ctx, persistLimit)
	defer cancel()
	for pause := roundPauseMin; ; pause = min(2*pause, roundPauseMax) {
		r, err := ask(ctx, c, q)
		if err == nil || ctx.Err() != nil || !elsewhere(err) {
			return r, err
		}
		if !sleep(ctx, pause/2+rand.N(pause)/2) {
			return r, err
		}
	}
}

// sleep waits, and says whether ctx is still there.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
