package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// serve waits until the ready unit has to end. An attached unit may be fenced and come back many times on the way.
func (u *unit) serve() {
	for range u.wake { // never closed: each wish wakes once
		stop, fail, back := u.wishes()
		switch {
		case stop != nil:
			return
		case fail == nil:
		case u.currentPhase() == state.Ready:
			u.fenced(fail)
			if !u.attached() {
				return
			}
			u.nudge() // its ranks may be back already
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

// fenced reports a fence that has happened: fail closed the DPServers, and their streams have told so.
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
	u.tell(msg.UnitEvent{Kind: msg.UnitFenced, Rank: f.rank, Reason: f.cause, LogTail: u.tail(f.rank)})
}

// comeBack makes an attached unit ready again: same epoch, new incarnations. If it fails on the way it is fenced again, and
// the DPServers go on probing.
func (u *unit) comeBack() {
	u.mu.Lock()
	over := u.stop != nil // since it was looked at: serve sees it next
	if !over {
		u.failure = nil
		clear(u.back)
	}
	u.mu.Unlock()
	if over {
		return
	}
	err := u.forEach(context.Background(), u.learn) // another engine may answer now
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), u.n.timers.ReplicaStop)
		defer cancel()
		err = u.becomeReady(ctx)
	}
	if err != nil {
		u.log.Warn("unit did not come back", slog.String("err", err.Error()))
	}
}
