package dpserver

import (
	"cmp"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// prefills are the open tickets whose answers come as a whole and whose prefill is not over. Nobody sees a first token of theirs, so
// their prefill is taken as done after the predicted time of all prefill that the rank had in hand when they were admitted, at the speed
// that the rank has shown with streams. The engine's KV events correct that: the prefill is done when they show the end of the prompt, and where they would show it and do not, up to
// stallFactor times the predicted time is waited for them.
type prefills struct {
	list  []wholePrefill // by due
	timer *time.Timer    // one for all; it may ring for one that is over
	rings time.Time      // zero: it does not run
	pace  pace
}

// pace is how long streams waited for their first tokens, beside what was predicted for them. In both sums the last ten streams are two
// thirds.
type pace struct{ waited, predicted time.Duration }

const (
	paceMemory  = 0.9                   // what every older stream weighs beside the next newer one
	paceLeast   = 50 * time.Millisecond // predicted: a shorter wait is mostly that for the end of a step
	paceExtreme = 64                    // times as slow, or as fast, as predicted at most
)

func (p *pace) learn(waited, predicted time.Duration) {
	if predicted < paceLeast {
		return
	}
	if p.predicted == 0 {
		p.waited, p.predicted = paceLeast, paceLeast
	}
	p.waited = time.Duration(paceMemory*float64(p.waited)) + max(waited, 0)
	p.predicted = time.Duration(paceMemory*float64(p.predicted)) + predicted
}

// of is a predicted time at the rank's speed.
func (p *pace) of(predicted time.Duration) time.Duration {
	if p.predicted == 0 {
		return predicted
	}
	return time.Duration(float64(predicted) * min(max(float64(p.waited)/float64(p.predicted), 1.0/paceExtreme), paceExtreme))
}

type wholePrefill struct {
	ticket uint64
	due    time.Time
	latest time.Time // that due may become
	unseen bool      // events did not show the end of the prompt when it was admitted
}

// prefillDue says that the prefill of some ticket is due.
type prefillDue struct{}

// insert keeps the order; nearly always it appends.
func (p *prefills) insert(e wholePrefill) {
	at, _ := slices.BinarySearchFunc(p.list, e.due, func(e wholePrefill, due time.Time) int {
		return cmp.Or(e.due.Compare(due), -1) // behind those that are due at the same time
	})
	p.list = slices.Insert(p.list, at, e)
}

// remove forgets a ticket that is over.
func (p *prefills) remove(ticket uint64) {
	p.list = slices.DeleteFunc(p.list, func(e wholePrefill) bool { return e.ticket == ticket })
}

// stop forgets all of them, and ends the timer.
func (p *prefills) stop() {
	if p.timer != nil {
		p.timer.Stop()
	}
	p.list, p.rings = p.list[:0], time.Time{}
}

// predictPrefill predicts the end of the prefill of a ticket that was just admitted. The law gives many prompts too much time, as one long
// prompt (their tokens do not attend to each other) and as one after the other (they share steps): the shorter of both is nearer.
func (r *replica) predictPrefill(id uint64, t *ticket, whole bool) {
	if r.prefill == nil {
		return
	}
	r.account.notePrefill(t, r.prefill(t.uncached()))
	now := t.admitted
	t.predicted = min(r.prefill(r.account.prefillWork), r.account.prefillAlone)
	if !whole {
		return
	}
	takes := r.prefills.pace.of(t.predicted)
	r.prefills.insert(wholePrefill{
		ticket: id, due: now.Add(takes), latest: now.Add(stallFactor * takes), unseen: len(t.blocks) > 0 && !r.showsPrompt(t),
	})
	r.armPrefills(now)
}

// armPrefills sets the timer to the first that is due.
func (r *replica) armPrefills(now time.Time) {
	p := &r.prefills
	if len(p.list) == 0 || !p.rings.IsZero() && !p.list[0].due.Before(p.rings) {
		return
	}
	p.rings = p.list[0].due
	if wait := p.rings.Sub(now); p.timer == nil {
		p.timer = r.after(wait, prefillDue{})
	} else {
		p.timer.Reset(wait)
	}
}

func (r *replica) onPrefillDue() {
	p, now := &r.prefills, time.Now()
	p.rings = time.Time{}
	for len(p.list) > 0 && !now.Before(p.list[0].due) {
		e := p.list[0]
		p.list = slices.Delete(p.list, 0, 1)
		if e.due.Before(e.latest) && r.awaitsEvents(&e) {
			e.due = e.latest
			p.insert(e)
			continue
		}
		r.assumeFirstToken(e.ticket, e.due)
	}
	r.armPrefills(now)
}

// awaitsEvents says that the engine's events will show the end of the prompt, and have not yet.
func (r *replica) awaitsEvents(e *wholePrefill) bool {
	t := r.account.tickets[e.ticket]
	return t != nil && e.unseen && r.pulse.truth && r.app.Routing.Identity == app.IdentityTokens && !r.showsPrompt(t)
}

// showsPrompt says that the device holds the last full block of the ticket's prompt, by the engine's events.
func (r *replica) showsPrompt(t *ticket) bool {
	if r.kv == nil || len(t.blocks) == 0 {
		return false
	}
	c := r.kv.columns[kvindex.GPU]
	return c != nil && c.Holds(t.blocks[len(t.blocks)-1])
}

// endShownPrefills ends the prefills whose prompts the events show now.
func (r *replica) endShownPrefills() {
	p := &r.prefills
	for i := 0; i < len(p.list); {
		e := p.list[i]
		if t := r.account.tickets[e.ticket]; !e.unseen || t == nil || !r.showsPrompt(t) {
			i++
			continue
		}
		p.list = slices.Delete(p.list, i, i+1)
		r.assumeFirstToken(e.ticket, time.Now())
	}
}

// assumeFirstToken tells the stream that a ticket's prefill was over at an instant. The engine has not said so itself.
func (r *replica) assumeFirstToken(id uint64, at time.Time) {
	if t, first := r.account.assumeDecoding(id); first {
		r.record(msg.RecFirstToken, &t.req, msg.CausePredicted, at)
	}
}
