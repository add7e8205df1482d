package dpserver

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// ticket is one request a rank has in hand.
type ticket struct {
	req       msg.OpenRequest
	weight    int              // sequences
	stopCtx   func() bool      // ends the watch of the admission's context
	blocks    []uint64         // of the prompt, as the record of what was sent has them; empty if nobody asks
	hitBlocks int              // leading blocks that the sender expected in the cache
	sent      kvindex.Recorded // what was written down
	admitted  time.Time        // when it was granted
	alone     time.Duration    // its prefill by itself, as predicted
	predicted time.Duration    // its prefill with all that was in front of it; 0: it is not predicted
	assumed   bool             // its prefill is over by prediction: nobody has seen a first token
}

// hasFirstToken says that a first token of the ticket was seen.
func (t *ticket) hasFirstToken() bool { return t.req.Decoding && !t.assumed }

// firstTokenAt is when its first token came: as told, if that is between its admission and now; now, if nothing is told.
func (t *ticket) firstTokenAt(told, now time.Time) time.Time {
	switch {
	case told.IsZero(), told.After(now):
		return now
	case told.Before(t.admitted):
		return t.admitted
	default:
		return told
	}
}

// uncached is the tokens that its prefill computes.
func (t *ticket) uncached() int { return max(t.req.Tokens-t.req.Hit, 0) }

// keptBlocks is the longest list of blocks that a ticket keeps for its next request: a prompt of 512 KiB.
const keptBlocks = 8192

// account is every open ticket of an incarnation.
type account struct {
	tickets       map[uint64]*ticket
	free          []*ticket     // ended ones, for re-use: admission allocates nothing after warm-up but the watch of its context
	weight        int           // sequences of all
	prefillTokens int           // tokens of requests whose first token was not seen: the prefill in front at most
	prefillWork   int           // uncached tokens of requests whose prefill is not over, seen or predicted
	prefillAlone  time.Duration // of the same requests, one after the other
}

func newAccount() account { return account{tickets: map[uint64]*ticket{}} }

func (a *account) open() int { return len(a.tickets) }

func (a *account) add(id uint64, req msg.OpenRequest, weight int, stopCtx func() bool) *ticket {
	var t *ticket
	if n := len(a.free); n > 0 {
		t, a.free = a.free[n-1], a.free[:n-1]
	} else {
		t = new(ticket)
	}
	*t = ticket{req: req, weight: weight, stopCtx: stopCtx, blocks: t.blocks[:0]}
	a.tickets[id] = t
	a.weight += weight
	a.prefillTokens += req.Tokens
	a.prefillWork += t.uncached()
	return t
}

// decoding marks a ticket's prefill as done; false if it was already, or the ticket is unknown.
func (a *account) decoding(id uint64) (*ticket, bool) {
	t := a.tickets[id]
	if t == nil || t.req.Decoding {
		return t, false
	}
	t.req.Decoding = true
	a.prefillTokens -= t.req.Tokens
	a.endPrefill(t)
	return t, true
}

// assumeDecoding is decoding by prediction. A first token that nobody has seen does not shorten the time that the rank has for it.
func (a *account) assumeDecoding(id uint64) (*ticket, bool) {
	t := a.tickets[id]
	if t == nil || t.req.Decoding {
		return t, false
	}
	t.req.Decoding, t.assumed = true, true
	a.endPrefill(t)
	return t, true
}

func (a *account) endPrefill(t *ticket) {
	a.prefillWork -= t.uncached()
	a.prefillAlone -= t.alone
}

// notePrefill notes how long the prefill of a ticket is predicted to take alone.
func (a *account) notePrefill(t *ticket, d time.Duration) {
	t.alone = d
	a.prefillAlone += d
}

// remove takes a ticket off the account; nil if it is unknown (lapsed, or of an incarnation before). The caller recycles it.
func (a *account) remove(id uint64) *ticket {
	t := a.tickets[id]
	if t == nil {
		return nil
	}
	delete(a.tickets, id)
	a.weight -= t.weight
	if !t.hasFirstToken() {
		a.prefillTokens -= t.req.Tokens
	}
	if !t.req.Decoding {
		a.endPrefill(t)
	}
	if t.stopCtx != nil {
		t.stopCtx()
	}
	return t
}

// recycle keeps a removed ticket for a later request.
func (a *account) recycle(t *ticket) {
	if cap(t.blocks) > keptBlocks {
		t.blocks = nil
	}
	a.free = append(a.free, t)
}

// reset drops every ticket.
func (a *account) reset() {
	for id := range a.tickets {
		a.recycle(a.remove(id))
	}
}

// snapshot lists the requests in the order of their admission: in that order an engine computes their prompts.
func (a *account) snapshot() []msg.OpenRequest {
	out := make([]msg.OpenRequest, 0, len(a.tickets))
	for _, id := range slices.Sorted(maps.Keys(a.tickets)) {
		out = append(out, a.tickets[id].req)
	}
	return out
}
