package cluster

import (
	"context"
	"slices"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
)

// Member is a node that takes part in consensus.
type Member struct {
	UID   string
	Voter bool // false: a standby, which has the log and no vote
}

// Members returns the nodes that take part in consensus by this node's log. The last change may not be
// committed yet.
func (c *Cluster) Members() []Member {
	servers := c.run.Load().raft.GetConfiguration().Configuration().Servers
	all := make([]Member, len(servers))
	for i, s := range servers {
		all[i] = Member{UID: string(s.ID), Voter: s.Suffrage == raft.Voter}
	}
	return all
}

// findMember reports whether a node takes part, and whether it votes.
func (c *Cluster) findMember(uid string) (votes, in bool) {
	all := c.Members()
	i := slices.IndexFunc(all, func(m Member) bool { return m.UID == uid })
	return i >= 0 && all[i].Voter, i >= 0
}

// closeBehind is how many entries a node may lack to get a vote: raft sends as many in one message. The
// cluster makes no progress while a voter that the majority needs lacks entries.
const closeBehind = 64

// IsCloseBehind reports whether a node answers this leader's raft and lacks at most closeBehind committed
// entries.
func (c *Cluster) IsCloseBehind(uid string) bool {
	if uid == c.ident.UID {
		return true
	}
	if c.net == nil {
		return false
	}
	last, ok := c.net.logOf(uid)
	return ok && last+closeBehind >= c.run.Load().raft.CommitIndex()
}

// AddStandby sends the log to a node without giving it a vote. It changes nothing for a node that takes part
// already. AddStandby, Promote, Demote and Remove work on the leader only (ErrNotLeader elsewhere), return
// when the change is committed, and may be repeated.
func (c *Cluster) AddStandby(ctx context.Context, uid string) error {
	if _, in := c.findMember(uid); in {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.AddNonvoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Promote gives a node a vote. From then on its vote counts for the majority: promote only a standby that
// IsCloseBehind, or the cluster makes no progress until the node has caught up.
func (c *Cluster) Promote(ctx context.Context, uid string) error {
	if votes, _ := c.findMember(uid); votes {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.AddVoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Demote takes a node's vote and makes it a standby. A leader that demotes itself stops leading. It is
// refused for the last voter.
func (c *Cluster) Demote(ctx context.Context, uid string) error {
	if votes, _ := c.findMember(uid); !votes {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.DemoteVoter(raft.ServerID(uid),
			0, proposeTimeout)
	})
}

// Remove takes a node out of consensus. It is refused for the last voter.
func (c *Cluster) Remove(ctx context.Context, uid string) error {
	if _, in := c.findMember(uid); !in {
		return c.awaitCommitted(ctx)
	}
	return c.changeMembers(ctx,
		func(r *raft.Raft) raft.IndexFuture { return r.RemoveServer(raft.ServerID(uid), 0, proposeTimeout) })
}

// changeMembers makes one change of the members.
func (c *Cluster) changeMembers(ctx context.Context, call func(*raft.Raft) raft.IndexFuture) error {
	return c.submit(ctx, func() applyResult {
		err := call(c.run.Load().raft).Error()
		if err != nil {
			err = c.changeError(err)
		}
		return applyResult{err: err}
	}).err
}

// awaitCommitted waits until a change that this node's log has already is committed: a Barrier after it is
// enough.
func (c *Cluster) awaitCommitted(ctx context.Context) error { return c.Barrier(ctx) }

// changeError is proposeError plus the refusals of raft's own rules.
func (c *Cluster) changeError(err error) error {
	known := c.proposeError(err)
	if problem.CodeOf(known) != problem.Internal {
		return known
	}
	return problem.New(problem.Conflict, "change the voters: %w", err).
		WithHint("a cluster needs a voter: make another node one first")
}

// StepDown hands leadership to the voter that has most of the log, before a node leaves or drains. It returns
// nil if this node does not lead, and Conflict if no other node votes.
func (c *Cluster) StepDown(ctx context.Context) error {
	r := c.run.Load().raft
	if r.State() != raft.Leader {
		return nil
	}
	others := func(m Member) bool { return m.Voter && m.UID != c.ident.UID }
	if !slices.ContainsFunc(c.Members(), others) {
		return problem.New(problem.Conflict, "hand over leadership: no other node votes").
			WithHint("join another control node first")
	}
	return c.submit(ctx, func() applyResult {
		err := r.LeadershipTransfer().Error()
		if err == nil || r.State() != raft.Leader {
			return applyResult{}
		}
		return applyResult{err: problem.New(problem.Unavailable, "hand over leadership: %w", err).
			WithHint("%s", c.leaderHint())}
	}).err
}
