package ingress

import (
	"context"
	"sync"
	"time"
)

// phaseTimer enforces the deadlines of an attempt's phases with one timer, which also lets a client hear that
// its request lives. The connection's read deadline cannot be set behind an http.Transport, so phaseTimer
// cancels the attempt's context with the phase's cause. arm and pause take a mutex and touch no timer while
// the timer is already set to fire earlier: when it fires, it checks what is due and starts again. The zero
// value is idle.
type phaseTimer struct {
	mu      sync.Mutex
	timer   *time.Timer
	firesAt time.Time  // zero: the timer is not running
	waits   bool       // the request's goroutine waits, and writes nothing to the client
	alive   keepalives // looked at only while the request waits
	due     time.Time  // end of the phase; zero: none
	cause   error
	cancel  context.CancelCauseFunc

	gapWatch gapWatch
	inGap    bool // the phase is a gap in the answer: at due, gapWatch checks the rank
}

// attach gives the timer to an attempt. The caller calls detach when the attempt is over.
func (pt *phaseTimer) attach(cancel context.CancelCauseFunc) {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.cancel, pt.due = cancel, time.Time{}
}

// arm starts a phase: at due, the attempt is cancelled with cause.
func (pt *phaseTimer) arm(now, due time.Time, cause error) {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.inGap = false
	pt.schedule(now, due, cause)
}

// watchGaps sets the answer that armGap watches.
func (pt *phaseTimer) watchGaps(of gapWatch) {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.gapWatch = of
}

// armGap starts a gap in the answer.
func (pt *phaseTimer) armGap(now time.Time) {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.inGap = true
	pt.gapWatch.start(now)
	pt.schedule(now, pt.gapWatch.nextCheck(), errStalled)
}

func (pt *phaseTimer) schedule(now, due time.Time, cause error) {
	pt.due, pt.cause, pt.waits = due, cause, true
	pt.startEarlier(now)
}

// startEarlier starts the timer if it would fire too late for what is due next.
func (pt *phaseTimer) startEarlier(now time.Time) {
	next := pt.due
	if sign := pt.alive.due(); next.IsZero() || !sign.IsZero() && sign.Before(next) {
		next = sign
	}
	if !next.IsZero() && (pt.firesAt.IsZero() || next.Before(pt.firesAt)) {
		pt.startTimer(now, next)
	}
}

// await begins a wait without a deadline of the timer's: for a rank, or for a leg on another goroutine.
func (pt *phaseTimer) await(now time.Time) {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.waits = true
	pt.startEarlier(now)
}

// pause ends the phase, or the wait. When it returns, nobody writes to the client.
func (pt *phaseTimer) pause() {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.due, pt.waits = time.Time{}, false
}

// detach takes the timer from its attempt.
func (pt *phaseTimer) detach() {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.cancel, pt.due, pt.cause, pt.gapWatch, pt.inGap = nil, time.Time{}, nil, gapWatch{}, false
	pt.waits = false
	if pt.timer != nil {
		pt.timer.Stop()
		pt.firesAt = time.Time{}
	}
}

func (pt *phaseTimer) startTimer(now, due time.Time) {
	pt.firesAt = due
	if pt.timer == nil {
		pt.timer = time.AfterFunc(due.Sub(now), pt.fire)
		return
	}
	pt.timer.Reset(due.Sub(now))
}

// fire can run late, after its phase or even its attempt is over, so it uses only the values that it reads
// under mu.
func (pt *phaseTimer) fire() {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	now := time.Now()
	pt.firesAt = time.Time{}
	if !pt.waits {
		return
	}
	pt.alive.sendIfDue(now)
	switch {
	case pt.cancel == nil || pt.due.IsZero() || now.Before(pt.due):
	case !pt.inGap:
		pt.expire(pt.cause)
	default:
		if cause := pt.gapWatch.check(now); cause != nil {
			pt.expire(cause)
		} else {
			pt.due = pt.gapWatch.nextCheck()
		}
	}
	pt.startEarlier(now)
}

func (pt *phaseTimer) expire(cause error) {
	pt.cancel(cause)
	pt.due = time.Time{}
}

// gapWatch watches an answer that has begun and whose engine sends nothing. Silence alone says nothing about
// the engine: it may parse a long tool call, or have put the request off for others. When no request of a
// rank makes progress, its DPServer probes the engine, and fences the rank if the probe fails; that cuts all
// its streams. gapWatch ends the other gaps: after between_tokens_s if the rank is fenced or gone, because
// nobody watches its engine any more, and after first_token_s, the time of a prefill, in any case. The phase
// timer calls gapWatch under its mutex; nothing here blocks.
type gapWatch struct {
	router *appRouter
	rank   *rank
	every  time.Duration // between two looks at the rank
	most   time.Duration

	look, end time.Time
}

// start begins a gap.
func (g *gapWatch) start(now time.Time) {
	g.look, g.end = now.Add(g.every), now.Add(max(g.most, g.every))
}

// nextCheck is the time of the next check.
func (g *gapWatch) nextCheck() time.Time {
	if g.look.Before(g.end) {
		return g.look
	}
	return g.end
}

// check looks at the rank. An error is the cause with which to cancel the attempt.
func (g *gapWatch) check(now time.Time) error {
	if isLost, _ := g.router.lossOf(g.rank); isLost {
		return errStalled
	}
	if !now.Before(g.end) {
		return errSilent
	}
	g.look = now.Add(g.every)
	return nil
}
