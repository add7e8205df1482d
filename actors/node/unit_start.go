package node

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
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
// settings, probe. One deadline bounds all of it, except for attached engines, which their owner may start
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
	u.n.mu.Lock()
	u.cancel = nil
	u.n.mu.Unlock()
	return u.explain(ctx, err)
}

// begin registers the cancel function of the start, unless a stop or the end of the node came first.
func (u *unit) begin(cancel context.CancelCauseFunc) bool {
	u.n.mu.Lock()
	defer u.n.mu.Unlock()
	u.cancel = cancel
	return u.life.stop == nil && !closed(u.n.detached)
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
		_, why, _ := u.next()
		return &startError{why.Rank, errors.New(why.Cause)}
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
	for _, r := range u.ranks {
		if _, progress := r.view(); progress != "" {
			return r.grant.Rank, progress
		}
	}
	return -1, "unknown"
}

func (u *unit) bringUp(ctx context.Context) error {
	if u.found != nil {
		return u.found.adopt(ctx, u)
	}
	if err := u.checkMeeting(); err != nil {
		return &startError{0, err}
	}
	part := partOf(u, engine.Bind{})
	if err := checkPorts(ctx, u); err != nil {
		return err
	}
	if err := devicesOf(u).check(ctx); err != nil {
		return err
	}
	var meeting engine.Bind
	var err error
	if part.MeetsFirst() {
		if meeting, err = u.rendezvous(ctx); err != nil {
			return err
		}
	}
	if err := u.makeRanks(ctx, meeting); err != nil {
		return err
	}
	if err := u.assign(ctx); err != nil {
		return err
	}
	if !part.MeetsFirst() {
		if meeting, err = u.rendezvous(ctx); err != nil {
			return err
		}
	}
	if !u.attached() {
		if err := u.launch(ctx, meeting); err != nil {
			return err
		}
	}
	return u.await(ctx)
}

// assign has the RankAssigner confirm the grant of every rank.
func (u *unit) assign(ctx context.Context) error {
	for _, r := range u.ranks {
		r.setProgress("waiting for its rank")
		if err := r.replica.Assign(ctx); err != nil {
			return &startError{r.grant.Rank, err}
		}
	}
	return nil
}

// makeRanks makes a DPServer for every rank. The list is complete before any step can fail.
func (u *unit) makeRanks(ctx context.Context, meeting engine.Bind) error {
	var ranks []*rank
	for _, g := range u.m.Ranks {
		r, err := u.makeRank(g, meeting)
		if err != nil {
			u.stopReplicas(context.WithoutCancel(ctx), ranks)
			return &startError{g.Rank, err}
		}
		ranks = append(ranks, r)
	}
	u.n.mu.Lock()
	u.ranks = ranks
	u.n.mu.Unlock()
	return nil
}

// makeRank makes a rank, with where its engine will answer, and where its KV events are, if that is known.
func (u *unit) makeRank(g state.RankGrant, meeting engine.Bind) (*rank, error) {
	l, err := renderRank(u, g, meeting)
	if err != nil {
		return nil, err
	}
	access, err := engine.AccessTo(u.m.App)
	if err != nil {
		return nil, err
	}
	access.Expect(l.ServerName)
	r := &rank{
		unit: u, grant: g, events: eventSource(l.Events),
		target: msg.Target{
			URL: l.URL, Addressing: l.Addressing, Selector: l.Selector, Owned: !u.attached(), Access: access,
			Model: modelNames(u.m.App, l.Model),
		},
	}
	u.found.correct(r)
	r.drawIncarnation()
	r.replica, err = u.n.cfg.NewReplica(msg.ReplicaSpec{
		App: u.m.App, Unit: u.m.Unit, Group: u.m.Group, Rank: g.Rank, Epoch: u.m.Epoch, Node: u.n.cfg.ID,
		Devices: g.Devices, Target: r.target,
		Events: r.events, Watcher: u,
	})
	if err != nil {
		return nil, err
	}
	r.client = engine.NewClient(r.target.URL,
		engine.Addressing{Mode: r.target.Addressing, Selector: r.target.Selector}, access, u.n.cfg.Transport)
	r.openLog()
	return r, nil
}

