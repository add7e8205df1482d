package routing

import (
	"math"
	"time"
)

// account is what a Router knows of one rank's open requests: the replica's own account as its stream tells
// it, plus the bumps of this ingress that the stream has not confirmed yet (Router states the rule). Each
// request counts once: its bump becomes the replica's entry when the replica reports the request.
//
// The row's Q, Pairs and Computed hold the prefill work that is left at the instant of the last reckon.
// Before the account changes the prompt that is computed first, it adds the work that reckon subtracted to
// the row again.
type account struct {
	opens opens
	// of the opens whose prompt is not known to be computed; empty if nothing is reckoned
	queue   prefills
	reckons bool           // the policy reads prefill work
	clock   *time.Duration // the view's time
	// when the record at hand happened, on the view's clock; 0 = what is at hand is no record
	when    time.Duration
	work    prefillWork // that all ingresses sent to the rank
	remote  rankClock   // the rank's clock
	pace    decodePace  // a request whose tokens are timed
	model   *costModel  // of the application; nil in tests of an account alone
	service *service    // likewise
	// the newest answers that failed
	failures []failure
	lastSeq  uint64 // stream number of the last record applied
	tickets  int    // entries that are ticketed
	minSeq   uint64 // no ticketed entry has a smaller seq; meaningful while tickets > 0
	spare    []open // memory of expire and forget
	log      *opensLog
}

// bump counts an own dispatch, unless the request is on this rank already.
func (a *account) bump(rk *Rank, key uint64, tokens, hit int) {
	a.send(rk, open{
		key: key, tokens: clampTokens(tokens), hit: clampHit(hit, tokens), phase: bumped, mine: true,
		sent: *a.clock,
	})
}

// send counts a request that an ingress sent to the rank.
func (a *account) send(rk *Rank, o open) {
	a.insert(rk, o)
	if a.reckons && a.model != nil {
		a.work.add(a.model.prefill*a.model.base.Prefill(int(o.tokens-o.hit), int(o.hit)), *a.clock)
	}
}

// ticket records that the replica admitted the dispatch as number seq. If the stream has already passed seq,
// the replica's account is right and the bump is dropped.
func (a *account) ticket(rk *Rank, key, seq uint64) (freed bool) {
	o := a.opens.get(key)
	if o == nil || !o.own() {
		return false
	}
	if seq <= a.lastSeq {
		a.drop(rk, o)
		return true
	}
	if o.phase != ticketed {
		a.tickets++
	}
	if a.tickets == 1 || seq < a.minSeq {
		a.minSeq = seq
	}
	a.add(rk, o, -1)
	o.phase, o.seq = ticketed, seq
	o.ticketAt(*a.clock)
	a.enqueue(o)
	a.add(rk, o, 1)
	return false
}

// undo removes a bump. An entry of the replica's account stays: the stream reports its end.
func (a *account) undo(rk *Rank, key uint64) (freed bool) {
	o := a.opens.get(key)
	if o == nil || !o.own() {
		return false
	}
	a.drop(rk, o)
	return true
}

// admit counts a request that the replica reports. A bump under the same key becomes the replica's entry.
func (a *account) admit(rk *Rank, key uint64, tokens, hit int) {
	o := a.opens.get(key)
	switch {
	case o == nil:
		a.send(rk, open{
			key: key, tokens: clampTokens(tokens), hit: clampHit(hit, tokens), phase: admitted, sent: a.at(),
		})
	case o.own():
		a.add(rk, o, -1)
		a.clearTicket(o)
		o.phase, o.tokens, o.hit = admitted, clampTokens(tokens), clampHit(hit, tokens)
		a.enqueue(o)
		a.confirm(rk, o)
		a.add(rk, o, 1)
	}
}

// firstToken moves a request from waiting to decoding. If the token is only assumed (seen is false), it is no
// measurement of the rank's speed.
func (a *account) firstToken(rk *Rank, key uint64, seen bool) {
	if o := a.opens.get(key); o != nil && o.phase != decoding {
		if seen {
			a.queue.measure(o.slot, rk, a.at(), a.model)
			if p := &a.pace; p.answer == 0 || a.opens.get(p.answer) == nil {
				p.answer, p.first = key, a.at()
			}
		}
		if a.service != nil && o.sent != 0 {
			learn(&a.service.prefill, a.at()-o.sent)
		}
		a.endPrefill(rk, o, decoding)
	}
}

// endPrefill moves a request from waiting to a phase behind its prefill.
func (a *account) endPrefill(rk *Rank, o *open, to phase) {
	a.dequeue(rk, o)
	a.add(rk, o, -1)
	a.clearTicket(o)
	o.phase = to
	a.add(rk, o, 1)
}

// prefillDone moves an own dispatch from waiting to decoding because its caller says so.
func (a *account) prefillDone(rk *Rank, key uint64) (known bool) {
	o := a.opens.get(key)
	if o == nil || !o.own() {
		return false
	}
	a.endPrefill(rk, o, held)
	return true
}

