package dispatch

import (
	"cmp"

	"github.com/dpserve/dpserve/routing"
)

// onPick takes the ranks that were picked. An answer to a pick that is not under way any more is undone.
func (p *Plan) onPick(ev *Event) {
	if ev.Number != p.pick || p.ended {
		if ev.Kind == EvPicked {
			p.out = append(p.out, Command{Kind: CmdUndo, Number: ev.Number})
		}
		return
	}
	want := p.want
	p.pick, p.want = 0, [2]bool{}
	if ev.Kind == EvNoRank {
		p.onNoRank(ev)
		return
	}
	if want[Decode] {
		p.reserve(Decode, ev.Decode)
	}
	switch {
	case want[Prefill] && ev.IsRemote:
		p.remote, p.way = true, WayRemote
		p.attempt++
		p.reserve(Prefill, ev.Prefill)
	case want[Prefill]:
		p.goLocal(ev.Fallback || p.way == WayRemote)
	}
}

// onNoRank ends a request that no rank can take. What the ranks that were asked have said counts more than
// that there is no other one; but a request that has waited in vain hears that.
func (p *Plan) onNoRank(ev *Event) {
	isAsked := p.last.Cause != OK
	if !isAsked || ev.HasWaited && p.last.Cause != Busy {
		p.end(AnswerNoRank, OK, ResultFailed)
		return
	}
	p.endFailed()
}

// endFailed ends a request for which every rank that was asked has failed.
func (p *Plan) endFailed() {
	if p.hasWords() {
		p.end(AnswerWords, p.last.Cause, ResultFailed)
		return
	}
	p.end(AnswerOwn, p.last.Cause, ResultFailed)
}

// onTicket takes the answer to a reservation. A ticket for which there is no use any more goes back at once.
func (p *Plan) onTicket(ev *Event) {
	s, ok := p.sideOf(ev.Number)
	isAsked := ok && ev.Number == p.asked
	if !ok || p.legs[s].ticket != ticketAsked && !isAsked {
		if ev.Kind == EvReserved {
			p.out = append(p.out, Command{Kind: CmdRelease, Number: ev.Number, Cause: Unused})
		}
		return
	}
	if ev.Kind == EvReserved {
		p.legs[s].ticket = ticketHeld
		return
	}
	p.legs[s].ticket, p.legs[s].state, p.asked = ticketNone, legIdle, 0
	p.refused(s, ev)
}

// refused looks for another rank in place of one of which no engine was asked. A full rank is no failure: the
// Router's view was outdated.
func (p *Plan) refused(s Side, ev *Event) {
	p.release(s, Unused, false)
	if ev.Cause.Row().Again == Nobody {
		p.end(AnswerOwn, ev.Cause, ResultFailed)
		return
	}
	p.record(&p.cfg, s, ev)
	p.suspect(ev)
	if ev.Cause == Full && (s == Prefill || p.cfg.IsHeld) { // nobody waits for room
		p.refusals++
	}
	switch {
	case !p.isOver(&p.cfg):
		p.choose(s == Prefill, s == Decode, false)
	case s == Prefill:
		p.goLocal(true)
	default:
		p.last.Cause = cmp.Or(p.last.Cause, ev.Cause)
		p.endFailed()
	}
}

// suspect tells the shell of a node that cannot be reached.
func (p *Plan) suspect(ev *Event) {
	if ev.Cause == Unreachable {
		p.out = append(p.out, Command{Kind: CmdSuspect, Side: ev.Side, Rank: ev.Rank})
	}
}

// sideOf is the side whose reservation and leg have that number.
func (p *Plan) sideOf(number uint32) (Side, bool) {
	for s := range p.legs {
		if l := &p.legs[s]; l.number == number && number != 0 {
			return Side(s), true
		}
	}
	return 0, false
}