// modelNames are the names of an attached engine's model; nil: the engine knows those that clients send.
func modelNames(a *app.Application, engine string) *msg.ModelNames {
	if engine == "" {
		return nil
	}
	return &msg.ModelNames{Engine: engine, Clients: append([]string{a.Model.ID}, a.Model.Aliases...)}
}

// launch starts every rank's engine and watches its exit.
func (u *unit) launch(ctx context.Context, meeting engine.Bind) error {
	if err := u.n.leaseKeeper.mayLaunch(); err != nil { // the lease may have ended while the unit waited
		return &startError{-1, err}
	}
	for _, r := range u.ranks {
		l, err := renderRank(u, r.grant, meeting)
		if err == nil {
			err = u.launchRank(ctx, r, &l)
		}
		if err != nil {
			return &startError{r.grant.Rank, err}
		}
	}
	return nil
}

func (u *unit) launchRank(ctx context.Context, r *rank, l *engine.Launch) error {
	if host := hostOf(u, r, l); host != nil {
		joinProcess(r, host)
		return nil
	}
	r.setProgress("starting its engine")
	if u.n.cfg.Launcher == nil && imageOf(l.Argv[0]) == "" {
		if err := findProgram(l); err != nil {
			return err
		}
	}
	p, err := u.n.launcher.Start(ctx, u.order(r, l), r.out[0], r.out[1])
	if err != nil {
		return err
	}
	r.setProc(p)
	u.log.Info("engine started", slog.Int("rank", r.grant.Rank), slog.Int("pid", p.PID()),
		slog.String("url", l.URL))
	u.n.running.Go(func() { u.watchExit(r, p, u.done) }) // ends with the engine or the unit
	return nil
}

// order is the launch of a rank's engine.
func (u *unit) order(r *rank, l *engine.Launch) LaunchOrder {
	o := LaunchOrder{
		Launch: *l, App: u.m.App.PoolName(), Revision: u.m.AppRevision, Unit: u.m.Unit, Group: u.m.Group,
		Epoch: u.m.Epoch, Order: u.m, Ports: portsOf(u, r, l),
		Output: u.n.logs.file(u.m.Unit, r.grant.Rank),
	}
	for _, other := range u.ranks {
		if other == r || slices.Contains(l.Ranks, other.grant.Rank) {
			o.Ranks = append(o.Ranks, other.grant.Rank)
			o.Incarnations = append(o.Incarnations, other.incarnation)
			o.Devices = append(o.Devices, other.grant.Devices...)
		}
	}
	return o
}

// watchExit turns every exit that the node did not request into a failure, whatever its code. An engine that
// no signal ends outlives its unit.
func (u *unit) watchExit(r *rank, p Process, until <-chan struct{}) {
	select {
	case <-p.Exited():
	case <-until:
		return
	}
	if !r.asked.Load() {
		u.fail(failureOf(r, p))
	}
}

// failureOf is the failure of a rank whose engine has ended by itself.
func failureOf(r *rank, p Process) Failure {
	exit := p.Exit()
	return Failure{Rank: r.grant.Rank, Cause: exit.String(), Exit: exit.How()}
}

// await waits until every rank answers, checks that engines publish events where they were told to and that
// coupled ranks agree, has each compute a token, and asks it for its facts.
func (u *unit) await(ctx context.Context) error {
	if err := u.answers(ctx); err != nil {
		return err
	}
	return u.forEach(ctx, (*rank).learn)
}

