package routing

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestRoundRobinGoesOnFromTheLastID(t *testing.T) {
	r := routerWith(RoundRobin{}, 4, 100)
	next := func() int { return pick(r, Request{ID: 1}).Ranked[0].Rank() }
	first := next()
	for k := 1; k <= 6; k++ {
		assert.Equal(t, (first+k)%4, next())
	}
	at := (first + 6) % 4
	// the cursor's own rank leaves: the turn does not shift
	r.Observe(&Event{Kind: EvRankDown, Rank: ID(0, at)})
	assert.Equal(t, (at+1)%4, next())
	r.Observe(up(ID(0, at), 100))
	assert.Equal(t, (at+2)%4, next())
	assert.Equal(t, (at+3)%4, next())
	assert.Equal(t, at, next())
}

func TestRoundRobinStartsAnywhere(t *testing.T) {
	starts := map[RankID]bool{}
	for seed := range uint64(64) {
		r := NewRouter(RoundRobin{}, seed)
		for i := range 4 {
			r.Observe(up(ID(0, i), 1))
		}
		starts[pick(r, Request{}).Ranked[0]] = true
	}
	assert.Len(t, starts, 4)
}
