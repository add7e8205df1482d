package pdproxy

import "github.com/dpserve/dpserve/internal/engine/transfer"

// onChoice takes the ranks that were chosen. An answer to a choice that is not under way any more is undone.
func (c *Core) onChoice(ev *Event) {
	if ev.Number != c.choice || c.ended {
		if ev.Kind == EvChosen {
			c.out = append(c.out, Command{Kind: CmdUndoChoice, Number: ev.Number})
		}
		return
	}
	want := c.want
	c.choice, c.want = 0, [2]bool{}
	if ev.Kind == EvNoRank {
		c.end(AnswerNoRank, OutcomeFailed, 0)
		return
	}
	if want[Decode] {
		c.reserve(Decode, ev.Decode)
	}
	switch {
	case want[Prefill] && ev.Remote:
		c.remote, c.way = true, WayRemote
		c.attempt++
		c.reserve(Prefill, ev.Prefill)
	case want[Prefill]:
		c.goLocal(ev.Fallback || c.way == WayRemote)
	}
}

// onTicket takes the answer to a reservation. A ticket for which there is no use any more goes back at once.
func (c *Core) onTicket(ev *Event) {
	s, ok := c.sideOf(ev.Number)
	if !ok || c.halves[s].ticket != ticketAsked {
		if ev.Kind == EvReserved {
			c.out = append(c.out, Command{Kind: CmdRelease, Number: ev.Number, Ending: EndUnused})
		}
		return
	}
	if ev.Kind == EvReserved {
		c.halves[s].ticket = ticketHeld
		return
	}
	c.halves[s].ticket = ticketNone
	c.refused(s)
}

// refused looks for another rank in place of one of which no engine was asked.
func (c *Core) refused(s Side) {
	c.avoid(s)
	c.release(s, EndUnused)
	c.refusals[s]++
	switch {
	case c.refusals[s] < maxRefusals:
		c.choose(s == Prefill, s == Decode)
	case s == Prefill:
		c.goLocal(true)
	default:
		c.end(AnswerNoRank, OutcomeFailed, 0)
	}
}

// sideOf is the side whose reservation and leg have that number.
func (c *Core) sideOf(number uint32) (Side, bool) {
	for s := range c.halves {
		if h := &c.halves[s]; h.number == number && number != 0 {
			return Side(s), true
		}
	}
	return 0, false
}

// onFenced handles that a rank serves no longer. Nothing that it was asked is waited for.
func (c *Core) onFenced(ev *Event) {
	h := &c.halves[ev.Side]
	if c.ended || h.number == 0 || h.rank != ev.Rank {
		return
	}
	switch isPassed := c.halves[Decode].leg == legPassed; {
	case isPassed && ev.Side == Decode:
		c.release(Decode, EndCancelled)
		c.end(AnswerStreamLost, OutcomeStreamLost, 0)
	case isPassed:
		c.release(Prefill, EndCancelled)
	case h.leg == legIdle && (ev.Side == Decode && c.decodeIsFree() ||
		ev.Side == Prefill && c.halves[Decode].leg == legIdle):
		c.refused(ev.Side)
	case ev.Side == Prefill:
		c.failPrefill(EndCancelled)
	case c.remote:
		c.avoid(Decode)
		c.release(Decode, EndCancelled)
		c.redo()
	default:
		c.failLocal(EndCancelled)
	}
}

// decodeIsFree reports whether another decode rank may take the place of the one that was chosen: the prefill
// leg, if it runs, does not name it.
func (c *Core) decodeIsFree() bool {
	return c.cfg.Order == transfer.PrefillFirst || c.halves[Prefill].leg == legIdle
}

// onLeg handles what a leg has to say. A leg that was given up says nothing any more.
func (c *Core) onLeg(ev *Event) {
	s, ok := c.sideOf(ev.Number)
	if ok && s == Prefill && c.halves[s].leg == legStarted {
		c.onPrefillLeg(ev)
		return
	}
	if ok && s == Decode && c.halves[s].leg != legIdle {
		c.onDecodeLeg(ev)
		return
	}
	if ev.Kind == EvDone && ev.Params != 0 { // of a prefill leg that was given up
		c.out = append(c.out, Command{Kind: CmdDiscard, Params: ev.Params})
	}
}

