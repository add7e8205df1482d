package routing

import (
	"math/rand/v2"
	"time"
)

const (
	// affinityNodes and affinityFallbacks are Ray Serve's: points per rank, and ranks tried behind the first.
	affinityNodes, affinityFallbacks = 100, 2
	maxFallbacks                     = 1024
	// sessionTTL is how long the table remembers an idle session, in seconds.
	sessionTTL = 300
	// maxSessions bounds the table; the session idle longest goes first.
	maxSessions = 1 << 17
)

// SessionAffinity keeps a session on one rank. Load does not count below max_ongoing_requests; chwbl moves
// sessions under load.
//
// With the ring (documented; Ray Serve's ConsistentHashRouter): the key's rank, else the next Fallbacks on
// the ring, else the shortest queue. The key is the session, or the request's own number. With the table
// (tuned): the rank that had the session last, if that is less than TTL ago; a new session goes to the
// shortest queue. The table records the requests of all ingresses: those of this ingress at dispatch, the
// others from the ranks' streams. Parameters: num_virtual_nodes, num_fallback_replicas, table, ttl_s.
type SessionAffinity struct {
	Nodes     int // ring: points per rank
	Fallbacks int // ring: ranks behind the first
	Table     bool
	TTL       time.Duration // table
}

type sessionState struct {
	ring     ring
	sessions sessions
}

func newSessionAffinity(p *params) Policy {
	return SessionAffinity{
		Nodes:     p.integer("num_virtual_nodes", affinityNodes, 1, maxNodes),
		Fallbacks: p.integer("num_fallback_replicas", affinityFallbacks, 0, maxFallbacks),
		Table:     p.boolean("table", p.tuned),
		TTL:       p.seconds("ttl_s", sessionTTL),
	}
}

// Name is "session-affinity".
func (SessionAffinity) Name() string { return nameSessionAffinity }

func (SessionAffinity) needs() Needs { return Needs{Session: true} }

// NewState has a ring of the view's ranks, or an empty table.
func (p SessionAffinity) NewState(v *View, _ *rand.Rand) State {
	st := &sessionState{}
	if !p.Table {
		st.ring = newRing(v, p.Nodes)
	}
	return st
}

// SessionKey identifies a request's session in the ranks' streams, so that every ingress knows the session's
// rank; 0 for none.
func SessionKey(session string) uint64 {
	if session == "" {
		return 0
	}
	return hashString(session)
}

// Observe updates the ring, or records the session's rank.
func (p SessionAffinity) Observe(s State, v *View, e *Event) {
	st, ok := s.(*sessionState)
	switch {
	case !ok:
	case !p.Table:
		st.ring.observe(e)
	case e.Kind == EvDispatched && e.Request != nil && e.Request.Session != "":
		st.sessions.put(SessionKey(e.Request.Session), e.Rank, v.Now)
	case e.Kind == EvAdmitted && e.Elsewhere && e.Session != 0:
		st.sessions.put(e.Session, e.Rank, v.Now)
	}
}

// Decide takes the session's rank.
func (p SessionAffinity) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: extra is 0 for the session's rank, 1 for the others; all 0 if it has none that may take it.
func (p SessionAffinity) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	st, ok := s.(*sessionState)
	if !ok {
		return aggregate{why: ReasonRingFallback}
	}
	if p.Table {
		return p.fromTable(st, q, v, c)
	}
	key, found, left := spread(q.ID), -1, 1+p.Fallbacks
	if q.Session != "" {
		key = hashString(q.Session)
	}
	st.ring.walk(v, key, c.extra, func(row int) bool {
		if c.tier.has(q, &v.Ranks[row]) {
			found = row
			return false
		}
		left--
		return left > 0
	})
	return onRing(found, c, aggregate{why: ReasonRing})
}

func (p SessionAffinity) fromTable(st *sessionState, q *Request, v *View, c *scratch) aggregate {
	if q.Session != "" {
		if id, ok := st.sessions.get(SessionKey(q.Session), v.Now-p.TTL); ok {
			if i, ok := v.Find(id); ok && c.tier.has(q, &v.Ranks[i]) {
				return onRing(i, c, aggregate{why: ReasonSession})
			}
		}
	}
	return aggregate{why: ReasonNewSession}
}

func (SessionAffinity) summands(_ *Request, rk *Rank, _, extra int64, _ *aggregate) sums {
	return two(float64(extra), notPreferredCost, float64(rk.ongoing()), 1)
}

func (p SessionAffinity) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (SessionAffinity) labels(*aggregate) []label {
	return []label{{"not_session_rank", "none"}, {"open", "requests"}}
}

func (SessionAffinity) rule(*aggregate) rule { return rule{} }

// sessions records each session's last rank: at most maxSessions sessions; the one that is idle longest is
// dropped first.
type sessions struct {
	at             table // session → index into list, +1
	list           []sessionEntry
	newest, oldest uint32 // +1
}

type sessionEntry struct {
	key          uint64
	rank         RankID
	used         time.Duration
	newer, older uint32 // +1
}

// get is the session's rank if it was used after since.
func (s *sessions) get(key uint64, since time.Duration) (RankID, bool) {
	i := s.at.get(key)
	if i == 0 || s.list[i-1].used < since {
		return 0, false
	}
	return s.list[i-1].rank, true
}

func (s *sessions) put(key uint64, rank RankID, now time.Duration) {
	i := s.at.get(key)
	switch {
	case i != 0:
		s.unlink(i)
	case len(s.list) < maxSessions:
		s.list = append(s.list, sessionEntry{})
		i = uint32(len(s.list)) //nolint:gosec // at most maxSessions
		s.at.set(key, i)
	default:
		i = s.oldest
		s.unlink(i)
		s.at.remove(s.list[i-1].key)
		s.at.set(key, i)
	}
	s.list[i-1] = sessionEntry{key: key, rank: rank, used: now, older: s.newest}
	if s.newest != 0 {
		s.list[s.newest-1].newer = i
	} else {
		s.oldest = i
	}
	s.newest = i
}

func (s *sessions) unlink(i uint32) {
	e := s.list[i-1]
	if e.newer != 0 {
		s.list[e.newer-1].older = e.older
	} else {
		s.newest = e.older
	}
	if e.older != 0 {
		s.list[e.older-1].newer = e.newer
	} else {
		s.oldest = e.newer
	}
}
