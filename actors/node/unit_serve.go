package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

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
