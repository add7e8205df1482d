package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// unit is one unit at one epoch on this node. Its life is one goroutine (run). Other goroutines only leave a
// stop request (askStop), a failure (fail) or an event (ReplicaEvent) and wake it.
type unit struct {
	n      *Node
	m      *msg.StartRank
	before *unit // of an older epoch: must end first
	log    *slog.Logger
	done   chan struct{} // closed after Gone was reported
	wake   chan struct{} // one slot
	hasten chan struct{} // closed at the first cut

	mu       sync.Mutex
	ranks    []*rank
	phase    state.Phase
	reason   string
	wasReady bool
	failure  *failure      // the first since the last ready
	stop     *stopRequest  // the earliest deadline so far
	cancel   func(error)   // ends the start
	back     map[int]bool  // attach: ranks whose engine answers again
	last     msg.UnitEvent // for a controller that missed it
}

// failure is the reason why a unit ended or was fenced.
type failure struct {
	rank  int // -1: no particular rank
	cause string
	heard []<-chan struct{} // per rank, closed when its sinks have the fence
}

// stopRequest is a request to stop.
type stopRequest struct {
	deadline time.Time
	reason   string
}

// Causes that end a start.
var (
	errStopAsked = errors.New("stopped while starting")
	errRankLost  = errors.New("a rank failed")
)

var _ msg.ReplicaWatcher = (*unit)(nil)

func newUnit(n *Node, m *msg.StartRank, before *unit) *unit {
	return &unit{
		n: n, m: m, before: before, phase: state.Starting, back: map[int]bool{},
		done: make(chan struct{}), wake: make(chan struct{}, 1), hasten: make(chan struct{}),
		log: n.log.With(slog.String("app", m.App.Name), slog.String("unit", m.Unit),
			slog.Uint64("epoch", m.Epoch)),
	}
}

func (u *unit) attached() bool { return u.m.App.Engine.Kind == app.KindAttach }

func (u *unit) lockstep() bool { return u.m.App.DataParallel.Coupling == app.Lockstep }

// run is the unit's life.
func (u *unit) run() {
	defer close(u.done)
	u.reportEvent(msg.UnitEvent{Kind: msg.UnitStarted, Rank: -1})
	if u.before != nil {
		<-u.before.done // it was asked to end at once
		u.before = nil
	}
	if err := u.start(); err != nil {
		u.end(err)
		return
	}
	u.serve()
	u.end(nil)
}

// askStop leaves a stop request; false if the unit is already gone. Of several requests the earliest deadline
// counts.
func (u *unit) askStop(grace time.Duration, reason string) bool {
	u.mu.Lock()
	if u.phase == state.Gone {
		u.last.Asked = true
		u.mu.Unlock()
		return false
	}
	deadline := time.Now().Add(grace)
	if u.stop == nil || deadline.Before(u.stop.deadline) {
		u.stop = &stopRequest{deadline: deadline, reason: reason}
	}
	cancel := u.cancel
	u.mu.Unlock()
	if cancel != nil {
		cancel(errStopAsked)
	}
	u.nudge()
	return true
}

// cut combines fail and askStop: the unit is fenced at once and then ended, an attached unit too, and faster
// than by other stops, because it is or soon will be granted elsewhere. It returns false if the unit is
// already gone.
func (u *unit) cut(cause string) bool {
	u.mu.Lock()
	if u.phase == state.Gone {
		u.mu.Unlock()
		return false
	}
	if now := time.Now(); u.stop == nil || now.Before(u.stop.deadline) {
		u.stop = &stopRequest{deadline: now, reason: cause}
	}
	if !closed(u.hasten) {
		close(u.hasten)
	}
	u.fence(-1, cause)
	cancel := u.cancel
	u.mu.Unlock()
	if cancel != nil {
		cancel(errStopAsked)
	}
	u.nudge()
	return true
}

// fail takes the unit out of routing, before anything else and on the caller's goroutine: every DPServer of
// the unit on this node has its fence in the mailbox when fail returns. Only the first failure since the last
// ready counts.
func (u *unit) fail(rank int, cause string) {
	if rank >= 0 && len(u.m.AllRanks) > 1 {
		cause = fmt.Sprintf("rank %d: %s", rank, cause)
	}
	u.mu.Lock()
	fenced := u.fence(rank, cause)
	cancel := u.cancel
	u.mu.Unlock()
	if !fenced {
		return
	}
	if cancel != nil {
		cancel(errRankLost)
	}
	u.nudge()
}

// fence is the part of fail under mu; false if the unit is already fenced.
func (u *unit) fence(rank int, cause string) bool {
	if u.failure != nil || u.phase == state.Killing || u.phase == state.Gone {
		return false
	}
	u.failure = &failure{rank: rank, cause: cause}
	clear(u.back)
	for _, r := range u.ranks {
		u.failure.heard = append(u.failure.heard, r.replica.Fence(cause))
	}
	return true
}

