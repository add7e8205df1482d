package simulate

import (
	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/routing"
)

// strike lets a fault happen.
func (s *sim) strike(f Fault) {
	p := s.pool
	if f.Prefill {
		p = s.prefill
	}
	rk := p.ranks[f.Rank]
	if rk.isDead {
		return
	}
	if f.Factor > 0 {
		s.step(rk, enginemodel.Input{Kind: enginemodel.InputSlow, Factor: f.Factor})
	} else {
		s.kill(rk)
	}
	if f.For > 0 {
		s.agenda.at(s.now+f.For, func() { s.recover(p, f.Rank) })
	}
}

// kill ends a rank. Its ingresses look for other ranks for what it had.
func (s *sim) kill(rk *rank) {
	rk.isDead = true
	s.step(rk, enginemodel.Input{Kind: enginemodel.InputKill})
	s.tell(rk, routing.Event{Kind: routing.EvRankDown})
	for i := range s.calls[:s.next] {
		c := &s.calls[i]
		if c.own != nil && (c.own.on == rk || c.pre != nil && c.pre.on == rk) {
			s.again(c, rk)
		}
	}
}

// recover starts a rank again that has died, and makes a slow one as fast as the others.
func (s *sim) recover(p *pool, number int) {
	rk := p.ranks[number]
	if !rk.isDead {
		s.step(rk, enginemodel.Input{Kind: enginemodel.InputRecover})
		return
	}
	next, err := p.start(rk.id, rk.started+1)
	if err != nil {
		return // the first start had the same shape
	}
	p.ranks[number] = next
	s.tell(next, *s.up(next))
}

// again looks for another rank for a request that a rank has died under. What its other leg did is lost.
func (s *sim) again(c *call, dead *rank) {
	own, pre := c.own, c.pre
	c.own, c.pre = nil, nil
	if own != nil {
		c.keep(own)
	}
	for _, l := range []*leg{own, pre} {
		if l == nil || l.on.isDead || l.sent.Finish() != enginemodel.FinishNone {
			continue
		}
		s.step(l.on, enginemodel.Input{Kind: enginemodel.InputAbort, Req: &l.sent})
		s.leave(l)
	}
	if pre != nil {
		s.pairs[c.ingress].Update(func(t *routing.PairTable) { t.Release(pre.on.ref(), pre.sent.Prompt) })
		if !pre.on.isDead {
			s.step(pre.on, enginemodel.Input{Kind: enginemodel.InputLeaseRead, Name: pre.sent.Lease})
		}
	}
	c.lost++
	side := s.side(dead.pool)
	c.tried[side] = append(c.tried[side], dead.id)
	switch {
	case c.lost >= s.cfg.Attempts, s.cfg.Cut && c.done > 0:
		s.open-- // its client gets an error
	case !s.dispatch(c):
		line := &s.queues[c.ingress]
		*line = append([]*call{c}, *line...)
	}
}
