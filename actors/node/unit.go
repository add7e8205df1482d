package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/enginelog"
	"github.com/dpserve/dpserve/internal/state"
)

// unit runs one unit at one epoch on this node: its Life tells what to do, run does it. run is one goroutine.
// Other goroutines only leave a request or a failure in the Life, and wake it.
type unit struct {
	n      *Node
	m      *msg.StartRank
	before *unit // of an older epoch: must end first
	log    *slog.Logger
	done   chan struct{} // closed after Gone was told
	wake   chan struct{} // one slot
	hasten chan struct{} // closed when the unit is cut

	found *foundUnit // its engines run since an earlier process; nil = this one starts them
	// what rank 0 has published for ranks on other nodes; nil: it is not here, or has no such ranks
	published atomic.Pointer[msg.Publish]

	// Guarded by the node's mu.
	life   *Life
	ranks  []*rank
	cancel func(error)       // ends the start
	back   map[int]bool      // attach: ranks whose engine answers again
	heard  []<-chan struct{} // per rank, closed when its sinks have the fence
}

// Causes that end a start.
var (
	errStopAsked = errors.New("stopped while starting")
	errRankLost  = errors.New("a rank failed")
)

var _ msg.ReplicaWatcher = (*unit)(nil)

func newUnit(n *Node, life *Life, before *unit) *unit {
	m := life.Order
	return &unit{
		n: n, m: m, life: life, before: before, back: map[int]bool{},
		done: make(chan struct{}), wake: make(chan struct{}, 1), hasten: make(chan struct{}),
		log: n.log.With(slog.String("app", m.App.PoolName()), slog.String("unit", m.Unit),
			slog.Uint64("epoch", m.Epoch)),
	}
}

func (u *unit) attached() bool { return u.life.isAttached() }

func (u *unit) lockstep() bool { return u.m.App.DataParallel.Coupling == app.Lockstep }

// run is the unit's life.
func (u *unit) run() {
	defer close(u.done)
	if u.before != nil {
		<-u.before.done // it was asked to end at once
		u.before = nil
	}
	if u.found == nil {
		awaitLeavers(u)
	} else if !u.found.awaitDecision(u) {
		u.end(nil)
		return
	}
	if err := u.start(); err != nil {
		u.end(err)
		return
	}
	u.serve()
	u.end(nil)
}

// interrupt ends a start and wakes run, after something was asked.
func (u *unit) interrupt(cause error) {
	u.n.mu.Lock()
	cancel := u.cancel
	u.n.mu.Unlock()
	if cancel != nil {
		cancel(cause)
	}
	u.nudge()
}

// fail takes the unit out of routing, before anything else and on the caller's goroutine: every DPServer of
// the unit on this node has its fence in the mailbox when fail returns.
func (u *unit) fail(why Failure) {
	u.n.mu.Lock()
	fenced := u.life.Fail(why)
	if fenced {
		u.fence()
	}
	u.n.mu.Unlock()
	if fenced {
		u.interrupt(errRankLost)
	}
}

// fence closes the DPServers after the Life has failed; end has closed them if it began before. The caller
// holds mu.
func (u *unit) fence() {
	if u.life.Failure == nil {
		return
	}
	clear(u.back)
	u.heard = nil
	for _, r := range u.ranks {
		u.heard = append(u.heard, r.replica.Fence(u.life.Failure.Cause))
	}
}

// ReplicaEvent implements msg.ReplicaWatcher.
func (u *unit) ReplicaEvent(e msg.ReplicaEvent) {
	if e.Epoch != u.m.Epoch {
		return
	}
	u.n.mu.Lock()
	if e.Kind == msg.ReplicaLost {
		delete(u.back, e.Rank)
	} else {
		u.back[e.Rank] = true
	}
	u.n.mu.Unlock()
	if e.Kind == msg.ReplicaLost {
		u.fail(Failure{Rank: e.Rank, Cause: e.Cause})
		return
	}
	u.nudge()
}

func (u *unit) nudge() {
	select {
	case u.wake <- struct{}{}:
	default:
	}
}

// next returns what the unit has to do, why, and the time until the deadline of its stop.
func (u *unit) next() (step Step, why Failure, grace time.Duration) {
	u.n.mu.Lock()
	defer u.n.mu.Unlock()
	now := time.Now()
	return u.life.Next(now), u.life.Why(), u.life.Grace(now)
}

