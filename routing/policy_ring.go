package routing

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/twmb/murmur3"
)

// ringSeed is the seed of Ray Serve's consistent-hash ring; with it a session falls on the same point here as
// there.
const ringSeed = 0xF9B4CA77

// ring is a consistent-hash ring: every rank has the same number of points, hashed from "GROUP/RANK:n".
// Points of a rank do not depend on the others, so a rank that comes or goes moves only its own share of the
// keys.
type ring struct {
	points []ringPoint // ascending by hash, then rank
	nodes  int         // points per rank
	ids    table       // rank id + 1 → 1
}

type ringPoint struct {
	hash uint64
	rank RankID
}

func newRing(v *View, nodes int) *ring {
	r := &ring{nodes: nodes}
	for i := range v.Ranks {
		r.add(v.Ranks[i].ID)
	}
	return r
}

func comparePoints(a, b ringPoint) int {
	return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.rank, b.rank))
}

func (r *ring) appendPoints(points []ringPoint, id RankID) []ringPoint {
	for n := range r.nodes {
		points = append(points, ringPoint{hash: hashString(fmt.Sprintf("%s:%d", id, n)), rank: id})
	}
	return points
}

// observe keeps the ring equal to the ranks of the view.
func (r *ring) observe(e *Event) {
	switch e.Kind {
	case EvRankUp:
		if r.ids.get(uint64(e.Rank)+1) == 0 {
			r.add(e.Rank)
		}
	case EvRankDown:
		if r.ids.get(uint64(e.Rank)+1) != 0 {
			r.ids.remove(uint64(e.Rank) + 1)
			r.points = slices.DeleteFunc(r.points, func(p ringPoint) bool { return p.rank == e.Rank })
		}
	default:
	}
}

// add merges a rank's points into the ring from behind, so that a thousand ranks coming up one by one stay
// cheap.
func (r *ring) add(id RankID) {
	r.ids.set(uint64(id)+1, 1)
	fresh := r.appendPoints(nil, id)
	slices.SortFunc(fresh, comparePoints)
	old := len(r.points)
	r.points = append(r.points, fresh...)
	for to, i, j := len(r.points)-1, old-1, len(fresh)-1; j >= 0; to-- {
		if i >= 0 && comparePoints(r.points[i], fresh[j]) > 0 {
			r.points[to] = r.points[i]
			i--
			continue
		}
		r.points[to] = fresh[j]
		j--
	}
}

// first is the index of the first point behind key, clockwise. The ring is not empty.
func (r *ring) first(key uint64) int {
	i, _ := slices.BinarySearchFunc(r.points, key, func(p ringPoint, key uint64) int {
		if p.hash > key {
			return 1
		}
		return -1
	})
	return i % len(r.points)
}

// walk calls visit with the row of each rank of the view, in the order of the ring from key on, each once,
// until it returns false. seen is scratch of one number per row, all 0; it is 1 for the rows that were
// visited.
func (r *ring) walk(v *View, key uint64, seen []int64, visit func(row int) bool) {
	if len(r.points) == 0 {
		return
	}
	left := len(v.Ranks)
	for k, i := 0, r.first(key); k < len(r.points) && left > 0; k++ {
		row, ok := v.Find(r.points[i].rank)
		if ok && seen[row] == 0 {
			seen[row] = 1
			left--
			if !visit(row) {
				return
			}
		}
		if i++; i == len(r.points) {
			i = 0
		}
	}
}

// hashString is the 64-bit murmur3 hash that the ring uses for keys and points.
func hashString(s string) uint64 { return murmur3.SeedStringSum64(ringSeed, s) }

func hashBytes(b []byte) uint64 { return murmur3.SeedSum64(ringSeed, b) }

// spread maps a request's number to a point of the ring: requests without a key go everywhere.
func spread(id uint64) uint64 {
	id ^= id >> 30
	id *= 0xBF58476D1CE4E5B9
	id ^= id >> 27
	id *= 0x94D049BB133111EB
	return id ^ id>>31
}

const (
	// chwblChars is how much of the prompt is KubeAI's key, in characters.
	chwblChars = 100
	// chwblNodes is KubeAI's virtual nodes per rank, prefixHashNodes that of variant prefix-hash.
	chwblNodes, prefixHashNodes = 256, 150
	// prefixHashTokens is the key of variant prefix-hash: the first 256 tokens.
	prefixHashTokens = 256
	// chwblFactor is KubeAI's c; chwblFactorTuned goes with the session as key.
	chwblFactor, chwblFactorTuned = 1.25, 3
	// maxNodes bounds the points per rank.
	maxNodes = 4096
)

