package routing

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
)

// The vector of the page: overlap 2, 5, 8 of 10 blocks, decode 10, 5, 9, weight 1 ⇒ 18, 10, 11.
func TestKVVectorOfThePage(t *testing.T) {
	const b = 16
	q := &Request{Tokens: 10 * b}
	rk := &Rank{BlockSize: b}
	for i, want := range []float64{18, 10, 11} {
		overlap, decode := []int64{2, 5, 8}[i], []int64{10, 5, 9}[i]
		assert.InDelta(t, want, total(kvTerms(q, rk, overlap*b, decode, 1)), 0)
	}
}

// The same through the whole router, with the request's own ten new blocks on top of each decode term.
func TestKVVectorThroughTheRouter(t *testing.T) {
	r := kvRouter(t, KV{Weight: 1})
	q := kvRequest()
	d := r.Explain(q)
	assert.Equal(t, []RankID{ID(0, 1)}, d.Ranked)
	assert.Equal(t, []Term{
		{Rank: ID(0, 0), Name: "prefill_blocks", Unit: "blocks", Raw: 8, Weight: 1, Value: 8},
		{Rank: ID(0, 0), Name: "decode_blocks", Unit: "blocks", Raw: 20, Weight: 1, Value: 20},
		{Rank: ID(0, 1), Name: "prefill_blocks", Unit: "blocks", Raw: 5, Weight: 1, Value: 5},
		{Rank: ID(0, 1), Name: "decode_blocks", Unit: "blocks", Raw: 15, Weight: 1, Value: 15},
		{Rank: ID(0, 2), Name: "prefill_blocks", Unit: "blocks", Raw: 2, Weight: 1, Value: 2},
		{Rank: ID(0, 2), Name: "decode_blocks", Unit: "blocks", Raw: 19, Weight: 1, Value: 19},
	}, d.Terms)
	assert.Equal(t, []PotentialLoad{{ID(0, 0), 128, 20}, {ID(0, 1), 80, 15}, {ID(0, 2), 32, 19}},
		r.PotentialLoads(q))
}

// kvRouter has three ranks with 10, 5 and 9 blocks decoding.
func kvRouter(t *testing.T, p Policy) *Router {
	t.Helper()
	r := routerWith(p, 3, 100)
	for i, blocks := range []int{10, 5, 9} {
		r.Observe(&Event{
			Kind: EvAdmitted, Rank: ID(0, i), ReqID: uint64(100 + i), Incarnation: 7, Seq: 1,
			Tokens: blocks * 16,
		})
		r.Observe(&Event{Kind: EvFirstToken, Rank: ID(0, i), ReqID: uint64(100 + i), Incarnation: 7, Seq: 2})
	}
	return r
}

func kvRequest() *Request {
	return &Request{
		ID: 1, Tokens: 160,
		Hits: []Hit{
			{Rank: ID(0, 0), Tokens: 32},
			{Rank: ID(0, 1), Tokens: 80},
			{Rank: ID(0, 2), Tokens: 128},
		},
	}
}

func TestKVOverridesHoldForOneRequest(t *testing.T) {
	r := kvRouter(t, KV{Weight: 1})
	q := kvRequest()
	q.Override = &Override{OverlapScoreWeight: 32, HasOverlapScoreWeight: true}
	assert.Equal(t, ID(0, 2), r.Explain(q).Ranked[0], "the cache counts for more")
	q.Override = &Override{HasOverlapScoreWeight: true}
	assert.Equal(t, ID(0, 1), r.Explain(q).Ranked[0], "0 is pure load")
	q.Override = nil
	assert.Equal(t, ID(0, 1), r.Explain(q).Ranked[0])
	q.Override = &Override{RouterTemperature: math.Inf(1), HasRouterTemperature: true}
	assert.Equal(t, ReasonSampled, r.Explain(q).Reason)
}

// Blocks that active sequences share count once; they go with the last of them.
func TestKVSharedBlocksCountOnce(t *testing.T) {
	r := routerWith(KV{Weight: 1}, 1, 100)
	hashes := chain([]byte("0123456789"))
	decode := func(q *Request) int64 { return r.PotentialLoads(q)[0].DecodeBlocks }
	q := Request{ID: 1, Tokens: 165, Blocks: hashes} // ten whole blocks and a part
	assert.Equal(t, int64(11), decode(&q))
	pick(r, q)
	assert.Equal(t, int64(12), decode(&q), "only the partial block is new")
	other := Request{ID: 2, Tokens: 160, Blocks: chain([]byte("01234abcde"))}
	assert.Equal(t, int64(16), decode(&other))
	pick(r, other)
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 1})
	queueOrReject := Request{ID: 3}
	assert.Equal(t, int64(10), decode(&queueOrReject))
	r.Observe(&Event{Kind: EvUndo, Rank: ID(0, 0), ReqID: 2})
	assert.Equal(t, int64(0), decode(&queueOrReject))
}

// T > 0 draws with the probabilities of the softmax over min–max scaled costs; all equal is uniform.
func TestKVTemperature(t *testing.T) {
	const draws = 20000
	v := View{Ranks: []Rank{
		{ID: ID(0, 0), Ready: true, MaxOngoing: 9, Load: Load{Q: 0}},
		{ID: ID(0, 1), Ready: true, MaxOngoing: 9, Load: Load{Q: 160}},
		{ID: ID(0, 2), Ready: true, MaxOngoing: 9, Load: Load{Q: 320}},
		{ID: ID(0, 3), MaxOngoing: 9},
	}}
	share := func(p KV) [4]float64 {
		var out [4]float64
		r := seeded(3)
		var d Decision
		for range draws {
			p.Decide(&Request{Tokens: 16}, &v, nil, r, &d)
			out[d.Ranked[0].Rank()] += 1.0 / draws
		}
		return out
	}
	norm := 1 + math.Exp(-1) + math.Exp(-2)
	got := share(KV{Weight: 1, Temperature: 0.5})
	assert.InDelta(t, 1/norm, got[0], 0.02)
	assert.InDelta(t, math.Exp(-1)/norm, got[1], 0.02)
	assert.InDelta(t, math.Exp(-2)/norm, got[2], 0.02)
	assert.Zero(t, got[3])
	got = share(KV{Weight: 0, NoTrack: true, Temperature: 1})
	for _, s := range got[:3] {
		assert.InDelta(t, 1.0/3, s, 0.02)
	}
}