// enter changes the phase and tells the leader; false if the unit does not become ready because of a failure.
func (u *unit) enter(kind msg.UnitEventKind, why Failure, tail []string) bool {
	u.n.mu.Lock()
	entered := u.n.core.Enter(time.Now(), u.life, kind, why, tail)
	u.n.mu.Unlock()
	u.n.leaseKeeper.ring()
	return entered
}

func (u *unit) currentPhase() state.Phase {
	u.n.mu.Lock()
	defer u.n.mu.Unlock()
	return u.life.Phase
}

// isAsked reports whether the unit was asked to end.
func (u *unit) isAsked() bool {
	u.n.mu.Lock()
	defer u.n.mu.Unlock()
	return u.life.stop != nil
}

// tail returns the last lines of a rank's engine at this epoch, or those that show why it did not start.
func (u *unit) tail(rank int) []string {
	switch {
	case rank < 0:
		return nil
	case u.hasServed():
		return u.n.logs.last(u.m.Unit, logOf(u, rank), u.m.Epoch, tailLines)
	}
	return enginelog.Excerpt(u.n.logs.last(u.m.Unit, logOf(u, rank), u.m.Epoch, hintLines), tailLines)
}

func (u *unit) statuses() []client.RankStatus {
	u.n.mu.Lock()
	ranks, phase := u.ranks, u.life.Phase
	u.n.mu.Unlock()
	var out []client.RankStatus
	for _, g := range u.m.Ranks {
		st := client.RankStatus{
			Group: u.m.Group, Rank: g.Rank, Epoch: u.m.Epoch, Devices: g.Devices,
			Progress: "waiting for its turn",
		}
		for _, r := range ranks {
			if r.grant.Rank == g.Rank {
				st = r.replica.Status()
				if st.PID, st.Progress = r.view(); st.PID > 0 {
					st.Memory = r.process().Memory()
				}
			}
		}
		st.Node, st.Phase = u.n.cfg.ID, string(phase)
		out = append(out, st)
	}
	return out
}

// serve waits until the ready unit has to end. An attached unit may be fenced and come back many times
// meanwhile.
func (u *unit) serve() {
	for {
		select {
		case <-u.wake: // each request wakes once
		case <-u.n.detached:
			return
		}
		switch step, why, _ := u.next(); step {
		case StepDrain, StepEnd:
			return
		case StepFence:
			u.fenced(why)
			u.nudge() // it has to end, or its ranks may already be back
		case StepStay:
			u.comeBack()
		case StepAdopt: // only while the unit starts
		}
	}
}

// fenced reports a fence after it is complete: the DPServers have stopped admission, and their streams have
// published it.
func (u *unit) fenced(why Failure) {
	u.n.mu.Lock()
	heard := u.heard
	u.n.mu.Unlock()
	late := time.NewTimer(u.n.timers.ReplicaStop)
	defer late.Stop()
	for _, h := range heard {
		select {
		case <-h:
		case <-late.C:
			u.log.Error("a DPServer did not take its fence in time")
			late.Reset(0)
		}
	}
	u.log.Warn("unit is fenced", slog.Int("rank", why.Rank), slog.String("cause", why.Cause))
	u.enter(msg.UnitFenced, why, u.tail(why.Rank))
}

// comeBack makes an attached unit ready again once all its ranks answer, with the same epoch and new
// incarnations. If it fails, the unit is fenced again, and the DPServers continue to probe.
func (u *unit) comeBack() {
	u.n.mu.Lock()
	back := len(u.back) == len(u.ranks) && u.life.Recover()
	if back {
		clear(u.back)
	}
	u.n.mu.Unlock()
	if !back {
		return
	}
	err := u.forEach(context.Background(), (*rank).learn) // it may be another engine now
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), u.n.timers.ReplicaStop)
		defer cancel()
		err = u.becomeReady(ctx)
	}
	if err != nil {
		u.log.Warn("unit did not come back", slog.String("err", err.Error()))
	}
}

// causeDrained is the cause of a fence at the end of a drain: it cuts the remaining requests.
const causeDrained = "drained"

