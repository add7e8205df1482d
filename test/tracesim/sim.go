package tracesim

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/routing"
)

const (
	// progressEvery is how often an ingress reports the progress of its streams.
	progressEvery = 500 * time.Millisecond
	// clockOrigin is what the ranks' own clocks show when a run begins. It is not 0, which says that a rank
	// told no time.
	clockOrigin = time.Hour
)

// Config is the shape of a run.
type Config struct {
	Ranks     int
	Blocks    int                   // of BlockSize tokens, per rank
	Ingresses int                   // requests come to them in turn, each has a Router of its own
	Lag       time.Duration         // how old a rank's records are when the ingresses hear of them
	Seed      uint64                // of the Routers
	Goals     Goals                 // what a request must meet to count as good
	Law       steptime.Coefficients // of the engines; the zero value is the reference

	SlowRank   int // takes SlowFactor times as long for every step from SlowFrom on, if SlowFactor is above 0
	SlowFactor float64
	SlowFrom   time.Duration

	ClockSkew   []time.Duration // by rank: how far its own clock is ahead; ranks beyond the list: 0
	ClockJump   []time.Duration // by rank: by how much its clock jumps at ClockJumpAt; likewise
	ClockJumpAt time.Duration   //
	WithoutHits int             // of the first of the ranks nobody knows what they hold
	// changes what a rank tells before an ingress hears of it; nil = nothing is changed
	Report func(*routing.Event)

	Each func(sent int) error // called after each request that came; an error ends the run; nil = not called
}

// Default is eight ranks with room for 699,392 tokens each, one ingress, and goals of 2 s and 50 ms.
func Default() Config {
	return Config{Ranks: 8, Blocks: 1366, Ingresses: 1, Goals: Goals{
		TTFT: 2 * time.Second,
		TPOT: 50 * time.Millisecond,
	}}
}

// sim is one run.
type sim struct {
	cfg     Config
	needs   routing.Needs
	routers []*routing.Router
	ranks   []*rank
	now     time.Duration
	late    []record // told, and not heard of yet
	calls   []call
	q       routing.Request
	d       routing.Decision
	group   *group // nil: the ranks step by themselves
}

// rank is one engine and the records of its replica.
type rank struct {
	core     *enginemodel.Core
	id       routing.RankID
	wake     time.Duration
	seq      uint64
	decoding []*call
}

// call is one request on its way.
type call struct {
	*Request
	key      uint64
	rank     int // -1: no rank took it
	place    int // in the rank's decoding
	sent     enginemodel.Request
	hit      int  // tokens that its rank held at the pick
	finished bool // with all its tokens
	named    routing.RankID
	isNamed  bool // named is the rank that it must go to
}

type record struct {
	due   time.Duration
	event routing.Event
}

// incarnation is that of all ranks: none dies here.
const incarnation = 1

// Run plays the workload, which is in the order of time, under the policy that newPolicy makes for each
// ingress.
func Run(cfg Config, work []Request, newPolicy func() (routing.Policy, error)) (*Result, error) {
	s, err := newSim(cfg, cfg.engine(), work, 1<<20, newPolicy)
	if err != nil {
		return nil, err
	}
	if err := s.play(); err != nil {
		return nil, err
	}
	return s.result(), nil
}

// newSim makes the engines and the Routers of a run. slots is how many requests a rank takes.
func newSim(cfg Config, engine enginemodel.Config, work []Request, slots int,
	newPolicy func() (routing.Policy, error),
) (*sim, error) {
	s := &sim{cfg: cfg, calls: make([]call, len(work))}
	for i := range work {
		s.calls[i] = call{Request: &work[i], key: uint64(i) + 1, rank: -1}
	}
	for i := range cfg.Ranks {
		core, err := enginemodel.New(engine)
		if err != nil {
			return nil, fmt.Errorf("engine: %w", err)
		}
		s.ranks = append(s.ranks, &rank{core: core, id: routing.ID(0, i), wake: enginemodel.Never})
	}
	for i := range cfg.Ingresses {
		policy, err := newPolicy()
		if err != nil {
			return nil, err
		}
		s.needs = routing.NeedsOf(policy)
		r := routing.NewRouter(policy, cfg.Seed+uint64(i))
		for _, rk := range s.ranks {
			up := routing.Event{
				Kind: routing.EvRankUp, Rank: rk.id, Epoch: 1, Incarnation: incarnation, MaxOngoing: slots,
				Capacity: int64(cfg.Blocks) * BlockSize, BlockSize: BlockSize,
			}
			cfg.report(&up)
			r.Observe(&up)
		}
		s.routers = append(s.routers, r)
	}
	return s, nil
}

