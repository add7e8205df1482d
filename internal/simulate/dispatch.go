package simulate

import (
	"encoding/binary"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/routing"
)

// longestLease is how long a prefill rank keeps a prompt: its reader says that it still waits.
const longestLease = 1 << 20 * time.Hour

// arrive hands a request to its ingress, behind those that wait there.
func (s *sim) arrive(c *call) {
	if !s.cfg.fits(c.Request) {
		return
	}
	s.open++
	line := &s.queues[c.ingress]
	if len(*line) == 0 && s.dispatch(c) {
		return
	}
	if s.cfg.Most > 0 && len(*line) >= s.cfg.Most {
		s.open--
		return
	}
	*line = append(*line, c)
}

// pump sends what waits and has room.
func (s *sim) pump() {
	for i := range s.queues {
		line := &s.queues[i]
		for len(*line) > 0 {
			c := (*line)[0]
			if s.cfg.Wait > 0 && s.now-c.At > s.cfg.Wait && c.lost == 0 {
				s.open-- // it was answered with an error
			} else if !s.dispatch(c) {
				break
			}
			*line = (*line)[1:]
		}
	}
}

// ask makes the question for a pool: with what every rank's cache holds of the prompt at this moment.
func (s *sim) ask(q *routing.Request, p *pool, c *call) {
	*q = routing.Request{
		ID: c.key, Now: s.now, Tokens: c.Prompt + c.done, Hits: q.Hits[:0], Blocks: c.Blocks,
		BlockSize: BlockSize, Session: c.Session, Text: q.Text[:0], Tried: c.tried[s.side(p)],
	}
	ranks := p.ranks
	if p == s.pool {
		ranks = ranks[min(s.cfg.WithoutHits, len(ranks)):]
	}
	for _, rk := range ranks {
		if hit := rk.core.Cached(c, c.Prompt+c.done); hit > 0 && !rk.isDead {
			q.Hits = append(q.Hits, routing.Hit{Rank: rk.id, Tokens: int32(hit)})
		}
	}
	if s.needs.Text {
		q.Text = c.text(q.Text)
	}
}

func (s *sim) side(p *pool) int {
	if p == s.prefill {
		return 1
	}
	return 0
}

// dispatch routes a request and sends it; false = no rank has room for it.
func (s *sim) dispatch(c *call) bool {
	s.ask(&s.q, s.pool, c)
	if s.prefill != nil {
		return s.dispatchPair(c)
	}
	s.routers[c.ingress].Pick(&s.q, &s.d)
	switch s.d.Kind {
	case routing.Queue:
		return false
	case routing.Route:
		id := s.d.Ranked[0]
		s.sendAlone(c, id, s.q.HitOn(id))
	default:
		s.open-- // rejected
	}
	return true
}

// dispatchPair is dispatch with a prefill pool: the decider says whether one of its ranks computes the
// prompt.
func (s *sim) dispatchPair(c *call) bool {
	s.ask(&s.p, s.prefill, c)
	router := s.pairs[c.ingress]
	router.Pick(&s.p, &s.q, false, &s.choice)
	d := &s.choice
	switch {
	case d.Kind == routing.Queue:
		return false
	case d.Kind != routing.Route:
		s.open--
		return true
	case !d.Remote:
		s.sendAlone(c, d.Decode, s.q.HitOn(d.Decode))
		return true
	}
	prefill, hit, moves := d.Prefill, s.p.HitOn(d.Prefill), s.q.Tokens-s.q.HitOn(d.Decode)
	own := s.reserve(s.pool, c, d.Decode, c.Prompt+c.done)
	if own == nil {
		undo(s.prefill.routers[c.ingress], prefill, c.key)
		return true
	}
	c.own = own
	if pre := s.reserve(s.prefill, c, prefill, hit); pre != nil {
		own.sent.Remote, own.moves, c.pre = true, moves, pre
		pre.sent.Output, pre.sent.Lease = 1, strconv.FormatUint(c.key, 10)+"."+strconv.Itoa(c.lost)
		router.Update(func(t *routing.PairTable) { t.Lease(pre.on.ref(), pre.sent.Prompt) })
		s.send(pre)
	}
	return true
}

