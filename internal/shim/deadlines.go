package shim

import (
	"fmt"
	"time"
)

// keepExited is how long a shim keeps the exit status of its engine for a node.
const keepExited = time.Hour

// firstOwner is how long a new engine waits at least for the node that has started it.
const firstOwner = 30 * time.Second

// killAgain is the pause between two SIGKILLs.
const killAgain = time.Second

// step is what a shim has to do.
type step int

// The steps of a shim.
const (
	stepWait      step = iota
	stepTerminate      // ask the engine to end
	stepKill           // kill all of it
	stepLeave          // end the shim
)

// deadlines decides when a shim ends its engine, and itself. It has no clock.
type deadlines struct {
	orphan time.Duration
	grace  time.Duration
	fence  bool // mode fence: until counts

	alone    time.Time // since when no owner is connected; zero = one is
	met      bool      // an owner was connected once
	until    time.Time // when the last Extend runs out
	asked    time.Time // when the engine was told to end by the shim; zero = it was not
	exited   time.Time // zero = it has not
	released bool
	lost     bool   // the folder was removed: no node can find the shim
	reason   string // of asked
}

func newDeadlines(now time.Time, s *Spec) deadlines {
	return deadlines{
		orphan: s.Orphan, grace: s.Grace, fence: s.Lease > 0, alone: now, until: now.Add(s.Lease),
	}
}

// next returns the step at now, and after it the time until another one may be due; negative = none.
func (d *deadlines) next(now time.Time) (step, time.Duration) {
	if d.orphan == 0 && d.met && !d.alone.IsZero() && !d.exited.IsZero() {
		d.released = true // no later owner is to learn of the end
	}
	switch {
	case d.released, d.lost && !d.alone.IsZero() && !d.exited.IsZero():
		return stepLeave, 0
	case !d.exited.IsZero():
		if left := d.exited.Add(keepExited).Sub(now); left > 0 {
			return stepWait, left
		}
		return stepLeave, 0
	case !d.asked.IsZero():
		if left := d.asked.Add(d.grace).Sub(now); left > 0 {
			return stepWait, left
		}
		return stepKill, killAgain
	}
	end, reason := d.end()
	switch left := end.Sub(now); {
	case end.IsZero():
		return stepWait, -1
	case left > 0:
		return stepWait, left
	}
	d.ask(now, reason)
	return stepTerminate, d.grace
}

// owned notes that an owner is connected.
func (d *deadlines) owned() { d.alone, d.met = time.Time{}, true }

// ask notes that the engine is told to end. The first reason stays.
func (d *deadlines) ask(now time.Time, reason string) {
	if d.asked.IsZero() {
		d.asked, d.reason = now, reason
	}
}

// end is when the engine has to end; zero = no deadline.
func (d *deadlines) end() (end time.Time, reason string) {
	if !d.alone.IsZero() {
		wait := d.orphan
		if !d.met {
			wait = max(wait, firstOwner)
		}
		end, reason = d.alone.Add(wait), fmt.Sprintf("no node came back within %s", wait)
	}
	if d.lost && !d.alone.IsZero() {
		return d.alone, "its folder was removed, so no node can find it"
	}
	if d.fence && (end.IsZero() || d.until.Before(end)) {
		end, reason = d.until, "the node's lease was not renewed"
	}
	return end, reason
}