func (c *Core) onPrefillLeg(ev *Event) {
	p := &c.halves[Prefill]
	switch ev.Kind {
	case EvDone:
		c.onPrefillDone(ev)
	case EvRejected:
		p.leg = legOver
		c.release(Prefill, EndOK)
		if c.halves[Decode].leg != legPassed {
			c.end(AnswerPassOn, OutcomeRejected, ev.Number)
		}
	case EvBusy, EvDialFailed, EvCut, EvError:
		p.leg = legOver
		c.failPrefill(endings[ev.Kind])
	default:
	}
}

// endings is how the reservation of a leg that failed ends. An answer without a first byte is an error.
var endings = [...]Ending{
	EvBusy: EndBusy, EvDialFailed: EndDial, EvCut: EndCut, EvError: EndError, EvDone: EndError,
}

// onPrefillDone keeps the parameters for one use.
func (c *Core) onPrefillDone(ev *Event) {
	p, since := &c.halves[Prefill], c.halves[Prefill].started
	p.leg, p.started = legAnswered, c.at.Now
	switch {
	case c.halves[Decode].leg == legPassed: // the decode rank was faster than the end of the answer
		c.release(Prefill, EndOK)
	case c.cfg.Order != transfer.PrefillFirst:
		c.params = ev.Params
		c.discard()
	case ev.Params == 0:
		c.note(NoteNullParams)
		p.leg = legOver // it holds nothing
		c.release(Prefill, EndOK)
		c.goLocal(true)
	default:
		c.params = ev.Params
		c.fence = newFence(p.rank, since, c.at.Now, c.cfg.Lease)
	}
}

func (c *Core) onDecodeLeg(ev *Event) {
	d := &c.halves[Decode]
	if d.leg == legPassed {
		c.onStream(ev)
		return
	}
	switch ev.Kind {
	case EvRejected, EvCut, EvBusy, EvError, EvDone:
		c.alarm() // the engine has had the request
	default:
	}
	switch ev.Kind {
	case EvSent:
		c.checkSent()
	case EvFirstByte:
		switch {
		case !c.remote && c.cfg.Order == transfer.PrefillFirst && c.at.Gap > d.started:
			c.askAgain()
		case c.checkSent():
			c.onFirstByte()
		}
	case EvTooLate:
		d.leg = legOver
		c.note(NoteParamsLate)
		c.release(Decode, EndCancelled)
		c.redo()
	case EvRejected:
		d.leg = legOver
		c.release(Decode, EndOK)
		c.end(AnswerPassOn, OutcomeRejected, ev.Number)
	case EvDialFailed:
		d.leg = legOver
		c.onDialFailed()
	case EvCut, EvBusy, EvError, EvDone:
		d.leg = legOver
		c.onDecodeFailed(endings[ev.Kind])
	default:
	}
}

// checkSent notes that the decode leg is written, and that its answer begins. If that was too late, the
// answer is not passed on: the engine may have read memory that belongs to another prompt.
func (c *Core) checkSent() (isGood bool) {
	if !c.isDoubtful() {
		c.halves[Decode].leg = legSent
		return true
	}
	c.note(NoteParamsLate)
	c.release(Decode, EndCancelled)
	c.redo()
	return false
}

// askAgain asks again for an answer that came while the process stood still. Another request's leg, which
// nothing cancelled meanwhile, may have put wrong blocks into the cache that the answer was made from; that
// request's core sets off the alarm now.
func (c *Core) askAgain() {
	c.note(NoteStoodStill)
	c.release(Decode, EndCancelled)
	c.chooseDecode()
}

// onFirstByte passes the answer on: from here on the request has one rank, and no retry.
func (c *Core) onFirstByte() {
	c.halves[Decode].leg, c.read = legPassed, true
	c.out = append(c.out, Command{Kind: CmdPassOn, Number: c.halves[Decode].number})
	c.discard()
	if c.halves[Prefill].leg == legAnswered {
		c.release(Prefill, EndOK)
	}
}

