package dpserver

import (
	"cmp"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

// prefills are the open tickets whose prefill is not over and whose answer comes as a whole, so that no first
// token is seen. Their prefill counts as done after the predicted time of all prefill that the rank had open
// when they were admitted, scaled by the speed that streams have shown. KV events correct it: the prefill is
// done when they show the end of the prompt. If the events should show it and do not, the wait is up to
// stallFactor times the predicted time.
type prefills struct {
	r       *replica
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

func (p *prefills) remove(ticket uint64) {
	p.byDue = slices.DeleteFunc(p.byDue, func(e wholePrefill) bool { return e.ticket == ticket })
}

// stop removes all tickets and stops the timer.
func (p *prefills) stop() {
	stopTimer(p.timer)
	p.byDue, p.timerAt = p.byDue[:0], time.Time{}
}

// predict predicts when the prefill of a ticket ends that was just admitted. The cost model gives
// several prompts too much time both as one long prompt (their tokens do not attend to each other) and one
// after the other (they share steps). The shorter of both is nearer.
func (p *prefills) predict(id uint64, t *ticket, whole bool) {
	if p.r.node.PrefillTime == nil {
		return
	}
	p.r.account.addPrefillTime(t, p.r.node.PrefillTime(t.uncachedTokens()))
	now := t.admittedAt
	t.prefillPredicted = min(p.r.node.PrefillTime(p.r.account.uncachedWork), p.r.account.prefillSum)
	if !whole {
		return
	}
	takes := p.pace.scale(t.prefillPredicted)
	p.insert(wholePrefill{
		ticket: id, due: now.Add(takes), latest: now.Add(stallFactor * takes), isUnseen: t.prompt != nil,
	})
	p.armTimer(now)
}

func (p *prefills) armTimer(now time.Time) {
	if len(p.byDue) == 0 || !p.timerAt.IsZero() && !p.byDue[0].due.Before(p.timerAt) {
		return
	}
	p.timerAt = p.byDue[0].due
	if wait := p.timerAt.Sub(now); p.timer == nil {
		p.timer = p.r.sendAfter(wait, prefillTimer{})
	} else {
		p.timer.Reset(wait)
	}
}

func (p *prefills) onTimer() {
	now := time.Now()
	p.timerAt = time.Time{}
	for len(p.byDue) > 0 && !now.Before(p.byDue[0].due) {
		e := p.byDue[0]
		p.byDue = slices.Delete(p.byDue, 0, 1)
		if e.due.Before(e.latest) && p.awaitsEvents(&e) {
			e.due = e.latest
			p.insert(e)
			continue
		}
		p.predictFirstToken(e.ticket, e.due)
	}
	p.armTimer(now)
}

// awaitsEvents says whether the engine's events will show the end of the prompt, and have not yet.
func (p *prefills) awaitsEvents(e *wholePrefill) bool {
	return p.r.account.tickets[e.ticket] != nil && e.isUnseen && p.r.kv.health.isLive &&
		p.r.app.Routing.Identity == app.IdentityTokens
}

// onPromptShown ends the prefill of a prompt that the events show now. Events that showed it before say
// nothing about its prefill.
func (p *prefills) onPromptShown(m promptShown) {
	i := slices.IndexFunc(p.byDue, func(e wholePrefill) bool { return e.ticket == m.ticket })
	switch {
	case i < 0:
	case m.wasBefore:
		p.byDue[i].isUnseen = false
	default:
		p.byDue = slices.Delete(p.byDue, i, i+1)
		p.predictFirstToken(m.ticket, time.Now())
	}
}

// predictFirstToken emits that a ticket's prefill was over at an instant, by prediction: the engine has not
// shown it.
func (p *prefills) predictFirstToken(id uint64, at time.Time) {
	if t, first := p.r.account.markDecoding(id, true); first {
		p.r.emitRequestRecord(msg.RecFirstToken, &t.req, msg.CausePredicted, at)
	}
}
