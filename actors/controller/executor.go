package controller

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// executor carries out effects outside of Receive: commands in a bounded number of goroutines, and the orders
// of each node in sequence in one goroutine per node.
type executor struct {
	ctx        context.Context //nolint:containedctx // ends the goroutines at Close
	cfg        *Config
	post       func(any)
	checkValid func(context.Context, *ProposeEffect) error // asks the core whether a command is still valid
	slots      chan struct{}
	nodes      map[string]chan Effect // used by the actor only
	work       sync.WaitGroup
}

func newExecutor(ctx context.Context, cfg *Config, post func(any),
	checkValid func(context.Context, *ProposeEffect) error,
) *executor {
	return &executor{
		ctx: ctx, cfg: cfg, post: post, checkValid: checkValid,
		slots: make(chan struct{}, maxCommands), nodes: map[string]chan Effect{},
	}
}

// execute starts an effect and returns at once.
func (a *executor) execute(e Effect) {
	switch e := e.(type) {
	case AssignEffect:
		a.cfg.Assigner.AssignGroup(e.Request, func(r msg.GroupAssigned) {
			a.logFailure("grant_group", e.Request.Grant.Units[0].Unit, r.Err)
			a.post(GroupAssigned{r})
		})
	case ProposeEffect:
		a.runCommand(func(ctx context.Context) {
			err := a.propose(ctx, &e)
			a.logFailure(e.Command.Kind(), e.Unit, err)
			a.post(CommandDone{e.App, e.Unit, e.Node, err})
		})
	case StepDownEffect:
		a.runCommand(func(ctx context.Context) { a.stepDown(ctx, &e) })
	case ReleaseEffect:
		a.cfg.Assigner.Release(e.Release, func(err error) {
			a.logFailure("release", e.Release.Unit, err)
			a.post(CommandDone{App: e.App, Unit: e.Release.Unit, Err: err})
		})
	case StartEffect:
		a.enqueueOrder(e.Node, e)
	case StopEffect:
		a.enqueueOrder(e.Node, e)
	case ForgetNodeEffect:
		if q := a.nodes[e.Node]; q != nil {
			close(q)
			delete(a.nodes, e.Node)
		}
	}
}

// runCommand waits for a slot and runs f with a deadline. Each unit has at most one command, so the units
// bound the number of goroutines.
func (a *executor) runCommand(f func(ctx context.Context)) {
	a.work.Go(func() {
		select {
		case a.slots <- struct{}{}:
		case <-a.ctx.Done():
			return
		}
		defer func() { <-a.slots }()
		ctx, cancel := context.WithTimeout(a.ctx, a.cfg.Timers.Call)
		defer cancel()
		f(ctx)
	})
}

// errWithdrawn ends the proposal of NodeLost: the node has renewed its lease meanwhile.
var errWithdrawn = errors.New("the node has renewed its lease")

// propose proposes a command. NodeLost needs a majority that confirms this leader after the silence. Renewals
// that waited for the same confirmation are handled before the proposal.
func (a *executor) propose(ctx context.Context, e *ProposeEffect) error {
	if e.Command.NodeLost != nil {
		if err := a.cfg.Confirm(ctx); err != nil {
			return err
		}
		if err := a.checkValid(ctx, e); err != nil {
			return err
		}
	}
	_, err := a.cfg.Proposer.Propose(ctx, e.Command)
	return err
}

func (a *executor) stepDown(ctx context.Context, e *StepDownEffect) {
	log := a.cfg.Log.With(slog.String("component", actorName), slog.Any("silent", e.Overdue))
	log.Warn("the leader does not hear its own node, or hears less than half of all nodes: it takes the " +
		"fault for its own and hands over")
	if err := a.cfg.StepDown(ctx); err != nil && a.ctx.Err() == nil {
		log.Warn("the leader cannot hand over: nodes that are silent for one more lease are lost",
			slog.Any("err", err))
	}
}

// logFailure warns of a command that failed. That the disk takes no writes the cluster has said once. Nothing
// is wrong where the state has gone on between the decision and the command.
func (a *executor) logFailure(kind, unit string, err error) {
	if err == nil || a.ctx.Err() != nil || errors.Is(err, errWithdrawn) {
		return
	}
	level := slog.LevelWarn
	switch {
	case errors.Is(err, cluster.ErrDisk):
		level = slog.LevelDebug
	case errors.Is(err, state.ErrStaleEpoch), errors.Is(err, state.ErrStaleRevision),
		errors.Is(err, state.ErrUnknownUnit), errors.Is(err, state.ErrUnknownNode):
		level = slog.LevelInfo
	}
	a.cfg.Log.Log(a.ctx, level, "command failed", slog.String("component", actorName),
		slog.String("command", kind), slog.String("unit", unit), slog.Any("err", err))
}

// enqueueOrder queues an order for a node. A full queue drops the order, and the resend timer sends it again.
func (a *executor) enqueueOrder(node string, e Effect) {
	q := a.nodes[node]
	if q == nil {
		q = make(chan Effect, nodeQueue)
		a.nodes[node] = q
		a.work.Go(func() { a.sendOrders(q) })
	}
	select {
	case q <- e:
	default:
		a.cfg.Log.Warn("order dropped, the node does not keep up", slog.String("component", actorName),
			slog.String("peer", node))
	}
}

func (a *executor) sendOrders(q <-chan Effect) {
	for {
		select {
		case e, isOpen := <-q:
			if !isOpen {
				return
			}
			a.sendOrder(e)
		case <-a.ctx.Done():
			return
		}
	}
}

func (a *executor) sendOrder(e Effect) {
	ctx, cancel := context.WithTimeout(a.ctx, a.cfg.Timers.Call)
	defer cancel()
	switch e := e.(type) {
	case StartEffect:
		a.startRank(ctx, e.Node, e.Order)
	case StopEffect:
		agent, ok := a.cfg.Agent(e.Node)
		if !ok {
			return
		}
		// A node that has seen a later epoch has ended this one.
		if err := agent.StopRank(ctx, e.Order); !errors.Is(err, state.ErrStaleEpoch) {
			a.logFailure("stop_rank", e.Order.Unit, err)
		}
	}
}

// startRank sends StartRank to a node. A refusal is a failed start; without an answer the resend timer sends
// it again.
func (a *executor) startRank(ctx context.Context, node string, o *msg.StartRank) {
	agent, ok := a.cfg.Agent(node)
	wanted := func() bool {
		rec := a.cfg.Store.State().Units[o.Unit]
		return rec != nil && rec.Epoch == o.Epoch
	}
	if !ok || !wanted() {
		return // the order waited in the queue for too long
	}
	err := agent.StartRank(ctx, o)
	if err == nil || errors.Is(err, state.ErrStaleEpoch) && !wanted() { // or it was too long on its way
		return
	}
	if !errors.Is(err, msg.ErrNodeStopping) { // else the node stopped while the order was on its way
		a.logFailure("start_rank", o.Unit, err)
	}
	if !isNoAnswer(err) {
		a.post(Refused{node, o.Unit, o.Epoch, err})
	}
}

// isNoAnswer reports whether a call got no answer or the node was too busy, in contrast to a refusal.
func isNoAnswer(err error) bool {
	if errors.Is(err, msg.ErrNodeStopping) {
		return false
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return true
	}
	switch problem.CodeOf(err) {
	case problem.Overloaded, problem.Unavailable, problem.Timeout:
		return true
	default:
		return false
	}
}
