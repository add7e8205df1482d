package shim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// at is a time of these tests.
func at(d time.Duration) time.Time { return time.Unix(1_000_000, 0).Add(d) }

func TestDeadlines(t *testing.T) {
	const s = time.Second
	serve := &Spec{Orphan: 600 * s, Grace: 5 * s}
	fence := &Spec{Orphan: 600 * s, Lease: 10 * s, Grace: s}
	type check struct {
		at   time.Duration
		do   func(d *deadlines)
		step step
		wait time.Duration
	}
	owned := func(d *deadlines) { d.owned() }
	alone := func(when time.Duration) func(d *deadlines) {
		return func(d *deadlines) { d.alone = at(when) }
	}
	for name, c := range map[string]struct {
		spec   *Spec
		checks []check
	}{
		"with an owner it waits": {serve, []check{
			{at: 0, do: owned, step: stepWait, wait: -1},
			{at: 9000 * s, step: stepWait, wait: -1},
		}},
		"without one it ends the engine, also after an owner has left": {serve, []check{
			{at: 0, step: stepWait, wait: 600 * s},
			{at: 10 * s, do: owned, step: stepWait, wait: -1},
			{at: 1000 * s, do: alone(1000 * s), step: stepWait, wait: 600 * s},
			{at: 1599 * s, step: stepWait, wait: s},
			{at: 1600 * s, step: stepTerminate, wait: 5 * s},
			{at: 1601 * s, step: stepWait, wait: 4 * s},
			{at: 1605 * s, step: stepKill, wait: killAgain},
			{at: 1606 * s, step: stepKill, wait: killAgain},
		}},
		"an owner that comes back too late does not stop it": {serve, []check{
			{at: 600 * s, step: stepTerminate, wait: 5 * s},
			{at: 601 * s, do: owned, step: stepWait, wait: 4 * s},
			{at: 605 * s, step: stepKill, wait: killAgain},
		}},
		"orphan timeout 0 waits for the first owner only": {&Spec{Grace: s}, []check{
			{at: 0, step: stepWait, wait: firstOwner},
			{at: s, do: owned, step: stepWait, wait: -1},
			{at: 2 * s, do: alone(2 * s), step: stepTerminate, wait: s},
			{at: 3 * s, do: func(d *deadlines) { d.exited = at(3 * s) }, step: stepLeave},
		}},
		"orphan timeout 0: the exit waits for the owner, and for the first one": {&Spec{Grace: s}, []check{
			{at: 0, do: func(d *deadlines) { d.exited = at(0) }, step: stepWait, wait: time.Hour},
			{at: s, do: owned, step: stepWait, wait: time.Hour - s},
			{at: 2 * s, do: alone(2 * s), step: stepLeave},
		}},
		"fence: the last extend counts, owner or not": {fence, []check{
			{at: 0, do: owned, step: stepWait, wait: 10 * s},
			{at: 5 * s, do: func(d *deadlines) { d.until = at(15 * s) }, step: stepWait, wait: 10 * s},
			{at: 14 * s, do: alone(14 * s), step: stepWait, wait: s},
			{at: 15 * s, step: stepTerminate, wait: s},
			{at: 16 * s, step: stepKill, wait: killAgain},
		}},
		"fence: the orphan timeout counts as well": {&Spec{Orphan: s, Lease: 10 * s, Grace: s}, []check{
			{at: 0, do: owned, step: stepWait, wait: 10 * s},
			{at: 2 * s, do: alone(2 * s), step: stepWait, wait: s},
			{at: 3 * s, step: stepTerminate, wait: s},
		}},
		"a shim that no node can find ends its engine and itself": {serve, []check{
			{at: 0, do: owned, step: stepWait, wait: -1},
			{at: s, do: func(d *deadlines) { d.lost = true }, step: stepWait, wait: -1},
			{at: 2 * s, do: alone(2 * s), step: stepTerminate, wait: 5 * s},
			{at: 3 * s, do: func(d *deadlines) { d.exited = at(3 * s) }, step: stepLeave},
		}},
		"the exit is kept for an hour": {serve, []check{
			{at: 0, do: func(d *deadlines) { d.exited = at(0) }, step: stepWait, wait: time.Hour},
			{at: 601 * s, step: stepWait, wait: 2999 * s},
			{at: 3600 * s, step: stepLeave},
		}},
		"or until it is released": {serve, []check{
			{at: 0, do: func(d *deadlines) { d.exited = at(0); d.released = true }, step: stepLeave},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDeadlines(at(0), c.spec)
			for _, check := range c.checks {
				if check.do != nil {
					check.do(&d)
				}
				step, wait := d.next(at(check.at))
				assert.Equal(t, check.step, step, "at %s", check.at)
				assert.Equal(t, check.wait, wait, "at %s", check.at)
			}
		})
	}
}

func TestTheFirstReasonStays(t *testing.T) {
	d := newDeadlines(at(0), &Spec{Orphan: time.Minute})
	d.owned()
	d.ask(at(time.Second), "its shim was told to end")
	d.ask(at(2*time.Second), "another")
	assert.Equal(t, "its shim was told to end", d.reason)
	assert.Equal(t, at(time.Second), d.asked)
}
