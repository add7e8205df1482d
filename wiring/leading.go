package wiring

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// takeOverPause is the wait before a node that leads tries once more to begin what only the leader does.
const takeOverPause = 200 * time.Millisecond

// leading is what runs on the node that leads, and nowhere else: made at each election behind the barrier, ended with the leadership.
type leading struct {
	term    uint64 // raft's, of the election
	assign  *rankassigner.Assigner
	control *controller.Controller
}

// errNotLeading answers what came here although another node leads by now, or although this one could if its disk took writes.
func (n *Node) errNotLeading() error {
	if err := n.diskFault(); err != nil {
		return err
	}
	return problem.New(problem.Unavailable, "this node does not lead the cluster at this moment").WithHint("try again in a second")
}

// lead gives the leader's actors, if this node leads.
func (n *Node) lead() (*leading, error) {
	if l := n.leads.Load(); l != nil {
		return l, nil
	}
	return nil, n.errNotLeading()
}

// diskFault is why this node cannot take part in consensus now, nil if it can or never does.
func (n *Node) diskFault() error {
	if n.consensus == nil {
		return nil
	}
	return n.consensus.Fault()
}

// leadingNow is remote.Leading.
func (n *Node) leadingNow() (msg.Leader, msg.Assigner, bool) {
	l := n.leads.Load()
	if l == nil {
		return nil, nil, false
	}
	return confirmed{l.control, n.consensus}, l.assign, true
}

// confirmed is the leader that asks a majority before it prolongs a lease: one that was frozen would else grant leases that are not its
// to grant any more, the first of them to itself.
type confirmed struct {
	control   *controller.Controller
	consensus *cluster.Cluster
}

// Renew implements msg.Leader.
func (c confirmed) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	if err := c.consensus.Confirm(ctx); err != nil {
		return msg.Lease{}, err
	}
	lease, err := c.control.Renew(ctx, r)
	if secrets := c.consensus.State().Secrets; err == nil && r.Node.Keyring != state.KeyringSum(secrets.Keyring()) {
		lease.Keyring = secrets.Keyring()
	}
	return lease, err
}

// proposesHere proposes for the leader's actors, and never sends on: one that was deposed and does not know it decides on what it saw
// last, which the next leader must not carry out.
type proposesHere struct{ consensus *cluster.Cluster }

// Propose implements msg.Proposer.
func (p proposesHere) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	return p.consensus.ProposeHere(ctx, c)
}

// followLeadership begins and ends the leader's actors as elections go, until ctx ends.
func (n *Node) followLeadership(ctx context.Context) {
	for {
		changed := n.store.Leadership() // before Leader, or a change in between goes unseen
		if err := n.adaptLeadership(ctx); err != nil && ctx.Err() == nil {
			level := slog.LevelError
			if !n.store.Leader() || errors.Is(err, cluster.ErrNotLeader) { // another one does by now
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

// adaptLeadership ends what an earlier election began, and begins what this one asks for. A leadership that was lost and won again
// begins anew: another node may have led in between, and told nodes what the actors here know nothing of. The only voter keeps what
// runs while its disk is sick: nobody else can lead meanwhile, and the leases of healthy nodes do not need the disk.
func (n *Node) adaptLeadership(ctx context.Context) error {
	leads := n.store.Leader()
	over := !leads && (n.consensus == nil || !n.consensus.Holds())
	if l := n.leads.Load(); l != nil && (over || leads && n.consensus.Term() != l.term) {
		n.log.Info("this node leads no more")
		if err := n.stepDown(); err != nil { //nolint:contextcheck // actors outlive the election that begins or ends them
			return err
		}
	}
	if leads && n.leads.Load() == nil {
		return n.takeOver(ctx)
	}
	return nil
}

// takeOver begins what the leader does. The state holds all that was committed before: Leader is true behind a barrier only.
func (n *Node) takeOver(ctx context.Context) error {
	term := n.consensus.Term()
	if err := n.putSelf(ctx); err != nil {
		return err
	}
	t := n.timers()
	here := proposesHere{n.consensus}
	l := &leading{term: term, assign: rankassigner.New(rankassigner.Config{Store: n.store, Proposer: here, Timers: t.assigner, Log: n.log})}
	l.control = controller.New(controller.Config{
		Store: n.store, Proposer: here, Granter: l.assign, Metrics: n.metrics, Timers: t.controller, Log: n.log, Agent: n.agent, Self: n.cfg.NodeID,
		Confirm: n.consensus.Confirm, StepDown: n.consensus.StepDown,
	})
	if err := l.assign.Start(n.system); err != nil { //nolint:contextcheck // as above
		return err
	}
	if err := l.control.Start(n.system); err != nil { //nolint:contextcheck // as above
		return errors.Join(err, l.assign.Close()) //nolint:contextcheck // as above
	}
	n.leads.Store(l)
	n.node.Renew(ctx) // what runs here is known before anybody asks; what does not is not shown as running
	if err := n.shown(ctx, l); err != nil {
		return err
	}
	n.log.Info("this node leads the cluster", slog.Uint64("term", term))
	return nil
}

// putSelf makes this node known to the cluster that it leads.
func (n *Node) putSelf(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	self := n.self()
	var err error
	if self.Key, err = n.mesh.keySum(); err != nil {
		return err
	}
	_, err = n.store.Propose(ctx, state.Command{PutNode: &state.PutNode{Node: self, AnyRoles: n.mesh == nil || n.mesh.founding}})
	return err
}

// stepDown ends what the leader does. Idempotent.
func (n *Node) stepDown() error {
	l := n.leads.Swap(nil)
	if l == nil {
		return nil
	}
	return errors.Join(l.control.Close(), l.assign.Close())
}

// shown waits until the controller shows the apps that were there before a restart: who asks for one is not told that there is
// none.
func (n *Node) shown(ctx context.Context, l *leading) error {
	for {
		next := l.control.Watch() // before Status, or a change in between goes unseen
		if len(l.control.Status()) >= len(n.store.State().Apps) {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return problem.New(problem.Timeout, "the controller has not taken up the applications of the data dir: %w", context.Cause(ctx))
		}
	}
}

// agent is how the controller tells a node.
func (n *Node) agent(id string) (msg.NodeAgent, bool) {
	if id == n.cfg.NodeID {
		return n.node, n.node != nil
	}
	return n.mesh.agent(id)
}

// onLeaseLoss is what ranks do when no leader answers: a node that stands alone serves until it ends.
func (n *Node) onLeaseLoss() node.LeaseLoss {
	if n.mesh == nil {
		return node.Serve
	}
	return node.LeaseLoss(n.cfg.OnLeaseLoss)
}

// trouble is what people should know of this node.
func (n *Node) trouble() string {
	if err := n.diskFault(); err != nil {
		return err.Error()
	}
	return ""
}

// self is this node as it shows itself to the others.
func (n *Node) self() state.Node { return n.describe(n.mesh) }

func (n *Node) describe(m *mesh) state.Node {
	out := state.Node{ID: n.cfg.NodeID, UID: n.ident.UID, Zone: n.cfg.Zone, Version: n.cfg.Version, Level: state.Level, Offer: n.offer}
	for _, r := range n.cfg.Roles {
		out.Roles = append(out.Roles, state.Role(r))
	}
	if m != nil {
		out.Advertise, out.Address, out.Gossip, out.Keyring = n.cfg.Advertise, m.address, m.gossipAddress, m.keyringSum()
	}
	n.describeNext(&out)
	return out
}
