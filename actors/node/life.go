package node

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// Life is one unit at one epoch on this node, without its engines: its phase, and what was asked of it. Core
// makes it and changes its phase.
type Life struct {
	Order    *msg.StartRank
	Phase    state.Phase
	WasReady bool
	Failure  *Failure // the first since the last ready

	stop  *stopRequest // the earliest deadline so far
	isCut bool
	last  msg.UnitEvent // for a controller that missed it
	found foundPhase
	// adopted without a leader: see Core.isAlone
	byCopy bool
}

// Failure is the reason why a unit ended or was fenced.
type Failure struct {
	Rank  int // -1: no particular rank
	Cause string
	Exit  string // of the engine, if it ended by itself
}

// stopRequest is a request to stop.
type stopRequest struct {
	deadline time.Time
	reason   string
}

// phases are the phases that units enter with the events.
var phases = map[msg.UnitEventKind]state.Phase{
	msg.UnitStarted:  state.Starting,
	msg.UnitReady:    state.Ready,
	msg.UnitFenced:   state.Fenced,
	msg.UnitDraining: state.Draining,
	msg.UnitIdle:     state.Draining,
	msg.UnitKilling:  state.Killing,
	msg.UnitGone:     state.Gone,
}

// Step is what a unit has to do next.
type Step int

// The steps of a unit.
const (
	StepStay  Step = iota // nothing
	StepFence             // report that a failure has closed it
	StepDrain             // let its requests continue until the deadline of the stop
	StepEnd               // end its engines
	StepAdopt             // attach to the engines that an earlier process has left
)

// Next returns the unit's next step by its phase and by what was asked. A failed start is not known here.
func (l *Life) Next(now time.Time) Step {
	asked, failed := l.stop != nil, l.Failure != nil
	late := asked && !now.Before(l.stop.deadline)
	switch {
	case l.Phase == state.Starting && (asked || failed):
		return StepEnd
	case l.Phase == state.Starting && l.found == foundGranted:
		return StepAdopt
	case l.Phase == state.Ready && failed && !asked:
		return StepFence
	case l.Phase == state.Ready && asked && !failed && !late:
		return StepDrain
	case l.Phase == state.Ready && asked:
		return StepEnd
	case l.Phase == state.Fenced && (asked || !l.isAttached()):
		return StepEnd
	case l.Phase == state.Draining && (failed || late):
		return StepEnd
	}
	return StepStay
}

func (l *Life) isAttached() bool { return l.Order.App.Engine.Kind == app.KindAttach }

// AskStop leaves a request to stop; false if the unit is already gone. Of several requests the earliest
// deadline counts.
func (l *Life) AskStop(now time.Time, grace time.Duration, reason string) bool {
	if l.Phase == state.Gone {
		l.last.Asked = true
		return false
	}
	if deadline := now.Add(grace); l.stop == nil || deadline.Before(l.stop.deadline) {
		l.stop = &stopRequest{deadline: deadline, reason: reason}
	}
	return true
}

// cut combines Fail and AskStop: the unit is fenced and ended at once, an attached unit too, because it is or
// soon will be granted elsewhere. It returns false if the unit is already gone or cut.
func (l *Life) cut(now time.Time, cause string) bool {
	if l.isCut || l.Phase == state.Gone {
		return false
	}
	l.isCut = true
	l.AskStop(now, 0, cause)
	l.Fail(Failure{Rank: -1, Cause: cause})
	return true
}

// Fail takes the unit out of routing. Only the first failure since the last ready counts: false for others.
func (l *Life) Fail(why Failure) bool {
	if l.Failure != nil || l.Phase == state.Killing || l.Phase == state.Gone {
		return false
	}
	if why.Rank >= 0 && len(l.Order.AllRanks) > 1 {
		why.Cause = fmt.Sprintf("rank %d: %s", why.Rank, why.Cause)
	}
	l.Failure = &why
	return true
}

// Recover forgets the failure of an attached unit whose ranks all answer again; false if there is none, or
// the unit has to end.
func (l *Life) Recover() bool {
	if l.Phase != state.Fenced || l.Failure == nil || l.stop != nil {
		return false
	}
	l.Failure = nil
	return true
}

// Why is the reason of the end: a failure or a request to stop; without a cause if there is neither.
func (l *Life) Why() Failure {
	switch {
	case l.Failure != nil && (l.stop == nil || l.Phase != state.Draining):
		return *l.Failure
	case l.stop != nil:
		return Failure{Rank: -1, Cause: l.stop.reason}
	}
	return Failure{Rank: -1}
}

// Grace is the time until the deadline of the stop; 0 if it has passed, or none was asked for.
func (l *Life) Grace(now time.Time) time.Duration {
	if l.stop == nil {
		return 0
	}
	return max(0, l.stop.deadline.Sub(now))
}

// foundPhase is how far a node is with a unit whose engines an earlier process of it has left.
type foundPhase uint8

const (
	notFound     foundPhase = iota // this process has started the unit
	foundOpen                      // not decided: no renewal was answered, or the copy of the state is older
	foundGranted                   // granted to this node at this epoch: it may be adopted
)

// IsFound reports whether an earlier process of the node has started the unit, and this one has not adopted
// it.
func (l *Life) IsFound() bool { return l.found != notFound }

// Adopt makes a found unit one of this process. It starts as any other one, with engines that run already.
func (l *Life) Adopt() { l.found = notFound }