// ReplicaEvent implements msg.ReplicaWatcher.
func (u *unit) ReplicaEvent(e msg.ReplicaEvent) {
	if e.Epoch != u.m.Epoch {
		return
	}
	if e.Kind == msg.ReplicaLost {
		u.mu.Lock()
		delete(u.back, e.Rank)
		u.mu.Unlock()
		u.fail(e.Rank, e.Cause)
		return
	}
	u.mu.Lock()
	u.back[e.Rank] = true
	u.mu.Unlock()
	u.nudge()
}

func (u *unit) nudge() {
	select {
	case u.wake <- struct{}{}:
	default:
	}
}

// pendingInput returns the stop request and the failure for run.
func (u *unit) pendingInput() (stop *stopRequest, fail *failure, allBack bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.stop, u.failure, len(u.back) == len(u.ranks)
}

// enter changes the phase.
func (u *unit) enter(p state.Phase, reason string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.phase, u.reason = p, reason
}

// reportEvent reports an event of this unit.
func (u *unit) reportEvent(e msg.UnitEvent) {
	u.mu.Lock()
	e.Unit, e.Epoch, e.WasReady = u.m.Unit, u.m.Epoch, u.wasReady
	u.last = e
	u.mu.Unlock()
	u.n.report(e)
}

// markGone sets the final state and keeps the Gone event, so that a later StopRank can be answered with it.
func (u *unit) markGone(e msg.UnitEvent) msg.UnitEvent {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.phase, u.reason = state.Gone, e.Reason
	e.Unit, e.Epoch, e.Kind, e.WasReady, e.Asked = u.m.Unit, u.m.Epoch, msg.UnitGone, u.wasReady,
		u.stop != nil
	u.last = e
	return e
}

// isEnding reports whether the unit drains, or its engines are being ended.
func (u *unit) isEnding() bool {
	p := u.currentPhase()
	return p == state.Draining || p == state.Killing
}

// repeat reports the last event again, to a controller that asked for what already is.
func (u *unit) repeat() { u.n.reportAgain(u) }

// tail returns the last lines of a rank's engine at this epoch.
func (u *unit) tail(rank int) []string {
	if rank < 0 {
		return nil
	}
	return u.n.logs.tail(u.m.Unit, rank, u.m.Epoch)
}

func (u *unit) statuses() []client.RankStatus {
	u.mu.Lock()
	ranks, phase := u.ranks, u.phase
	u.mu.Unlock()
	var out []client.RankStatus
	for _, g := range u.m.Ranks {
		st := client.RankStatus{
			Group: u.m.Group, Rank: g.Rank, Epoch: u.m.Epoch, Devices: g.Devices,
			Progress: "waiting for its turn",
		}
		for _, r := range ranks {
			if r.grant.Rank == g.Rank {
				st = r.replica.Status()
				st.PID, st.Progress = r.view()
			}
		}
		st.Node, st.Phase = u.n.cfg.ID, string(phase)
		out = append(out, st)
	}
	return out
}

// heldNow names the remaining processes and ports of the unit's engines.
func (u *unit) heldNow() string {
	u.mu.Lock()
	ranks := u.ranks
	u.mu.Unlock()
	return held(ranks)
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

// serve waits until the ready unit has to end. An attached unit may be fenced and come back many times
// meanwhile.
func (u *unit) serve() {
	for range u.wake { // never closed: each request wakes once
		stop, fail, back := u.pendingInput()
		switch {
		case stop != nil:
			return
		case fail == nil:
		case u.currentPhase() == state.Ready:
			u.fenced(fail)
			if !u.attached() {
				return
			}
			u.nudge() // its ranks may already be back
		case back:
			u.comeBack()
		}
	}
}

func (u *unit) currentPhase() state.Phase {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.phase
}

// fenced reports a fence after it is complete: the DPServers have stopped admission, and their streams have
// published it.
func (u *unit) fenced(f *failure) {
	late := time.NewTimer(u.n.timers.ReplicaStop)
	defer late.Stop()
	for _, heard := range f.heard {
		select {
		case <-heard:
		case <-late.C:
			u.log.Error("a DPServer did not take its fence in time")
			late.Reset(0)
		}
	}
	u.enter(state.Fenced, f.cause)
	u.log.Warn("unit is fenced", slog.Int("rank", f.rank), slog.String("cause", f.cause))
	u.reportEvent(msg.UnitEvent{Kind: msg.UnitFenced, Rank: f.rank, Reason: f.cause, LogTail: u.tail(f.rank)})
}

// comeBack makes an attached unit ready again, with the same epoch and new incarnations. If it fails, the
// unit is fenced again, and the DPServers continue to probe.
func (u *unit) comeBack() {
	u.mu.Lock()
	over := u.stop != nil // since the check: serve sees it next
	if !over {
		u.failure = nil
		clear(u.back)
	}
	u.mu.Unlock()
	if over {
		return
	}
	err := u.forEach(context.Background(), u.learn) // it may be another engine now
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), u.n.timers.ReplicaStop)
		defer cancel()
		err = u.becomeReady(ctx)
	}
	if err != nil {
		u.log.Warn("unit did not come back", slog.String("err", err.Error()))
	}
}