// onFenced handles that a rank serves no longer. Nothing that it was asked is waited for. A leg that has
// ended says no more, so that its end and the fence count as one death.
func (p *Plan) onFenced(ev *Event) {
	l, dec := &p.legs[ev.Side], &p.legs[Decode]
	if p.ended || l.number == 0 || l.rank != ev.Rank {
		return
	}
	lost := *ev
	lost.Kind, lost.Cause, lost.Number, lost.IsLost = EvEnded, UnitLost, l.number, true
	switch isPassed := dec.state == legPassed; {
	case isPassed && ev.Side == Decode:
		p.release(Decode, GivenUp, false)
		p.end(AnswerStreamLost, UnitLost, ResultStreamLost)
	case isPassed:
		p.release(Prefill, GivenUp, false)
	case l.state == legIdle && (ev.Side == Decode && p.decodeIsFree() ||
		ev.Side == Prefill && dec.state == legIdle):
		lost.Cause = Fenced
		p.refused(ev.Side, &lost)
	case ev.Side == Prefill:
		p.failPrefill(&lost)
	case p.remote:
		p.failPair(&lost)
	default:
		p.failAlone(&lost)
	}
}

// decodeIsFree reports whether another decode rank may take the place of the one that was picked: the prefill
// leg, if it runs, does not name it.
func (p *Plan) decodeIsFree() bool {
	return p.cfg.Order == PrefillFirst || p.legs[Prefill].state == legIdle
}

// onLeg handles what a leg has to say. A leg that was given up says nothing any more.
func (p *Plan) onLeg(ev *Event) {
	s, ok := p.sideOf(ev.Number)
	if ok && s == Prefill && p.legs[s].state == legStarted {
		p.onPrefill(ev)
		return
	}
	if ok && s == Decode && p.legs[s].state != legIdle {
		p.onDecode(ev)
		return
	}
	if ev.Kind == EvEnded && ev.Params != 0 { // of a prefill leg that was given up
		p.out = append(p.out, Command{Kind: CmdDiscard, Params: ev.Params})
	}
}

// onPrefill handles the end of a prefill leg.
func (p *Plan) onPrefill(ev *Event) {
	if ev.Kind != EvEnded {
		return
	}
	if ev.Cause == OK {
		p.onPrefilled(ev)
		return
	}
	p.legs[Prefill].state = legOver
	if p.legs[Decode].state == legPassed || p.again(ev) != Nobody {
		p.failPrefill(ev)
		return
	}
	p.record(&p.cfg, Prefill, ev)
	p.endAt(Prefill, ev) // the decode rank would say the same
}

// onPrefilled keeps the parameters for one use.
func (p *Plan) onPrefilled(ev *Event) {
	l, since := &p.legs[Prefill], p.legs[Prefill].started
	l.state, l.started = legAnswered, p.at.Now
	if p.cfg.Order != PrefillFirst {
		p.params = ev.Params
		p.discard()
	}
	switch {
	case p.bereft:
		p.endBereft(Prefill, ev)
	case p.legs[Decode].state == legPassed: // the decode rank was faster than the end of the answer
		p.release(Prefill, OK, false)
	case p.cfg.Order != PrefillFirst:
	case ev.Params == 0:
		p.note(NoteNullParams)
		l.state = legOver // it holds nothing
		p.release(Prefill, OK, false)
		p.goLocal(true)
	default:
		p.params = ev.Params
		p.fence = newFence(l.rank, since, p.at.Now, p.cfg.Lease)
	}
}

// wasSeen reports whether the engine may have got a leg that ended so.
func wasSeen(c Cause) bool {
	switch c {
	case ConnRefused, TooLate, NoMemory, NoFiles, NoPeer:
		return false
	default:
		return true
	}
}

