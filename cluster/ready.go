package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Ready waits until this node's copy of the state has everything that was committed before the call: on the
// leader by a Barrier, on other nodes by a command that changes nothing. Before that, State may be older than
// what was acknowledged before a restart: grant nothing from it, or a rank might be granted twice.
// ErrUnreadable: this version cannot read what was committed.
func (c *Cluster) Ready(ctx context.Context) error {
	if err := c.endError(); err != nil {
		return err
	}
	for {
		turn, retry := c.Leadership(), (<-chan time.Time)(nil)
		if err := c.Fault(); errors.Is(err, ErrUnreadable) {
			return err
		}
		if c.Leader() {
			return nil
		}
		if leader, ok := c.LeaderNode(); ok && leader != c.ident.UID {
			err := c.catchUp(ctx)
			if err == nil || problem.CodeOf(err) == problem.Conflict {
				return err
			}
			retry = time.After(leadRetry)
		}
		if err := c.awaitTurn(ctx, turn, retry); err != nil {
			return err
		}
	}
}

// awaitTurn waits for a change of the leadership, or for retry.
func (c *Cluster) awaitTurn(ctx context.Context, turn <-chan struct{}, retry <-chan time.Time) error {
	select {
	case <-turn:
		return nil
	case <-retry:
		return nil
	case <-ctx.Done():
		return problem.New(problem.Timeout, "wait for a leader: %w", context.Cause(ctx)).
			WithHint("%s", c.leaderHint())
	case <-c.done:
		return c.endError()
	}
}

// catchUp waits until this node has applied what the leader had committed. Conflict: the leader is of another
// cluster.
func (c *Cluster) catchUp(ctx context.Context) error {
	if c.cfg.Forward == nil {
		return c.fsm.awaitCluster(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	res, err := c.proposeAtLeader(ctx, state.Command{Init: &state.Init{Cluster: c.ident.Cluster}})
	if err != nil {
		return err
	}
	return c.fsm.await(ctx, res.Index)
}
