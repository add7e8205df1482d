package node

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
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
	u.n.mu.Lock()
	u.cancel = nil
	u.n.mu.Unlock()
	return u.explain(ctx, err)
}

// begin registers the cancel function of the start, unless a stop came first.
func (u *unit) begin(cancel context.CancelCauseFunc) bool {
	u.n.mu.Lock()
	defer u.n.mu.Unlock()
	u.cancel = cancel
	return u.life.stop == nil
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
	u.n.mu.Lock()
	u.ranks = ranks
	u.n.mu.Unlock()
	return nil
}

func (u *unit) makeRank(g state.RankGrant) (*rank, error) {
	target, events, err := u.target(g)
	if err != nil {
		return nil, err
	}
	r := &rank{unit: u, grant: g, target: target, events: events}
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
	if err := u.n.leaseKeeper.mayLaunch(); err != nil { // the lease may have ended while the unit waited
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
	return u.forEach(ctx, (*rank).canary)
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
		settings[u.index(r)] = s
		return err
	})
	if err != nil {
		return err
	}
	for i, s := range settings {
		if s != settings[0] {
			return &startError{
				u.ranks[i].grant.Rank,
				fmt.Errorf("%w: rank %d has %+v, rank %d has %+v", errMismatch, u.ranks[0].grant.Rank,
					settings[0], u.ranks[i].grant.Rank, s),
			}
		}
	}
	return nil
}

// errMismatch means that coupled ranks run with different settings.
var errMismatch = errors.New("ranks of one group disagree on their settings")

func (u *unit) index(r *rank) int {
	for i := range u.ranks {
		if u.ranks[i] == r {
			return i
		}
	}
	return -1
}

func (u *unit) rankNumbers() []int {
	var out []int
	for _, g := range u.m.Ranks {
		out = append(out, g.Rank)
	}
	return out
}

// layout is the layout of the unit's port block, and the indices of this node's ranks in it; none for
// attached engines.
func (u *unit) layout() (engine.Ports, []int) {
	s := engine.Spec{App: u.m.App, Base: u.m.Block.Base}
	switch {
	case u.attached():
		return s.Ports(), nil
	case u.lockstep():
		return s.Ports(), u.rankNumbers()
	}
	return s.Ports(), []int{0}
}

// bindTest reports whether a port of the unit's block can be bound where its engines will bind it.
func (u *unit) bindTest(ctx context.Context, port int) error {
	if u.n.cfg.BindTest != nil {
		return u.n.cfg.BindTest(port)
	}
	host := u.n.cfg.EngineHost
	if layout, _ := u.layout(); u.lockstep() && port == layout.RPC() {
		host = u.meetingHost()
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	return l.Close()
}

// spansNodes reports whether the unit has ranks on other nodes.
func (u *unit) spansNodes() bool { return len(u.m.AllRanks) > len(u.m.Ranks) }

// meetingHost is the address where rank 0 of the unit listens for the other ranks, if it runs here.
func (u *unit) meetingHost() string {
	if u.spansNodes() {
		return u.n.cfg.Advertise
	}
	return u.n.cfg.EngineHost
}

func (u *unit) hasRankZero() bool {
	for _, g := range u.m.Ranks {
		if g.Rank == 0 {
			return true
		}
	}
	return false
}

// checkMeeting reports whether ranks of other nodes can reach rank 0, if it runs here.
func (u *unit) checkMeeting() error {
	if u.attached() || !u.lockstep() || !u.spansNodes() || !u.hasRankZero() || u.n.cfg.Advertise != "" {
		return nil
	}
	return problem.New(problem.InvalidArgument,
		"ranks of %s on other nodes cannot reach rank 0: node %s has no address that others know", u.m.Unit,
		u.n.cfg.ID).
		WithHint("start the node with --advertise IP")
}

// rendezvous returns rank 0's address in a coupled unit: rank 0's node publishes it, the other nodes wait for
// it.
func (u *unit) rendezvous(ctx context.Context, layout engine.Ports) (addr string, port int, err error) {
	if u.attached() || !u.lockstep() {
		return "", 0, nil
	}
	if !u.hasRankZero() {
		return u.awaitRankZero(ctx)
	}
	p := msg.Publish{Unit: u.m.Unit, Epoch: u.m.Epoch, Rank: 0, Addr: u.meetingHost(), Port: layout.RPC()}
	u.n.cfg.Assigner.Publish(p)
	if u.spansNodes() {
		u.n.running.Go(func() { u.publishAgain(ctx, p) }) // ends with the start
	}
	return p.Addr, p.Port, nil
}

// publishAgain repeats rank 0's address while the unit starts, because a new leader has an empty table.
func (u *unit) publishAgain(ctx context.Context, p msg.Publish) {
	for pause.For(ctx, u.n.timers.LeaseRenew) == nil {
		u.n.cfg.Assigner.Publish(p)
	}
}

// awaitRankZero waits for rank 0's address. Each rank asks, so that the RankAssigner can name the missing
// ranks after a timeout.
func (u *unit) awaitRankZero(ctx context.Context) (addr string, port int, err error) {
	ctx, cancel := context.WithTimeout(ctx, u.n.timers.Rendezvous)
	defer cancel()
	err = u.forEach(ctx, func(r *rank, ctx context.Context) error {
		r.setProgress("waiting for the address of rank 0")
		a, p, err := u.n.cfg.Assigner.Await(ctx, u.m.Unit, u.m.Epoch, r.grant.Rank)
		if err == nil && r == u.ranks[0] { // all ranks get the same answer
			addr, port = a, p
		}
		return err
	})
	return addr, port, err
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