func (u *unit) answers(ctx context.Context) error {
	if u.attached() {
		return u.forEach(ctx, (*rank).awaitAttached)
	}
	if err := u.forEach(ctx, (*rank).awaitHealth); err != nil {
		return err
	}
	if err := u.forEach(ctx, (*rank).checkEvents); err != nil {
		return err
	}
	if u.lockstep() {
		if err := u.agree(ctx); err != nil {
			return err
		}
	}
	return u.forEach(ctx, (*rank).probe)
}

// forEach runs a step of the start for all ranks at once. The first error ends the others.
func (u *unit) forEach(ctx context.Context, step func(r *rank, ctx context.Context) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, r := range u.ranks {
		g.Go(func() error {
			if err := step(r, ctx); err != nil {
				return &startError{r.grant.Rank, err}
			}
			return nil
		})
	}
	return g.Wait()
}

// becomeReady opens every DPServer for its engine; an attached one is a new incarnation each time. A rank
// that failed meanwhile closes them again.
func (u *unit) becomeReady(ctx context.Context) error {
	for _, r := range u.ranks {
		if u.attached() {
			r.drawIncarnation()
		}
		r.facts.Incarnation, r.facts.Base = r.incarnation, r.base
		if err := r.replica.Ready(ctx, r.facts); err != nil {
			return &startError{r.grant.Rank, err}
		}
		r.setProgress("")
		r.log.Stop()
	}
	if !u.enter(msg.UnitReady, Failure{Rank: -1}, nil) {
		_, why, _ := u.next()
		for _, r := range u.ranks {
			r.replica.Fence(why.Cause)
		}
		return &startError{why.Rank, errors.New(why.Cause)}
	}
	u.log.Info("unit is ready", slog.Int("ranks", len(u.ranks)))
	return nil
}

// agree compares the settings that the ranks of a coupled unit report. Engines with different settings start
// and answer /health, and fail only later, in collective operations.
func (u *unit) agree(ctx context.Context) error {
	settings := make([]engine.Settings, len(u.ranks))
	err := u.forEach(ctx, func(r *rank, ctx context.Context) error {
		r.setProgress("reading its settings back")
		ctx, cancel := context.WithTimeout(ctx, r.healthTimeout())
		defer cancel()
		s, err := r.client.ReadBack(ctx)
		settings[slices.Index(u.ranks, r)] = s
		return err
	})
	if err != nil {
		return err
	}
	for i, s := range settings {
		if s != settings[0] {
			return &startError{
				u.ranks[i].grant.Rank,
				fmt.Errorf("%w: rank %d has %s, rank %d has %s", errMismatch, u.ranks[0].grant.Rank,
					settings[0], u.ranks[i].grant.Rank, s),
			}
		}
	}
	return u.agreeWithRankZero(ctx, settings[0].String())
}

// agreeWithRankZero compares the settings of this node's ranks with those of rank 0 on another node, which
// publishes them. A node that has taken its engines over has compared them at their start.
func (u *unit) agreeWithRankZero(ctx context.Context, settings string) error {
	if !u.spansNodes() || u.found != nil {
		return nil
	}
	if p := u.published.Load(); p != nil {
		p := *p
		p.Settings = settings
		u.published.Store(&p)
		u.n.cfg.Assigner.Publish(p)
		return nil
	}
	first := u.ranks[0]
	first.setProgress("comparing its settings with those of rank 0")
	limited, cancel := context.WithTimeout(ctx, u.n.timers.Probe)
	defer cancel()
	for {
		said, err := u.n.cfg.Assigner.Await(limited, u.m.Unit, u.m.Epoch, first.grant.Rank)
		if err == nil && said.Settings == "" {
			err = pause.For(limited, u.n.timers.PollLast)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil: // for example, the leader has changed
			u.log.Warn("rank 0 does not tell its settings", slog.String("err", err.Error()))
			return nil
		case said.Settings == "":
		case said.Settings != settings:
			return &startError{
				first.grant.Rank, fmt.Errorf("%w: rank 0 has %s, rank %d has %s", errMismatch, said.Settings,
					first.grant.Rank, settings),
			}
		default:
			return nil
		}
	}
}

