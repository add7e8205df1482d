package routing

import (
	"math/rand/v2"
	"slices"
)

// tier is a class of candidates. A policy takes the first tier that is not empty.
type tier uint8

const (
	tierLocal  tier = iota // eligible, with room, stream alive, on the ingress's own node
	tierOpen               // eligible, with room, stream alive
	tierSilent             // eligible, stream silent: an old "full" never blocks, admission has the last word
)

// isEligible reports whether q may go to rk: the rank is ready, not left out because its answers failed, not
// above busy_threshold, not tried, and has what q needs. It does not ask for room. Every policy calls it, so
// busy_threshold and the cap of ejected ranks hold under all policies.
func isEligible(q *Request, rk *Rank) bool {
	return rk.Serves() && !rk.Busy && (len(q.Tried) == 0 || !slices.Contains(q.Tried, rk.ID)) &&
		q.fits(rk.ID)
}

// Serves reports whether rk is ready and not left out because its answers failed.
func (rk *Rank) Serves() bool { return rk.Ready && !rk.LeftOut }

// maxLeftOut is how many of n ready ranks may be left out because their answers failed: 30 %, at least one,
// and never all of them. A failed answer may be the fault of its request, and if every engine answers with
// errors, clients should still see those answers.
func maxLeftOut(n int) int { return max(0, min(max(1, n*3/10), n-1)) }

// markLeftOut marks the ranks that get no requests because their answers failed: those ejected first, up
// to the cap. Other ejected ranks are used like every rank. changed reports whether a mark changed.
func (v *View) markLeftOut() (changed bool) {
	ready := 0
	for i := range v.Ranks {
		if v.Ranks[i].Ready {
			ready++
		}
	}
	most := maxLeftOut(ready)
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		out := rk.Ready && rk.Ejected > 0 && v.ejectedBefore(rk) < most
		changed = changed || out != rk.LeftOut
		rk.LeftOut = out
	}
	return changed
}

// ejectedBefore is how many ready ranks were ejected before rk. Equal places go by id.
func (v *View) ejectedBefore(rk *Rank) int {
	n := 0
	for i := range v.Ranks {
		o := &v.Ranks[i]
		if o.Ready && o.Ejected > 0 && (o.Ejected < rk.Ejected || o.Ejected == rk.Ejected && o.ID < rk.ID) {
			n++
		}
	}
	return n
}

// hasRoom reports whether rk has fewer open requests than max_ongoing_requests, as far as the view knows.
func hasRoom(rk *Rank) bool { return rk.Open() < rk.MaxOngoing }

// ongoing is rk.Load.O() without the copy of the Load, which would be a tenth of a pick.
func (rk *Rank) ongoing() int { return rk.Load.W + rk.Load.F + rk.Load.R }

// has reports whether rk is a candidate of the tier for q.
func (t tier) has(q *Request, rk *Rank) bool {
	switch t {
	case tierLocal:
		return rk.Local && !rk.Silent && hasRoom(rk) && isEligible(q, rk)
	case tierOpen:
		return !rk.Silent && hasRoom(rk) && isEligible(q, rk)
	case tierSilent:
		return rk.Silent && isEligible(q, rk)
	}
	return false
}

// count is the number of candidates of the tier.
func (t tier) count(q *Request, v *View) int {
	n := 0
	for i := range v.Ranks {
		if t.has(q, &v.Ranks[i]) {
			n++
		}
	}
	return n
}

// nth is the index of the k-th candidate (from 0) in id order, -1 if there are fewer.
func (t tier) nth(q *Request, v *View, k int) int {
	for i := range v.Ranks {
		if !t.has(q, &v.Ranks[i]) {
			continue
		}
		if k == 0 {
			return i
		}
		k--
	}
	return -1
}

// blindDraws is how often a draw goes over all ranks before the candidates are counted. With half of the
// ranks not eligible, all eight draws miss once in 256 picks.
const blindDraws = 8

// one draws a candidate uniformly; -1 if the tier is empty. It draws over all ranks and rejects misses: that
// is uniform over the candidates and reads one row instead of all.
func (t tier) one(q *Request, v *View, r *rand.Rand) int {
	for range min(blindDraws, len(v.Ranks)) {
		if i := r.IntN(len(v.Ranks)); t.has(q, &v.Ranks[i]) {
			return i
		}
	}
	n := t.count(q, v)
	if n == 0 {
		return -1
	}
	return t.nth(q, v, r.IntN(n))
}

// pair draws two distinct candidates, uniform over ordered pairs; j is -1 if there is only one, both are if
// there is none. A blind draw that gives up and the counted draw after it are both uniform, so their mixture
// is.
func (t tier) pair(q *Request, v *View, r *rand.Rand) (i, j int) {
	if i, j = t.blindPair(q, v, r); j >= 0 {
		return i, j
	}
	switch n := t.count(q, v); n {
	case 0:
		return -1, -1
	case 1:
		return t.nth(q, v, 0), -1
	default:
		a, b := r.IntN(n), r.IntN(n-1)
		if b >= a {
			b++
		}
		return t.nth(q, v, a), t.nth(q, v, b)
	}
}

