package dpserver

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// turns shares the room of a full rank between the ingresses that wait for it: each has one waiting place, and freed room is held for
// the ingress whose turn it is, for a short time, so that an ingress that hears of it later than others gets as much. Nothing is held
// while no ingress waits. The value is a pure account: it reads no clock.
//
// The ingress is told of its room by Record.Turn. It may have several turns before it has taken the first: it is far, or places become
// free at the same time. A request of several sequences needs as many places: freed room is collected for it, and for no other ingress
// meanwhile, until there is enough.
type turns struct {
	places []waitingPlace // in the order of their turns
	held   int            // room held for all of them
	last   string         // the ingress that was offered room last
}

// waitingPlace is an ingress that waits for room.
type waitingPlace struct {
	ingress string
	need    int       // sequences of its next request
	held    int       // room held for it
	told    int       // of held: it was told that this is its own
	until   time.Time // it waits until then, unless it says so again
	due     time.Time // while told > 0: it takes some of it until then, or loses it
	barred  time.Time // no turn before: it did not take what it was told of
}

// Bounds of the turns.
const (
	maxPlaces    = 64                     // ingresses that wait at a time; more compete for room that nobody is offered
	offerLife    = 250 * time.Millisecond // for an ingress to take what it is offered: two ways over the network, and the upload of a prompt
	waitLife     = 3 * time.Second        // an ingress that waits says so every second
	refusedLife  = time.Second            // of a request that was refused as full: it may have gone elsewhere
	barredFor    = 5 * time.Second        // an ingress that does not take its offer has nobody for this rank, or is dead
	turnOfNobody = "/"                    // Record.Turn while there is no room, or it is collected: no node has this name
)

func (t *turns) find(ingress string) *waitingPlace {
	for i := range t.places {
		if t.places[i].ingress == ingress {
			return &t.places[i]
		}
	}
	return nil
}

// wait notes that an ingress waits: need is the weight of its request that was refused, 0 if it only says that requests wait.
func (t *turns) wait(now time.Time, ingress string, need int) {
	p := t.find(ingress)
	if p == nil {
		t.prune(now)
		if len(t.places) >= maxPlaces {
			return
		}
		t.places = append(t.places, waitingPlace{ingress: ingress, need: 1})
		p = &t.places[len(t.places)-1]
	}
	if need == 0 {
		p.until = now.Add(waitLife)
		return
	}
	if until := now.Add(refusedLife); until.After(p.until) {
		p.until = until
	}
	p.need = need
	t.hold(p, min(p.held, p.told+need))
}

// leave notes that an ingress waits no longer. freed says that room was held for it.
func (t *turns) leave(ingress string) (freed bool) {
	p := t.find(ingress)
	if p == nil {
		return false
	}
	freed = p.held > 0
	t.hold(p, 0)
	p.until, p.need = time.Time{}, 1
	return freed
}

// mayTake says whether an ingress may have need of the free room: what is held for others is not for it.
func (t *turns) mayTake(ingress string, need, free int) bool {
	if t.held == 0 {
		return need <= free
	}
	others := t.held
	if p := t.find(ingress); p != nil {
		others -= p.held
	}
	return need <= free-others
}

// take notes that an ingress was given room for n: what is held for it is used first.
func (t *turns) take(now time.Time, ingress string, n int) {
	p := t.find(ingress)
	if p == nil {
		return
	}
	told := max(p.told-n, 0)
	t.hold(p, max(p.held-n, 0))
	p.told, p.due, p.barred, p.need = told, now.Add(offerLife), time.Time{}, 1
}

// offer holds free room for the ingress whose turn it is, as much as its next request needs. It gives the ingress's name if there is
// enough, else "": nobody has a turn, or room is still collected.
func (t *turns) offer(now time.Time, free int) (ingress string) {
	t.prune(now)
	i := slices.IndexFunc(t.places, func(p waitingPlace) bool { return p.hasTurn(now) })
	if i < 0 {
		return ""
	}
	p := &t.places[i]
	t.hold(p, min(p.told+p.need, p.held+max(free-t.held, 0)))
	if p.held < p.told+p.need {
		return ""
	}
	if p.told == 0 {
		p.due = now.Add(offerLife)
	}
	p.told = p.held
	turn := *p
	t.places = append(slices.Delete(t.places, i, i+1), turn) // behind all others
	t.last = turn.ingress
	return t.last
}