// onDecode handles what a decode leg, or the only leg of a request, has to say before its content.
func (p *Plan) onDecode(ev *Event) {
	l := &p.legs[Decode]
	if l.state == legPassed {
		p.onStream(ev)
		return
	}
	if ev.Kind == EvEnded && wasSeen(ev.Cause) {
		p.alarm()
	}
	switch ev.Kind {
	case EvSent:
		p.checkSent()
	case EvContent:
		switch {
		case !p.remote && p.cfg.Order == PrefillFirst && p.at.Gap > l.started:
			p.askAgain()
		case p.checkSent():
			p.pass()
		}
	case EvAnswered:
		if p.passesError(ev) {
			p.alarm()
			l.isError = true
			p.pass()
		}
	case EvEnded:
		l.state, p.asked = legOver, 0
		failed := *ev
		if failed.Cause == OK {
			failed.Cause = Empty
		}
		if p.remote {
			p.onRemoteEnded(&failed)
		} else {
			p.failAlone(&failed)
		}
	default:
	}
}

// checkSent notes that the decode leg is written, and that its answer begins. If that was too late, the
// answer is not passed on: the engine may have read memory that belongs to another prompt.
func (p *Plan) checkSent() (isGood bool) {
	if !p.isDoubtful() {
		p.legs[Decode].state = legSent
		return true
	}
	p.note(NoteParamsLate)
	p.release(Decode, GivenUp, false)
	p.redo()
	return false
}

// askAgain asks again for an answer that came while the process stood still. Another request's leg, which
// nothing cancelled meanwhile, may have put wrong blocks into the cache that the answer was made from; that
// request's plan sets off the alarm now.
func (p *Plan) askAgain() {
	p.note(NoteStoodStill)
	p.release(Decode, StoodStill, false)
	p.choose(false, true, false)
}

// passesError reports whether the client gets an error of the decode rank now. A remote leg's error may be
// the transfer's.
func (p *Plan) passesError(ev *Event) bool {
	row := ev.Cause.Row()
	switch {
	case p.begun: // the client has another status
		return false
	case p.remote:
		return row.Again == Nobody
	}
	return ev.IsSpent || p.again(ev) == Nobody || row.Words && row.Cost == Run && p.runs+1 >= p.cfg.Attempts
}

// pass passes the answer on: from here on the request has one rank, and no retry.
func (p *Plan) pass() {
	l := &p.legs[Decode]
	l.state = legPassed
	p.out = append(p.out, Command{Kind: CmdRelay, Number: l.number})
	if l.isError {
		return
	}
	p.read, p.begun = true, true
	p.discard()
	if s := p.legs[Prefill].state; s == legAnswered || s == legIdle {
		p.release(Prefill, OK, false)
	}
}

// onStream handles the rest of an answer that the client is reading.
func (p *Plan) onStream(ev *Event) {
	if ev.Kind != EvEnded {
		return
	}
	l, row := &p.legs[Decode], ev.Cause.Row()
	isError := l.isError
	l.state, p.asked = legOver, 0
	var charge bool
	if isError {
		charge = p.record(&p.cfg, Decode, ev)
	} else {
		charge = p.charge(Decode, ev)
	}
	p.suspect(ev)
	p.release(Decode, ev.Cause, charge)
	switch {
	case p.mayContinue(ev):
		p.continueStream(ev)
	case ev.Cause == ClientGone, ev.Cause == SlowReader:
		p.end(AnswerNone, ev.Cause, ResultClientGone)
	case ev.Cause == Deadline:
		p.end(AnswerDeadline, ev.Cause, ResultDeadline)
	case isError && row.Again == Nobody, isError && ev.Cause == RankError:
		p.end(AnswerNone, ev.Cause, ResultRejected)
	case isError:
		p.end(AnswerNone, ev.Cause, ResultFailed)
	case ev.Cause == OK, ev.Cause == Passed, ev.Cause == ErrorEvent:
		p.end(AnswerNone, ev.Cause, ResultOK)
	default:
		p.end(AnswerStreamLost, ev.Cause, ResultStreamLost)
	}
}