// end ends the unit, for whatever reason: drain if it serves and was asked to stop, kill, verify, report
// gone. startErr is set if the unit never became ready.
func (u *unit) end(startErr error) {
	u.drain()
	if closed(u.n.detached) {
		u.detach()
		return
	}
	why := u.whyEnd(startErr)
	for _, r := range u.ranks {
		r.replica.Fence(causeDrained) // no effect on a fenced replica
	}
	level := slog.LevelInfo
	if u.currentPhase() == state.Fenced {
		level = slog.LevelDebug // the fence has been logged
	}
	u.enter(msg.UnitKilling, why, nil)
	u.kill()
	left := u.verify(why)
	if closed(u.n.detached) && left != "" {
		u.detach()
		return
	}
	if left == "" {
		why = devicesOf(u).awaitFree(why)
	}
	u.stopReplicas(context.Background(), u.ranks)
	if left != "" { // not gone: the leader waits until this node is lost
		u.n.leave(u.m.Unit + ": " + left)
		return
	}
	for _, r := range u.ranks {
		r.out[0].End()
		r.out[1].End()
	}
	why.Cause += u.hint(why.Rank)
	u.enter(msg.UnitGone, why, u.tail(why.Rank))
	u.n.logs.retire(u.m.Unit, u.isAsked())
	for _, p := range enginesOf(u) {
		p.Release()
	}
	u.log.Log(context.Background(), level, "unit is gone", slog.String("cause", why.Cause),
		slog.Bool("asked", u.isAsked()))
}

// whyEnd is the reason of the end: a failed start, the failure of a rank, or a stop request.
func (u *unit) whyEnd(startErr error) Failure {
	_, why, _ := u.next()
	var s *startError
	if errors.As(startErr, &s) {
		return Failure{Rank: s.rank, Cause: s.Error(), Exit: why.Exit}
	}
	switch {
	case why.Cause != "":
	case startErr != nil:
		why.Cause = startErr.Error()
	default:
		why.Cause = "unknown"
	}
	return why
}

// Lines in which the cause of an engine's end is looked for. Behind the cause of a failed start stand the
// tracebacks of all its processes.
const (
	hintLines    = 2000
	hintLinesRan = 200 // of an engine that has served
)

// hint is what the logs of the unit's engines tell of their end, to be added to its cause; "" if they tell
// nothing, or the unit was asked to end. The rank that failed first comes first; of the others only a known
// cause counts, because they fail when it does.
func (u *unit) hint(failed int) string {
	if u.attached() || u.isAsked() {
		return ""
	}
	read, most := enginelog.Hint, hintLines
	if u.hasServed() {
		read, most = enginelog.KnownCause, hintLinesRan
	}
	if failed >= 0 {
		if text := read(u.n.logs.last(u.m.Unit, logOf(u, failed), u.m.Epoch, most)); text != "" {
			return ": " + text
		}
	}
	for _, r := range u.ranks {
		text := enginelog.KnownCause(u.n.logs.last(u.m.Unit, r.grant.Rank, u.m.Epoch, most))
		if text != "" && r.grant.Rank != failed {
			return fmt.Sprintf("; rank %d: %s", r.grant.Rank, text)
		}
	}
	return ""
}

func (u *unit) hasServed() bool {
	u.n.mu.Lock()
	defer u.n.mu.Unlock()
	return u.life.WasReady
}

// drain lets the requests of a serving unit continue until the deadline of the stop. A failure, an earlier
// deadline or the node's end cuts it short. If other nodes have ranks of the unit, an engine that ends would
// break their requests: then the part waits until the leader tells all parts to end, because none has a
// request.
func (u *unit) drain() {
	step, why, _ := u.next()
	if step != StepDrain {
		return
	}
	u.enter(msg.UnitDraining, why, nil)
	for _, r := range u.ranks {
		r.replica.Drain("draining")
	}
	empty := make(chan struct{})
	go func() { // ends with the DPServers, which end with the unit
		defer close(empty)
		for _, r := range u.ranks {
			<-r.replica.Drained()
		}
	}()
	if u.awaitIdle(empty) && u.spansNodes() {
		u.enter(msg.UnitIdle, why, nil)
		u.awaitIdle(nil)
	}
}

// awaitIdle returns true when empty is closed, false when the unit has to end. An idle part of a node that
// stops also ends with the lease, because without a leader nobody tells it when the others are idle.
func (u *unit) awaitIdle(empty <-chan struct{}) bool {
	for {
		step, _, wait := u.next()
		if empty == nil && u.n.isStopping() {
			wait = min(wait, u.n.LeaseLeft())
		}
		if step == StepEnd || wait <= 0 {
			return false
		}
		select {
		case <-u.wake:
		case <-time.After(wait):
		case <-empty:
			return true
		case <-u.n.hard:
			return false
		case <-u.n.detached:
			return false
		}
	}
}

