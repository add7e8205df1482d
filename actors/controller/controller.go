// Package controller makes the cluster match its applications: it places units, has them granted, tells the
// nodes to start and stop them, and follows the nodes' reports. It runs on the leader only.
package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// DefaultRetry is the pause before a command that consensus did not accept is proposed again.
	DefaultRetry = time.Second
	// DefaultCall bounds one order to a node and one command.
	DefaultCall = 5 * time.Second

	actorName    = "controller"
	mailboxBound = 1024            // unreceived requests; results of commands bypass it
	closeGrace   = 5 * time.Second // time for the actor to stop
	maxCommands  = 64              // concurrent commands; each unit has at most one
	nodeQueue    = 4096            // orders that wait for one node; the resend timer repeats dropped ones
	eventRing    = 1000            // state changes kept for the API
)

// Timers of the controller. Zero fields mean the defaults.
type Timers struct {
	Unit     state.Timers  // retries, restarts, resends
	Retry    time.Duration // before a failed command is proposed again
	Call     time.Duration // bound of one order or one command
	LeaseTTL time.Duration // duration of a node's lease
	Regrant  time.Duration // silence after which a node is lost; more than LeaseTTL
}

func (t Timers) withDefaults() Timers {
	t.Unit = t.Unit.WithDefaults()
	t.Retry, t.Call = cmp.Or(max(0, t.Retry), DefaultRetry), cmp.Or(max(0, t.Call), DefaultCall)
	t.LeaseTTL = cmp.Or(max(0, t.LeaseTTL), state.LeaseTTL)
	if t.Regrant <= t.LeaseTTL {
		t.Regrant = t.LeaseTTL + state.LeaseGrace
	}
	return t
}

// Assigner places, numbers, grants and releases ranks; the RankAssigner implements it. Both methods return at
// once. They answer once, from any goroutine, unless the Assigner is closed, and place in the order of calls.
type Assigner interface {
	AssignGroup(m *msg.AssignGroup, answer func(msg.GroupAssigned))
	Release(m msg.ReleaseRank, answer func(error))
}

// Metrics counts the changes of units, by the names of their pools. It is called from one goroutine at a time
// and may not block.
type Metrics interface {
	UnitPhase(pool, unit string, phase state.Phase)
	UnitForget(pool, unit string)
}

// Config is the configuration of a Controller. Store must have everything that was committed before this node
// led: a grant on an older state could use an epoch twice.
type Config struct {
	// Self is the id of the leader's node.
	Self     string
	Store    msg.Store
	Proposer msg.Proposer
	Assigner Assigner
	// Agent returns the client for commands to a node; false while the node is not connected.
	Agent func(node string) (msg.NodeAgent, bool)
	// Confirm asks a majority whether this node still leads, before a node is declared lost.
	Confirm func(ctx context.Context) error
	// StepDown hands the leadership to another voter. An error means that this node still leads.
	StepDown func(ctx context.Context) error
	Metrics  Metrics
	Resolver Resolver // of services; nil = net.DefaultResolver
	Timers   Timers
	Log      *slog.Logger
	Clock    func() time.Time // nil = time.Now
}

func (c Config) withDefaults() Config {
	c.Timers = c.Timers.withDefaults()
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Resolver == nil {
		c.Resolver = net.DefaultResolver
	}
	return c
}

// ErrStopped says that the controller was closed: its node stops, or no longer leads. It wraps
// cluster.ErrNotLeader.
var ErrStopped = fmt.Errorf("controller is stopped: %w", cluster.ErrNotLeader)

// minTick keeps a due time in the past from causing a busy loop.
const minTick = time.Millisecond

// Controller is the actor around the core. All methods but Start are safe for concurrent use.
type Controller struct {
	cfg      Config
	box      *inbox.Inbox
	ring     *ring
	executor *executor

	mu   sync.Mutex
	core *Core

	ranksLock chan struct{} // held by the change of ranks under way
	leases    rankLeases
	services  services
	ready     chan struct{} // closed when the core has the first state
	boot      sync.Once
	timer     *time.Timer // used by the actor only
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
	return &Controller{
		cfg: cfg, ring: newRing(), core: core, ranksLock: make(chan struct{}, 1), ready: make(chan struct{}),
		leases:   rankLeases{until: map[leasedRank]time.Time{}},
		services: services{views: map[service]*serviceView{}},
	}
}

