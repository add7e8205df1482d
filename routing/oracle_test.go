package routing

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// oracle is a plain model of the bump rule (see Router): it keeps two maps per rank and sums everything anew.
type oracle struct{ ranks map[RankID]*oracleRank }

type oracleRank struct {
	epoch, incarnation, last uint64
	account                  map[uint64]oracleOpen
	bumps                    map[uint64]oracleBump
}

type oracleOpen struct {
	tokens, out, hit int
	decoding, mine   bool
}

type oracleBump struct {
	tokens, hit int
	seq         uint64 // of the ticket, 0 = none
	prefilled   bool   // its caller said so
}

// hitOf is what counts of a hit: at least one token is computed.
func hitOf(hit, tokens int) int { return max(0, min(hit, tokens-1)) }

// load is the row's Load, its own requests and its pairs.
func (o *oracleRank) load() (l Load, pairs int64) {
	waits := func(tokens, hit int) {
		u := int64(tokens - hit)
		l.W, l.Q, l.Kq = l.W+1, l.Q+u, l.Kq+int64(tokens)
		pairs += u*u + 2*u*int64(hit)
	}
	for _, b := range o.bumps {
		if b.prefilled {
			l.R, l.K = l.R+1, l.K+int64(b.tokens)
		} else {
			waits(b.tokens, b.hit)
		}
	}
	for _, a := range o.account {
		if a.decoding {
			l.R, l.K = l.R+1, l.K+int64(a.tokens+a.out)
		} else {
			waits(a.tokens, a.hit)
		}
	}
	l.F = min(l.W, 1) // the first of them is being computed
	l.W -= l.F
	return l, pairs
}

// apply is what the Router must do; it reports whether the event was in time.
func (o *oracle) apply(e *Event) bool {
	rk := o.ranks[e.Rank]
	switch e.Kind {
	case EvRankUp:
		return o.rankUp(e)
	case EvUndo:
		if rk != nil {
			delete(rk.bumps, e.ReqID)
		}
		return true
	default:
	}
	if rk == nil {
		return false
	}
	switch e.Kind {
	case EvDispatched:
		_, known := rk.account[e.ReqID]
		if _, bumped := rk.bumps[e.ReqID]; !known && !bumped {
			rk.bumps[e.ReqID] = oracleBump{tokens: e.Tokens, hit: hitOf(e.Hit, e.Tokens)}
		}
	case EvTicket:
		rk.ticket(e)
	case EvPrefillDone:
		b, bumped := rk.bumps[e.ReqID]
		if !bumped {
			return false
		}
		b.prefilled, b.seq = true, 0
		rk.bumps[e.ReqID] = b
	case EvRankDown:
		if e.Incarnation != 0 && e.Incarnation != rk.incarnation {
			return false
		}
		delete(o.ranks, e.Rank)
	default:
		return rk.record(e)
	}
	return true
}

func (o *oracle) rankUp(e *Event) bool {
	old := o.ranks[e.Rank]
	rk := &oracleRank{
		epoch: e.Epoch, incarnation: e.Incarnation, last: e.Seq,
		account: map[uint64]oracleOpen{}, bumps: map[uint64]oracleBump{},
	}
	for _, s := range e.Snapshot {
		a := oracleOpen{tokens: s.Tokens, out: s.Out, hit: hitOf(s.Hit, s.Tokens), decoding: s.Decoding ||
			s.Out > 0}
		if old != nil && old.epoch == e.Epoch && old.incarnation == e.Incarnation {
			_, bumped := old.bumps[s.ReqID]
			a.mine = bumped || old.account[s.ReqID].mine
		}
		rk.account[s.ReqID] = a
	}
	if old != nil && old.epoch == e.Epoch && old.incarnation == e.Incarnation {
		for key, b := range old.bumps {
			if _, known := rk.account[key]; !known && (b.seq == 0 || b.seq > e.Seq) {
				rk.bumps[key] = b
			}
		}
	}
	o.ranks[e.Rank] = rk
	return true
}

func (o *oracleRank) ticket(e *Event) {
	b, ok := o.bumps[e.ReqID]
	switch {
	case !ok:
	case e.Incarnation != o.incarnation || e.Seq <= o.last:
		delete(o.bumps, e.ReqID)
	default:
		b.seq, b.prefilled = e.Seq, false
		o.bumps[e.ReqID] = b
	}
}

func (o *oracleRank) record(e *Event) bool {
	if e.Incarnation != o.incarnation || e.Seq < o.last {
		return false
	}
	a, known := o.account[e.ReqID]
	b, bumped := o.bumps[e.ReqID]
	if bumped && e.Kind != EvFinished { // named by the stream: the bump becomes the replica's entry
		delete(o.bumps, e.ReqID)
		a, known = oracleOpen{tokens: b.tokens, hit: b.hit, mine: true}, true
		if e.Kind == EvAdmitted {
			a.tokens, a.hit = e.Tokens, hitOf(e.Hit, e.Tokens)
		}
	}
	switch e.Kind {
	case EvAdmitted:
		if !known {
			a = oracleOpen{tokens: e.Tokens, hit: hitOf(e.Hit, e.Tokens)}
		}
		o.account[e.ReqID] = a
	case EvFirstToken, EvProgress:
		if known {
			a.decoding = true
			if e.Kind == EvProgress {
				a.out = max(a.out, e.Out)
			}
			o.account[e.ReqID] = a
		}
	default: // EvFinished
		delete(o.account, e.ReqID)
		delete(o.bumps, e.ReqID)
	}
	o.last = max(o.last, e.Seq)
	for key, b := range o.bumps {
		if b.seq != 0 && b.seq <= o.last {
			delete(o.bumps, key)
		}
	}
	return true
}