// progress sets a request's output to n tokens; a smaller n is ignored.
func (a *account) progress(rk *Rank, key uint64, n int) {
	a.firstToken(rk, key, true)
	if o := a.opens.get(key); o != nil && clampTokens(n) > o.out {
		a.timeTokens(rk, o, clampTokens(n))
		a.add(rk, o, -1)
		o.out = clampTokens(n)
		a.add(rk, o, 1)
	}
}

// at is the time of the record that is being applied, or the view's time.
func (a *account) at() time.Duration {
	if a.when != 0 {
		return a.when
	}
	return *a.clock
}

// place sets the time at which a record happened and updates the rank's Lag, the age of its records at
// arrival.
func (a *account) place(rk *Rank, e *Event) {
	now := *a.clock
	if o := a.opens.get(e.ReqID); e.At != 0 && e.Kind == EvAdmitted && o != nil && o.own() {
		a.remote.learn(e.At, o.sent, o.admittedBy(now), now)
	}
	when, sure := a.remote.place(e.At, now)
	if a.when = when; sure {
		rk.Lag += (now - when - rk.Lag) / lagMemory
	}
}

// finish ends a request, whatever its phase.
func (a *account) finish(rk *Rank, e *Event) (freed bool) {
	o := a.opens.get(e.ReqID)
	if o == nil {
		return false
	}
	if p := &a.pace; p.answer == e.ReqID && a.reckons && a.model != nil && e.Out > 1 {
		decodes, context := rk.decodes()
		took := float64(a.at()-p.first) / float64(time.Millisecond)
		a.model.addAnswer(took, float64(e.Out-1)*a.model.base.Step(0, decodes, int(context), 0), a.at())
	}
	a.end(o, e.End)
	a.drop(rk, o)
	return true
}

// advanceStream records that the stream is at seq and drops the bumps whose ticket is not above it. Normally
// there are none, because the Admitted record turned them into entries; after a gap the stream never named
// them.
func (a *account) advanceStream(rk *Rank, seq uint64) (freed bool) {
	a.lastSeq = max(a.lastSeq, seq)
	if a.tickets == 0 || a.minSeq > seq {
		return false
	}
	return a.expire(rk, seq)
}

// expire drops every ticketed entry with a number up to seq and finds the smallest number above it.
func (a *account) expire(rk *Rank, seq uint64) (freed bool) {
	late := a.spare[:0]
	var least uint64
	for i := range a.opens.cells {
		o := &a.opens.cells[i]
		switch {
		case o.phase != ticketed:
		case o.seq <= seq:
			late = append(late, *o)
		case least == 0 || o.seq < least:
			least = o.seq
		}
	}
	for i := range late {
		a.drop(rk, &late[i])
	}
	a.spare, a.minSeq = late, least
	return len(late) > 0
}

// reset replaces the account by a snapshot taken at seq. same (the incarnation goes on) spares the own bumps
// that the snapshot cannot know of, those without a ticket and those whose ticket is above seq, and remembers
// which of its requests are own.
func (a *account) reset(rk *Rank, snapshot []Open, seq uint64, same bool) {
	old, log := a.opens, a.log
	a.opens, a.log = opens{}, nil
	a.tickets, a.lastSeq, rk.Load, rk.Pairs, rk.Bumps, rk.Computed = 0, seq, Load{}, 0, Bumps{}, Prompts{}
	rk.Failed = Load{}
	a.queue.clear(same)
	if a.pace = (decodePace{decode: a.pace.decode}); !same {
		a.pace, a.remote, a.failures, a.work = decodePace{}, rankClock{}, nil, prefillWork{}
	}
	for i := range snapshot {
		s := &snapshot[i]
		before := old.get(s.ReqID)
		a.load(rk, s, same && before != nil && before.mine)
	}
	for i := range old.cells {
		o := &old.cells[i]
		if same && (o.phase == bumped || o.phase == held || o.phase == ticketed && o.seq > seq) {
			a.keep(rk, o)
		}
	}
	a.log = log
	a.logDifference(rk.ID, &old)
}

func (a *account) load(rk *Rank, s *Open, mine bool) {
	a.insert(rk, open{
		key: s.ReqID, tokens: clampTokens(s.Tokens), hit: clampHit(s.Hit, s.Tokens), phase: admitted,
		mine: mine,
	})
	if s.Decoding || s.Out > 0 {
		a.progress(rk, s.ReqID, s.Out)
	}
}

// keep copies a bump from the previous table.
func (a *account) keep(rk *Rank, o *open) {
	if a.insert(rk, *o); o.phase != ticketed || a.opens.get(o.key).phase != ticketed {
		return
	}
	if a.tickets++; a.tickets == 1 || o.seq < a.minSeq {
		a.minSeq = o.seq
	}
}

