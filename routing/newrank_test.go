package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// newRankRouter has two ranks with requests in hand, and one that came up 100 s later.
func newRankRouter(p Policy) *Router {
	r := NewRouter(p, 5)
	for i := range 2 {
		e := up(ID(0, i), 256)
		for k := range 2 {
			e.Snapshot = append(e.Snapshot, Open{ReqID: uint64(100*k + i), Tokens: 500, Decoding: true})
		}
		r.Observe(e)
	}
	e := up(ID(0, 2), 256)
	e.Now = 100 * time.Second
	r.Observe(e)
	return r
}

func creditPolicies(t *testing.T) []Policy {
	return []Policy{newPolicy(t, "mex")}
}

// RA6: A new rank gets what has no home yet, until it has its share or has been there for a while; homes
// stay.
func TestANewRankGetsPromptsWithoutAHome(t *testing.T) {
	holder, fresh := ID(0, 0), ID(0, 2)
	half, most := []Hit{{Rank: holder, Tokens: 5000}}, []Hit{{Rank: holder, Tokens: 9000}}
	for _, p := range creditPolicies(t) {
		t.Run(p.Name(), func(t *testing.T) {
			ask := func(r *Router, now time.Duration, hits []Hit) RankID {
				d := r.Explain(&Request{ID: 1, Now: now, Tokens: 10_000, Hits: hits})
				sums := map[RankID]float64{}
				for _, term := range d.Terms {
					sums[term.Rank] += term.Value
				}
				for _, sum := range sums {
					assert.LessOrEqual(t, sums[d.Ranked[0]], sum)
				}
				return d.Ranked[0]
			}
			r := newRankRouter(p)
			assert.Equal(t, fresh, ask(r, 101*time.Second, half))
			assert.Equal(t, holder, ask(r, 101*time.Second, most), "a prompt that has a home goes there")
			assert.Equal(t, fresh, ask(r, 219*time.Second, half))
			assert.Equal(t, holder, ask(r, 221*time.Second, half), "no longer new")

			give := func(id uint64, tokens int) {
				q := Request{
					ID: id, Now: 101 * time.Second, Tokens: tokens, HasDirect: true, Direct: fresh,
					Force: true,
				}
				require.Equal(t, Route, pick(r, q).Kind)
			}
			r = newRankRouter(p)
			for id := range uint64(2) {
				give(900+id, 1)
				r.Observe(&Event{Kind: EvPrefillDone, Rank: fresh, ReqID: 900 + id})
			}
			assert.Equal(t, holder, ask(r, 102*time.Second, half), "it has as many requests as the others")

			r = newRankRouter(p)
			give(900, 10_000)
			assert.Equal(t, holder, ask(r, 101*time.Second, half), "what waits there counts in full")
		})
	}
}

// RA6: Ranks that begin together have equally empty caches: none of them is new.
func TestRanksThatBeginTogetherAreNotNew(t *testing.T) {
	for _, p := range creditPolicies(t) {
		r := NewRouter(p, 5)
		for i := range 3 {
			e := up(ID(0, i), 256)
			e.Now = time.Duration(i) * 4 * time.Second
			if i < 2 {
				e.Snapshot = []Open{{ReqID: uint64(100 + i), Tokens: 500, Decoding: true}}
			}
			r.Observe(e)
		}
		q := Request{
			ID: 1, Now: 10 * time.Second, Tokens: 10_000,
			Hits: []Hit{{Rank: ID(0, 0), Tokens: 5000}},
		}
		d := pick(r, q)
		assert.Equal(t, ID(0, 0), d.Ranked[0], p.Name())
	}
}