// continueStream asks other ranks for the rest of an answer. After a death that costs the retry budget if it
// has to wait for room; a drain is wanted, and moves every stream once.
func (p *Plan) continueStream(ev *Event) {
	p.release(Prefill, GivenUp, false)
	p.exclude(Decode, ev)
	p.remote, p.read, p.redone, p.bereft, p.unlike = false, false, false, false, [2]routing.RankRef{}
	p.choose(!p.cfg.IsAlone, true, ev.isDeath())
}

// onRemoteEnded handles a decode leg that ended without a first byte, though a prefill rank had computed its
// prompt.
func (p *Plan) onRemoteEnded(ev *Event) {
	if p.bereft {
		p.endBereft(Decode, ev)
		return
	}
	switch ev.Cause {
	case ConnRefused:
		p.onConnRefused(ev)
	case TooLate, NotResent:
		if ev.Cause == TooLate {
			p.note(NoteParamsLate)
		}
		p.release(Decode, ev.Cause, false)
		p.redo()
	case NoPeer:
		p.release(Decode, ev.Cause, false)
		p.goLocal(true)
	default:
		p.failPair(ev)
	}
}

// onConnRefused handles that no byte of a decode leg was sent. Parameters stay good: no engine has seen them.
func (p *Plan) onConnRefused(ev *Event) {
	p.record(&p.cfg, Decode, ev)
	p.release(Decode, ev.Cause, false)
	switch {
	case p.isOver(&p.cfg):
		p.goLocal(true)
	case p.decodeIsFree():
		p.choose(false, true, false)
	default:
		p.goOn(Decode, ev)
	}
}

// failPair handles a decode leg with a prefill that failed. Without a sign of whose fault it is, it may be
// that of the transfer: the pair is charged, and the next attempt takes another decode rank if there is one.
func (p *Plan) failPair(ev *Event) {
	switch {
	case p.bereft:
		p.endBereft(Decode, ev)
		return
	case ev.Cause.Row().Again == Nobody:
		p.endAt(Decode, ev)
		return
	case ev.Cause == UnitLost, ev.Cause == Reset, ev.Cause == EngineDead, ev.Cause == RankError,
		ev.Cause == Busy, ev.Cause == Unreachable, ev.Cause == StoodStill:
		charge := p.record(&p.cfg, Decode, ev)
		p.suspect(ev)
		p.release(Decode, ev.Cause, charge)
		if ev.Cause == Busy {
			p.unlike[Decode] = ev.Rank
		}
	default:
		p.recordPair(ev)
		if ev.Cause == FirstToken {
			p.note(NoteDecodeLate)
		} else {
			p.note(NoteKVFailure)
		}
		p.unlike[Decode] = ev.Rank
		prefill := p.legs[Prefill].rank
		p.release(Decode, KVFailure, false)
		p.out = append(p.out, Command{Kind: CmdPairFailed, Rank: ev.Rank, Prefill: prefill})
	}
	p.goOn(Decode, ev)
}

// goOn asks again after a leg of a pair has failed. If its engine is gone and the other leg may be at an
// engine too, that engine may die next: the other leg is heard for a moment before anybody else is asked.
func (p *Plan) goOn(s Side, ev *Event) {
	if p.endIfTwoDied() {
		return
	}
	isGone := ev.isDeath() || ev.Cause == ConnRefused
	if other := &p.legs[Decode-s]; isGone && other.isRunning() && p.cfg.Order != PrefillFirst {
		p.bereft = true
		other.limit = min(other.limit, p.at.Now+lastWords)
		return
	}
	if p.legs[Decode].state != legIdle {
		p.release(Decode, GivenUp, false)
	}
	if ev.Cause == NoPeer {
		p.goLocal(true)
		return
	}
	p.redo()
}