// cutPart of KillGrace, 0.5 of 5 s, is an engine's time to end by itself after a cut. So a superseded unit is
// killed within 1 s, and with on_lease_loss fence no process is left 3 s after the fence, when the leader may
// grant the rank elsewhere.
const cutPart = 10

// kill ends every engine: SIGTERM, the rest of the drain plus KillGrace, SIGKILL to the whole group. A cut
// leaves less time.
func (u *unit) kill() {
	_, _, grace := u.next()
	limit := u.n.timers.KillGrace + grace
	var all sync.WaitGroup
	for _, r := range u.ranks {
		r.asked.Store(true)
		r.setProgress("")
		if r.process() != nil { // the node does not end attached engines
			r.setProgress("ending its engine")
		}
	}
	for _, p := range enginesOf(u) {
		p.Terminate()
		all.Go(func() { u.awaitExit(p, limit) })
	}
	all.Wait()
}

func (u *unit) awaitExit(p Process, limit time.Duration) {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-p.Exited():
	case <-t.C:
	case <-u.n.hard:
	case <-u.n.detached: // the next process goes on with the end
		return
	case <-u.hasten:
		t.Reset(u.n.timers.KillGrace / cutPart)
		select {
		case <-p.Exited():
		case <-t.C:
		case <-u.n.hard:
		}
	}
	p.Kill() // also after an exit: children may still live
}

// verify waits until nothing of the unit's engines is left: groups empty, ports bindable. After VerifyNamed
// it names what is left and continues to wait and to kill: a new start would meet the old memory and ports.
// Only the node's own end gives up, after KillGrace if it is hurried; then verify returns what is left.
func (u *unit) verify(why Failure) string {
	began, named := time.Now(), false
	for wait := u.n.timers.PollFirst; ; wait = min(2*wait, u.n.timers.VerifyPoll) {
		left := u.left()
		if left == "" || closed(u.n.detached) {
			return left
		}
		limit := u.n.timers.VerifyNamed
		if u.n.isStopping() && closed(u.n.hard) {
			limit = min(limit, u.n.timers.KillGrace)
		}
		late := time.Since(began) >= limit
		if late && !named {
			named = true
			u.named(why, left, limit)
		}
		if late && u.n.isStopping() {
			u.log.Error("giving up on an engine that does not end", slog.String("left", left))
			return left
		}
		time.Sleep(wait)
		for _, p := range enginesOf(u) {
			p.Kill()
		}
	}
}

func (u *unit) named(why Failure, left string, after time.Duration) {
	why.Cause = fmt.Sprintf("%s; still held after %s: %s", why.Cause, after, left)
	u.log.Warn("an ended engine still holds something", slog.String("left", left))
	u.enter(msg.UnitKilling, why, nil)
}

// left names what the unit's engines still hold. It checks ports only if engines were started: after a failed
// bind test they belong to another process.
func (u *unit) left() string {
	engines := enginesOf(u)
	var held []string
	for _, p := range engines {
		if text := p.Held(); text != "" {
			held = append(held, text)
		}
	}
	if len(held) > 0 || len(engines) == 0 {
		return strings.Join(held, ", ")
	}
	for _, b := range partOf(u, engine.Bind{}).Binds() {
		if err := u.n.cfg.bindTest(context.Background(), b); err != nil {
			return fmt.Sprintf("port %d (%v)", b.Port, err)
		}
	}
	return ""
}

// stopReplicas stops all DPServers concurrently.
func (u *unit) stopReplicas(ctx context.Context, ranks []*rank) {
	ctx, cancel := context.WithTimeout(ctx, u.n.timers.ReplicaStop)
	defer cancel()
	var all sync.WaitGroup
	for _, r := range ranks {
		all.Go(func() {
			if err := r.replica.Stop(ctx); err != nil {
				u.log.Error("a DPServer did not stop", slog.Int("rank", r.grant.Rank),
					slog.String("err", err.Error()))
			}
		})
	}
	all.Wait()
}

// detach leaves the unit's engines to the node's next process.
func (u *unit) detach() {
	for _, p := range enginesOf(u) {
		p.Detach()
	}
	u.stopReplicas(context.Background(), u.ranks)
}
