package wiring

import (
	"context"
	"sync"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// checkLeave says whether a node could be removed if it were drained. It changes nothing. `leave` asks before the drain, so that no
// node is drained in vain.
func (n *Node) checkLeave(ctx context.Context, id string) error {
	n.voting.Lock()
	defer n.voting.Unlock()
	if err := n.store.State().CheckLeave(id); err != nil {
		return err
	}
	_, err := n.checkUnvote(ctx, id)
	return err
}

// remove takes a node's vote and then removes the node: a voter that goes with its vote could leave the others without a majority for
// good. No vote changes before it is known that the removal is accepted and that the voters that remain have a living majority. The
// lock is held to the end, because keepOrder would give the node its vote back.
func (n *Node) remove(ctx context.Context, l *leading, id string) error {
	n.voting.Lock()
	defer n.voting.Unlock()
	if err := n.store.State().CheckRemoval(id); err != nil {
		return err
	}
	successor, err := n.checkUnvote(ctx, id)
	if err != nil {
		return err
	}
	if err := n.unvote(ctx, n.store.State().Nodes[id], successor); err != nil {
		return err
	}
	return l.control.Remove(ctx, id)
}

// checkUnvote is state.CheckUnvote with voters that answer at this moment.
func (n *Node) checkUnvote(ctx context.Context, id string) (successor string, err error) {
	rec := n.store.State().Nodes[id]
	if rec == nil || !n.votes(rec.UID) {
		return "", nil
	}
	return state.CheckUnvote(n.electors(n.answering(ctx)), n.ident.UID, rec.UID)
}

// answering are the members of consensus, by name, that answer at this moment, and this node. A lease is too old for this question:
// it speaks of seconds ago, and the vote of a node that died since then is not there.
func (n *Node) answering(ctx context.Context) map[string]bool {
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
			answers := n.answers(ctx, rec.UID)
			mu.Lock()
			defer mu.Unlock()
			out[id] = answers
		})
	}
	asked.Wait()
	return out
}

// unvote takes a node's vote, and gives one to its successor first. If the node leads, another one leads first, and the caller has to
// ask again there.
func (n *Node) unvote(ctx context.Context, rec *state.Node, successor string) error {
	if !n.votes(rec.UID) {
		return nil
	}
	if successor != "" {
		if err := n.consensus.Promote(ctx, successor); err != nil {
			return err
		}
	}
	if rec.UID != n.ident.UID {
		return n.consensus.Demote(ctx, rec.UID) // it stands by until it has heard that it is removed
	}
	if err := n.consensus.StepDown(ctx); err != nil {
		return err
	}
	return problem.New(problem.Unavailable, "node %s leads and votes: another one takes that over first", rec.ID).
		WithHint("try again in some seconds")
}