// fits says whether a rank can compute a request. Engines refuse the others.
func (c Config) fits(r *Request) bool { return r.Prompt+r.Output <= c.Blocks*BlockSize }

func (c Config) report(e *routing.Event) {
	if c.Report != nil {
		c.Report(e)
	}
}

// clock is what a rank's own clock shows at now.
func (c Config) clock(rank int, now time.Duration) time.Duration {
	at := clockOrigin + now
	if rank < len(c.ClockSkew) {
		at += c.ClockSkew[rank]
	}
	if rank < len(c.ClockJump) && now >= c.ClockJumpAt {
		at += c.ClockJump[rank]
	}
	return at
}

func (c Config) engine() enginemodel.Config {
	e := enginemodel.Default()
	e.BlockSize, e.Blocks, e.MaxModelLen = BlockSize, c.Blocks, c.Blocks*BlockSize
	if c.Law != (steptime.Coefficients{}) {
		e.Law = c.Law
	}
	return e
}

// play is the loop: at equal times records are heard of first, then progress, then steps end, then requests
// arrive.
func (s *sim) play() error {
	next, tick, slow := 0, progressEvery, s.cfg.SlowFrom
	if s.cfg.SlowFactor <= 0 {
		slow = enginemodel.Never
	}
	for {
		wake, busiest := enginemodel.Never, -1
		for i, rk := range s.ranks {
			if rk.wake < wake {
				wake, busiest = rk.wake, i
			}
		}
		arrival := enginemodel.Never
		if next < len(s.calls) {
			arrival = s.calls[next].At
		}
		told := enginemodel.Never
		if len(s.late) > 0 {
			told = s.late[0].due
		}
		if min(wake, arrival, told) == enginemodel.Never {
			return nil
		}
		s.now = max(s.now, min(wake, arrival, told, tick, slow))
		switch {
		case told <= s.now:
			s.hear(&s.late[0].event)
			s.late = s.late[1:]
		case tick <= s.now:
			s.progress()
			tick += progressEvery
		case slow <= s.now:
			s.step(s.ranks[s.cfg.SlowRank], enginemodel.Input{
				Kind:   enginemodel.InputSlow,
				Factor: s.cfg.SlowFactor,
			})
			slow = enginemodel.Never
		case wake <= s.now:
			s.step(s.ranks[busiest])
		default:
			if c := &s.calls[next]; s.cfg.fits(c.Request) {
				s.dispatch(s.routers[next%len(s.routers)], c)
			}
			next++
			if s.cfg.Each != nil {
				if err := s.cfg.Each(next); err != nil {
					return err
				}
			}
		}
	}
}

// tell puts a record into a rank's stream.
func (s *sim) tell(rk *rank, e routing.Event) {
	e.Rank, e.Incarnation, e.Seq = rk.id, incarnation, rk.seq
	switch e.Kind {
	case routing.EvAdmitted, routing.EvFirstToken, routing.EvProgress, routing.EvFinished:
		e.At = s.cfg.clock(rk.id.Rank(), s.now)
	default:
	}
	s.cfg.report(&e)
	if s.cfg.Lag > 0 {
		s.late = append(s.late, record{s.now + s.cfg.Lag, e})
		return
	}
	s.hear(&e)
}