// blindPair draws over all ranks; j is -1 if it gave up. One random word gives two draws.
func (t tier) blindPair(q *Request, v *View, r *rand.Rand) (i, j int) {
	i = -1
	if len(v.Ranks) < 2 {
		return i, -1
	}
	for range blindDraws / 2 {
		word := r.Uint64()
		for _, k := range [...]int{below(word>>32, len(v.Ranks)), below(word&halfWord, len(v.Ranks))} {
			switch {
			case k == i || !t.has(q, &v.Ranks[k]):
			case i < 0:
				i = k
			default:
				return i, k
			}
		}
	}
	return i, -1
}

const halfWord = 1<<32 - 1

// below maps 32 random bits to [0, n); the bias is below n/2^32, 2e-8 at 64 ranks.
func below(bits uint64, n int) int {
	return int(bits * uint64(n) >> 32)
}

// openTier is the tier that a load policy chooses from: open ranks, else silent ones. ok is false if both are
// empty.
func openTier(q *Request, v *View) (t tier, ok bool) {
	silent := false
	for i := range v.Ranks {
		if tierOpen.has(q, &v.Ranks[i]) {
			return tierOpen, true
		}
		silent = silent || tierSilent.has(q, &v.Ranks[i])
	}
	return tierSilent, silent
}

// gather is openTier with the rows of the tier listed.
func gather(q *Request, v *View, c *scratch) (t tier, ok bool) {
	rows := resize(&c.candidates, len(v.Ranks))
	n := 0
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		if !rk.Silent && hasRoom(rk) && isEligible(q, rk) {
			rows[n] = int32(i)
			n++
		}
	}
	if t = tierOpen; n == 0 {
		t = tierSilent
		for i := range v.Ranks {
			if tierSilent.has(q, &v.Ranks[i]) {
				rows[n] = int32(i)
				n++
			}
		}
	}
	c.tier, c.candidates = t, rows[:n]
	return t, n > 0
}

// Exclusion is why a rank does not get a request now. Its zero value is a candidate.
type Exclusion uint8

// The exclusions, in the order in which they are named: a rank may have several.
const (
	NotExcluded Exclusion = iota
	Tried                 // in Request.Tried
	Lacking               // not in Request.Only
	NotReady
	LeftOut   // ejected, and among the first of those
	AboveBusy // its KV usage is above busy_threshold
	SilentStream
	NoRoom
)

// Exclusions says for each row of v why q cannot go there now, by isEligible and the tier that load policies
// choose from. A policy may still prefer another rank, or know tiers of its own.
func (v *View) Exclusions(q *Request) []Exclusion {
	out := make([]Exclusion, len(v.Ranks))
	t, _ := openTier(q, v)
	for i := range v.Ranks {
		switch rk := &v.Ranks[i]; {
		case t.has(q, rk):
		case isEligible(q, rk) && rk.Silent:
			out[i] = SilentStream
		case isEligible(q, rk):
			out[i] = NoRoom
		case slices.Contains(q.Tried, rk.ID):
			out[i] = Tried
		case !q.fits(rk.ID):
			out[i] = Lacking
		case !rk.Ready:
			out[i] = NotReady
		case rk.LeftOut:
			out[i] = LeftOut
		default:
			out[i] = AboveBusy
		}
	}
	return out
}

// resetDecision empties d for a new decision and keeps its memory.
func resetDecision(d *Decision) {
	d.Kind, d.Reason, d.Disqualified = Reject, "", 0
	d.Ranked, d.Terms = d.Ranked[:0], d.Terms[:0]
}

// routeTo makes d a Route to rk, with the reason of its tier.
func routeTo(d *Decision, t tier, rk *Rank, reason string) {
	if t == tierSilent {
		reason = ReasonSilentFallback
	}
	d.Kind, d.Reason = Route, reason
	d.Ranked = append(d.Ranked, rk.ID)
}

// queueOrReject fills d when no tier has a candidate: Queue while a rank may get room, else Reject. DESIGN.md
// has the table.
func queueOrReject(q *Request, v *View, d *Decision) {
	eligible, ready, busy := false, false, false
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		if !q.fits(rk.ID) {
			continue
		}
		ready = ready || rk.Serves()
		eligible = eligible || isEligible(q, rk)
		busy = busy || rk.Serves() && rk.Busy && !slices.Contains(q.Tried, rk.ID)
	}
	switch {
	case eligible:
		d.Kind, d.Reason = Queue, ReasonNoRoom
	case v.OnTheWay > 0:
		d.Kind, d.Reason = Queue, ReasonOnTheWay
	case busy:
		d.Kind, d.Reason = Reject, ReasonAllBusy
	case ready:
		d.Kind, d.Reason = Reject, ReasonAllTried
	default:
		d.Kind, d.Reason = Reject, ReasonNoReadyRank
	}
}
