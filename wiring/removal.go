package wiring

import (
	"context"
	"sync"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// checkLeave reports whether a node could be removed after a drain. It changes nothing. `leave` asks before
// it drains, so that no node is drained in vain.
func (n *Node) checkLeave(ctx context.Context, id string) error {
	n.voterMu.Lock()
	defer n.voterMu.Unlock()
	if err := n.store.State().CheckLeave(id); err != nil {
		return err
	}
	_, err := n.checkVoteTransfer(ctx, id)
	return err
}

// remove takes a node's vote and then removes the node. Demote before removing: removing a live voter can
// leave the rest permanently without a quorum. No vote changes before the removal is known to be acceptable
// and the remaining voters have a living majority. The lock is held to the end, because maintainCluster would
// give the vote back.
func (n *Node) remove(ctx context.Context, l *leaderActors, id string) error {
	n.voterMu.Lock()
	defer n.voterMu.Unlock()
	if err := n.store.State().CheckRemoval(id); err != nil {
		return err
	}
	successor, err := n.checkVoteTransfer(ctx, id)
	if err != nil {
		return err
	}
	if err := n.transferVote(ctx, n.store.State().Nodes[id], successor); err != nil {
		return err
	}
	return l.control.Remove(ctx, id)
}

// checkVoteTransfer is state.CheckUnvote with the voters that answer at this moment.
func (n *Node) checkVoteTransfer(ctx context.Context, id string) (successor string, err error) {
	rec := n.store.State().Nodes[id]
	if rec == nil || !n.isVoter(rec.UID) {
		return "", nil
	}
	return state.CheckUnvote(n.electors(n.answeringMembers(ctx)), n.ident.UID, rec.UID)
}

// answeringMembers returns the members of consensus, by name, that answer at this moment, and this node. A
// lease is too old for this question: a node that died seconds ago still has one.
func (n *Node) answeringMembers(ctx context.Context) map[string]bool {
	out := map[string]bool{n.cfg.NodeID: true}
	member := map[string]bool{}
	for _, m := range n.members() {
		member[m.UID] = m.UID != n.ident.UID
	}
	var mu sync.Mutex
	var asked sync.WaitGroup
	for id, rec := range n.store.State().Nodes {
		if !member[rec.UID] || rec.Lost {
			continue
		}
		asked.Go(func() {
			isAnswering := n.isAnswering(ctx, rec.UID)
			mu.Lock()
			defer mu.Unlock()
			out[id] = isAnswering
		})
	}
	asked.Wait()
	return out
}

// transferVote takes a node's vote after its successor got one. If the node leads, it first hands the
// leadership over, and the caller must ask the new leader.
func (n *Node) transferVote(ctx context.Context, rec *state.Node, successor string) error {
	if !n.isVoter(rec.UID) {
		return nil
	}
	if successor != "" {
		if err := n.consensus.Promote(ctx, successor); err != nil {
			return err
		}
	}
	if rec.UID != n.ident.UID {
		return n.consensus.Demote(ctx, rec.UID) // it stays a standby until it learns of its removal
	}
	if err := n.consensus.StepDown(ctx); err != nil {
		return err
	}
	return problem.New(problem.Unavailable, "node %s leads and votes: another one takes that over first",
		rec.ID).
		WithHint("try again in some seconds")
}