// Start spawns the actor. Call it after the barrier of the election.
func (c *Controller) Start(system *actor.ActorSystem) error {
	ctx, stop := context.WithCancel(context.Background())
	c.executor = newExecutor(ctx, &c.cfg, func(m any) { c.box.Send(m) }, c.checkValid)
	box, err := inbox.Spawn(system, actorName, mailboxBound, func() inbox.Receiver { return receiver{c} })
	if err != nil {
		stop()
		return err
	}
	c.box, c.stop = box, stop
	c.loops.Go(func() { c.followStore(ctx) })
	c.loops.Go(func() { c.followLeases(ctx) })
	c.loops.Go(func() { c.followServices(ctx) })
	return nil
}

// Close stops deciding and waits for the calls under way, because the node stops or no longer leads. Units
// continue to run, and the next leader takes them over.
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
		c.executor.work.Wait()
		if c.timer != nil {
			c.timer.Stop()
		}
		for id, u := range c.core.units {
			c.cfg.Metrics.UnitForget(u.poolName(), id)
		}
	})
	return c.closeErr
}

// followStore posts every change of the store. It never polls.
func (c *Controller) followStore(ctx context.Context) {
	for {
		changed := c.cfg.Store.Changed() // Changed comes before State, so that no change in between is missed
		c.box.Send(StateSeen{c.cfg.Store.State()})
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// validityQuery asks whether a command may still be proposed. The actor answers after all messages before it.
type validityQuery struct {
	effect *ProposeEffect
	answer chan bool // one slot
}

// checkValid asks the core whether e may still be proposed; errWithdrawn if not.
func (c *Controller) checkValid(ctx context.Context, e *ProposeEffect) error {
	m := &validityQuery{e, make(chan bool, 1)}
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

// receiver is the actor: it steps the core and passes the effects on.
type receiver struct{ *Controller }

// Receive implements inbox.Receiver.
func (c receiver) Receive(m any) {
	effects, due := c.step(m)
	woken := false
	for _, e := range effects {
		switch e := e.(type) {
		case RenewEffect:
			if r, ok := m.(*renewRequest); ok {
				r.reply <- e
			}
			continue
		case ChangeEffect:
			c.publishEvent(e.Event)
		case ForgetEffect:
			c.cfg.Metrics.UnitForget(e.Pool, e.Unit)
		default:
			c.executor.execute(e)
			continue
		}
		woken = true
	}
	switch m.(type) {
	case StateSeen, *redeployRequest:
		woken = true
	}
	if woken {
		c.ring.wake()
	}
	c.armTimer(due)
	if r, ok := m.(*redeployRequest); ok {
		close(r.done)
	}
}

func (c *Controller) step(m any) ([]Effect, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var effects []Effect
	switch in := m.(type) {
	case *validityQuery:
		in.answer <- c.core.Stands(in.effect)
		return nil, c.core.Due()
	case *redeployRequest:
		m = in.AppsRedeployed
	case *renewRequest:
		effects = c.refreshState()
		m = NodeReported{in.report}
	}
	effects = append(effects, c.core.Step(c.cfg.Clock(), m)...)
	if c.core.state != nil {
		c.boot.Do(func() { close(c.ready) })
	}
	return effects, c.core.Due()
}

func (c *Controller) publishEvent(e Event) {
	c.ring.add(e)
	if e.Node != "" { // the log has it from elsewhere
		return
	}
	attrs := []any{
		slog.String("component", actorName), slog.String("app", e.App), slog.String("from", e.From),
		slog.String("to", e.To),
	}
	if e.Unit != "" {
		c.cfg.Metrics.UnitPhase(e.Pool, e.Unit, state.Phase(e.To))
		attrs = append(attrs, slog.String("unit", e.Unit), slog.Uint64("epoch", e.Epoch))
	}
	// a start would repeat the reason of the end before it
	if e.Reason != "" && state.Phase(e.To) != state.Starting {
		attrs = append(attrs, slog.String("cause", e.Reason))
	}
	c.cfg.Log.Log(context.Background(), logLevel(&e), "state changed", attrs...)
}

// logLevel keeps one line per event at level info: every change of an application, and of units the decisions
// of this leader. A unit's changes on its node are in that node's log. A new leader's first sight of a unit
// or application is no change.
func logLevel(e *Event) slog.Level {
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

func (c *Controller) armTimer(due time.Time) {
	if c.timer != nil {
		c.timer.Stop()
	}
	if due.IsZero() {
		return
	}
	c.timer = time.AfterFunc(max(minTick, due.Sub(c.cfg.Clock())), func() { c.box.Send(TimerFired{}) })
}

// Status returns the status of all applications, ordered by name. The caller adds what the replicas report of
// their ranks.
func (c *Controller) Status() []client.AppStatus { return c.StatusWithout(nil) }

// StatusWithout is Status while some nodes do not answer. unreachable gives the reason for each of them.
func (c *Controller) StatusWithout(unreachable map[string]string) []client.AppStatus {
	c.mu.Lock()
	out := view{c.core}.StatusWithout(unreachable)
	c.mu.Unlock()
	c.services.addNotes(out)
	return out
}

// Watch returns a channel that is closed at the next change of Status or Events. Call it before them, so that
// no change in between is missed.
func (c *Controller) Watch() <-chan struct{} { return c.ring.watch() }

// Events returns the changes after number since, at most the last 1000.
func (c *Controller) Events(since uint64) []Event { return c.ring.since(since) }

// renewRequest is a node's report on its way to the core.
type renewRequest struct {
	report *msg.NodeReport
	reply  chan RenewEffect // one slot
}

// Renew implements msg.Leader: it takes a node's report and prolongs the node's lease. The caller must not
// change the report afterwards. It waits until a new leader is ready, and for nothing else. Errors:
// problem.PermissionDenied for a node that is not, or no longer, a member; problem.Unavailable,
// problem.Overloaded, problem.Conflict and ctx's mean "try again".
func (c *Controller) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	select {
	case <-c.ready:
	case <-c.box.Stopped():
	case <-ctx.Done():
		return msg.Lease{}, context.Cause(ctx)
	}
	m := &renewRequest{r, make(chan RenewEffect, 1)}
	if err := c.box.TrySend(m); errors.Is(err, inbox.ErrStopped) {
		return msg.Lease{}, errStopped()
	} else if err != nil {
		return msg.Lease{}, problem.New(problem.Overloaded, "renew the lease of node %s: %w", r.Node.ID,
			err).WithHint("try again in a moment")
	}
	select {
	case e := <-m.reply:
		e.Lease.Leader = c.cfg.Self
		return e.Lease, e.Err
	case <-c.box.Stopped():
		return msg.Lease{}, errStopped()
	case <-ctx.Done():
		return msg.Lease{}, context.Cause(ctx)
	}
}

func errStopped() error {
	return problem.New(problem.Unavailable, "tell the controller: %w", ErrStopped).
		WithHint("this node does not lead any more; ask the new leader")
}

// refreshState loads the latest state first, so that a node that joined a moment ago is recognised. The
// caller holds mu.
func (c *Controller) refreshState() []Effect {
	s := c.cfg.Store.State()
	if c.core.state == nil || s.Index <= c.core.state.Index {
		return nil
	}
	return c.core.Step(c.cfg.Clock(), StateSeen{s})
}

// Note adds a change of an application that another component made to the events, for example a reset of its
// Router. Safe for concurrent use.
func (c *Controller) Note(app, what, reason string) {
	c.ring.add(Event{At: time.Now(), App: app, To: what, Reason: reason})
	c.ring.wake()
}

// Nodes returns the status of all nodes, in order. The caller fills in Voter and InFlight.
func (c *Controller) Nodes() []client.NodeStatus {
	now := c.cfg.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return view{c.core}.Nodes(now, c.cfg.Self)
}

// Silences returns the silence of every node that is not lost.
func (c *Controller) Silences() map[string]Silence {
	now := c.cfg.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return view{c.core}.Silences(now)
}
