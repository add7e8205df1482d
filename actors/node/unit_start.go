package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// startError is the reason of a failed start, with the rank whose log tells more.
type startError struct {
	rank int // -1: no particular rank
	err  error
}

func (e *startError) Error() string { return e.err.Error() }
func (e *startError) Unwrap() error { return e.err }

// errStartDeadline ends a start that takes longer than startup_timeout_s.
var errStartDeadline = errors.New("not ready within the startup timeout")

// start starts every rank of the unit: bind test, DPServers, assignment, rendezvous, engines, health,
// settings, canary. One deadline bounds all of it, except for attached engines, which their owner may start
// at any time.
func (u *unit) start() error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	if !u.attached() {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, u.startTimeout(),
			fmt.Errorf("%w of %s (engine.startup_timeout_s)", errStartDeadline, u.startTimeout()))
		defer stop()
	}
	if !u.begin(cancel) {
		return errStopAsked
	}
	err := u.bringUp(ctx)
	if err == nil {
		err = u.becomeReady(ctx)
	}
	u.mu.Lock()
	u.cancel = nil
	u.mu.Unlock()
	return u.explain(ctx, err)
}

// begin registers the cancel function of the start, unless a stop came first.
func (u *unit) begin(cancel context.CancelCauseFunc) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.cancel = cancel
	return u.stop == nil
}

func (u *unit) startTimeout() time.Duration {
	if u.n.timers.StartupTimeout > 0 {
		return u.n.timers.StartupTimeout
	}
	if s := u.m.App.Engine.StartupTimeoutS; s > 0 {
		return app.Seconds(s)
	}
	return DefaultStartupTimeout
}

// explain replaces the error of a cancelled start by the cause of the cancellation.
func (u *unit) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errRankLost):
		_, f, _ := u.pendingInput()
		return &startError{f.rank, errors.New(f.cause)}
	case errors.Is(cause, errStopAsked):
		return cause
	case errors.Is(cause, errStartDeadline):
		rank, progress := u.slowest()
		return &startError{rank, fmt.Errorf("%w; rank %d: %s", cause, rank, progress)}
	}
	return err
}

// slowest names a rank that is not ready yet and what it waits for.
func (u *unit) slowest() (rank int, progress string) {
	u.mu.Lock()
	ranks := u.ranks
	u.mu.Unlock()
	for _, r := range ranks {
		if _, progress := r.view(); progress != "" {
			return r.grant.Rank, progress
		}
	}
	return -1, "unknown"
}

func (u *unit) bringUp(ctx context.Context) error {
	if err := u.checkMeeting(); err != nil {
		return &startError{0, err}
	}
	layout, ranks := u.layout()
	for _, p := range layout.Bound(engine.WantsEvents(u.m.App), ranks...) {
		if err := u.bindTest(ctx, p); err != nil {
			return &startError{-1, fmt.Errorf("port %d of the unit's block is taken: %w", p, err)}
		}
	}
	if err := u.makeRanks(ctx); err != nil {
		return err
	}
	for _, r := range u.ranks {
		r.setProgress("waiting for its rank")
		if err := r.replica.Assign(ctx); err != nil {
			return &startError{r.grant.Rank, err}
		}
	}
	addr, port, err := u.rendezvous(ctx, layout)
	if err != nil {
		return err
	}
	if !u.attached() {
		if err := u.launch(ctx, addr, port); err != nil {
			return err
		}
	}
	return u.await(ctx)
}

// makeRanks makes a DPServer for every rank. The list is complete before any step can fail.
func (u *unit) makeRanks(ctx context.Context) error {
	var ranks []*rank
	for _, g := range u.m.Ranks {
		r, err := u.makeRank(g)
		if err != nil {
			u.stopReplicas(context.WithoutCancel(ctx), ranks)
			return &startError{g.Rank, err}
		}
		ranks = append(ranks, r)
	}
	u.mu.Lock()
	u.ranks = ranks
	u.mu.Unlock()
	return nil
}

