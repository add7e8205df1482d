package controller

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

// acts carries effects out, outside of Receive: commands in a bounded number of goroutines, orders to a node in their order by
// one goroutine per node.
type acts struct {
	ctx   context.Context //nolint:containedctx // ends the goroutines at Close
	cfg   *Config
	post  func(any)
	stand func(context.Context, *ProposeEffect) error // asks the core whether a command is still to be proposed
	slots chan struct{}
	nodes map[string]chan Effect // the actor's own
	work  sync.WaitGroup
}

func newActs(ctx context.Context, cfg *Config, post func(any), stand func(context.Context, *ProposeEffect) error) *acts {
	return &acts{ctx: ctx, cfg: cfg, post: post, stand: stand, slots: make(chan struct{}, maxCommands), nodes: map[string]chan Effect{}}
}

// do starts an effect and returns at once.
func (a *acts) do(e Effect) {
	switch e := e.(type) {
	case GrantEffect:
		a.command(func(ctx context.Context) { a.post(a.grant(ctx, &e)) })
	case ProposeEffect:
		a.command(func(ctx context.Context) {
			err := a.propose(ctx, &e)
			a.failed(e.Command.Kind(), e.Unit, err)
			a.post(Concluded{e.App, e.Unit, e.Node, err})
		})
	case StepDownEffect:
		a.command(func(ctx context.Context) { a.stepDown(ctx, &e) })
	case ReleaseEffect:
		a.command(func(ctx context.Context) {
			err := a.cfg.Granter.Release(ctx, e.Release)
			a.failed("release", e.Release.Unit, err)
			a.post(Concluded{App: e.App, Unit: e.Release.Unit, Err: err})
		})
	case StartEffect:
		a.order(e.Node, e)
	case StopEffect:
		a.order(e.Node, e)
	}
}

// command waits for a slot and runs f with a deadline. The number of goroutines is bounded by the units: each has at most one.
func (a *acts) command(f func(ctx context.Context)) {
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

// errWithdrawn ends the proposal of a loss: the node has renewed its lease meanwhile.
var errWithdrawn = errors.New("the node has renewed its lease")

// propose proposes a command. The loss of a node is for a leader to say that a majority follows, after the silence; and once it
// knows that, renewals that waited for the same answer come first.
func (a *acts) propose(ctx context.Context, e *ProposeEffect) error {
	if e.Command.NodeLost != nil {
		if err := a.cfg.Confirm(ctx); err != nil {
			return err
		}
		if err := a.stand(ctx, e); err != nil {
			return err
		}
	}
	_, err := a.cfg.Proposer.Propose(ctx, e.Command)
	return err
}

func (a *acts) stepDown(ctx context.Context, e *StepDownEffect) {
	log := a.cfg.Log.With(slog.String("room", actorName), slog.Any("silent", e.Overdue))
	log.Warn("the leader does not hear its own node, or hears less than half of all nodes: it takes the fault for its own and hands over")
	if err := a.cfg.StepDown(ctx); err != nil && a.ctx.Err() == nil {
		log.Warn("the leader cannot hand over: nodes that are silent for one more lease are lost", slog.Any("err", err))
	}
}

func (a *acts) grant(ctx context.Context, e *GrantEffect) Granted {
	out := Granted{}
	for i := range e.Grant.Units {
		out.Units = append(out.Units, e.Grant.Units[i].Unit)
	}
	out.Result, out.Err = a.cfg.Granter.Grant(ctx, e.Grant)
	a.failed("grant_group", out.Units[0], out.Err)
	return out
}

func (a *acts) failed(kind, unit string, err error) {
	if err != nil && a.ctx.Err() == nil && !errors.Is(err, errWithdrawn) {
		a.cfg.Log.Warn("command failed", slog.String("room", actorName), slog.String("command", kind), slog.String("unit", unit), slog.Any("err", err))
	}
}

// order queues an order for a node. A full queue drops it: the resend timer sends it again.
func (a *acts) order(node string, e Effect) {
	q := a.nodes[node]
	if q == nil {
		q = make(chan Effect, nodeQueue)
		a.nodes[node] = q
		a.work.Go(func() { a.serve(q) })
	}
	select {
	case q <- e:
	default:
		a.cfg.Log.Warn("order dropped, the node does not keep up", slog.String("room", actorName), slog.String("peer", node))
	}
}

// serve sends the orders of one node.
func (a *acts) serve(q <-chan Effect) {
	for {
		select {
		case e := <-q:
			a.send(e)
		case <-a.ctx.Done():
			return
		}
	}
}

func (a *acts) send(e Effect) {
	ctx, cancel := context.WithTimeout(a.ctx, a.cfg.Timers.Call)
	defer cancel()
	switch e := e.(type) {
	case StartEffect:
		a.start(ctx, e.Node, e.Order)
	case StopEffect:
		agent, ok := a.cfg.Agent(e.Node)
		if !ok {
			return
		}
		if err := agent.StopRank(ctx, e.Order); err != nil {
			a.failed("stop_rank", e.Order.Unit, err)
		}
	}
}

// start tells a node. Its refusal is a failed start; silence is answered by the resend timer.
func (a *acts) start(ctx context.Context, node string, o *msg.StartRank) {
	agent, ok := a.cfg.Agent(node)
	if rec := a.cfg.Store.State().Units[o.Unit]; !ok || rec == nil || rec.Epoch != o.Epoch {
		return // the order waited behind others for too long
	}
	err := agent.StartRank(ctx, o)
	if err == nil {
		return
	}
	if !errors.Is(err, msg.ErrNodeStopping) { // its order met the node's end
		a.failed("start_rank", o.Unit, err)
	}
	if !silence(err) {
		a.post(Refused{node, o.Unit, o.Epoch, err})
	}
}

// silence tells a call that got no answer, or a node that has no time for it, from a refusal.
func silence(err error) bool {
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

func (a *acts) wait() { a.work.Wait() }