// drawEvent is any event, sensible or not: the rules must hold for every order.
func drawEvent(t *rapid.T, seq uint64) Event {
	kinds := []EventKind{
		EvDispatched, EvDispatched, EvTicket, EvTicket, EvUndo, EvAdmitted, EvAdmitted, EvFirstToken,
		EvProgress, EvFinished, EvFinished, EvRankUp, EvRankDown,
		EvPrefillDone,
	}
	e := Event{
		Kind: rapid.SampledFrom(kinds).Draw(t, "kind"), Rank: ID(0, rapid.IntRange(0, 1).Draw(t, "rank")),
		ReqID: rapid.Uint64Range(0, 40).Draw(t, "key"), Tokens: rapid.IntRange(0, 9).Draw(t, "tokens"),
		Out: rapid.IntRange(0, 9).Draw(t, "out"),
		Hit: rapid.IntRange(0, 9).Draw(t, "hit"),
		Seq: seq + rapid.Uint64Range(0, 3).Draw(t, "ahead"), Epoch: 1, Incarnation: 1, MaxOngoing: 1 << 20,
	}
	if rapid.IntRange(0, 9).Draw(t, "other") == 0 {
		e.Incarnation = 2
	}
	if e.Kind == EvRankUp {
		for _, key := range rapid.SliceOfDistinct(rapid.Uint64Range(0, 40), rapid.ID[uint64]).
			Draw(t, "snapshot") {
			e.Snapshot = append(e.Snapshot,
				Open{
					ReqID: key, Tokens: int(key % 7), Hit: int(key % 5), Decoding: key%3 == 0,
					Out: int(key % 2),
				})
		}
	}
	return e
}

func TestAccountsMatchTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := NewRouter(rapid.SampledFrom([]Policy{PowerOfTwo{}, KV{Weight: 1}}).Draw(t, "policy"), 1)
		o := &oracle{ranks: map[RankID]*oracleRank{}}
		dropped, seq := uint64(0), uint64(1)
		for range rapid.IntRange(1, 150).Draw(t, "length") {
			e := drawEvent(t, seq)
			seq = max(seq, e.Seq) - min(seq-1, rapid.Uint64Range(0, 1).Draw(t, "back"))
			if !o.apply(&e) {
				dropped++
			}
			r.Observe(&e)
			require.Equal(t, dropped, r.dropped, "%+v", e)
			checkRouter(t, r, o)
		}
	})
}

func checkRouter(t *rapid.T, r *Router, o *oracle) {
	v := r.Snapshot()
	require.True(t, slices.IsSortedFunc(v.Ranks, func(a, b Rank) int { return int(a.ID) - int(b.ID) }))
	require.Len(t, v.Ranks, len(o.ranks))
	for i := range v.Ranks {
		want := o.ranks[v.Ranks[i].ID]
		load, pairs := want.load()
		require.Equal(t, load, v.Ranks[i].Load)
		require.Equal(t, pairs, v.Ranks[i].Pairs)
		a := &r.accounts[i]
		require.Equal(t, len(want.bumps)+len(want.account), a.opens.n)
		tickets := 0
		for _, b := range want.bumps {
			if b.seq != 0 {
				tickets++
				require.LessOrEqual(t, a.minSeq, b.seq)
			}
		}
		require.Equal(t, tickets, a.tickets)
	}
	checkFollowed(t, r)
}

// checkFollowed reports that kv's state knows exactly the requests that the accounts count.
func checkFollowed(t *rapid.T, r *Router) {
	st, ok := r.state.(*activeBlocks)
	if !ok {
		return
	}
	followed := 0
	for i := range r.accounts {
		id := r.view.Ranks[i].ID
		slot := int(st.slotOf.get(uint64(id)+1)) - 1
		require.GreaterOrEqual(t, slot, 0)
		blocks := int64(0)
		for _, o := range r.accounts[i].opens.cells {
			if o.phase != free {
				followed++
				require.NotZero(t, st.openOf.get(mix(o.key, slot)))
			}
		}
		for k := st.ranks[slot].list; k != 0; k = st.opens[k-1].next {
			blocks += st.opens[k-1].single
		}
		require.Equal(t, blocks, st.of(slot))
	}
	require.Equal(t, followed, st.openOf.n)
}

func TestOpensMatchAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var table opens
		want := map[uint64]int32{}
		// Few distinct homes: keys differ in multiples of 2^56 times the inverse of the multiplier, so chains
		// are long.
		key := rapid.Custom(func(t *rapid.T) uint64 {
			return (rapid.Uint64Range(0, 3).Draw(t, "home")<<60 | rapid.Uint64Range(0, 30).
				Draw(t, "low")) * inverse(fibonacci)
		})
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			k := key.Draw(t, "key")
			if _, ok := want[k]; ok {
				table.remove(k)
				delete(want, k)
			} else {
				table.add(open{key: k, tokens: int32(k % 97), phase: bumped})
				want[k] = int32(k % 97)
			}
			table.remove(key.Filter(func(x uint64) bool { _, ok := want[x]; return !ok }).Draw(t, "absent"))
			require.Equal(t, len(want), table.n)
			for k, tokens := range want {
				o := table.get(k)
				require.NotNil(t, o)
				require.Equal(t, tokens, o.tokens)
			}
		}
	})
}

// inverse is the multiplicative inverse of an odd number modulo 2^64 (Newton).
func inverse(x uint64) uint64 {
	y := x
	for range 5 {
		y *= 2 - x*y
	}
	return y
}
