package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/state"
)

// rank is one rank of a unit on this node.
type rank struct {
	unit    *unit
	grant   state.RankGrant
	target  msg.Target
	events  *msg.EventSource // where its KV events are, if known
	facts   msg.Facts        // of the engine as last asked; used by the unit's goroutine only
	replica Replica
	client  *engine.Client
	out     [2]*lineWriter

	mu       sync.Mutex
	proc     Process
	asked    bool // the node has told it to end
	progress string
}

func (r *rank) setProc(p Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proc = p
}

func (r *rank) process() Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.proc
}

// ask marks the engine's exit as requested by the node; every other exit is a failure.
func (r *rank) ask() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = true
}

func (r *rank) wasAsked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

func (r *rank) setProgress(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress = text
}

func (r *rank) view() (pid int, progress string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.proc != nil && !closed(r.proc.Exited()) {
		pid = r.proc.PID()
	}
	return pid, r.progress
}

// held describes the living processes of the engine, "" if there are none.
func (r *rank) held() string {
	if p := r.process(); p != nil {
		return p.Held()
	}
	return ""
}

// awaitHealth polls /health: quickly at first, because a simulated engine is up in milliseconds; a real one
// takes minutes.
func (r *rank) awaitHealth(ctx context.Context) error {
	for wait := r.unit.n.timers.PollFirst; ; wait = min(2*wait, r.unit.n.timers.PollLast) {
		h, err := r.askHealth(ctx)
		if h == engine.Alive {
			return nil
		}
		r.setProgress(fmt.Sprintf("waiting for %s/health: %v", r.target.URL, err))
		if err := pause.For(ctx, wait); err != nil {
			return err
		}
	}
}

func (r *rank) askHealth(ctx context.Context) (engine.Health, error) {
	ctx, cancel := context.WithTimeout(ctx, r.healthTimeout())
	defer cancel()
	return r.client.Health(ctx)
}

func (r *rank) canary(ctx context.Context) error {
	r.setProgress("waiting for the first token")
	ctx, cancel := context.WithTimeout(ctx, r.unit.n.timers.Canary)
	defer cancel()
	if err := r.client.Canary(ctx, r.unit.m.App.Model.ID); err != nil {
		return fmt.Errorf("the engine is up and does not compute: %w", err)
	}
	return nil
}

// awaitAttached asks for health and a token until both succeed. It never gives up.
func (r *rank) awaitAttached(ctx context.Context) error {
	for {
		if err := r.awaitHealth(ctx); err != nil {
			return err
		}
		err := r.canary(ctx)
		if err == nil {
			return nil
		}
		r.setProgress(fmt.Sprintf("waiting for %s: %v", r.target.URL, err))
		if err := pause.For(ctx, r.healthPeriod()); err != nil {
			return err
		}
	}
}

func (r *rank) healthPeriod() time.Duration {
	if s := r.unit.m.App.HealthCheckPeriodS; s > 0 {
		return app.Seconds(s)
	}
	return r.unit.n.timers.PollLast
}

func (r *rank) healthTimeout() time.Duration {
	if s := r.unit.m.App.HealthCheckTimeoutS; s > 0 {
		return app.Seconds(s)
	}
	return r.unit.n.timers.Canary
}
