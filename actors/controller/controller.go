package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// ErrStopped says that the controller was closed: its node stops, or does not lead any more. It is cluster.ErrNotLeader.
var ErrStopped = fmt.Errorf("controller is stopped: %w", cluster.ErrNotLeader)

// minTick keeps a due time in the past from becoming a busy loop.
const minTick = time.Millisecond

// Controller is the actor around the core. All methods but Start are safe for concurrent use.
type Controller struct {
	cfg  Config
	box  *inbox.Inbox
	ring *ring
	acts *acts

	mu   sync.Mutex
	core *Core

	reshaping chan struct{} // held by the one change of ranks under way
	booted    chan struct{} // closed when the first state behind the barrier is taken up
	boot      sync.Once
	timer     *time.Timer // the actor's own
	stop      context.CancelFunc
	loops     sync.WaitGroup
	closeOnce sync.Once
	closeErr  error
}

var _ msg.Leader = (*Controller)(nil)

// New makes a Controller.
func New(cfg Config) *Controller {
	cfg = cfg.withDefaults()
	core := NewCore(cfg.Timers)
	core.Self = cfg.Self
	return &Controller{cfg: cfg, ring: newRing(), core: core, reshaping: make(chan struct{}, 1), booted: make(chan struct{})}
}

// Start spawns the actor. Nothing is granted before the barrier has passed.
func (c *Controller) Start(system *actor.ActorSystem) error {
	ctx, stop := context.WithCancel(context.Background())
	c.acts = newActs(ctx, &c.cfg, func(m any) { c.box.Send(m) }, c.stands)
	box, err := inbox.Spawn(system, actorName, mailboxBound, func() inbox.Receiver { return receiver{c} })
	if err != nil {
		stop()
		return err
	}
	c.box, c.stop = box, stop
	c.loops.Go(func() { c.follow(ctx) })
	return nil
}

// Close stops deciding and waits for the calls under way: the node stops, or does not lead any more. Units go on as they are, and the
// next leader counts them.
func (c *Controller) Close() error {
	c.closeOnce.Do(func() {
		if c.box == nil {
			return
		}
		c.stop()
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		defer cancel()
		c.closeErr = c.box.Stop(ctx)
		c.loops.Wait()
		c.acts.wait()
		if c.timer != nil {
			c.timer.Stop()
		}
		for id, u := range c.core.units {
			c.cfg.Metrics.UnitForget(u.app, id)
		}
		for name := range c.core.apps {
			c.cfg.Metrics.AppRanksForget(name)
		}
	})
	return c.closeErr
}

