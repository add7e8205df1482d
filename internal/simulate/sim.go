package simulate

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/routing"
)

const (
	// progressEvery is how often an ingress reports the progress of its streams.
	progressEvery = 500 * time.Millisecond
	// clockOrigin is what the ranks' own clocks show when a run begins. It is not 0, which says that a rank
	// told no time.
	clockOrigin = time.Hour
	// longSilence is how long before the next event progress is reported again, if no request is under way.
	longSilence = time.Hour
	// unlimited is how many requests a rank takes that has no limit.
	unlimited = 1 << 20
)

// sim is one run.
type sim struct {
	cfg     Config
	needs   routing.Needs
	*pool                         // of all requests; of a pair, the decode ranks
	prefill *pool                 // nil: there is none
	pairs   []*routing.PairRouter // by ingress, with prefill
	now     time.Duration
	late    []record // told, and not heard of yet
	agenda  agenda
	calls   []call
	next    int       // of calls
	open    int       // of them: neither ended nor given up
	queues  [][]*call // by ingress: no rank has room for them
	room    bool      // the queues are to be looked at
	q, p    routing.Request
	d       routing.Decision
	choice  routing.PairDecision
	group   *group // nil: the ranks step by themselves
}

// pool is ranks that are alike, and what the ingresses know of them.
type pool struct {
	Pool
	ranks   []*rank
	routers []*routing.Router // by ingress
}

// rank is one engine and the records of its replica.
type rank struct {
	core     *enginemodel.Core
	pool     *pool
	id       routing.RankID
	started  uint64 // how often: its incarnation and epoch
	isDead   bool
	wake     time.Duration
	seq      uint64
	decoding []*leg
}

// call is one request on its way.
type call struct {
	*Request
	key     uint64
	ingress int
	own     *leg // that makes the answer
	pre     *leg // that computes the prompt for it, until own has read it

	rank, prefill int                 // that took it last; -1: none
	lost          int                 // how many ranks have died under it
	tried         [2][]routing.RankID // they, by pool
	done          int                 // tokens that ranks have made which died then
	hit           int                 // prompt tokens that came from a cache
	finished      bool                // with all its tokens
	times         enginemodel.Times
	named         routing.RankID
	isNamed       bool // named is the rank that it must go to
}

// leg is what a rank does for a call.
type leg struct {
	*call
	on    *rank
	sent  enginemodel.Request
	place int // in the rank's decoding, once it has a token; else -1
	hit   int // tokens that the rank need not compute
	moves int // tokens that come from a prefill rank
}

type record struct {
	due   time.Duration
	pool  *pool
	event routing.Event
}

// Run plays the workload, which is in the order of time, under the policy that newPolicy makes for each
// ingress.
func Run(cfg Config, work []Request, newPolicy func() (routing.Policy, error)) (*Result, error) {
	s, err := newSim(cfg, work, newPolicy)
	if err != nil {
		return nil, err
	}
	if err := s.play(); err != nil {
		return nil, err
	}
	return s.result(), nil
}

// newSim makes the engines and the Routers of a run.
func newSim(cfg Config, work []Request, newPolicy func() (routing.Policy, error)) (s *sim, err error) {
	s = &sim{cfg: cfg, calls: make([]call, len(work)), queues: make([][]*call, cfg.Ingresses)}
	for i := range work {
		s.calls[i] = call{
			Request: &work[i], key: uint64(i) + 1, ingress: i % cfg.Ingresses, rank: -1, prefill: -1,
		}
	}
	if cfg.Prefill.Ranks > 0 {
		cfg.Prefill.Engine.Transfer, cfg.Engine.Transfer = true, true
		cfg.Prefill.Engine.Lease = longestLease
		if cfg.PrefillPolicy == nil {
			cfg.PrefillPolicy = newPolicy
		}
		if s.prefill, err = s.newPool(cfg.Prefill, cfg.PrefillPolicy); err != nil {
			return nil, err
		}
	}
	if s.pool, err = s.newPool(cfg.Pool, newPolicy); err != nil {
		return nil, err
	}
	if s.prefill != nil {
		for i, r := range s.routers {
			s.pairs = append(s.pairs,
				routing.NewPairRouter(s.prefill.routers[i], r, cfg.Pair, false, cfg.Seed+uint64(i)))
		}
	}
	for _, f := range cfg.Faults {
		s.agenda.at(f.At, func() { s.strike(f) })
	}
	return s, nil
}