// sendAlone sends a request to a rank that computes its prompt and makes its answer.
func (s *sim) sendAlone(c *call, id routing.RankID, hit int) {
	if l := s.reserve(s.pool, c, id, hit); l != nil {
		c.own = l
		s.send(l)
	}
}

func undo(r *routing.Router, id routing.RankID, key uint64) {
	r.Observe(&routing.Event{Kind: routing.EvUndo, Rank: id, ReqID: key})
}

func (rk *rank) ref() routing.RankRef {
	return routing.RankRef{ID: rk.id, Incarnation: rk.started}
}

// reserve takes a place on a rank; nil = the rank has died without the ingress knowing it, and another one is
// asked.
func (s *sim) reserve(p *pool, c *call, id routing.RankID, hit int) *leg {
	rk := p.ranks[id.Rank()]
	router := p.routers[c.ingress]
	if rk.isDead {
		undo(router, id, c.key)
		s.again(c, rk)
		return nil
	}
	l := &leg{call: c, on: rk, hit: hit, place: -1}
	if p == s.prefill {
		c.prefill = id.Rank()
	} else {
		c.rank = id.Rank()
	}
	s.admit(router, l)
	l.sent = enginemodel.Request{
		Prompt: c.Prompt + c.done, Output: c.Output - c.done, Ending: enginemodel.FinishLength,
		Content: c, User: l,
	}
	return l
}

// admit is the ticket of a request, and the record of it.
func (s *sim) admit(router *routing.Router, l *leg) {
	rk, c := l.on, l.call
	rk.seq++
	router.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: rk.id, ReqID: c.key, Seq: rk.seq,
		Incarnation: rk.started, Now: s.now,
	})
	s.tell(rk, routing.Event{
		Kind: routing.EvAdmitted, ReqID: c.key, Tokens: c.Prompt + c.done, Hit: l.hit,
		Session: routing.SessionKey(c.Session),
	})
}

func (s *sim) send(l *leg) {
	s.step(l.on, enginemodel.Input{Kind: enginemodel.InputAdd, Req: &l.sent})
}

// load brings the KV that an engine asks for.
func (s *sim) load(l *leg) {
	blocks := l.sent.LoadBlocks()
	in := enginemodel.Input{
		Kind: enginemodel.InputLoaded, Req: &l.sent, KV: make([]enginemodel.BlockKV, blocks),
	}
	if s.group != nil { // the prompts of a decode pool come computed
		s.group.loads = append(s.group.loads, in)
		return
	}
	took := time.Duration(blocks*BlockSize) * s.cfg.PerToken
	s.agenda.at(s.now+took, func() {
		if l.own == l {
			s.step(l.on, in)
		}
	})
}

// isRead ends the wait of a prefill rank when the decode rank makes its first token.
func (s *sim) isRead(l *leg) {
	c := l.call
	if l != c.own || c.pre == nil {
		return
	}
	pre := c.pre
	c.pre = nil
	s.pairs[c.ingress].Transferred(pre.on.ref(), l.on.ref(), l.moves, s.now-pre.sent.Times().Last)
	s.pairs[c.ingress].Update(func(t *routing.PairTable) { t.Release(pre.on.ref(), pre.sent.Prompt) })
	if !pre.on.isDead {
		s.step(pre.on, enginemodel.Input{Kind: enginemodel.InputLeaseRead, Name: pre.sent.Lease})
	}
}

// charsPerToken is how long the text of a token is.
const charsPerToken = 4

// text is a prompt with the prefixes of its blocks.
func (c *call) text(buf []byte) []byte {
	var word [8]byte
	for i := range (c.Prompt + BlockSize - 1) / BlockSize {
		n := min(BlockSize, c.Prompt-i*BlockSize) * charsPerToken
		hash := hashOf(c.key<<16, uint64(i))
		if i < len(c.Blocks) {
			hash = c.Blocks[i]
		}
		binary.LittleEndian.PutUint64(word[:], hash)
		for ; n > 0; n -= len(word) {
			buf = append(buf, word[:min(n, len(word))]...)
		}
	}
	return buf
}
