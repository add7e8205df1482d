package dpserver

import (
	"slices"
	"time"
)

// fairShare shares the free slots of a full rank between the ingresses that wait for it. Each has one waiting
// place. Freed room is held for a short time for the ingress that comes next, so that an ingress that hears
// of it later than others gets as much. While no ingress waits, no room is held. The type is a pure account:
// it reads no clock.
//
// Record.OfferedTo names the ingress that has room. An ingress may have several offers before it has taken
// the first: its messages may be slow, or places become free at the same time. A request of several sequences
// needs as many places: freed room is collected for it, and for no other ingress meanwhile, until it
// suffices.
type fairShare struct {
	places      []waitingPlace // in the order of their offers
	held        int            // sum of held over all places
	lastOffered string         // the ingress that was offered room last
}

// waitingPlace is an ingress that waits for room.
type waitingPlace struct {
	ingress     string
	need        int       // sequences of its next request
	held        int       // room held for it
	offered     int       // of held: published as the room of this ingress
	waitsUntil  time.Time // it waits until then, unless it renews its demand
	offerEnds   time.Time // while offered > 0: the ingress uses some of it until then, or loses it
	barredUntil time.Time // no offer before: it did not use an offer
}

// Bounds of the offers.
const (
	// ingresses that wait at a time; further ones compete for room that is not offered
	maxPlaces = 64
	// for an ingress to use its offer: two network round trips, and the upload of a prompt
	offerLife = 250 * time.Millisecond
	waitLife  = 3 * time.Second // an ingress with waiting requests sends its Demand every second
	// of a request that was refused as full: another rank may have taken it
	refusedLife = time.Second
	// an ingress that does not use its offer has no request for this rank, or has died
	barredFor = 5 * time.Second
	// Record.OfferedTo while there is no free room, or it is collected: no node has this name
	offeredToNone = "/"
)

func (t *fairShare) find(ingress string) *waitingPlace {
	for i := range t.places {
		if t.places[i].ingress == ingress {
			return &t.places[i]
		}
	}
	return nil
}

// addWait notes that an ingress waits. need is the weight of its refused request, 0 for a Demand.
func (t *fairShare) addWait(now time.Time, ingress string, need int) {
	p := t.find(ingress)
	if p == nil {
		t.prunePlaces(now)
		if len(t.places) >= maxPlaces {
			return
		}
		t.places = append(t.places, waitingPlace{ingress: ingress, need: 1})
		p = &t.places[len(t.places)-1]
	}
	if need == 0 {
		p.waitsUntil = now.Add(waitLife)
		return
	}
	if until := now.Add(refusedLife); until.After(p.waitsUntil) {
		p.waitsUntil = until
	}
	p.need = need
	t.setHeld(p, min(p.held, p.offered+need))
}

// removeWait notes that an ingress waits no longer. freed says whether room was held for it.
func (t *fairShare) removeWait(ingress string) (freed bool) {
	p := t.find(ingress)
	if p == nil {
		return false
	}
	freed = p.held > 0
	t.setHeld(p, 0)
	p.waitsUntil, p.need = time.Time{}, 1
	return freed
}

// canUse says whether an ingress may use need of the free room. Room that is held for other ingresses is not
// available to it.
func (t *fairShare) canUse(ingress string, need, free int) bool {
	if t.held == 0 {
		return need <= free
	}
	others := t.held
	if p := t.find(ingress); p != nil {
		others -= p.held
	}
	return need <= free-others
}

// useRoom notes that an ingress was given room for n sequences. The room that is held for it is used first.
func (t *fairShare) useRoom(now time.Time, ingress string, n int) {
	p := t.find(ingress)
	if p == nil {
		return
	}
	offered := max(p.offered-n, 0)
	t.setHeld(p, max(p.held-n, 0))
	p.offered, p.offerEnds, p.barredUntil, p.need = offered, now.Add(offerLife), time.Time{}, 1
}

// offerRoom holds free room for the ingress that comes next, as much as its next request needs. It returns
// the ingress's name if there is enough. Otherwise it returns "": no ingress can get an offer, or room is
// still collected.
func (t *fairShare) offerRoom(now time.Time, free int) (ingress string) {
	t.prunePlaces(now)
	i := slices.IndexFunc(t.places, func(p waitingPlace) bool { return p.isWaiting(now) })
	if i < 0 {
		return ""
	}
	p := &t.places[i]
	t.setHeld(p, min(p.offered+p.need, p.held+max(free-t.held, 0)))
	if p.held < p.offered+p.need {
		return ""
	}
	if p.offered == 0 {
		p.offerEnds = now.Add(offerLife)
	}
	p.offered = p.held
	next := *p
	t.places = append(slices.Delete(t.places, i, i+1), next) // behind all others
	t.lastOffered = next.ingress
	return t.lastOffered
}

// canOffer says whether offerRoom would hold more room.
func (t *fairShare) canOffer(now time.Time, free int) bool {
	isWaiting := func(p waitingPlace) bool { return p.isWaiting(now) }
	return free > t.held && slices.ContainsFunc(t.places, isWaiting)
}

func (p *waitingPlace) isWaiting(now time.Time) bool {
	return now.Before(p.waitsUntil) && !now.Before(p.barredUntil)
}

// expireOffers ends the offers that were not used in time, and the collecting for ingresses whose demand is
// over.
func (t *fairShare) expireOffers(now time.Time) {
	for i := range t.places {
		p := &t.places[i]
		switch {
		case p.held == 0:
		case p.offered > 0 && !now.Before(p.offerEnds):
			t.setHeld(p, 0)
			p.barredUntil, p.waitsUntil, p.need = now.Add(barredFor), time.Time{}, 1
		case p.offered == 0 && !now.Before(p.waitsUntil):
			t.setHeld(p, 0)
		}
	}
}

// releaseAll frees all held room; the ingresses keep their places.
func (t *fairShare) releaseAll() {
	for i := range t.places {
		t.setHeld(&t.places[i], 0)
	}
}

// nextExpiry is when the next hold ends; false if no room is held.
func (t *fairShare) nextExpiry() (at time.Time, ok bool) {
	for i := range t.places {
		p := &t.places[i]
		if p.held == 0 {
			continue
		}
		end := p.offerEnds
		if p.offered == 0 {
			end = p.waitsUntil
		}
		if !ok || end.Before(at) {
			at, ok = end, true
		}
	}
	return at, ok
}

// roomOwner says which ingress may use the free room: "" for every ingress, offeredToNone while there is none
// or it is collected.
func (t *fairShare) roomOwner(free int) string {
	if free > t.held {
		return ""
	}
	if p := t.find(t.lastOffered); p != nil && p.offered > 0 {
		return t.lastOffered
	}
	for i := range t.places {
		if t.places[i].offered > 0 {
			return t.places[i].ingress
		}
	}
	return offeredToNone
}

func (t *fairShare) setHeld(p *waitingPlace, n int) {
	t.held += n - p.held
	p.held, p.offered = n, min(p.offered, n)
}

// prunePlaces drops the places of ingresses that do not wait.
func (t *fairShare) prunePlaces(now time.Time) {
	t.places = slices.DeleteFunc(t.places, func(p waitingPlace) bool {
		return p.held == 0 && !now.Before(p.waitsUntil) && !now.Before(p.barredUntil)
	})
}