func (s *sim) newPool(cfg Pool, newPolicy func() (routing.Policy, error)) (*pool, error) {
	p := &pool{Pool: cfg}
	for i := range cfg.Ranks {
		rk, err := p.start(routing.ID(0, i), 1)
		if err != nil {
			return nil, err
		}
		p.ranks = append(p.ranks, rk)
	}
	for i := range s.queues {
		policy, err := newPolicy()
		if err != nil {
			return nil, err
		}
		needs := routing.NeedsOf(policy)
		s.needs.Text = s.needs.Text || needs.Text
		r := routing.NewRouter(policy, s.cfg.Seed+uint64(i))
		r.OnRoom = func() { s.room = true }
		if cfg.BusyThreshold != nil || !cfg.Engine.PrefixCaching {
			r.Observe(&routing.Event{Kind: routing.EvConfigured, Config: &routing.Config{
				BusyThreshold: cfg.BusyThreshold, PrefixCachingOff: !cfg.Engine.PrefixCaching,
			}})
		}
		for _, rk := range p.ranks {
			r.Observe(s.up(rk))
		}
		p.routers = append(p.routers, r)
	}
	return p, nil
}

// start makes a rank's engine.
func (p *pool) start(id routing.RankID, times uint64) (*rank, error) {
	core, err := enginemodel.New(p.Engine)
	if err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	return &rank{core: core, pool: p, id: id, started: times, wake: never}, nil
}

// up is the record of a rank that serves.
func (s *sim) up(rk *rank) *routing.Event {
	e := &routing.Event{
		Kind: routing.EvRankUp, Rank: rk.id, Epoch: rk.started, Incarnation: rk.started,
		MaxOngoing: rk.pool.Slots,
		Capacity:   int64(rk.pool.Engine.Blocks) * BlockSize, BlockSize: BlockSize,
		Machine: rk.id.String(), // each has its own
	}
	if rk.pool.Slots == 0 {
		e.MaxOngoing = unlimited
	}
	s.cfg.report(e)
	return e
}

// play is the loop: at equal times records are heard of first, then progress, then what was on its way comes,
// then steps end, then requests arrive.
func (s *sim) play() error {
	tick := progressEvery
	for {
		if s.room {
			s.room = false
			s.pump()
		}
		busiest := s.busiest()
		arrival := never
		if s.next < len(s.calls) {
			arrival = s.calls[s.next].At
		}
		told := never
		if len(s.late) > 0 {
			told = s.late[0].due
		}
		next, due := min(busiest.wake, arrival, told), s.agenda.next()
		if s.isOver(next) {
			return nil
		}
		s.now = max(s.now, min(next, tick, due))
		switch {
		case told <= s.now:
			s.hear(s.late[0].pool, &s.late[0].event)
			s.late = s.late[1:]
		case tick <= s.now:
			if err := s.progress(); err != nil {
				return err
			}
			tick = nextTick(tick, min(next, due), s.open == 0)
		case due <= s.now:
			s.agenda.do()
		case busiest.wake <= s.now:
			s.step(busiest)
		default:
			s.arrive(&s.calls[s.next])
			s.next++
			if err := s.each(); err != nil {
				return err
			}
		}
	}
}

// each tells the caller how many requests came.
func (s *sim) each() error {
	if s.cfg.Each == nil {
		return nil
	}
	return s.cfg.Each(s.next)
}

// nextTick is when progress is reported after tick. The time until the next event may be years, as timestamps
// have them.
func nextTick(tick, next time.Duration, isIdle bool) time.Duration {
	tick += progressEvery
	if isIdle {
		tick = max(tick, next-longSilence)
	}
	return tick
}

// busiest is the rank whose engine wakes first.
func (s *sim) busiest() *rank {
	first := s.ranks[0]
	for _, rk := range s.ranks[1:] {
		if rk.wake < first.wake {
			first = rk
		}
	}
	if s.prefill != nil {
		for _, rk := range s.prefill.ranks {
			if rk.wake < first.wake {
				first = rk
			}
		}
	}
	return first
}

// isOver: nothing happens before next, and no request that has come is under way, or can be.
func (s *sim) isOver(next time.Duration) bool {
	return next == never && (s.open == 0 || s.agenda.next() == never)
}