func (u *unit) makeRank(g state.RankGrant) (*rank, error) {
	target, events, err := u.target(g)
	if err != nil {
		return nil, err
	}
	r := &rank{grant: g, target: target, events: events}
	r.replica, err = u.n.cfg.NewReplica(msg.ReplicaSpec{
		App: u.m.App, Unit: u.m.Unit, Group: u.m.Group, Rank: g.Rank, Epoch: u.m.Epoch, Node: u.n.cfg.ID,
		Devices: g.Devices, Target: target,
		Events: events, Watcher: u,
	})
	if err != nil {
		return nil, err
	}
	r.client = engine.NewClient(target.URL,
		engine.Addressing{Mode: target.Addressing, Selector: target.Selector}, engine.APIKey(u.m.App),
		u.n.cfg.Transport)
	r.out[0], r.out[1] = u.n.logs.open(u.m.App.Name, u.m.Unit, g.Rank, u.m.Epoch)
	return r, nil
}

// target says where the engine of a rank will answer, and where its KV events are, if that is known.
func (u *unit) target(g state.RankGrant) (msg.Target, *msg.EventSource, error) {
	l, err := u.render(g, "", 0)
	if err != nil {
		return msg.Target{}, nil, err
	}
	t := msg.Target{URL: l.URL, Addressing: app.AddressURL, Owned: true}
	if u.attached() {
		a, err := engine.AttachedRank(u.m.App, u.m.Group, g.Rank)
		if err != nil {
			return msg.Target{}, nil, err
		}
		t = msg.Target{URL: a.URL, Addressing: a.Addressing, Selector: a.Selector}
	}
	return t, eventSource(l.Events), nil
}

func (u *unit) render(g state.RankGrant, addr string, port int) (engine.Launch, error) {
	return engine.Render(&engine.Spec{
		App: u.m.App, Group: u.m.Group, Rank: g.Rank, Base: u.m.Block.Base, Host: u.n.cfg.EngineHost,
		Devices:    g.Devices,
		Executable: u.n.cfg.Executable, Rank0Addr: addr, Rank0Port: port, GroupKey: u.groupKey(),
	}, u.n.cfg.Environ)
}

// launch starts every rank's engine and watches its exit.
func (u *unit) launch(ctx context.Context, addr string, port int) error {
	if err := u.n.mayStart(); err != nil { // the lease may have ended while the unit waited
		return &startError{-1, err}
	}
	for _, r := range u.ranks {
		l, err := u.render(r.grant, addr, port)
		if err == nil {
			err = u.launchRank(ctx, r, l)
		}
		if err != nil {
			return &startError{r.grant.Rank, err}
		}
	}
	return nil
}

func (u *unit) launchRank(ctx context.Context, r *rank, l engine.Launch) error {
	r.setProgress("starting its engine")
	p, err := u.n.launcher.Start(ctx, l, r.out[0], r.out[1])
	if err != nil {
		return err
	}
	r.setProc(p)
	u.log.Info("engine started", slog.Int("rank", r.grant.Rank), slog.Int("pid", p.PID()),
		slog.String("url", l.URL))
	u.n.running.Go(func() { u.watchExit(r, p) }) // ends with the engine or the unit
	return nil
}

// watchExit turns every exit that the node did not request into a failure, whatever its code. An engine that
// no signal ends outlives its unit.
func (u *unit) watchExit(r *rank, p Process) {
	select {
	case <-p.Exited():
	case <-u.done:
		return
	}
	if !r.wasAsked() {
		u.fail(r.grant.Rank, p.Exit().String())
	}
}

// await waits until every rank answers, checks that engines publish events where they were told to and that
// coupled ranks agree, has each compute a token, and asks it for its facts.
func (u *unit) await(ctx context.Context) error {
	if err := u.answers(ctx); err != nil {
		return err
	}
	return u.forEach(ctx, u.learn)
}

