package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// causeDrained is the cause of a fence at the end of a drain: it cuts the remaining requests.
const causeDrained = "drained"

// end ends the unit, for whatever reason: drain if it serves and was asked to stop, kill, verify, report
// gone. startErr is set if the unit never became ready.
func (u *unit) end(startErr error) {
	u.drain()
	why := u.whyEnd(startErr)
	for _, r := range u.ranks {
		r.replica.Fence(causeDrained) // no effect on a fenced replica
	}
	level := slog.LevelInfo
	if u.currentPhase() == state.Fenced {
		level = slog.LevelDebug // the fence has been logged
	}
	u.enter(state.Killing, why.cause)
	u.reportEvent(msg.UnitEvent{Kind: msg.UnitKilling, Rank: why.rank, Reason: why.cause})
	u.kill()
	left := u.verify(why)
	u.stopReplicas(context.Background(), u.ranks)
	if left != "" { // not gone: the leader waits until this node is lost
		u.n.leave(u.m.Unit + ": " + left)
		return
	}
	for _, r := range u.ranks {
		r.out[0].end()
		r.out[1].end()
	}
	e := u.markGone(msg.UnitEvent{Rank: why.rank, Reason: why.cause, LogTail: u.tail(why.rank)})
	u.log.Log(context.Background(), level, "unit is gone", slog.String("cause", why.cause),
		slog.Bool("asked", e.Asked))
	u.n.report(e)
}

// whyEnd is the reason of the end: a failed start, the failure of a rank, or a stop request.
func (u *unit) whyEnd(startErr error) failure {
	stop, fail, _ := u.pendingInput()
	var s *startError
	switch {
	case errors.As(startErr, &s):
		return failure{rank: s.rank, cause: s.Error()}
	case fail != nil && (stop == nil || u.currentPhase() != state.Draining):
		return *fail
	case stop != nil:
		return failure{rank: -1, cause: stop.reason}
	case startErr != nil:
		return failure{rank: -1, cause: startErr.Error()}
	}
	return failure{rank: -1, cause: "unknown"}
}

// drain lets the requests of a serving unit continue until the deadline of the stop. A failure, an earlier
// deadline or the node's end cuts it short.
func (u *unit) drain() {
	stop, fail, _ := u.pendingInput()
	if stop == nil || fail != nil || u.currentPhase() != state.Ready || !time.Now().Before(stop.deadline) {
		return
	}
	u.enter(state.Draining, stop.reason)
	u.reportEvent(msg.UnitEvent{Kind: msg.UnitDraining, Rank: -1, Reason: stop.reason})
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
	for u.draining(empty) {
		continue
	}
}

// draining waits for one event and returns whether to continue waiting.
func (u *unit) draining(empty <-chan struct{}) bool {
	stop, fail, _ := u.pendingInput()
	if fail != nil {
		return false
	}
	deadline := time.NewTimer(time.Until(stop.deadline))
	defer deadline.Stop()
	select {
	case <-u.wake:
		return true
	case <-empty:
	case <-deadline.C:
	case <-u.n.hard:
	}
	return false
}

// cutPart of KillGrace, 0.5 of 5 s, is an engine's time to end by itself after a cut. So a superseded unit is
// killed within 1 s, and with on_lease_loss fence no process is left 3 s after the fence, when the leader may
// grant the rank elsewhere.
const cutPart = 10

// kill ends every engine: SIGTERM, the rest of the drain plus KillGrace, SIGKILL to the whole group. A cut
// leaves less time.
func (u *unit) kill() {
	stop, _, _ := u.pendingInput()
	limit := u.n.timers.KillGrace
	if stop != nil {
		limit += max(0, time.Until(stop.deadline))
	}
	var all sync.WaitGroup
	for _, r := range u.ranks {
		r.ask()
		r.setProgress("")
		if p := r.process(); p != nil { // the node does not end attached engines
			r.setProgress("ending its engine")
			p.Terminate()
			all.Go(func() { u.awaitExit(p, limit) })
		}
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
func (u *unit) verify(why failure) string {
	began, named := time.Now(), false
	for wait := u.n.timers.PollFirst; ; wait = min(2*wait, u.n.timers.VerifyPoll) {
		left := u.left()
		if left == "" {
			return ""
		}
		limit := u.n.timers.VerifyNamed
		if u.n.closing.Load() && closed(u.n.hard) {
			limit = min(limit, u.n.timers.KillGrace)
		}
		late := time.Since(began) >= limit
		if late && !named {
			named = true
			u.named(why, left, limit)
		}
		if late && u.n.closing.Load() {
			u.log.Error("giving up on an engine that does not end", slog.String("left", left))
			return left
		}
		time.Sleep(wait)
		u.killAgain()
	}
}

func (u *unit) named(why failure, left string, after time.Duration) {
	reason := fmt.Sprintf("%s; still held after %s: %s", why.cause, after, left)
	u.log.Warn("an ended engine still holds something", slog.String("left", left))
	u.enter(state.Killing, reason)
	u.reportEvent(msg.UnitEvent{Kind: msg.UnitKilling, Rank: why.rank, Reason: reason})
}

func (u *unit) killAgain() {
	for _, r := range u.ranks {
		if p := r.process(); p != nil {
			p.Kill()
		}
	}
}

// left names what the unit's engines still hold. It checks ports only if engines were started: after a failed
// bind test they belong to another process.
func (u *unit) left() string {
	if text := held(u.ranks); text != "" {
		return text
	}
	if !started(u.ranks) {
		return ""
	}
	layout, ranks := u.layout()
	for _, p := range layout.Bound(engine.WantsEvents(u.m.App), ranks...) {
		if err := u.bindTest(context.Background(), p); err != nil {
			return fmt.Sprintf("port %d (%v)", p, err)
		}
	}
	return ""
}

func held(ranks []*rank) string {
	var out []string
	for _, r := range ranks {
		if text := r.held(); text != "" {
			out = append(out, text)
		}
	}
	return strings.Join(out, ", ")
}

func started(ranks []*rank) bool {
	for _, r := range ranks {
		if r.process() != nil {
			return true
		}
	}
	return false
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
