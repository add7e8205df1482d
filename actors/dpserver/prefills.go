package dpserver

import (
	"cmp"
	"slices"
	"time"
)

// prefills are the open tickets whose prefill is not over and whose answer comes as a whole, so that no first
// token is seen. Their prefill counts as done after the predicted time of all prefill that the rank had open
// when they were admitted, scaled by the speed that streams have shown. KV events correct it: the prefill is
// done when they show the end of the prompt. If the events should show it and do not, the wait is up to
// stallFactor times the predicted time.
type prefills struct {
	byDue   []wholePrefill // by due
	timer   *time.Timer    // one for all; it may fire for a ticket that has ended
	timerAt time.Time      // zero: the timer does not run
	pace    pace
}

// pace compares how long streams waited for their first tokens with the predicted time. The last ten streams
// make two thirds of both sums.
type pace struct{ waited, predicted time.Duration }

const (
	paceMemory  = 0.9                   // weight of a stream relative to the next newer one
	paceMinimum = 50 * time.Millisecond // a shorter predicted wait is mostly the wait for the end of a step
	paceLimit   = 64                    // times as slow, or as fast, as predicted at most
)

func (p *pace) addSample(waited, predicted time.Duration) {
	if predicted < paceMinimum {
		return
	}
	if p.predicted == 0 {
		p.waited, p.predicted = paceMinimum, paceMinimum
	}
	p.waited = time.Duration(paceMemory*float64(p.waited)) + max(waited, 0)
	p.predicted = time.Duration(paceMemory*float64(p.predicted)) + predicted
}

// scale is a predicted time at the rank's speed.
func (p *pace) scale(predicted time.Duration) time.Duration {
	if p.predicted == 0 {
		return predicted
	}
	return time.Duration(float64(predicted) * min(max(float64(p.waited)/float64(p.predicted), 1.0/paceLimit),
		paceLimit))
}

type wholePrefill struct {
	ticket   uint64
	due      time.Time
	latest   time.Time // the latest time that due may become
	isUnseen bool      // the events did not show the end of the prompt when it was admitted
}

// prefillTimer says that the prefill of a ticket is due.
type prefillTimer struct{}

// insert keeps the order; nearly always it appends.
func (p *prefills) insert(e wholePrefill) {
	at, _ := slices.BinarySearchFunc(p.byDue, e.due, func(e wholePrefill, due time.Time) int {
		return cmp.Or(e.due.Compare(due), -1) // after those that are due at the same time
	})
	p.byDue = slices.Insert(p.byDue, at, e)
}

// remove removes a ticket that has ended.
func (p *prefills) remove(ticket uint64) {
	p.byDue = slices.DeleteFunc(p.byDue, func(e wholePrefill) bool { return e.ticket == ticket })
}

// stop removes all tickets and stops the timer.
func (p *prefills) stop() {
	if p.timer != nil {
		p.timer.Stop()
	}
	p.byDue, p.timerAt = p.byDue[:0], time.Time{}
}
