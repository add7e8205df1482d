package ingress

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// gapWatch watches an answer that has begun and whose engine is silent. It cuts the answer after between_tokens_s, unless its rank makes
// progress: then the engine works, and shows this answer nothing yet (a large stream_interval, a pre-emption, a long prefill beside
// it). The gap is looked at in stretches of between_tokens_s. In the middle of a stretch, and before its end, the rank's DPServer is
// asked to look at its engine. A first token or output in the rank's stream, of whatever request, in the second half of the stretch is
// progress, and so is the DPServer's answer. A stretch without progress is the end. A gap never lasts longer than first_token_s, the
// time that a prefill has. The phase timer calls it under its mutex; nothing here waits.
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

// gapStep is what comes next in a stretch.
type gapStep uint8

const (
	gapAsk      gapStep = iota // half way: the DPServer takes its first look
	gapNote                    // its answer, which concerns what was before, has come by now
	gapAskAgain                // the DPServer takes its second look
	gapJudge                   // the end of the stretch: that answer has come too
)

// gapAnswer is the time that a DPServer has to look at its engine, and to answer, perhaps from another node.
const gapAnswer = time.Second

// start starts a gap.
func (g *gapWatch) start(now time.Time) {
	g.silentSince, g.stretchStart, g.step, g.madeProgress = now, now, gapAsk, false
}

// nextCheck is when the gap is looked at again.
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

// check does what is due now. An error is the cause to cut the answer for.
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

// ask asks for a look at the engine. A full mailbox, or a node that cannot be reached, is a rank without an answer.
func (g *gapWatch) ask() { _ = g.rank.mailbox.TrySend(&msg.Probe{TicketID: g.ticket}) }
