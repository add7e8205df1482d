package wiring

import (
	"context"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// unvote takes a node's vote before it is removed: a voter that goes with its vote could leave the others without a
// majority for good. If it leads, another one leads first, and who asked has to ask again there.
func (n *Node) unvote(ctx context.Context, id string) error {
	rec := n.store.State().Nodes[id]
	if rec == nil || n.consensus == nil || !n.votes(rec.UID) {
		return nil
	}
	successor := n.successor(id)
	if successor == nil {
		return nil // the last control node: the removal is refused
	}
	n.voting.Lock()
	defer n.voting.Unlock()
	if !n.votes(successor.UID) {
		if err := n.consensus.Promote(ctx, successor.UID); err != nil {
			return err
		}
	}
	if rec.UID != n.ident.UID {
		return n.consensus.Demote(ctx, rec.UID) // it stands by until it has heard that it is removed
	}
	if err := n.consensus.StepDown(ctx); err != nil {
		return err
	}
	return problem.New(problem.Unavailable, "node %s leads and votes: %s takes that over first", id, successor.ID).WithHint("try again in some seconds")
}

// successor is a control node that can take another one's vote over: one that answers, this one or a voter if possible.
func (n *Node) successor(but string) *state.Node {
	heard, nodes := n.heard(), n.store.State().Nodes
	var found *state.Node
	for _, id := range slices.Sorted(maps.Keys(nodes)) {
		rec := nodes[id]
		if id == but || !heard[id] || rec.Lost || !hasRole(rec, state.RoleControl) {
			continue
		}
		if found == nil || !n.votes(found.UID) && n.votes(rec.UID) {
			found = rec
		}
	}
	return found
}