// endBereft ends the leg that went on after the engine of the other one had died. How it ends says nothing of
// its rank, unless its engine has died as well.
func (p *Plan) endBereft(s Side, ev *Event) {
	p.bereft = false
	if ev.Cause != OK && ev.Cause.Row().Again == Nobody {
		p.endAt(s, ev)
		return
	}
	cause := GivenUp
	if ev.isDeath() {
		p.record(&p.cfg, s, ev)
		cause = ev.Cause
	}
	p.release(s, cause, false)
	if !p.endIfTwoDied() {
		p.redo()
	}
}

// endAt ends a request whose leg ended so that nobody else is asked.
func (p *Plan) endAt(s Side, ev *Event) {
	p.release(s, ev.Cause, false)
	switch {
	case ev.Cause == ClientGone, ev.Cause == SlowReader:
		p.end(AnswerNone, ev.Cause, ResultClientGone)
	case ev.Cause == Deadline, ev.Cause == Expired:
		p.end(AnswerDeadline, Deadline, ResultDeadline)
	case ev.Cause.Row().Words:
		p.end(AnswerWords, ev.Cause, ResultRejected)
	default:
		p.end(AnswerOwn, ev.Cause, ResultFailed)
	}
}

// failAlone handles a decode rank that did not do with a request of its own: another one is asked.
func (p *Plan) failAlone(ev *Event) {
	row, again := ev.Cause.Row(), p.again(ev)
	charge := p.record(&p.cfg, Decode, ev)
	if again == Nobody {
		p.endAt(Decode, ev)
		return
	}
	p.suspect(ev)
	p.release(Decode, ev.Cause, charge)
	switch {
	case p.endIfTwoDied():
	case ev.IsSpent, row.Cost != Nothing && p.isOver(&p.cfg):
		p.endFailed()
	default:
		p.choose(false, true, row.Pays && !ev.IsLost)
	}
}

// failPrefill ends a prefill leg that failed, and the decode leg that waits for it.
func (p *Plan) failPrefill(ev *Event) {
	if p.bereft {
		p.endBereft(Prefill, ev)
		return
	}
	charge := p.record(&p.cfg, Prefill, ev)
	p.suspect(ev)
	if p.legs[Decode].state == legPassed { // the decode rank has what it needs
		p.release(Prefill, ev.Cause, charge)
		return
	}
	p.note(NotePrefillFailed)
	if ev.Cause.Row().Again == Any {
		p.unlike[Prefill] = ev.Rank
	}
	p.release(Prefill, ev.Cause, charge)
	p.goOn(Prefill, ev)
}

func (p *Plan) endIfTwoDied() bool {
	if p.deaths >= 2 {
		p.end(AnswerTwoDied, p.last.Cause, ResultFailed)
	}
	return p.deaths >= 2
}

// redo computes the prompt again, once. After that, or when the request has had its attempts, the decode rank
// computes it. What is left of the prefill before is dropped.
func (p *Plan) redo() {
	p.discard()
	p.release(Prefill, GivenUp, false)
	if p.redone || p.isOver(&p.cfg) {
		p.goLocal(true)
		return
	}
	p.redone = true
	p.note(NoteRedo)
	p.choose(true, p.legs[Decode].number == 0, false)
}

// goLocal gives the prompt to the decode rank.
func (p *Plan) goLocal(isFallback bool) {
	p.discard()
	p.release(Prefill, GivenUp, false)
	p.remote, p.way = false, WayLocal
	if isFallback {
		p.way = WayFallback
		p.note(NoteFallback)
		if p.cfg.FallbackFails {
			p.end(AnswerNoPrefill, OK, ResultFailed)
			return
		}
	}
	needsDecode := p.legs[Decode].number == 0
	if p.pick != 0 { // a pick under way for a pair is one for a decode rank now
		needsDecode = needsDecode || p.want[Decode]
		p.cancelPick()
		p.want = [2]bool{}
	}
	if needsDecode {
		p.choose(false, true, false)
	}
}