// CHWBL is consistent hashing with bounded loads (KubeAI): from the key's point on the ring, the first rank
// with
//
//	O ≤ Factor · (ΣO + 1) / N
//
// over the N ranks that the request may go to. The key is the first chwblChars characters of the prompt and
// the adapter, or the session; a request without either has its number as the key. Variant prefix-hash: the
// first 256 tokens are the key, and a rank above the bound is left for the shortest queue, not for the next
// rank on the ring. Parameters: variant, key (prefix, session), load_factor, virtual_nodes.
type CHWBL struct {
	staged
	Factor     float64 // c, at least 1
	Nodes      int     // points per rank
	Session    bool    // key: session
	PrefixHash bool    // variant prefix-hash
}

func newCHWBL(p *params) Policy {
	hash := p.word("variant", nameCHWBL, nameCHWBL, "prefix-hash") == "prefix-hash"
	nodes, key := chwblNodes, "prefix"
	if hash {
		nodes = prefixHashNodes
	}
	if p.tuned && !hash {
		key = "session"
	}
	return CHWBL{
		Session:    p.word("key", key, "prefix", "session") == "session",
		Factor:     p.number("load_factor", p.choose(chwblFactor, chwblFactorTuned), 1, maxWeight),
		Nodes:      p.integer("virtual_nodes", nodes, 1, maxNodes),
		PrefixHash: hash,
	}
}

func (CHWBL) Name() string { return nameCHWBL }

func (p CHWBL) needs() Needs {
	return Needs{Text: !p.Session, Session: p.Session, Blocks: p.PrefixHash}
}

func (p CHWBL) NewState(v *View, _ *rand.Rand) State { return newRing(v, p.Nodes) }

func (CHWBL) Observe(s State, _ *View, e *Event) {
	if r, ok := s.(*ring); ok {
		r.observe(e)
	}
}

func (p CHWBL) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// key is the request's point on the ring.
func (p CHWBL) key(q *Request) uint64 {
	switch {
	case p.Session && q.Session != "":
		return hashString(q.Session)
	case p.Session:
	case p.PrefixHash && q.BlockSize > 0 && len(q.Blocks)*q.BlockSize >= prefixHashTokens:
		return q.Blocks[max(1, prefixHashTokens/q.BlockSize)-1]
	case p.PrefixHash && len(q.Text) > 0:
		return hashBytes(q.Text[:min(len(q.Text), charsPerToken*prefixHashTokens)])
	case len(q.Text) > 0:
		return hashBytes(firstChars(q.Text, chwblChars)) ^ spread(hashString(q.Adapter))
	}
	return spread(q.ID)
}

// firstChars is the first n characters of text; a byte that is no UTF-8 counts as one.
func firstChars(text []byte, n int) []byte {
	end := 0
	for ; n > 0 && end < len(text); n-- {
		_, size := utf8.DecodeRune(text[end:])
		end += size
	}
	return text[:end]
}

// prepare: extra is 0 for the rank that the ring gives, 1 for the others; all 0 if it gives none. x[0] is the
// bound.
func (p CHWBL) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	sum, n := 0, 0
	for i := range v.Ranks {
		if rk := &v.Ranks[i]; isEligible(q, rk) {
			sum += rk.ongoing()
			n++
		}
	}
	bound := p.Factor * float64(sum+1) / float64(max(1, n))
	found := -1
	if r, ok := s.(*ring); ok {
		r.walk(v, p.key(q), c.extra, func(row int) bool {
			rk := &v.Ranks[row]
			if !isEligible(q, rk) {
				return true
			}
			if c.tier.has(q, rk) && float64(rk.ongoing()) <= bound {
				found = row
				return false
			}
			return !p.PrefixHash
		})
	}
	return onRing(found, c, aggregate{why: ReasonRing, x: [4]float64{bound}})
}

// onRing leaves extra 0 for the found row alone, or for all of them.
func onRing(found int, c *scratch, a aggregate) aggregate {
	if found < 0 {
		clear(c.extra)
		a.why = ReasonRingFallback
		return a
	}
	c.exclude()
	c.extra[found] = 0
	return a
}

func (CHWBL) labels(*aggregate) []label {
	return []label{{"not_first_on_ring", "none"}, {"open", "requests"}, {"bound", "requests"}}
}

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
	staged
	Nodes     int // ring: points per rank
	Fallbacks int // ring: ranks behind the first
	Table     bool
	TTL       time.Duration // table
}

type sessionState struct {
	ring     *ring // nil with the table
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