// onStream handles the rest of an answer that the client is reading.
func (c *Core) onStream(ev *Event) {
	c.halves[Decode].leg = legOver
	switch ev.Kind {
	case EvDone:
		c.release(Decode, EndOK)
		c.end(AnswerNone, OutcomeOK, 0)
	case EvCut, EvError:
		c.release(Decode, endings[ev.Kind])
		c.end(AnswerStreamLost, OutcomeStreamLost, 0)
	default:
		c.halves[Decode].leg = legPassed
	}
}

// onDialFailed handles that no byte of a decode leg was sent. Parameters stay good: no engine has seen them.
func (c *Core) onDialFailed() {
	if !c.remote {
		c.failLocal(EndDial)
		return
	}
	c.avoid(Decode)
	c.release(Decode, EndDial)
	if c.decodeIsFree() {
		c.chooseDecode()
	} else {
		c.redo()
	}
}

// onDecodeFailed handles a decode leg that ended without a first byte. With a prefill behind it that is a
// failure of the transfer first, which charges nobody; another decode rank goes on if there is one. A broken
// connection is the decode rank's.
func (c *Core) onDecodeFailed(e Ending) {
	if !c.remote {
		c.failLocal(e)
		return
	}
	switch e {
	case EndCut:
		c.deaths++
		c.avoid(Decode)
	case EndBusy:
		c.avoid(Decode)
	default:
		c.note(NoteKVFailure)
		c.unlike[Decode] = c.halves[Decode].rank
		e = EndCancelled
	}
	c.release(Decode, e)
	if !c.endIfTwoDied() {
		c.redo()
	}
}

// failLocal handles a decode rank that did not do with a plain request: another one is asked.
func (c *Core) failLocal(e Ending) {
	if e == EndCut {
		c.deaths++
	}
	c.avoid(Decode)
	c.release(Decode, e)
	if !c.endIfTwoDied() {
		c.chooseDecode()
	}
}

// chooseDecode asks for another decode rank after one failed on its own account; there are MaxDecodes.
func (c *Core) chooseDecode() {
	c.decodes++
	if c.decodes >= c.cfg.MaxDecodes {
		c.end(AnswerFailed, OutcomeFailed, 0)
		return
	}
	c.choose(false, true)
}

// failPrefill ends a prefill leg that failed, and the decode leg that waits for it.
func (c *Core) failPrefill(e Ending) {
	if c.halves[Decode].leg == legPassed { // the decode rank has what it needs
		c.release(Prefill, e)
		return
	}
	c.note(NotePrefillFailed)
	if e == EndCut {
		c.deaths++
	}
	c.avoid(Prefill)
	c.release(Prefill, e)
	if c.halves[Decode].leg != legIdle {
		c.release(Decode, EndCancelled)
	}
	if !c.endIfTwoDied() {
		c.redo()
	}
}

func (c *Core) endIfTwoDied() bool {
	if c.deaths >= 2 {
		c.end(AnswerTwoDied, OutcomeFailed, 0)
	}
	return c.deaths >= 2
}

// redo computes the prompt again, once: on another prefill rank if there is one. After that the decode rank
// computes it. What is left of the prefill before is dropped.
func (c *Core) redo() {
	c.discard()
	if p := &c.halves[Prefill]; p.number != 0 {
		c.unlike[Prefill] = p.rank
		c.release(Prefill, EndCancelled)
	}
	if c.redone {
		c.goLocal(true)
		return
	}
	c.redone = true
	c.note(NoteRedo)
	c.choose(true, c.halves[Decode].number == 0)
}

// goLocal gives the prompt to the decode rank.
func (c *Core) goLocal(isFallback bool) {
	c.discard()
	c.release(Prefill, EndCancelled)
	c.remote, c.way = false, WayLocal
	if isFallback {
		c.way = WayFallback
		c.note(NoteFallback)
		if c.cfg.FallbackFails {
			c.end(AnswerNoPrefill, OutcomeFailed, 0)
			return
		}
	}
	needsDecode := c.halves[Decode].number == 0
	if c.choice != 0 { // a choice under way for a pair is one for a decode rank now
		needsDecode = needsDecode || c.want[Decode]
		c.cancelChoice()
		c.want = [2]bool{}
	}
	if needsDecode {
		c.choose(false, true)
	}
}
