package routing

import (
	"math/rand/v2"
	"time"

	"github.com/zeebo/xxh3"
)

const (
	// sessionTTL is how long the table remembers an idle session, in seconds.
	sessionTTL = 300
	// maxSessions bounds the table; the session idle longest goes first.
	maxSessions = 1 << 17
)

// SessionAffinity keeps a session on the rank that had it last, if that is less than TTL ago; a new session
// goes to the shortest queue. Load does not count below max_ongoing_requests. The table records the requests
// of all ingresses: those of this ingress at dispatch, the others from the ranks' streams. Parameters: ttl_s.
type SessionAffinity struct {
	staged
	TTL time.Duration
}

func newSessionAffinity(p *params) Policy {
	return SessionAffinity{TTL: p.seconds("ttl_s", sessionTTL)}
}

func (SessionAffinity) Name() string { return nameSessionAffinity }

func (SessionAffinity) needs() Needs { return Needs{Session: true} }

// NewState is an empty table.
func (SessionAffinity) NewState(*View, *rand.Rand) State { return &sessions{} }

// SessionKey identifies a request's session in the ranks' streams, so that every ingress knows the session's
// rank; 0 for none.
func SessionKey(session string) uint64 {
	if session == "" {
		return 0
	}
	return xxh3.HashString(session)
}

// Observe records the session's rank.
func (SessionAffinity) Observe(s State, v *View, e *Event) {
	st, ok := s.(*sessions)
	switch {
	case !ok:
	case e.Kind == EvDispatched && e.Request != nil && e.Request.Session != "":
		st.put(SessionKey(e.Request.Session), e.Rank, v.Now)
	case e.Kind == EvAdmitted && e.Elsewhere && e.Session != 0:
		st.put(e.Session, e.Rank, v.Now)
	}
}

func (p SessionAffinity) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: extra is 0 for the session's rank, 1 for the others; all 0 if it has none that may take it.
func (p SessionAffinity) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	st, ok := s.(*sessions)
	if !ok || q.Session == "" {
		return aggregate{why: ReasonNewSession}
	}
	id, ok := st.get(SessionKey(q.Session), v.Now-p.TTL)
	if !ok {
		return aggregate{why: ReasonNewSession}
	}
	row, ok := v.Find(id)
	if !ok || !c.tier.has(q, &v.Ranks[row]) {
		return aggregate{why: ReasonNewSession}
	}
	c.exclude()
	c.extra[row] = 0
	return aggregate{why: ReasonSession}
}

func (SessionAffinity) labels(*aggregate) []label {
	return []label{{"not_session_rank", "none"}, {"open", "requests"}}
}

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
		i = uint32(len(s.list))
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
