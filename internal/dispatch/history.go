package dispatch

import (
	"slices"

	"github.com/dpserve/dpserve/routing"
)

// Excluded is a rank that must not be asked again. With a Unit, the same holds for every rank of its unit if
// the application is a lockstep one.
type Excluded struct {
	Rank routing.RankRef
	Unit uint64 // 0: the rank alone
}

// history is what a request has been through.
type history struct {
	tried    [2][]Excluded
	failed   []routing.RankRef // one entry per run on a rank; for Config.PerRank
	runs     int
	refusals int
	deaths   int
	diedUnit uint64 // of the first death
	redone   bool   // the prefill was done again, which happens once
	moves    int    // of the begun answer to another rank, without a death

	charged     Ended // the one failure that counts towards a rank's ejection; zero: none does
	chargedSide Side
	pardons     bool // … and it is about the request after all

	last     Ended // the last end that counts
	answered bool  // every run so far ended with an answer of an engine
	same     Ended // the last end whose text may be about the request
}

// Ended is how a leg ended, as far as it matters later.
type Ended struct {
	Cause Cause
	Rank  routing.RankRef
	Text  uint64
}

// reset forgets everything but keeps the memory.
func (h *history) reset() {
	*h = history{
		tried:  [2][]Excluded{h.tried[Prefill][:0], h.tried[Decode][:0]},
		failed: h.failed[:0], answered: true,
	}
}

// isAboutRequest reports whether an answer that usually is the rank's fault is about the request: another
// rank has said the same.
func (h *history) isAboutRequest(ev *Event) bool {
	was := &h.same
	return ev.Cause.Row().Same && was.Cause == ev.Cause && was.Rank != ev.Rank && was.Text == ev.Text &&
		(ev.Text != 0 || ev.Cause == RankError)
}

// again is who gets the request next.
func (h *history) again(ev *Event) Again {
	if h.isAboutRequest(ev) {
		return Nobody
	}
	return ev.Cause.Row().Again
}

// record notes the end of a leg of side s, or a refusal, and reports whether it is a charge of its rank.
func (h *history) record(cfg *Config, s Side, ev *Event) (charge bool) {
	row := ev.Cause.Row()
	if h.again(ev) == Nobody && row.Again != Nobody { // it is about the request
		h.pardons = h.charged == h.same
		h.last = Ended{ev.Cause, ev.Rank, ev.Text}
		return false
	}
	switch row.Cost {
	case Refusal:
		h.refusals++
		h.exclude(s, ev)
	case Run:
		h.runs++
		h.answered = h.answered && row.Words
		h.failed = append(h.failed, ev.Rank)
		if row.Again == Other && h.runsOn(ev.Rank) >= max(cfg.PerRank, 1) {
			h.exclude(s, ev)
		}
	case Nothing:
	}
	if row.Same {
		h.same = Ended{ev.Cause, ev.Rank, ev.Text}
	}
	h.remember(ev)
	h.countDeath(ev)
	return h.charge(s, ev)
}

// countDeath counts an engine that died while it had the request.
func (h *history) countDeath(ev *Event) {
	if ev.isDeath() && (h.deaths == 0 || h.diedUnit != ev.Unit) {
		h.deaths++
		h.diedUnit = ev.Unit
	}
}

// maxMoves is how often an answer that has begun goes on from another rank because its rank drains or cannot
// be reached.
const maxMoves = 2

// mayContinue reports whether an answer that broke goes on from another rank. A request under which two
// engines died, whether or not their answers had begun, is not sent to a third one.
func (h *history) mayContinue(ev *Event) bool {
	if !ev.CanContinue || !ev.Cause.Row().Moves {
		return false
	}
	if h.countDeath(ev); ev.isDeath() {
		return h.deaths < 2
	}
	h.moves++
	return h.moves <= maxMoves
}

// charge reports whether an end counts towards its rank's ejection: one end of a request does.
func (h *history) charge(s Side, ev *Event) bool {
	if !ev.Cause.Row().Charge || h.charged != (Ended{}) || ev.IsLost {
		return false
	}
	h.charged, h.chargedSide = Ended{ev.Cause, ev.Rank, ev.Text}, s
	return true
}

// isDeath reports whether an engine died, or its connection did, while it had the request.
func (ev *Event) isDeath() bool {
	return ev.Cause.Row().Death && (ev.Cause != UnitLost || ev.EngineFailed)
}

// recordPair notes the end of a decode leg that counts against the pair.
func (h *history) recordPair(ev *Event) {
	h.runs++
	h.answered = h.answered && ev.Cause.Row().Words
	h.remember(ev)
}

// remember keeps the last end that the client may hear of. An engine that is full knows best what the client
// should do. A full rank and a node that cannot be reached say nothing.
func (h *history) remember(ev *Event) {
	row := ev.Cause.Row()
	switch {
	case row.Cost == Nothing && ev.Cause != Busy, ev.Cause == Unreachable:
	case h.last.Cause == Busy && ev.Cause != Busy && row.Words:
	default:
		h.last = Ended{ev.Cause, ev.Rank, ev.Text}
	}
}

func (h *history) runsOn(r routing.RankRef) (n int) {
	for _, f := range h.failed {
		if f == r {
			n++
		}
	}
	return n
}

func (h *history) exclude(s Side, ev *Event) {
	x := Excluded{Rank: ev.Rank}
	if ev.Cause.Row().Unit {
		x.Unit = ev.Unit
	}
	if !slices.Contains(h.tried[s], x) {
		h.tried[s] = append(h.tried[s], x)
	}
}

// isOver reports whether the request has had as many runs or refusals as it may have.
func (h *history) isOver(cfg *Config) bool {
	return h.runs >= cfg.Attempts || h.refusals >= cfg.Refusals
}

// hasWords reports whether the client gets what an engine has said, once nobody is left to ask.
func (h *history) hasWords() bool {
	return h.last.Cause.Row().Words && (h.answered || h.last.Cause == Busy)
}