// forget drops the own dispatches that the replica has not confirmed.
func (a *account) forget(rk *Rank) {
	a.failures = nil
	a.spare = a.spare[:0]
	for i := range a.opens.cells {
		if o := &a.opens.cells[i]; o.own() {
			a.spare = append(a.spare, *o)
		}
	}
	for i := range a.spare {
		a.drop(rk, &a.spare[i])
	}
}

func (a *account) insert(rk *Rank, o open) {
	o.slot = 0
	if a.enqueue(&o); !a.opens.add(o) {
		a.dequeue(rk, &o)
		return
	}
	a.add(rk, &o, 1)
	a.log.opened(rk.ID, &o)
}

// drop takes o out of load and table. o may point into the table.
func (a *account) drop(rk *Rank, o *open) {
	key := o.key
	a.dequeue(rk, o)
	a.add(rk, o, -1)
	a.clearTicket(o)
	a.opens.remove(key)
	a.log.closed(rk.ID, key)
}

// clearTicket removes o from the count of ticketed entries, if it is one. Stream numbers are unique, so the
// next smallest one is larger.
func (a *account) clearTicket(o *open) {
	if o.phase != ticketed {
		return
	}
	a.tickets--
	if o.seq == a.minSeq {
		a.minSeq++
	}
}

// enqueue appends o to the rank's queue of prompts, unless o is in it already or its prompt is computed.
func (a *account) enqueue(o *open) {
	if a.reckons && o.slot == 0 && o.hasPrefill() {
		o.slot = a.queue.join(o.tokens, o.hit, a.at())
		a.pace.key = 0 // its prefill stalls all decodes
	}
}

// dequeue removes o from the rank's queue of prompts. o may be a copy of its entry.
func (a *account) dequeue(rk *Rank, o *open) {
	if o.slot == 0 {
		return
	}
	a.queue.restore(rk)
	a.queue.leave(o.slot, a.at())
	o.slot = 0
}

// confirm updates o's prompt to the tokens that the replica reported. From here on all times of the prompt
// come from the stream, so the stream's delay cancels out in their differences.
func (a *account) confirm(rk *Rank, o *open) {
	if o.slot == 0 {
		return
	}
	a.queue.restore(rk)
	a.queue.renew(o.slot, o.tokens, o.hit, a.at())
}

// add adds o's load to the rank's row (sign 1) or subtracts it (sign -1).
func (a *account) add(rk *Rank, o *open, sign int) {
	rk.Load.add(o, sign)
	if o.mine {
		rk.Bumps.add(o, sign)
	}
	if o.hasPrefill() {
		rk.Pairs += int64(sign) * o.pairs()
	}
	a.queue.front.rate = 0 // it goes by the row, and by what is first
}

func (b *Bumps) add(o *open, sign int) {
	if o.isBump() {
		s := int64(sign)
		b.N += sign
		b.Q += s * o.uncached()
		b.Kq += s * int64(o.tokens)
		b.Pairs += s * o.pairs()
	}
}

func (l *Load) add(o *open, sign int) {
	s := int64(sign)
	if !o.hasPrefill() {
		l.R += sign
		l.K += s * (int64(o.tokens) + int64(o.out))
		return
	}
	n := l.W + l.F + sign
	l.F = min(n, 1) // the first of them is being computed
	l.W = n - l.F
	l.Q += s * o.uncached()
	l.Kq += s * int64(o.tokens)
}

// clampHit limits a hit to 0..tokens-1: an engine always computes the last token.
func clampHit(hit, tokens int) int32 { return clampTokens(min(hit, int(clampTokens(tokens))-1)) }

// clampTokens limits a token count to 0..2^31-1.
func clampTokens(n int) int32 { return int32(min(max(n, 0), math.MaxInt32)) }

// logDifference logs the requests that are only in before as closed, and those that are only in the account
// as opened.
func (a *account) logDifference(rank RankID, before *opens) {
	if a.log == nil {
		return
	}
	for i := range before.cells {
		if o := &before.cells[i]; o.phase != free && a.opens.get(o.key) == nil {
			a.log.closed(rank, o.key)
		}
	}
	for i := range a.opens.cells {
		if o := &a.opens.cells[i]; o.phase != free && before.get(o.key) == nil {
			a.log.opened(rank, o)
		}
	}
}

// timeTokens learns from a report of o's tokens, n by now, if the rank had no prompt to compute since the
// report before.
func (a *account) timeTokens(rk *Rank, o *open, n int32) {
	p := &a.pace
	if !a.reckons || a.model == nil || a.when == 0 || a.queue.first != 0 {
		p.key = 0
		return
	}
	if p.key != o.key {
		if p.key == 0 || a.opens.get(p.key) == nil {
			p.key, p.out, p.since = o.key, n, a.when
		}
		return
	}
	observed := float64(a.when-p.since) / float64(time.Millisecond)
	if observed < leastSpan {
		return
	}
	b := &a.model.base
	decodes, context := rk.decodes()
	p.decode.learn(observed, float64(n-p.out)*b.Step(0, decodes, int(context), 0), a.when)
	p.out, p.since = n, a.when
	a.model.addDecodeSample(*a.clock)
}
