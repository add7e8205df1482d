package server

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// leaderActors run only on the leader. They are made at each election and end with the leadership.
type leaderActors struct {
	assign  *rankassigner.Assigner
	control *controller.Controller
}

// Close ends the actors.
func (l *leaderActors) Close() error { return errors.Join(l.control.Close(), l.assign.Close()) }

// startLeaderActors starts the leader's actors, after this node's record is in the state.
func (n *Node) startLeaderActors(ctx context.Context) (*leaderActors, error) {
	here := localProposer{n.consensus}
	if err := n.putSelf(ctx, here); err != nil {
		return nil, err
	}
	t := n.timers()
	l := &leaderActors{assign: rankassigner.New(rankassigner.Config{
		Store: n.store, Proposer: here, Timers: t.assigner, Log: n.log,
	})}
	l.control = controller.New(controller.Config{
		Store: n.store, Proposer: here, Assigner: l.assign, Metrics: n.metrics, Timers: t.controller,
		Log: n.log, Agent: n.nodeAgent, Self: n.cfg.NodeID, Resolver: n.cfg.Resolver,
		Confirm: n.consensus.Confirm, StepDown: n.consensus.StepDown,
	})
	if err := l.assign.Start(n.system); err != nil { //nolint:contextcheck // actors outlive the election
		return nil, err
	}
	if err := l.control.Start(n.system); err != nil { //nolint:contextcheck // as above
		return nil, errors.Join(err, l.assign.Close()) //nolint:contextcheck // as above
	}
	return l, nil
}

// putSelf puts this node's record into the state and never forwards it: another leader would refuse the
// record of a founding node, whose roles may change.
func (n *Node) putSelf(ctx context.Context, here localProposer) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	put := &state.PutNode{Node: n.selfRecord(), AnyRoles: n.peering == nil || n.peering.IsFounding()}
	if n.peering != nil {
		var err error
		if put.Node.Key, err = n.peering.Certificates.KeySum(); err != nil {
			return err
		}
	}
	_, err := here.Propose(ctx, state.Command{PutNode: put})
	return err
}

// awaitController shows this node's units to a new controller, as running or as gone, and waits until it
// lists every stored app, so that early status requests do not get a false 404.
func (n *Node) awaitController(ctx context.Context, l *leaderActors) error {
	n.node.Renew(ctx)
	for {
		next := l.control.Watch() // Watch comes before Status, so that no change in between is missed
		if len(l.control.Status()) >= len(n.store.State().Apps) {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return problem.New(problem.Timeout,
				"the controller has not taken up the applications of the data dir: %w", context.Cause(ctx)).
				WithHint("try again in a second; the log says what the controller waits for")
		}
	}
}

// nodeAgent returns the agent by which the controller commands a node.
func (n *Node) nodeAgent(id string) (msg.NodeAgent, bool) {
	switch {
	case id == n.cfg.NodeID:
		return n.node, n.node != nil
	case n.peering == nil: // it knows no other node
		return nil, false
	}
	return n.conns.Node(id), true
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

func (n *Node) requireLeader() (*leaderActors, error) {
	if l, leads := n.leading.Current(); leads {
		return l, nil
	}
	return nil, n.errNotLeading()
}

// errNoLeader answers a request that needs a leader while no node leads.
func (n *Node) errNoLeader() error {
	text := "no node leads the cluster at this moment"
	if note := n.search.note(); note != "" {
		text += "; " + note
	}
	return problem.New(problem.Unavailable, "%s", text).
		WithHint("an election takes a second or two; if it stays so, a majority of the voters is not "+
			"there (%s): start those that are down", n.describeVoters())
}

// diskFault says why this node cannot take part in consensus now; nil if it can, or never does.
func (n *Node) diskFault() error {
	if n.consensus == nil {
		return nil
	}
	return n.consensus.Fault()
}

func (n *Node) members() []cluster.Member {
	if n.consensus == nil {
		return nil
	}
	return n.consensus.Members()
}

func (n *Node) isVoter(uid string) bool {
	return slices.Contains(n.members(), cluster.Member{UID: uid, Voter: true})
}

// describeVoters is a hint for the time without a leader.
func (n *Node) describeVoters() string {
	isHeard := func(string) bool { return true }
	if n.peering != nil {
		isHeard = n.peering.Neighbours.IsHeard
	}
	return cluster.DescribeVoters(n.members(), n.consensus.NameOf, isHeard) // no consensus: no members
}

func (n *Node) renewingNodes() map[string]bool {
	out := map[string]bool{}
	if l, leads := n.leading.Current(); leads {
		list := l.control.Nodes()
		for i := range list {
			s := list[i].State
			out[list[i].Node] = s == "alive" || s == "draining" || s == "drained"
		}
	}
	return out
}

// currentLeader implements noderpc.Leading.
func (n *Node) currentLeader() (msg.Leader, msg.Assigner, bool) {
	l, leads := n.leading.Current()
	if !leads {
		return nil, nil, false
	}
	return confirmingLeader{l.control, n.consensus}, l.assign, true
}

// leaderHandler implements api.Forward: it forwards to the leader unless this node leads. A node that knows
// no leader and whose disk refuses writes answers itself with that fault.
func (n *Node) leaderHandler() (http.Handler, bool) {
	if _, leads := n.leading.Current(); leads || n.peering == nil {
		return nil, false
	}
	uid, ok := n.opened.LeaderNode()
	if !ok || uid == n.ident.UID { // elected a moment ago, and not ready
		return nil, n.diskFault() == nil
	}
	for id, rec := range n.peering.Neighbours.All() {
		if rec.UID == uid {
			return n.leaderProxy(id), true
		}
	}
	return nil, true
}

// confirmingLeader asks a majority before it prolongs a lease. A leader that was frozen would otherwise grant
// leases after another node took over, first of all to itself.
type confirmingLeader struct {
	control   *controller.Controller
	consensus *cluster.Cluster
}

// Renew implements msg.Leader. A node that has another gossip key gets the present one.
func (c confirmingLeader) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	if err := c.consensus.Confirm(ctx); err != nil {
		return msg.Lease{}, err
	}
	lease, err := c.control.Renew(ctx, r)
	if secrets := c.consensus.State().Secrets; err == nil &&
		r.Node.GossipSum != state.GossipKeySum(secrets.GossipKey) {
		lease.GossipKey = secrets.GossipKey
	}
	return lease, err
}

// localProposer proposes for the leader's actors and never forwards. A deposed leader that does not know it
// yet decides on an old state, and the next leader must not execute such decisions.
type localProposer struct{ consensus *cluster.Cluster }

func (p localProposer) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	return p.consensus.ProposeHere(ctx, c)
}

// renewer wraps lease renewal: a new gossip key in the reply is handed on, and the ingress learns which units
// wait for resources.
type renewer struct{ n *Node }

func (k renewer) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	lease, err := k.n.leader.Renew(ctx, r)
	if err != nil {
		return lease, err
	}
	if in := k.n.readyIngress.Load(); in != nil {
		in.TakeWaiting(lease.Waiting, lease.TTL)
	}
	if len(lease.GossipKey) > 0 && k.n.peering != nil {
		k.n.peering.OfferGossipKey(lease.GossipKey)
	}
	return lease, nil
}
