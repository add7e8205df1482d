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
	Voter bool // else it stands by: it has the log and no vote
}

// Members are the nodes that take part in consensus, as far as this node's log goes; the last change may not be committed yet.
func (c *Cluster) Members() []Member {
	servers := c.run.Load().raft.GetConfiguration().Configuration().Servers
	all := make([]Member, len(servers))
	for i, s := range servers {
		all[i] = Member{UID: string(s.ID), Voter: s.Suffrage == raft.Voter}
	}
	return all
}

// member is whether a node takes part, and votes.
func (c *Cluster) member(uid string) (votes, in bool) {
	all := c.Members()
	i := slices.IndexFunc(all, func(m Member) bool { return m.UID == uid })
	return i >= 0 && all[i].Voter, i >= 0
}

// closeBehind is how many entries a node may lack that gets a vote: raft sends as many in one message. The cluster stands still while
// a voter that is needed for the majority takes up what it lacks.
const closeBehind = 64

// IsCloseBehind says whether a node answers this leader's raft and its log lacks at most closeBehind committed entries.
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

// AddStandby sends the log to a node, which gets no vote. A node that takes part already stays what it is. This and the three
// below are the leader's (ErrNotLeader elsewhere), return when the change is committed, and may be repeated.
func (c *Cluster) AddStandby(ctx context.Context, uid string) error {
	if _, in := c.member(uid); in {
		return c.confirm(ctx)
	}
	return c.change(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.AddNonvoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Promote gives a node a vote. A majority of all votes is needed from then on: promote only a standby that IsCloseBehind, or the cluster stands still until it comes.
func (c *Cluster) Promote(ctx context.Context, uid string) error {
	if votes, _ := c.member(uid); votes {
		return c.confirm(ctx)
	}
	return c.change(ctx, func(r *raft.Raft) raft.IndexFuture {
		return r.AddVoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Demote takes a node's vote; it stands by from then on. The leader that demotes itself stops leading. Refused for the last
// voter.
func (c *Cluster) Demote(ctx context.Context, uid string) error {
	if votes, _ := c.member(uid); !votes {
		return c.confirm(ctx)
	}
	return c.change(ctx, func(r *raft.Raft) raft.IndexFuture { return r.DemoteVoter(raft.ServerID(uid), 0, proposeTimeout) })
}

// Remove takes a node out of consensus. Refused for the last voter.
func (c *Cluster) Remove(ctx context.Context, uid string) error {
	if _, in := c.member(uid); !in {
		return c.confirm(ctx)
	}
	return c.change(ctx, func(r *raft.Raft) raft.IndexFuture { return r.RemoveServer(raft.ServerID(uid), 0, proposeTimeout) })
}

// change is one change of the members.
func (c *Cluster) change(ctx context.Context, call func(*raft.Raft) raft.IndexFuture) error {
	return c.submit(ctx, func() applied {
		err := call(c.run.Load().raft).Error()
		if err != nil {
			err = c.changeError(err)
		}
		return applied{err: err}
	}).err
}

// confirm is for a change that this node's log holds already: it is committed when a Barrier behind it is.
func (c *Cluster) confirm(ctx context.Context) error { return c.Barrier(ctx) }

// changeError is proposeError, and a refusal by raft's rules.
func (c *Cluster) changeError(err error) error {
	known := c.proposeError(err)
	if problem.CodeOf(known) != problem.Internal {
		return known
	}
	return problem.New(problem.Conflict, "change the voters: %w", err).WithHint("a cluster needs a voter: make another node one first")
}

// StepDown hands leadership to the voter that has most of the log, for a node that leaves or drains. Nil when this node does not
// lead; Conflict when nobody else votes.
func (c *Cluster) StepDown(ctx context.Context) error {
	r := c.run.Load().raft
	if r.State() != raft.Leader {
		return nil
	}
	others := func(m Member) bool { return m.Voter && m.UID != c.ident.UID }
	if !slices.ContainsFunc(c.Members(), others) {
		return problem.New(problem.Conflict, "hand over leadership: no other node votes").WithHint("join another control node first")
	}
	return c.submit(ctx, func() applied {
		err := r.LeadershipTransfer().Error()
		if err == nil || r.State() != raft.Leader {
			return applied{}
		}
		return applied{err: problem.New(problem.Unavailable, "hand over leadership: %w", err).WithHint("%s", c.leaderHint())}
	}).err
}