func (s *sim) hear(e *routing.Event) {
	e.Now = s.now
	for _, r := range s.routers {
		r.Observe(e)
	}
	if s.group != nil {
		s.group.hear(e)
	}
}

// dispatch routes a request, with what every rank's cache holds of it at this moment.
func (s *sim) dispatch(r *routing.Router, c *call) {
	s.q = routing.Request{
		ID: c.key, Now: s.now, Tokens: c.Prompt, Hits: s.q.Hits[:0], Blocks: c.Blocks,
		BlockSize: BlockSize, Session: c.Session, Text: s.q.Text[:0],
	}
	for _, rk := range s.ranks[min(s.cfg.WithoutHits, len(s.ranks)):] {
		if hit := rk.core.Cached(c, c.Prompt); hit > 0 {
			s.q.Hits = append(s.q.Hits, routing.Hit{Rank: rk.id, Tokens: int32(hit)})
		}
	}
	if s.needs.Text {
		s.q.Text = c.text(s.q.Text)
	}
	r.Pick(&s.q, &s.d)
	if s.d.Kind != routing.Route {
		return
	}
	c.rank = s.d.Ranked[0].Rank()
	c.hit = s.q.HitOn(s.d.Ranked[0])
	rk := s.ranks[c.rank]
	s.admit(r, rk, c)
	c.sent = enginemodel.Request{
		Prompt: c.Prompt, Output: c.Output, Ending: enginemodel.FinishLength,
		Content: c, User: c,
	}
	s.step(rk, enginemodel.Input{Kind: enginemodel.InputAdd, Req: &c.sent})
}

// admit is the ticket of a request, and the record of it.
func (s *sim) admit(r *routing.Router, rk *rank, c *call) {
	rk.seq++
	r.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: rk.id, ReqID: c.key, Seq: rk.seq,
		Incarnation: incarnation, Now: s.now,
	})
	s.tell(rk, routing.Event{
		Kind: routing.EvAdmitted, ReqID: c.key, Tokens: c.Prompt, Hit: c.hit,
		Session: routing.SessionKey(c.Session),
	})
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

// step runs an engine and records what it did.
func (s *sim) step(rk *rank, in ...enginemodel.Input) {
	effects, wake := rk.core.Step(s.now, in)
	rk.wake = wake
	for i := range effects {
		e := &effects[i]
		switch e.Kind {
		case enginemodel.EffectToken:
			if e.Req.Produced() == 1 {
				c := e.Req.User.(*call)
				c.place = len(rk.decoding)
				rk.decoding = append(rk.decoding, c)
				rk.seq++
				s.tell(rk, routing.Event{Kind: routing.EvFirstToken, ReqID: c.key})
			}
			if s.group != nil {
				s.group.token(e.Req)
			}
		case enginemodel.EffectFinished:
			c := e.Req.User.(*call)
			c.finished = e.Req.Finish() == enginemodel.FinishLength
			last := len(rk.decoding) - 1
			rk.decoding[c.place] = rk.decoding[last]
			rk.decoding[c.place].place = c.place
			rk.decoding = rk.decoding[:last]
			rk.seq++
			s.tell(rk, routing.Event{Kind: routing.EvFinished, ReqID: c.key, Out: c.sent.Produced()})
		case enginemodel.EffectWave, enginemodel.EffectReport, enginemodel.EffectLoad:
			s.group.take(rk, e)
		default:
		}
	}
}

// progress reports how far every stream is, and how full the ranks' caches are.
func (s *sim) progress() {
	for _, rk := range s.ranks {
		for _, c := range rk.decoding {
			rk.seq++
			s.tell(rk, routing.Event{Kind: routing.EvProgress, ReqID: c.key, Out: c.sent.Produced()})
		}
		st := rk.core.Stats()
		rk.seq++
		s.tell(rk, routing.Event{
			Kind: routing.EvStatus, KVUsage: float64(st.UsedBlocks) / float64(st.Blocks),
			BlockSize: BlockSize,
		})
	}
}