func (u *unit) answers(ctx context.Context) error {
	if u.attached() {
		return u.forEach(ctx, u.awaitAttached)
	}
	if err := u.forEach(ctx, u.awaitHealth); err != nil {
		return err
	}
	if err := u.forEach(ctx, u.checkEvents); err != nil {
		return err
	}
	if u.lockstep() {
		if err := u.agree(ctx); err != nil {
			return err
		}
	}
	return u.forEach(ctx, u.canary)
}

// forEach runs a step of the start for all ranks at once. The first error ends the others.
func (u *unit) forEach(ctx context.Context, step func(ctx context.Context, r *rank) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, r := range u.ranks {
		g.Go(func() error {
			if err := step(ctx, r); err != nil {
				return &startError{r.grant.Rank, err}
			}
			return nil
		})
	}
	return g.Wait()
}

// awaitHealth polls /health: quickly at first, because a simulated engine is up in milliseconds; a real one
// takes minutes.
func (u *unit) awaitHealth(ctx context.Context, r *rank) error {
	for wait := u.n.timers.PollFirst; ; wait = min(2*wait, u.n.timers.PollLast) {
		h, err := u.askHealth(ctx, r)
		if h == engine.Alive {
			return nil
		}
		r.setProgress(fmt.Sprintf("waiting for %s/health: %v", r.target.URL, err))
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

func (u *unit) askHealth(ctx context.Context, r *rank) (engine.Health, error) {
	ctx, cancel := context.WithTimeout(ctx, u.healthTimeout())
	defer cancel()
	return r.client.Health(ctx)
}

func (u *unit) canary(ctx context.Context, r *rank) error {
	r.setProgress("waiting for the first token")
	ctx, cancel := context.WithTimeout(ctx, u.n.timers.Canary)
	defer cancel()
	if err := r.client.Canary(ctx, u.m.App.Model.ID); err != nil {
		return fmt.Errorf("the engine is up and does not compute: %w", err)
	}
	return nil
}

// awaitAttached asks for health and a token until both succeed. It never gives up.
func (u *unit) awaitAttached(ctx context.Context, r *rank) error {
	for {
		if err := u.awaitHealth(ctx, r); err != nil {
			return err
		}
		err := u.canary(ctx, r)
		if err == nil {
			return nil
		}
		r.setProgress(fmt.Sprintf("waiting for %s: %v", r.target.URL, err))
		if err := sleep(ctx, u.healthPeriod()); err != nil {
			return err
		}
	}
}

// becomeReady opens every DPServer for a new incarnation of its engine. A rank that failed meanwhile closes
// them again.
func (u *unit) becomeReady(ctx context.Context) error {
	for _, r := range u.ranks {
		r.facts.Incarnation = draw(u.n.cfg.Rand)
		if err := r.replica.Ready(ctx, r.facts); err != nil {
			return &startError{r.grant.Rank, err}
		}
		r.setProgress("")
	}
	if f := u.enterReady(); f != nil {
		for _, r := range u.ranks {
			r.replica.Fence(f.cause)
		}
		return &startError{f.rank, errors.New(f.cause)}
	}
	u.log.Info("unit is ready", slog.Int("ranks", len(u.ranks)))
	u.reportEvent(msg.UnitEvent{Kind: msg.UnitReady, Rank: -1})
	return nil
}

// enterReady changes the phase unless a rank failed.
func (u *unit) enterReady() *failure {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.failure == nil {
		u.phase, u.reason, u.wasReady = state.Ready, "", true
	}
	return u.failure
}

func (u *unit) healthPeriod() time.Duration {
	if s := u.m.App.HealthCheckPeriodS; s > 0 {
		return app.Seconds(s)
	}
	return u.n.timers.PollLast
}

func (u *unit) healthTimeout() time.Duration {
	if s := u.m.App.HealthCheckTimeoutS; s > 0 {
		return app.Seconds(s)
	}
	return u.n.timers.Canary
}

// draw draws the random number of one process; 0 means none.
func draw(random func() uint64) uint64 {
	for {
		if v := random(); v != 0 {
			return v
		}
	}
}

// sleep waits, or returns the cause why ctx ended.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
