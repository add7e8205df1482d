package ingress

import (
	"context"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// phaseTimer enforces the deadlines of an attempt's phases with one timer. The connection's read deadline
// cannot be set behind an http.Transport, so phaseTimer cancels the attempt's context with the phase's cause.
// arm and pause take a mutex and touch no timer while the timer is already set to fire earlier: when it
// fires, it checks what is due and starts again. The zero value is idle.
type phaseTimer struct {
	mu      sync.Mutex
	timer   *time.Timer
	firesAt time.Time // zero: the timer is not running
	due     time.Time // end of the phase; zero: paused
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
	pt.due, pt.cause = due, cause
	if pt.firesAt.IsZero() || due.Before(pt.firesAt) {
		pt.startTimer(now, due)
	}
}

// pause ends the phase: the attempt does not wait for its engine.
func (pt *phaseTimer) pause() {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.due = time.Time{}
}

// detach takes the timer from its attempt.
func (pt *phaseTimer) detach() {
	pt.mu.Lock()
	defer pt.mu.Unlock()
	pt.cancel, pt.due, pt.cause, pt.gapWatch, pt.inGap = nil, time.Time{}, nil, gapWatch{}, false
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
	switch {
	case pt.cancel == nil || pt.due.IsZero():
	case now.Before(pt.due):
		pt.startTimer(now, pt.due)
	case pt.inGap:
		if cause := pt.gapWatch.check(now); cause != nil {
			pt.expire(cause)
			return
		}
		pt.due = pt.gapWatch.nextCheck()
		pt.startTimer(now, pt.due)
	default:
		pt.expire(pt.cause)
	}
}

func (pt *phaseTimer) expire(cause error) {
	pt.cancel(cause)
	pt.due = time.Time{}
}

// gapWatch watches an answer that has begun and whose engine sends nothing. It cuts the answer after
// between_tokens_s, unless the rank makes progress: then the engine works but has no output for this answer
// yet (a large stream_interval, a pre-emption, a long prefill in the same batch). A gap is divided into
// stretches of between_tokens_s. In the middle of a stretch and before its end, gapWatch asks the rank's
// DPServer to check its engine. Progress is a first token or output of any request in the rank's stream
// during the second half of the stretch, or the DPServer's answer. A stretch without progress ends the
// answer. A gap never lasts longer than first_token_s, the time of a prefill. The phase timer calls gapWatch
// under its mutex; nothing here blocks.
type gapWatch struct {
	router *appRouter
	rank   *rank
	ticket uint64
	limit  time.Duration // length of a stretch
	maxGap time.Duration

	silentSince  time.Time
	stretchStart time.Time
	step         gapStep
	askedAt      time.Time // in this stretch
	noted        uint64    // the rank's progress in the middle of this stretch
	madeProgress bool      // in the stretch before
}

// gapStep is the next step in a stretch.
type gapStep uint8

const (
	gapAsk      gapStep = iota // half-way: the DPServer checks its engine
	gapNote                    // its answer, which is about the time before, has arrived by now
	gapAskAgain                // the DPServer checks its engine again
	gapJudge                   // the end of the stretch: the second answer has arrived too
)

// gapAnswer is the time in which a DPServer checks its engine and answers, possibly from another node.
const gapAnswer = time.Second

// start begins a gap.
func (g *gapWatch) start(now time.Time) {
	g.silentSince, g.stretchStart, g.step, g.madeProgress = now, now, gapAsk, false
}

// nextCheck is the time of the next check.
func (g *gapWatch) nextCheck() time.Time {
	answer := min(gapAnswer, g.limit/8)
	var at time.Time
	switch g.step {
	case gapAsk:
		at = g.stretchStart.Add(g.limit / 2)
	case gapAskAgain:
		at = g.stretchStart.Add(g.limit - answer)
	case gapNote, gapJudge:
		at = g.askedAt.Add(answer)
	}
	if end := g.end(); at.After(end) {
		return end
	}
	return at
}

// end is when the gap is over, whatever the rank does.
func (g *gapWatch) end() time.Time { return g.silentSince.Add(max(g.maxGap, g.limit)) }

// check executes the step that is due. An error is the cause with which to cancel the attempt.
func (g *gapWatch) check(now time.Time) error {
	steps := g.router.progressOf(g.rank)
	over := !now.Before(g.end())
	switch {
	case over || g.step == gapJudge:
		moved := g.madeProgress
		if g.step == gapJudge {
			moved = steps != g.noted
		}
		if !moved {
			return errStalled
		}
		if over {
			return errSilent
		}
		g.stretchStart, g.step, g.madeProgress = now, gapAsk, true
		return nil
	case g.step == gapNote:
		g.noted = steps
	default:
		g.askedAt = now
		g.ask()
	}
	g.step++
	return nil
}

// ask requests a check of the engine. A full mailbox or an unreachable node counts as no answer.
func (g *gapWatch) ask() { _ = g.rank.Mailbox.TrySend(&msg.Probe{TicketID: g.ticket}) }
