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

// Pauses between two rounds of a query that no node answered.
const (
	roundPauseMin = 50 * time.Millisecond
	roundPauseMax = 500 * time.Millisecond // so that grants are accepted again within 3 s after an election
)

// fairWait is the shortest time after which a node without an answer counts as silent. A node that got only
// the rest of the caller's time after another node is not at fault.
const fairWait = 100 * time.Millisecond

// leaderQuery is a question to the leader, in-process (local, nil = never) or over the wire (remote).
type leaderQuery[R any] struct {
	limit  time.Duration // for one node
	once   bool          // after a node that may have received it, no other node is asked
	any    bool          // every control node may answer it
	local  func(msg.Leader, msg.Assigner) (R, error)
	remote func(context.Context, dpservev1.ControlClient, ...grpc.CallOption) (R, error)
}

// askLeader is one round: this node if it leads, else each control node until one answers. A node that does
// not lead names the leader, which is asked next.
func askLeader[R any](ctx context.Context, c *LeaderClient, q leaderQuery[R]) (R, error) {
	var none R
	last := error(&notLeaderError{})
	if leader, assigner, ok := c.cfg.Leading(); ok && q.local != nil {
		r, err := q.local(leader, assigner)
		if err == nil || ctx.Err() != nil || !mayRetryElsewhere(err) {
			return r, err
		}
		last = err
	}
	tried := map[string]bool{}
	for node, ok := c.nextNode(tried); ok; node, ok = c.nextNode(tried) {
		tried[node] = true
		r, err := askNode(ctx, c, node, q)
		if err == nil || ctx.Err() != nil || !mayRetryElsewhere(err) ||
			errors.Is(err, cluster.ErrOutcomeUnknown) {
			return r, err
		}
		last = err
	}
	return none, problem.New(problem.Unavailable, "no leader answers: %w", last).
		WithHint("wait for the election; if it does not end, look at `dpserve nodes`: " +
			"most control nodes must be alive")
}

// askNode asks one node.
func askNode[R any](ctx context.Context, c *LeaderClient, node string, q leaderQuery[R]) (R, error) {
	began := time.Now()
	r, err := callNode(ctx, c.cfg.Conns, node, q.limit,
		func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (R, error) {
			return q.remote(ctx, dpservev1.NewControlClient(conn), opts...)
		})
	if !q.any {
		c.noteResult(ctx, node, err, time.Since(began))
	}
	if q.once && mayHaveApplied(err) {
		return r, problem.New(problem.Unavailable, "propose at %s: %w", node,
			cluster.ErrOutcomeUnknown).WithHint("look at the state, then try again")
	}
	return r, err
}

// noteResult notes the result of asking a node, which took the time asked. A node that was silent until the
// caller's own deadline counts like one that was silent for the limit.
func (c *LeaderClient) noteResult(ctx context.Context, node string, err error, asked time.Duration) {
	switch {
	case err == nil:
		c.updateLeader(node, nil)
	case errors.Is(ctx.Err(), context.Canceled): // the caller left
	case errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil:
		if asked >= fairWait {
			c.updateLeader(node, context.DeadlineExceeded)
		}
	default:
		c.updateLeader(node, err)
	}
}

// mayHaveApplied says whether a node may have taken a call that it did not answer.
func mayHaveApplied(err error) bool {
	return err != nil && !errors.Is(err, errUnsent) && mayRetryElsewhere(err) &&
		!errors.Is(err, cluster.ErrNotLeader)
}

// askUntilAnswered repeats rounds until a leader answers, or ctx ends; without a deadline until persistLimit.
func askUntilAnswered[R any](ctx context.Context, c *LeaderClient, q leaderQuery[R]) (R, error) {
	ctx, cancel := context.WithTimeout(ctx, persistLimit)
	defer cancel()
	for pause := roundPauseMin; ; pause = min(2*pause, roundPauseMax) {
		r, err := askLeader(ctx, c, q)
		if err == nil || ctx.Err() != nil || !mayRetryElsewhere(err) {
			return r, err
		}
		if !sleep(ctx, pause/2+rand.N(pause)/2) {
			return r, err
		}
	}
}

// sleep waits. It returns false if ctx ended.
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
