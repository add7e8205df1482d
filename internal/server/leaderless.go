package server

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
)

// noteLeaderless is what status, nodes and /health say of a node that has begun without a leader.
const noteLeaderless = "no leader has answered since this node was started: it serves what its own copy of " +
	"the state grants, and starts nothing"

// search is a starting node's search for a leader.
type search struct {
	n          *Node
	began      time.Time
	leaderless atomic.Bool // it was given up, and no leader has answered since
}

// await waits until this node's copy of the state is complete, which needs a leader. A node with
// on_lease_loss serve that finds none for a whole lease goes on with the copy of its last process, as it does
// when it loses its leader while it runs: what is granted to it is served, and nothing starts.
//
//nolint:contextcheck // the search goes on until the node ends
func (s *search) await(ctx context.Context) error {
	n := s.n
	s.began = time.Now()
	searching, stop := context.WithCancel(n.life.ctx)
	if n.peering != nil && n.peering.RejoinAddress() != "" {
		n.life.loops.Go(func() {
			n.peering.Neighbours.FindAt(searching, n.peering.Port, n.peering.RejoinAddress())
		})
	}
	err := s.findLeader(ctx)
	if !errors.Is(err, errLeaderless) {
		stop()
		return err
	}
	n.log.Warn(noteLeaderless)
	s.leaderless.Store(true)
	n.life.loops.Go(func() {
		defer stop()
		if err := n.store.Ready(n.life.ctx); err == nil {
			s.leaderless.Store(false)
			n.log.Info("a leader answers: this node has the present state")
		} else if n.life.ctx.Err() == nil {
			n.log.Error("this node does not get the present state", slog.Any("err", err))
		}
	})
	return nil
}

// errLeaderless says that no leader answers, and that this node serves without one.
var errLeaderless = errors.New("no leader answers")

func (s *search) findLeader(ctx context.Context) error {
	n := s.n
	patience := min(n.timers().node.LeaseTTL, readyTimeout/2)
	if patience <= 0 {
		patience = node.DefaultLeaseTTL
	}
	short, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := n.store.Ready(short)
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(short), context.DeadlineExceeded) {
		// a node that stands alone, or begins a cluster, needs no other node to lead
		if n.peering != nil && !n.peering.IsFounding() && n.onLeaseLoss() != node.Fence && n.store.Recall() {
			return errLeaderless
		}
		err = n.store.Ready(ctx)
	}
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, nodeport.ErrRemoved) {
		return cause
	}
	return err
}

// note is what people are told of a node without a leader; "" = it has one, or had one.
func (s *search) note() string {
	if s.leaderless.Load() {
		return noteLeaderless
	}
	return ""
}

const (
	// restartPatience is how long a restart waits for a leader: an election takes a second or two.
	restartPatience = 5 * time.Second
	restartAskPause = 200 * time.Millisecond
)

// awaitRestartable refuses a restart after which a node could do less than before.
func awaitRestartable(ctx context.Context, n *node.Node) error {
	ctx, cancel := context.WithTimeout(ctx, restartPatience)
	defer cancel()
	for !n.Renew(ctx) {
		if pause.For(ctx, restartAskPause) != nil {
			return problem.New(problem.Unavailable, "no leader answers: the next process of this node could "+
				"start no engine, and would serve the ranks that it has only after a search for a leader").
				WithHint("wait until `dpserve nodes` shows a leader; " +
					"`dpserve restart --force` restarts all the same")
		}
	}
	return nil
}
