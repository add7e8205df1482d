package ingress

import (
	"context"
	"sync"
	"time"
)

// guard enforces the deadlines of an attempt's phases with one timer: the connection's read deadline is out of
// reach behind an http.Transport, so the guard cancels the attempt's context with the phase's cause. arm and pause cost a
// mutex and no timer operation while the timer is already set to fire earlier: when it does, it looks at what is due and
// goes back to sleep. The zero value is idle.
type guard struct {
	mu     sync.Mutex
	timer  *time.Timer
	fires  time.Time // when the timer will fire; zero: it is not running
	due    time.Time // when the phase is over; zero: paused
	cause  error
	cancel context.CancelCauseFunc

	gap   gap
	inGap bool // the phase is a gap of the answer: at due, the gap is looked at
}

// begin hands the guard to an attempt. Call end when the attempt is over.
func (g *guard) begin(cancel context.CancelCauseFunc) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cancel, g.due = cancel, time.Time{}
}

// arm starts the clock of a phase: at due the attempt is cancelled with cause.
func (g *guard) arm(now, due time.Time, cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inGap = false
	g.wait(now, due, cause)
}

// watchGaps says whose answer comes, for armGap.
func (g *guard) watchGaps(of gap) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gap = of
}

// armGap starts the clock of a gap in the answer.
func (g *guard) armGap(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inGap = true
	g.gap.begin(now)
	g.wait(now, g.gap.next(), errStalled)
}

func (g *guard) wait(now, due time.Time, cause error) {
	g.due, g.cause = due, cause
	if g.fires.IsZero() || due.Before(g.fires) {
		g.set(now, due)
	}
}

// pause stops the clock: the attempt is not waiting for its engine.
func (g *guard) pause() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.due = time.Time{}
}

// end takes the guard back from its attempt.
func (g *guard) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cancel, g.due, g.cause, g.gap, g.inGap = nil, time.Time{}, nil, gap{}, false
	if g.timer != nil {
		g.timer.Stop()
		g.fires = time.Time{}
	}
}

func (g *guard) set(now, due time.Time) {
	g.fires = due
	if g.timer == nil {
		g.timer = time.AfterFunc(due.Sub(now), g.fire)
		return
	}
	g.timer.Reset(due.Sub(now))
}

// fire may come late: for a phase, even an attempt, that is over. So it believes only what it reads under mu.
func (g *guard) fire() {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	g.fires = time.Time{}
	switch {
	case g.cancel == nil || g.due.IsZero():
	case now.Before(g.due):
		g.set(now, g.due)
	case g.inGap:
		if cause := g.gap.look(now); cause != nil {
			g.expire(cause)
			return
		}
		g.due = g.gap.next()
		g.set(now, g.due)
	default:
		g.expire(g.cause)
	}
}

func (g *guard) expire(cause error) {
	g.cancel(cause)
	g.due = time.Time{}
}