// tell puts a record into a rank's stream.
func (s *sim) tell(rk *rank, e routing.Event) {
	e.Rank, e.Incarnation, e.Seq = rk.id, rk.started, rk.seq
	switch e.Kind {
	case routing.EvAdmitted, routing.EvFirstToken, routing.EvProgress, routing.EvFinished:
		e.At = s.cfg.clock(rk.id.Rank(), s.now)
	default:
	}
	s.cfg.report(&e)
	if s.cfg.Lag > 0 {
		s.late = append(s.late, record{s.now + s.cfg.Lag, rk.pool, e})
		return
	}
	s.hear(rk.pool, &e)
}

func (s *sim) hear(p *pool, e *routing.Event) {
	e.Now = s.now
	for _, r := range p.routers {
		r.Observe(e)
	}
	if s.group != nil {
		s.group.hear(e)
	}
}

// step runs an engine and records what it did.
func (s *sim) step(rk *rank, in ...enginemodel.Input) {
	effects, wake := rk.core.Step(s.now, in)
	rk.wake = wake
	if wake >= longestLease || rk.isDead {
		rk.wake = never
	}
	for i := range effects {
		e := &effects[i]
		var l *leg
		if e.Req != nil {
			l, _ = e.Req.User.(*leg)
			if l != l.own && l != l.pre { // another rank has its request
				continue
			}
		}
		switch e.Kind {
		case enginemodel.EffectToken:
			if e.Req.Produced() == 1 {
				l.place = len(rk.decoding)
				rk.decoding = append(rk.decoding, l)
				rk.seq++
				s.tell(rk, routing.Event{Kind: routing.EvFirstToken, ReqID: l.key})
				s.isRead(l)
			}
			if s.group != nil {
				s.group.token(e.Req)
			}
		case enginemodel.EffectFinished:
			if !rk.isDead {
				s.leave(l)
				s.end(l)
			}
		case enginemodel.EffectLoad:
			s.load(l)
		case enginemodel.EffectWave, enginemodel.EffectReport:
			s.group.take(rk, e)
		default:
		}
	}
}

// leave records that a leg has left its rank.
func (s *sim) leave(l *leg) {
	rk := l.on
	if l.place >= 0 {
		last := len(rk.decoding) - 1
		rk.decoding[l.place] = rk.decoding[last]
		rk.decoding[l.place].place = l.place
		rk.decoding = rk.decoding[:last]
	}
	rk.seq++
	s.tell(rk, routing.Event{Kind: routing.EvFinished, ReqID: l.key, Out: l.sent.Produced()})
}

// end takes the end of a leg. The decode rank reads the prompt after that of a prefill leg.
func (s *sim) end(l *leg) {
	c := l.call
	c.keep(l)
	if l == c.pre {
		own := c.own
		s.agenda.at(s.now+s.cfg.HandOver, func() {
			if c.own == own { // no rank has died meanwhile
				s.send(own)
			}
		})
		return
	}
	c.finished = l.sent.Finish() == enginemodel.FinishLength
	c.own = nil
	s.open--
}

// keep keeps what a leg has come to.
func (c *call) keep(l *leg) {
	if c.done == 0 && !l.sent.Remote {
		c.hit = l.sent.Cached()
	}
	if l == c.pre {
		return
	}
	t := l.sent.Times()
	if c.times.First == 0 {
		c.times.Scheduled, c.times.First = t.Scheduled, t.First
	}
	c.times.Last = max(c.times.Last, t.Last)
	c.done += l.sent.Produced()
}

// progress reports how far every stream is, and how full the ranks' caches are.
func (s *sim) progress() error {
	s.report(s.pool)
	if s.prefill != nil {
		s.report(s.prefill)
	}
	return s.each()
}

func (s *sim) report(p *pool) {
	for _, rk := range p.ranks {
		if rk.isDead {
			continue
		}
		for _, l := range rk.decoding {
			rk.seq++
			s.tell(rk, routing.Event{Kind: routing.EvProgress, ReqID: l.key, Out: l.sent.Produced()})
		}
		st := rk.core.Stats()
		rk.seq++
		s.tell(rk, routing.Event{
			Kind: routing.EvStatus, KVUsage: float64(st.UsedBlocks) / float64(st.Blocks),
			BlockSize: BlockSize,
		})
	}
}
