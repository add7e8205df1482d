package cluster

import (
	"context"
	"errors"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

// Confirm asks a majority whether this node still leads: one that was frozen takes itself for the leader until it has heard of the
// others. ErrNotLeader: it does not lead, or no majority says so.
func (c *Cluster) Confirm(ctx context.Context) error {
	if !c.Leader() {
		return errUnconfirmed(ErrNotLeader)
	}
	return c.submit(ctx, c.verify).err
}

func (c *Cluster) verify() applied {
	if err := c.run.Load().raft.VerifyLeader().Error(); err != nil {
		return applied{err: errUnconfirmed(err)}
	}
	return applied{}
}

func errUnconfirmed(err error) error {
	if errors.Is(err, raft.ErrRaftShutdown) {
		return errClosed()
	}
	return problem.New(problem.Unavailable, "confirm the leadership: %w", ErrNotLeader).WithHint("wait for the election and try again")
}