// errMismatch means that coupled ranks run with different settings.
var errMismatch = errors.New("ranks of one group disagree on their settings")

// spansNodes reports whether the unit has ranks on other nodes.
func (u *unit) spansNodes() bool { return len(u.m.AllRanks) > len(u.m.Ranks) }

func (u *unit) hasRankZero() bool {
	return slices.ContainsFunc(u.m.Ranks, func(g state.RankGrant) bool { return g.Rank == 0 })
}

// checkMeeting reports whether ranks of other nodes can reach rank 0, if it runs here.
func (u *unit) checkMeeting() error {
	if u.attached() || !u.lockstep() || !u.spansNodes() || !u.hasRankZero() || u.n.cfg.Advertise != "" {
		return checkShares(u)
	}
	return problem.New(problem.InvalidArgument,
		"ranks of %s on other nodes cannot reach rank 0: node %s has no address that others know", u.m.Unit,
		u.n.cfg.ID).
		WithHint("start the node with --advertise IP")
}

// rendezvous returns rank 0's address in a coupled unit: rank 0's node publishes it, the other nodes wait for
// it.
func (u *unit) rendezvous(ctx context.Context) (engine.Bind, error) {
	if u.attached() || !u.lockstep() {
		return engine.Bind{}, nil
	}
	if !u.hasRankZero() {
		return u.awaitRankZero(ctx)
	}
	at := partOf(u, engine.Bind{}).Meeting()
	p := msg.Publish{Unit: u.m.Unit, Epoch: u.m.Epoch, Rank: 0, Addr: at.Host, Port: at.Port}
	u.n.cfg.Assigner.Publish(p)
	if u.spansNodes() {
		u.published.Store(&p)
		u.n.running.Go(func() { u.publishAgain(ctx) }) // ends with the start
	}
	return at, nil
}

// publishAgain repeats what rank 0 has published while the unit starts, because a new leader has an empty
// table.
func (u *unit) publishAgain(ctx context.Context) {
	for pause.For(ctx, u.n.timers.LeaseRenew) == nil {
		u.n.cfg.Assigner.Publish(*u.published.Load())
	}
}

// meetingMargin is the part of the rendezvous, 15 s of 120 s, that a rank waits longer than the RankAssigner,
// whose error names the missing ranks.
const meetingMargin = 8

// awaitRankZero waits for rank 0's address. Each rank asks, so that the RankAssigner can name the missing
// ranks after a timeout.
func (u *unit) awaitRankZero(ctx context.Context) (at engine.Bind, err error) {
	limit := u.n.timers.Rendezvous
	ctx, cancel := context.WithTimeout(ctx, limit+limit/meetingMargin)
	defer cancel()
	for _, r := range u.ranks {
		r.setProgress("waiting for the address of rank 0")
	}
	all, ctx := errgroup.WithContext(ctx)
	for i, g := range u.m.Ranks {
		all.Go(func() error {
			said, err := u.n.cfg.Assigner.Await(ctx, u.m.Unit, u.m.Epoch, g.Rank)
			if err != nil {
				return &startError{g.Rank, err}
			}
			if i == 0 { // all ranks get the same answer
				at = engine.Bind{Host: said.Addr, Port: said.Port}
			}
			return nil
		})
	}
	return at, all.Wait()
}

// groupKey is a secret of the engines of one start of a unit, made of the cluster's secret, the unit and its
// epoch.
func (u *unit) groupKey() string {
	h := hmac.New(sha256.New, u.n.cfg.Store.State().Secret)
	_, _ = fmt.Fprintf(h, "group %s %d", u.m.Unit, u.m.Epoch) // a hash never fails
	return hex.EncodeToString(h.Sum(nil))
}

// draw draws the random number of one process; 0 means none.
func draw(random func() uint64) uint64 {
	for {
		if v := random(); v != 0 {
			return v
		}
	}
}