// canOffer says whether offer would hold more room.
func (t *turns) canOffer(now time.Time, free int) bool {
	return free > t.held && slices.ContainsFunc(t.places, func(p waitingPlace) bool { return p.hasTurn(now) })
}

// hasTurn says that room may be held for the ingress.
func (p *waitingPlace) hasTurn(now time.Time) bool {
	return now.Before(p.until) && !now.Before(p.barred)
}

// expire ends the offers that were not taken in time, and the collecting for ingresses that say no longer that they wait.
func (t *turns) expire(now time.Time) {
	for i := range t.places {
		p := &t.places[i]
		switch {
		case p.held == 0:
		case p.told > 0 && !now.Before(p.due):
			t.hold(p, 0)
			p.barred, p.until, p.need = now.Add(barredFor), time.Time{}, 1
		case p.told == 0 && !now.Before(p.until):
			t.hold(p, 0)
		}
	}
}

// release holds nothing any more; the ingresses go on waiting.
func (t *turns) release() {
	for i := range t.places {
		t.hold(&t.places[i], 0)
	}
}

// next is when the next hold ends; false if nothing is held.
func (t *turns) next() (at time.Time, ok bool) {
	for i := range t.places {
		p := &t.places[i]
		if p.held == 0 {
			continue
		}
		end := p.due
		if p.told == 0 {
			end = p.until
		}
		if !ok || end.Before(at) {
			at, ok = end, true
		}
	}
	return at, ok
}

// whose says for whom the free room is: "" for everybody, turnOfNobody while there is none or it is collected.
func (t *turns) whose(free int) string {
	if free > t.held {
		return ""
	}
	if p := t.find(t.last); p != nil && p.told > 0 {
		return t.last
	}
	for i := range t.places {
		if t.places[i].told > 0 {
			return t.places[i].ingress
		}
	}
	return turnOfNobody
}

// hold changes what is held for a place.
func (t *turns) hold(p *waitingPlace, n int) {
	t.held += n - p.held
	p.held, p.told = n, min(p.told, n)
}

// prune drops the places of ingresses that do not wait.
func (t *turns) prune(now time.Time) {
	t.places = slices.DeleteFunc(t.places, func(p waitingPlace) bool {
		return p.held == 0 && !now.Before(p.until) && !now.Before(p.barred)
	})
}

// demand notes whether an ingress has requests that wait.
func (r *replica) demand(m *msg.Demand) {
	if m.Waits {
		r.turns.wait(time.Now(), m.Ingress, 0)
	} else if r.turns.leave(m.Ingress) {
		r.tellTurns()
	}
}

// passTurn holds free room for the ingress whose turn it is, and says for whom the free room is.
func (r *replica) passTurn() string {
	if len(r.turns.places) == 0 || r.vitals.phase != open || r.busy.on {
		return ""
	}
	now := time.Now()
	r.turns.offer(now, r.free())
	if at, ok := r.turns.next(); ok && (r.turnDue.IsZero() || at.Before(r.turnDue)) {
		r.turnDue = at
		r.after(at.Sub(now), turnOver{})
	}
	return r.turns.whose(r.free())
}

// tellTurns says that room is free again.
func (r *replica) tellTurns() {
	r.state("")
	r.offerRest()
}

// offerRest tells further ingresses of their turns: more than one place is free.
func (r *replica) offerRest() {
	if len(r.turns.places) == 0 || r.vitals.phase != open || r.busy.on {
		return
	}
	for range r.free() - r.turns.held { // each turn holds some of it
		if !r.turns.canOffer(time.Now(), r.free()) {
			return
		}
		r.state("")
	}
}

// onTurnOver frees the room that was held for ingresses that did not take it.
func (r *replica) onTurnOver() {
	r.turnDue = time.Time{}
	held := r.turns.held
	r.turns.expire(time.Now())
	if r.turns.held < held {
		r.tellTurns()
	} else if at, ok := r.turns.next(); ok {
		r.turnDue = at
		r.after(time.Until(at), turnOver{})
	}
}