// follow passes the barrier, then posts every change of the store. It never polls.
func (c *Controller) follow(ctx context.Context) {
	if !c.passBarrier(ctx) {
		return
	}
	for {
		changed := c.cfg.Store.Changed() // before State, or a change in between goes unseen
		c.box.Send(StateSeen{c.cfg.Store.State()})
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// passBarrier tries until it succeeds or the controller is closed: without it nothing may be decided.
func (c *Controller) passBarrier(ctx context.Context) bool {
	for c.cfg.Barrier != nil {
		err := c.cfg.Barrier(ctx)
		if err == nil {
			break
		}
		c.cfg.Log.Warn("barrier failed, trying again", slog.String("room", actorName), slog.Any("err", err))
		select {
		case <-time.After(c.cfg.Timers.Retry):
		case <-ctx.Done():
			return false
		}
	}
	return ctx.Err() == nil
}

// caughtUp tells the core of a deploy, and who deployed when the core has seen it.
type caughtUp struct {
	Redeployed
	done chan struct{}
}

// standing asks whether a command may still be proposed, behind all that the actor was told before.
type standing struct {
	effect *ProposeEffect
	answer chan bool // one slot
}

// stands asks the core; errWithdrawn: not any more.
func (c *Controller) stands(ctx context.Context, e *ProposeEffect) error {
	m := &standing{e, make(chan bool, 1)}
	c.box.Send(m)
	select {
	case yes := <-m.answer:
		if !yes {
			return errWithdrawn
		}
		return nil
	case <-c.box.Stopped():
		return errStopped()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// receiver is the actor: it steps the core and hands the effects on.
type receiver struct{ *Controller }

// Receive implements inbox.Receiver.
func (c receiver) Receive(m any) {
	effects, due := c.step(m)
	woken := false
	for _, e := range effects {
		switch e := e.(type) {
		case RenewEffect:
			if r, ok := m.(*renewal); ok {
				r.reply <- e
			}
			continue
		case ChangeEffect:
			c.tell(e.Event)
		case RestartEffect:
			c.cfg.Metrics.UnitRestart(e.App, e.Unit)
		case ForgetEffect:
			c.cfg.Metrics.UnitForget(e.App, e.Unit)
		case RanksEffect:
			c.cfg.Metrics.AppRanks(e.App, e.Ready, e.Desired)
		case ForgetAppEffect:
			c.cfg.Metrics.AppRanksForget(e.App)
		default:
			c.acts.do(e)
			continue
		}
		woken = true
	}
	switch m.(type) {
	case StateSeen, *caughtUp:
		woken = true
	}
	if woken {
		c.ring.wake()
	}
	c.arm(due)
	if r, ok := m.(*caughtUp); ok {
		close(r.done)
	}
}

func (c *Controller) step(m any) ([]Effect, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var effects []Effect
	switch in := m.(type) {
	case *standing:
		in.answer <- c.core.Stands(in.effect)
		return nil, c.core.Due()
	case *caughtUp:
		m = in.Redeployed
	case *renewal:
		effects = c.freshen()
		m = NodeSeen{in.report}
	}
	effects = append(effects, c.core.Step(c.cfg.Clock(), m)...)
	if c.core.state != nil {
		c.boot.Do(func() { close(c.booted) })
	}
	return effects, c.core.Due()
}

// tell puts a change into ring, metrics and log.
func (c *Controller) tell(e Event) {
	c.ring.add(e)
	attrs := []any{slog.String("room", actorName), slog.String("app", e.App), slog.String("from", e.From), slog.String("to", e.To)}
	if e.Unit != "" {
		c.cfg.Metrics.UnitPhase(e.App, e.Unit, state.Phase(e.To), e.Epoch)
		attrs = append(attrs, slog.String("unit", e.Unit), slog.Uint64("epoch", e.Epoch))
	}
	if e.Reason != "" && state.Phase(e.To) != state.Starting { // a start has the reason of the end before it
		attrs = append(attrs, slog.String("cause", e.Reason))
	}
	c.cfg.Log.Log(context.Background(), levelOf(&e), "state changed", attrs...)
}

// levelOf makes one event one line at level info: of applications every change, of units what this leader decides. What a node
// reports of a unit is in that node's log; the first sight of a unit or an application is no change, as at each change of leaders.
func levelOf(e *Event) slog.Level {
	switch {
	case e.From == "" && e.To != string(state.Deploying):
		return slog.LevelDebug
	case e.Unit == "":
		return slog.LevelInfo
	}
	switch state.Phase(e.To) {
	case state.Pending, state.Starting, state.Draining, state.Backoff, state.Failed:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

// arm sets the one timer to the next due time.
func (c *Controller) arm(due time.Time) {
	if c.timer != nil {
		c.timer.Stop()
	}
	if due.IsZero() {
		return
	}
	c.timer = time.AfterFunc(max(minTick, due.Sub(c.cfg.Clock())), func() { c.box.Send(Ticked{}) })
}

// Status is the picture of all applications, in order of name. Nothing of a rank's account is in it: those who know it add it.
func (c *Controller) Status() []msg.AppStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.Status()
}

// StatusWithout is Status while some nodes do not answer: unreachable gives the reason for each.
func (c *Controller) StatusWithout(unreachable map[string]string) []msg.AppStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.StatusWithout(unreachable)
}

// Watch is closed at the next change of what Status or Events show. Take it before them, or a change in between goes unseen.
func (c *Controller) Watch() <-chan struct{} { return c.ring.watch() }

// Events are the changes of state after number since that are still kept, at most the last 1000.
func (c *Controller) Events(since uint64) []Event { return c.ring.since(since) }

// Deploy creates or replaces applications and, with prune, deletes the others. It first places on paper all that would be
// started: what cannot be placed is refused before anything happens; with partial, groups without room wait for it instead. expect
// gives the revision the caller saw per app (0 = none). Apps that do not change get another chance for their failed units. Errors:
// problem.Unplaceable, problem.Conflict.
func (c *Controller) Deploy(ctx context.Context, apps []*app.Application, expect map[string]uint64, prune, partial bool) (state.Result, error) {
	if err := runnable(apps); err != nil {
		return state.Result{}, err
	}
	if !partial {
		if err := dryRun(c.placeable(), apps, prune); err != nil {
			return state.Result{}, err
		}
	}
	put := &state.PutApps{Expect: expect, Prune: prune}
	names := make([]string, 0, len(apps))
	for _, a := range apps {
		spec, err := specOf(a)
		if err != nil {
			return state.Result{}, err
		}
		put.Apps = append(put.Apps, spec)
		names = append(names, a.Name)
	}
	before := c.epochs()
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: put})
	if err != nil {
		return r, err
	}
	return r, c.catchUp(ctx, names, before)
}

// placeable is the present state for a placement on paper.
func (c *Controller) placeable() *state.State {
	s := c.cfg.Store.State()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.withoutStopping(s)
}

// specOf is an application as the state keeps it.
func specOf(a *app.Application) (state.AppSpec, error) {
	spec, err := json.Marshal(a)
	if err != nil {
		return state.AppSpec{}, problem.New(problem.Internal, "deploy %s: %w", a.Name, err)
	}
	return state.AppSpec{Name: a.Name, Spec: spec, Names: a.Model.ServedNames(), Route: a.RoutePrefix}, nil
}

// Delete ends an application: its units drain and stop, then it is forgotten. A second time changes nothing.
func (c *Controller) Delete(ctx context.Context, name string) (state.Result, error) {
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{DeleteApp: &state.DeleteApp{Name: name}})
	if err != nil {
		return r, err
	}
	return r, c.catchUp(ctx, nil, nil)
}

// epochs gives the epoch of every unit there is now.
func (c *Controller) epochs() map[string]uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[string]uint64, len(c.core.units))
	for id, u := range c.core.units {
		out[id] = u.m.Epoch
	}
	return out
}

// catchUp waits until Status shows what was committed, so that who deploys and then asks is not told that there is no such
// app. The change is committed whatever happens here: running out of time is no error.
func (c *Controller) catchUp(ctx context.Context, apps []string, before map[string]uint64) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timers.Call)
	defer cancel()
	select {
	case <-c.booted: // before, there is nothing to catch up
	case <-c.box.Stopped():
	case <-ctx.Done():
	}
	m := &caughtUp{Redeployed{apps, before, c.cfg.Store.State()}, make(chan struct{})}
	if err := c.box.TrySend(m); errors.Is(err, inbox.ErrStopped) {
		return errStopped()
	} else if err != nil {
		return problem.New(problem.Overloaded, "tell the controller: %w", err).WithHint("deploy again in a second")
	}
	select {
	case <-m.done:
	case <-c.box.Stopped():
	case <-ctx.Done():
	}
	return nil
}
