package server

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// takeOverPause is the wait before a new leader tries again to start the leader's actors.
const takeOverPause = 200 * time.Millisecond

// leaderActors run only on the leader. They are made at each election, after the barrier, and end with the
// leadership.
type leaderActors struct {
	term    uint64 // raft term of the election
	assign  *rankassigner.Assigner
	control *controller.Controller
}

// errNotLeading answers a request for the leader on a node that does not lead, or that cannot lead because
// its disk refuses writes.
func (n *Node) errNotLeading() error {
	if err := n.diskFault(); err != nil {
		return err
	}
	return problem.New(problem.Unavailable, "this node does not lead the cluster at this moment").
		WithHint("try again in a second")
}

// requireLeader returns the leader's actors if this node leads.
func (n *Node) requireLeader() (*leaderActors, error) {
	if l := n.leading.Load(); l != nil {
		return l, nil
	}
	return nil, n.errNotLeading()
}

// diskFault says why this node cannot take part in consensus now; nil if it can, or never does.
func (n *Node) diskFault() error {
	if n.consensus == nil {
		return nil
	}
	return n.consensus.Fault()
}

// currentLeader implements remote.Leading.
func (n *Node) currentLeader() (msg.Leader, msg.Assigner, bool) {
	l := n.leading.Load()
	if l == nil {
		return nil, nil, false
	}
	return confirmingLeader{l.control, n.consensus}, l.assign, true
}

// confirmingLeader asks a majority before it prolongs a lease. A leader that was frozen would otherwise grant
// leases after another node took over, first of all to itself.
type confirmingLeader struct {
	control   *controller.Controller
	consensus *cluster.Cluster
}

// Renew implements msg.Leader.
func (c confirmingLeader) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	if err := c.consensus.Confirm(ctx); err != nil {
		return msg.Lease{}, err
	}
	lease, err := c.control.Renew(ctx, r)
	if secrets := c.consensus.State().Secrets; err == nil &&
		r.Node.Keyring != state.KeyringSum(secrets.Keyring()) {
		lease.Keyring = secrets.Keyring()
	}
	return lease, err
}

// localProposer proposes for the leader's actors and never forwards. A deposed leader that does not know it
// yet decides on an old state, and the next leader must not execute such decisions.
type localProposer struct{ consensus *cluster.Cluster }

// Propose implements msg.Proposer.
func (p localProposer) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	return p.consensus.ProposeHere(ctx, c)
}

