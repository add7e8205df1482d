package routing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestSessionTableForgetsIdleSessions(t *testing.T) {
	r := routerWith(SessionAffinity{TTL: 300 * time.Second}, 4, 100)
	ask := func(id uint64, s string, now time.Duration) Decision {
		return pick(r, Request{ID: id, Session: s, Now: now})
	}
	first := ask(1, "s", time.Second)
	assert.Equal(t, ReasonNewSession, first.Reason)
	again := ask(2, "s", 300*time.Second)
	assert.Equal(t, ReasonSession, again.Reason)
	assert.Equal(t, first.Ranked, again.Ranked)
	assert.Equal(t, ReasonSession, ask(3, "s", 600*time.Second).Reason, "renewed by each request")
	assert.Equal(t, ReasonNewSession, ask(4, "s", 901*time.Second).Reason)
	r.Observe(&Event{Kind: EvRankDown, Rank: ask(5, "s", 902*time.Second).Ranked[0]})
	assert.Equal(t, ReasonNewSession, ask(6, "s", 903*time.Second).Reason)
}

func TestSessionTableIsBounded(t *testing.T) {
	var s sessions
	for i := range uint64(maxSessions + 100) {
		s.put(spread(i), ID(0, int(i%7)), time.Duration(i))
	}
	assert.Len(t, s.list, maxSessions)
	assert.Equal(t, maxSessions, s.at.n)
	_, ok := s.get(spread(50), 0)
	assert.False(t, ok, "the oldest went")
	id, ok := s.get(spread(150), 0)
	assert.True(t, ok)
	assert.Equal(t, ID(0, 150%7), id)
}
