package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

// Confirm asks a majority whether this node still leads: one that was frozen takes itself for the leader until it has heard of the
// others. Only answers to what was sent after the call count. ErrNotLeader: it does not lead, or no majority says so. A node that
// Holds has nobody to ask.
func (c *Cluster) Confirm(ctx context.Context) error {
	if c.Holds() {
		return nil
	}
	if !c.Leader() {
		return errUnconfirmed(ErrNotLeader)
	}
	return c.submit(ctx, c.verify).err
}

// verify asks until a majority has answered what was sent after it began. Raft counts every answer that comes in after it was asked,
// also one that has been in a socket buffer since before a freeze, and those of standbys. It ends, because a leader that hears of no
// majority of voters stops leading within Timers.Lease.
func (c *Cluster) verify() applied {
	r, began := c.run.Load().raft, time.Now()
	term := r.CurrentTerm()
	for {
		if err := r.VerifyLeader().Error(); err != nil {
			return applied{err: errUnconfirmed(err)}
		}
		if r.CurrentTerm() != term { // lost, and won again
			return applied{err: errUnconfirmed(ErrNotLeader)}
		}
		if c.isHeardSince(r.GetConfiguration().Configuration(), term, began) {
			return applied{}
		}
	}
}

// isHeardSince says whether a majority of the voters has acknowledged a message that was sent in a term after a moment.
func (c *Cluster) isHeardSince(members raft.Configuration, term uint64, since time.Time) bool {
	voters, heard := 0, 0
	for _, s := range members.Servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		voters++
		if string(s.ID) == c.ident.UID || c.net != nil && c.net.hasAnswered(s.ID, term, since) {
			heard++
		}
	}
	return heard > voters/2
}

func errUnconfirmed(err error) error {
	if errors.Is(err, raft.ErrRaftShutdown) {
		return errClosed()
	}
	return problem.New(problem.Unavailable, "confirm the leadership: %w", ErrNotLeader).WithHint("wait for the election and try again")
}