// followLeadership starts and stops the leader's actors at each election, until ctx ends.
func (n *Node) followLeadership(ctx context.Context) {
	for {
		// Leadership comes before Leader, so that no change in between is missed
		changed := n.store.Leadership()
		if err := n.adaptLeadership(ctx); err != nil && ctx.Err() == nil {
			level := slog.LevelError
			// The term is over: another node leads by now, or this one was elected again.
			if !n.store.Leader() || errors.Is(err, cluster.ErrNotLeader) ||
				errors.Is(err, cluster.ErrOutcomeUnknown) {
				level = slog.LevelInfo
			}
			n.log.Log(ctx, level, "cannot lead", slog.Any("err", err))
			select {
			case <-time.After(takeOverPause):
				continue
			case <-ctx.Done():
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// adaptLeadership stops the actors of an earlier election and starts those of the current one. Leadership
// that was lost and won again starts new actors: another node may have led in between and given commands that
// the old actors do not know. The only voter keeps its actors while its disk fails: no other node can lead
// meanwhile, and the leases of healthy nodes do not need the disk.
func (n *Node) adaptLeadership(ctx context.Context) error {
	leads := n.store.Leader()
	over := !leads && (n.consensus == nil || !n.consensus.Holds())
	if l := n.leading.Load(); l != nil && (over || leads && n.consensus.Term() != l.term) {
		n.log.Info("this node leads no more")
		if err := n.stepDown(); err != nil { //nolint:contextcheck // actors outlive the election
			return err
		}
	}
	if leads && n.leading.Load() == nil {
		return n.takeOver(ctx)
	}
	return nil
}

// takeOver starts the leader's actors. Store.Leader is true only after a barrier, so the state holds
// everything committed before.
func (n *Node) takeOver(ctx context.Context) error {
	term := n.consensus.Term()
	if err := n.putSelf(ctx); err != nil {
		return err
	}
	t := n.timers()
	here := localProposer{n.consensus}
	l := &leaderActors{term: term, assign: rankassigner.New(rankassigner.Config{
		Store:    n.store,
		Proposer: here, Timers: t.assigner, Log: n.log,
	})}
	l.control = controller.New(controller.Config{
		Store: n.store, Proposer: here, Granter: l.assign, Metrics: n.metrics, Timers: t.controller,
		Log: n.log, Agent: n.nodeAgent, Self: n.cfg.NodeID,
		Confirm: n.consensus.Confirm, StepDown: n.consensus.StepDown,
	})
	if err := l.assign.Start(n.system); err != nil { //nolint:contextcheck // as above
		return err
	}
	if err := l.control.Start(n.system); err != nil { //nolint:contextcheck // as above
		return errors.Join(err, l.assign.Close()) //nolint:contextcheck // as above
	}
	n.leading.Store(l)
	n.node.Renew(ctx) // show this node's units from the start, as running or as gone
	if err := n.awaitControllerReady(ctx, l); err != nil {
		return err
	}
	n.log.Info("this node leads the cluster", slog.Uint64("term", term))
	return nil
}

// putSelf writes this node's record into the state of the cluster that it leads.
func (n *Node) putSelf(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	self := n.selfRecord()
	var err error
	if self.Key, err = n.peering.publicKeySum(); err != nil {
		return err
	}
	_, err = n.store.Propose(ctx, state.Command{PutNode: &state.PutNode{
		Node:     self,
		AnyRoles: n.peering == nil || n.peering.founding,
	}})
	return err
}

// stepDown stops the leader's actors. Idempotent.
func (n *Node) stepDown() error {
	l := n.leading.Swap(nil)
	if l == nil {
		return nil
	}
	return errors.Join(l.control.Close(), l.assign.Close())
}

// awaitControllerReady waits until the controller lists every stored app, so that early status requests do
// not get a false 404.
func (n *Node) awaitControllerReady(ctx context.Context, l *leaderActors) error {
	for {
		next := l.control.Watch() // Watch comes before Status, so that no change in between is missed
		if len(l.control.Status()) >= len(n.store.State().Apps) {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return problem.New(problem.Timeout,
				"the controller has not taken up the applications of the data dir: %w", context.Cause(ctx))
		}
	}
}

// nodeAgent returns the agent by which the controller commands a node.
func (n *Node) nodeAgent(id string) (msg.NodeAgent, bool) {
	if id == n.cfg.NodeID {
		return n.node, n.node != nil
	}
	return n.peering.nodeAgent(id)
}

// onLeaseLoss says what ranks do without a lease. A node that stands alone serves until it ends.
func (n *Node) onLeaseLoss() node.LeaseLoss {
	if n.peering == nil {
		return node.Serve
	}
	return node.LeaseLoss(n.cfg.OnLeaseLoss)
}

// warning is shown in this node's status; "" if there is none.
func (n *Node) warning() string {
	if err := n.diskFault(); err != nil {
		return err.Error()
	}
	return ""
}

// selfRecord is this node's record for the other nodes.
func (n *Node) selfRecord() state.Node { return n.nodeRecord(n.peering) }

func (n *Node) nodeRecord(m *peering) state.Node {
	out := state.Node{
		ID: n.cfg.NodeID, UID: n.ident.UID, Zone: n.cfg.Zone, Version: n.cfg.Version,
		Level: state.Level, Offer: n.offer,
	}
	for _, r := range n.cfg.Roles {
		out.Roles = append(out.Roles, state.Role(r))
	}
	if m != nil {
		out.Advertise, out.Address, out.Gossip, out.Keyring = n.cfg.Advertise, m.address, m.gossipAddress,
			m.keyringSum()
	}
	n.addNextVersionFields(&out)
	return out
}
