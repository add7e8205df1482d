package server

import (
	"context"
	"errors"
	"time"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
)

// noteLeaderless is what status, nodes and /health say of a node that has begun without a leader.
const noteLeaderless = "no leader has answered since this node was started: it serves what its own copy of " +
	"the state grants, and starts nothing"

// awaitState waits until this node's copy of the state is complete, which needs a leader. A node with
// on_lease_loss serve that finds none for a whole lease goes on with the copy of its last process, as it does
// when it loses its leader while it runs: what is granted to it is served, and nothing starts.
func (n *Node) awaitState(ctx context.Context) error {
	// until the state is there: a rejoin names the address of a control node
	found, stop := context.WithCancel(n.life.ctx)
	if n.peering != nil && n.peering.RejoinAddress() != "" {
		n.life.loops.Go(func() {
			n.peering.Neighbours.FindAt(found, n.peering.Port, n.peering.RejoinAddress())
		})
	}
	err := n.awaitLeader(ctx)
	if !errors.Is(err, errLeaderless) {
		stop()
		return err
	}
	n.log.Warn(noteLeaderless)
	n.leaderless.Store(true)
	n.life.loops.Go(func() { //nolint:contextcheck // the node serves without a leader until it ends
		defer stop()
		if err := n.store.Ready(n.life.ctx); err == nil {
			n.leaderless.Store(false)
			n.log.Info("a leader answers: this node has the present state")
		} else if n.life.ctx.Err() == nil {
			n.log.Error("this node does not get the present state", "err", err)
		}
	})
	return nil
}

// errLeaderless says that no leader answers, and that this node serves without one.
var errLeaderless = errors.New("no leader answers")

func (n *Node) awaitLeader(ctx context.Context) error {
	short, cancel := context.WithTimeout(ctx, n.leaderlessAfter())
	defer cancel()
	err := n.store.Ready(short)
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(short), context.DeadlineExceeded) {
		if n.mayServeCopy() && n.store.Recall() {
			return errLeaderless
		}
		err = n.store.Ready(ctx)
	}
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, nodeport.ErrRemoved) {
		return cause
	}
	return err
}

// leaderlessAfter is how long a node that starts looks for a leader before it serves without one.
func (n *Node) leaderlessAfter() time.Duration {
	ttl := n.timers().node.LeaseTTL
	if ttl <= 0 {
		ttl = node.DefaultLeaseTTL
	}
	return min(ttl, readyTimeout/2)
}

// mayServeCopy reports whether this node may serve by the state of its last process. One that stands alone, or
// begins a cluster, needs no other node to lead.
func (n *Node) mayServeCopy() bool {
	return n.peering != nil && !n.peering.IsFounding() && n.onLeaseLoss() != node.Fence
}

// healthNote is added to the answer of /health.
func (n *Node) healthNote() string {
	if !n.leaderless.Load() {
		return ""
	}
	return noteLeaderless
}

// restartPatience is how long a restart waits for a leader: an election takes a second or two.
const (
	restartPatience = 5 * time.Second
	restartAskPause = 200 * time.Millisecond
)

// refuseWithoutLeader refuses a restart after which this node could do less than before.
func (n *Node) refuseWithoutLeader(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, restartPatience)
	defer cancel()
	for !n.node.AskLeader(ctx) {
		if pause.For(ctx, restartAskPause) != nil {
			return problem.New(problem.Unavailable, "no leader answers: the next process of this node could start "+
				"no engine, and would serve the ranks that it has only after it has looked for a leader").
				WithHint("wait until `dpserve nodes` shows a leader; `dpserve restart --force` restarts all the same")
		}
	}
	return nil
}
