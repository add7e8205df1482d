package ingress

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

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
func (g *gapWatch) ask() { _ = g.rank.mailbox.TrySend(&msg.Probe{TicketID: g.ticket}) }
