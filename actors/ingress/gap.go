package ingress

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// gap watches an answer that has begun and whose engine is silent. It cuts the answer after between_tokens_s, unless its rank makes
// progress: then the engine works, and shows this answer nothing yet (a large stream_interval, a pre-emption, a long prefill beside
// it). The gap is looked at in stretches of between_tokens_s. In the middle of a stretch, and before its end, the rank's DPServer is
// asked to look at its engine. A first token or output in the rank's stream, of whatever request, in the second half of the stretch is
// progress, and so is the DPServer's answer. A stretch without progress is the end. A gap never lasts longer than first_token_s, the
// time that a prefill has. The guard calls it under its mutex; nothing here waits.
type gap struct {
	lane   *lane
	rank   *rank
	ticket uint64
	limit  time.Duration // of a stretch
	most   time.Duration // of the gap

	since time.Time // the engine is silent since then
	from  time.Time // the stretch began then
	stage gapStage
	asked time.Time // in this stretch
	steps uint64    // of the rank, when they were noted in this stretch
	moved bool      // the rank made progress in the stretch before
}

// gapStage is what comes next in a stretch.
type gapStage uint8

const (
	gapAsk      gapStage = iota // half way: the DPServer takes its first look
	gapNote                     // its answer, which concerns what was before, has come by now
	gapAskAgain                 // the DPServer takes its second look
	gapJudge                    // the end of the stretch: that answer has come too
)

// gapAnswer is the time that a DPServer has to look at its engine, and to answer, perhaps from another node.
const gapAnswer = time.Second

// begin starts a gap.
func (g *gap) begin(now time.Time) {
	g.since, g.from, g.stage, g.moved = now, now, gapAsk, false
}

// next is when the gap is looked at again.
func (g *gap) next() time.Time {
	answer := min(gapAnswer, g.limit/8)
	var at time.Time
	switch g.stage {
	case gapAsk:
		at = g.from.Add(g.limit / 2)
	case gapAskAgain:
		at = g.from.Add(g.limit - answer)
	case gapNote, gapJudge:
		at = g.asked.Add(answer)
	}
	if end := g.end(); at.After(end) {
		return end
	}
	return at
}

// end is when the gap is over, whatever the rank does.
func (g *gap) end() time.Time { return g.since.Add(max(g.most, g.limit)) }

// look does what is due now. An error is the cause to cut the answer for.
func (g *gap) look(now time.Time) error {
	steps := g.lane.steps(g.rank)
	over := !now.Before(g.end())
	switch {
	case over || g.stage == gapJudge:
		moved := g.moved
		if g.stage == gapJudge {
			moved = steps != g.steps
		}
		if !moved {
			return errStalled
		}
		if over {
			return errSilent
		}
		g.from, g.stage, g.moved = now, gapAsk, true
		return nil
	case g.stage == gapNote:
		g.steps = steps
	default:
		g.asked = now
		g.ask()
	}
	g.stage++
	return nil
}

// ask asks for a look at the engine. A full mailbox, or a node that cannot be reached, is a rank without an answer.
func (g *gap) ask() { _ = g.rank.mailbox.TrySend(&msg.Probe{TicketID: g.ticket}) }
