package routing

import "math"

// account is what a Router knows of one rank's open requests: the replica's own account as its stream tells it, plus
// the bumps of this ingress that the stream has not confirmed yet (CONTRACTS 6). One request is counted once: a bump
// turns into the replica's entry when that is heard of, it is never beside it.
type account struct {
	opens   opens
	lastSeq uint64 // stream number of the last record applied
	tickets int    // entries that are ticketed
	minSeq  uint64 // no ticketed entry has a smaller seq; meaningful while tickets > 0
	spare   []open // memory of reset
}

// bump counts an own dispatch, unless the request is on this rank already.
func (a *account) bump(l *Load, key uint64, tokens int) {
	a.insert(l, open{key: key, tokens: small(tokens), phase: bumped})
}

// ticket says that the dispatch was admitted as number seq. Already applied ⇒ the replica's account stands.
func (a *account) ticket(l *Load, key, seq uint64) (freed bool) {
	o := a.opens.get(key)
	if o == nil || !o.own() {
		return false
	}
	if seq <= a.lastSeq {
		a.drop(l, o)
		return true
	}
	if o.phase == bumped {
		a.tickets++
	}
	if a.tickets == 1 || seq < a.minSeq {
		a.minSeq = seq
	}
	o.phase, o.seq = ticketed, seq
	return false
}

// undo takes a bump back. An entry of the replica's account stays: its stream will tell of the end.
func (a *account) undo(l *Load, key uint64) (freed bool) {
	o := a.opens.get(key)
	if o == nil || !o.own() {
		return false
	}
	a.drop(l, o)
	return true
}

// admit counts a request of the replica's account; a bump under the same key becomes it.
func (a *account) admit(l *Load, key uint64, tokens int) {
	o := a.opens.get(key)
	switch {
	case o == nil:
		a.insert(l, open{key: key, tokens: small(tokens), phase: admitted})
	case o.own():
		l.add(o, -1)
		a.settle(o)
		o.phase, o.tokens = admitted, small(tokens)
		l.add(o, 1)
	}
}

// firstToken moves a request from waiting to decoding.
func (a *account) firstToken(l *Load, key uint64) {
	if o := a.opens.get(key); o != nil && o.phase != decoding {
		l.add(o, -1)
		a.settle(o)
		o.phase = decoding
		l.add(o, 1)
	}
}

// progress says that a request has put out n tokens so far; it never goes back.
func (a *account) progress(l *Load, key uint64, n int) {
	a.firstToken(l, key)
	if o := a.opens.get(key); o != nil && small(n) > o.out {
		l.add(o, -1)
		o.out = small(n)
		l.add(o, 1)
	}
}

// finish ends a request, whatever its phase.
func (a *account) finish(l *Load, key uint64) (freed bool) {
	o := a.opens.get(key)
	if o == nil {
		return false
	}
	a.drop(l, o)
	return true
}

// reached notes that the stream is at seq and lets the bumps go whose ticket is not above it: normally none, because
// the Admitted record took them over; after a gap those that the stream never named.
func (a *account) reached(l *Load, seq uint64) (freed bool) {
	a.lastSeq = max(a.lastSeq, seq)
	if a.tickets == 0 || a.minSeq > seq {
		return false
	}
	return a.expire(l, seq)
}

// expire drops every ticketed entry with a number up to seq and finds the smallest number above it.
func (a *account) expire(l *Load, seq uint64) (freed bool) {
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
		a.drop(l, &late[i])
	}
	a.spare, a.minSeq = late, least
	return len(late) > 0
}

// reset replaces the account by a snapshot taken at seq. keepBumps (same incarnation) spares the own bumps that the
// snapshot cannot know of: those without a ticket, and those whose ticket is above seq.
func (a *account) reset(l *Load, snapshot []Open, seq uint64, keepBumps bool) {
	a.spare = a.spare[:0]
	for i := range a.opens.cells {
		o := a.opens.cells[i]
		if keepBumps && (o.phase == bumped || o.phase == ticketed && o.seq > seq) {
			a.spare = append(a.spare, o)
		}
	}
	a.opens.clear()
	a.tickets, a.lastSeq, *l = 0, seq, Load{}
	for i := range snapshot {
		a.load(l, &snapshot[i])
	}
	for _, o := range a.spare {
		a.bump(l, o.key, int(o.tokens))
		if o.phase == ticketed {
			a.ticket(l, o.key, o.seq)
		}
	}
}

func (a *account) load(l *Load, s *Open) {
	a.admit(l, s.ReqID, s.Tokens)
	if s.Decoding || s.Out > 0 {
		a.progress(l, s.ReqID, s.Out)
	}
}

func (a *account) insert(l *Load, o open) {
	if a.opens.add(o) {
		l.add(&o, 1)
	}
}

// drop takes o out of load and table.
func (a *account) drop(l *Load, o *open) {
	l.add(o, -1)
	a.settle(o)
	a.opens.remove(o.key)
}

// settle ends o's life as a ticketed entry, if it was one. Numbers are unique, so behind the smallest comes a larger one.
func (a *account) settle(o *open) {
	if o.phase != ticketed {
		return
	}
	a.tickets--
	if o.seq == a.minSeq {
		a.minSeq++
	}
}

// add puts what o weighs into l (sign 1) or takes it out (sign -1). Without a cache the whole prompt is uncached.
func (l *Load) add(o *open, sign int) {
	s := int64(sign)
	if o.phase == decoding {
		l.R += sign
		l.K += s * (int64(o.tokens) + int64(o.out))
		return
	}
	l.W += sign
	l.Q += s * int64(o.tokens)
	l.Kq += s * int64(o.tokens)
}

// small is a token count as an entry keeps it: not negative, and no prompt is longer than 2^31.
func small(n int) int32 { return int32(min(max(n, 0), math.MaxInt32)) }
