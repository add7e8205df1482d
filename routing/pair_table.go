package routing

// RankRef names one incarnation of a rank.
type RankRef struct {
	ID          RankID
	Incarnation uint64
}

// RefOf names the incarnation that is in the view.
func RefOf(rk *Rank) RankRef { return RankRef{rk.ID, rk.Incarnation} }

const (
	// leasedShare is the part of a prefill rank's KV cache that finished prompts may hold for decode ranks
	// that have not read them yet. A prefill rank that is full of them computes nothing until their leases
	// end.
	leasedShare = 0.5
	// leasedTokens is the bound where the size of the cache is not known.
	leasedTokens = 1 << 16
)

// PairTable holds what a pair decision needs to know beyond both pools' views: which ranks have met, and what
// prefill ranks hold for decode ranks. Rank numbers of the two pools may be equal, so a rank is always named
// together with its pool. The caller serializes all calls; the table reads no clock.
type PairTable struct {
	prewarm  bool
	met      map[pairKey]struct{}
	prefills map[RankRef]int // met decode ranks
	decodes  map[RankRef]int // met prefill ranks
	leased   map[RankRef]int64
}

type pairKey struct{ prefill, decode RankRef }

// IsFullOfLeases reports whether a prefill rank that holds so many tokens for decode ranks may not get a
// prompt of so many tokens more. capacity is the size of its KV cache in tokens, 0 if it is not known. A rank
// that holds nothing takes a prompt of any length.
func IsFullOfLeases(held, tokens, capacity int64) bool {
	most := int64(leasedTokens)
	if capacity > 0 {
		most = int64(leasedShare * float64(capacity))
	}
	return held > 0 && held+tokens > most
}

// NewPairTable is an empty table. With prewarm, only pairs that SetMet was called for are used; transfers
// whose engines need no handshake do without.
func NewPairTable(prewarm bool) *PairTable {
	return &PairTable{
		prewarm: prewarm, met: map[pairKey]struct{}{}, prefills: map[RankRef]int{},
		decodes: map[RankRef]int{}, leased: map[RankRef]int64{},
	}
}

// SetMet records that a first transfer from p to d has ended well since both started.
func (t *PairTable) SetMet(p, d RankRef) {
	key := pairKey{p, d}
	if _, ok := t.met[key]; ok {
		return
	}
	t.met[key] = struct{}{}
	t.prefills[p]++
	t.decodes[d]++
}

// HasMet reports whether p and d may have a client's request.
func (t *PairTable) HasMet(p, d RankRef) bool {
	if !t.prewarm {
		return true
	}
	_, ok := t.met[pairKey{p, d}]
	return ok
}

// hasPartner reports whether any prefill rank has met the decode rank.
func (t *PairTable) hasPartner(d *Rank) bool { return !t.prewarm || t.decodes[RefOf(d)] > 0 }

// ForgetPrefill drops an incarnation of a prefill rank that is gone, with its leases.
func (t *PairTable) ForgetPrefill(p RankRef) {
	delete(t.leased, p)
	t.forget(func(k pairKey) bool { return k.prefill == p })
}

// ForgetDecode drops an incarnation of a decode rank that is gone.
func (t *PairTable) ForgetDecode(d RankRef) {
	t.forget(func(k pairKey) bool { return k.decode == d })
}

func (t *PairTable) forget(isGone func(pairKey) bool) {
	for key := range t.met {
		if isGone(key) {
			delete(t.met, key)
			subtract(t.prefills, key.prefill, 1)
			subtract(t.decodes, key.decode, 1)
		}
	}
}

// Lease counts tokens that p holds for a decode rank, from the dispatch of the prefill leg on.
func (t *PairTable) Lease(p RankRef, tokens int) { t.leased[p] += int64(max(0, tokens)) }

// Release ends a Lease of as many tokens. One of an incarnation that is gone changes nothing.
func (t *PairTable) Release(p RankRef, tokens int) { subtract(t.leased, p, int64(max(0, tokens))) }

// subtract takes n off a count, which goes when it is 0.
func subtract[N int | int64](counts map[RankRef]N, ref RankRef, n N) {
	if left := counts[ref] - n; left > 0 {
		counts[ref] = left
	} else {
		delete(counts, ref)
	}
}

// Leased is the number of tokens that rk holds for decode ranks.
func (t *PairTable) Leased(rk *Rank) int64 {
	if len(t.leased) == 0 {
		return 0
	}
	return t.leased[RefOf(rk)]
}

// skipPrefill is why a prefill rank may not get a prompt of so many tokens whatever the decode rank; "" if it
// may.
func (t *PairTable) skipPrefill(rk *Rank, tokens int) string {
	switch {
	case IsFullOfLeases(t.Leased(rk), int64(tokens), rk.Capacity):
		return PairLeasesFull
	case t.prewarm && t.prefills[RefOf(rk)] == 0:
		return PairNotPrewarmed
	}
	return ""
}

// skipPair is why two ranks may not be paired; "" if they may.
func (t *PairTable) skipPair(p, d *Rank) string {
	if t.HasMet(RefOf(p), RefOf(d)) {
		return ""
	}
	return PairNotPrewarmed
}
