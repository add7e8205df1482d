package simulate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/routing"
)

// GroupConfig is the shape of a run in which the ranks of Config are one lockstep group.
type GroupConfig struct {
	Config

	Decode bool // the prompts come computed
	// Rule has one queue for all ingresses; nil: each ingress has its own, and the policy chooses ranks
	Rule *routing.GroupRule
	// Waiting requests at any time, whatever the workload's times: the group is saturated. 0 = requests come
	// at their times
	Waiting     int
	From, Until time.Duration // what is measured

	Dispatch [2]time.Duration // least and most time from a decision to the engine
	Notice   time.Duration    // from a first token to the queue of the rule
	Handover time.Duration    // from an ingress to the queue of the rule
}

// LockstepGroup is one ingress before ranks of DeepSeek-V3 with slots requests each, 1M tokens of KV, records
// 100 ms old and a dispatch of 1 to 3 ms.
func LockstepGroup(ranks, slots int) GroupConfig {
	c := GroupConfig{Config: Default(), Dispatch: [2]time.Duration{time.Millisecond, 3 * time.Millisecond}}
	c.Ranks, c.Slots, c.Engine.Blocks, c.Lag = ranks, slots, 2048, 100*time.Millisecond
	c.Engine.MaxModelLen = c.Engine.Blocks * BlockSize
	c.Engine.Law, c.Shared = steptime.DeepSeek(ranks)
	return c
}

// group is the part of a run that concerns its lockstep group.
type group struct {
	*sim
	cfg   GroupConfig
	steps *enginemodel.Group
	wake  time.Duration      // of steps
	line  *routing.GroupLine // nil: each ingress has its own queue
	askAt time.Duration      // of line; 0 = never
	// requests that left a queue, and that ended
	released, ended int
	rnd             *rand.Rand

	words []enginemodel.GroupInput // of ranks
	loads []enginemodel.Input      // KV that has come, for the rank at hand
	rows  []routing.GroupRank
	look  routing.GroupLook

	meter groupMeter
}

// RunGroup plays a workload, which is in the order of time, against a lockstep group.
func RunGroup(cfg GroupConfig, work []Request, newPolicy func() (routing.Policy, error),
) (*GroupResult, error) {
	cfg.Engine.Lockstep, cfg.Engine.Transfer = true, cfg.Decode
	s, err := newSim(cfg.Config, work, newPolicy)
	if err != nil {
		return nil, err
	}
	steps, err := enginemodel.NewGroup(enginemodel.GroupConfig{
		Ranks: cfg.Ranks, SyncInterval: enginemodel.DefaultSyncInterval, Shared: cfg.Shared,
	})
	if err != nil {
		return nil, fmt.Errorf("group: %w", err)
	}
	g := &group{
		sim: s, cfg: cfg, steps: steps, wake: never, rnd: rand.New(rand.NewPCG(cfg.Seed, 5)),
		meter: groupMeter{cfg: &cfg, took: make([]time.Duration, cfg.Ranks)},
	}
	s.group = g
	if cfg.Rule != nil {
		g.line = routing.NewGroupLine(*cfg.Rule)
	}
	g.refill()
	if err := g.play(); err != nil {
		return nil, err
	}
	return g.meter.result(s), nil
}

// play is the loop: at equal times records are heard of first, then what was on its way comes, then steps
// end, then requests arrive.
func (g *group) play() error {
	tick, s := progressEvery, g.sim
	for {
		if g.room {
			g.room = false
			g.pump()
		}
		arrival, told := never, never
		if g.cfg.Waiting == 0 && g.next < len(s.calls) {
			arrival = s.calls[g.next].At
		}
		if len(s.late) > 0 {
			told = s.late[0].due
		}
		ask := never
		if g.askAt > 0 {
			ask = g.askAt
		}
		due := g.agenda.next()
		now := min(arrival, told, due, g.wake, ask, tick)
		if g.isOver(now) {
			return nil
		}
		s.now = max(s.now, now)
		switch {
		case told <= s.now:
			s.hear(s.late[0].pool, &s.late[0].event)
			s.late = s.late[1:]
		case due <= s.now:
			g.agenda.do()
		case tick <= s.now:
			if err := s.progress(); err != nil {
				return err
			}
			tick = nextTick(tick, min(arrival, told, due, g.wake, ask), g.next == g.ended)
		case g.wake <= s.now:
			g.tellSteps()
		case arrival <= s.now:
			if c := &s.calls[g.next]; s.cfg.fits(c.Request) {
				g.arrive(c)
			} else {
				g.ended++
			}
			g.next++
			if err := s.each(); err != nil {
				return err
			}
		default: // the rule is asked again
			g.askAt, g.room = 0, true
		}
	}
}

// isOver: a saturated group is watched until Until, and the others until all requests that arrived before it
// have ended.
func (g *group) isOver(now time.Duration) bool {
	return now >= g.cfg.Until && (g.cfg.Waiting > 0 || g.next == len(g.calls) && g.ended == g.next)
}

// soon does something after a time, or at once.
func (g *group) soon(d time.Duration, do func()) {
	if d > 0 {
		g.agenda.at(g.now+d, do)
		return
	}
	do()
}

// arrive hands a request to the queue.
func (g *group) arrive(c *call) {
	if g.line == nil {
		g.queues[c.ingress] = append(g.queues[c.ingress], c)
		g.room = true
		return
	}
	g.soon(g.cfg.Handover, func() {
		g.ask(&g.q, g.pool, c)
		g.line.Add(routing.GroupWaiting{
			ID: c.key, Tokens: c.Prompt, Hits: slices.Clone(g.q.Hits), Since: c.At,
		}, g.now)
		g.room = true
	})
}

// refill keeps the number of waiting requests of a saturated group.
func (g *group) refill() {
	for g.next-g.released < g.cfg.Waiting && g.next < len(g.calls) {
		c := &g.calls[g.next]
		arrived := *c.Request
		arrived.At = g.now
		c.Request = &arrived
		g.next++
		g.arrive(c)
	}
}

// pump releases what may go.
func (g *group) pump() {
	if g.line == nil {
		for i, r := range g.routers {
			for len(g.queues[i]) > 0 && g.pick(r, g.queues[i][0]) {
				g.queues[i] = g.queues[i][1:]
			}
		}
		g.refill()
		return
	}
	g.rows = g.routers[0].GroupRanks(0, g.rows[:0])
	g.line.Look(g.rows, g.now, &g.look)
	g.askAt = g.look.AskAt
	for _, rel := range g.look.Releases {
		c := &g.calls[rel.ID-1]
		g.meter.skip(c, rel.Skips)
		c.named, c.isNamed = rel.Rank, true
		if !g.pick(g.routers[0], c) {
			panic("a release above a rank's slots")
		}
	}
	if len(g.look.Releases) > 0 {
		g.refill()
	}
}

// pick asks a Router and sends the request; false = it must wait.
func (g *group) pick(r *routing.Router, c *call) bool {
	g.ask(&g.q, g.pool, c)
	g.q.Direct, g.q.HasDirect, g.q.Force = c.named, c.isNamed, c.isNamed
	r.Pick(&g.q, &g.d)
	if g.d.Kind != routing.Route {
		return false
	}
	c.rank = g.d.Ranked[0].Rank()
	g.released++
	took := g.cfg.Dispatch[0]
	if more := g.cfg.Dispatch[1] - took; more > 0 {
		took += time.Duration(g.rnd.Int64N(int64(more)))
	}
	hit := g.q.HitOn(g.d.Ranked[0])
	g.agenda.at(g.now+took, func() {
		c.own = g.reserve(g.pool, c, routing.ID(0, c.rank), hit)
		c.own.sent.Remote = g.cfg.Decode
		g.send(c.own)
		g.bring(c.own.on)
		if len(g.words) > 0 {
			g.tellSteps()
		}
	})
	return true
}

// take notes what an engine says to its group.
func (g *group) take(rk *rank, e *enginemodel.Effect) {
	said := enginemodel.GroupInput{Kind: enginemodel.GroupWave, Rank: rk.id.Rank()}
	if e.Kind == enginemodel.EffectReport {
		said.Kind, said.Took, said.Tokens = enginemodel.GroupReport, e.Took, e.Tokens
		said.Unfinished = e.Unfinished
		g.meter.report(said.Rank, e)
	}
	g.words = append(g.words, said)
}

// bring gives an engine the KV that it asked for.
func (g *group) bring(rk *rank) {
	for len(g.loads) > 0 {
		in := g.loads
		g.loads = nil
		g.step(rk, in...)
	}
}

// tellSteps gives the coordinator what the ranks said, and the ranks what it answers.
func (g *group) tellSteps() {
	for {
		effects, wake := g.steps.Step(g.now, g.words)
		g.words, g.wake = g.words[:0], wake
		if len(effects) == 0 {
			return
		}
		in := enginemodel.Input{Kind: enginemodel.InputGroupBegin}
		if e := effects[0]; e.Kind == enginemodel.GroupEnd {
			in = enginemodel.Input{Kind: enginemodel.InputGroupEnd, Continue: e.Continue}
			g.meter.endStep(g.now)
		}
		g.meter.began = g.now
		for _, rk := range g.ranks {
			g.step(rk, in)
			g.bring(rk)
		}
	}
}

// token hears of a token.
func (g *group) token(r *enginemodel.Request) {
	g.meter.token(r, g.now)
	if r.Produced() > 1 || g.line == nil {
		return
	}
	l, _ := r.User.(*leg)
	g.soon(g.cfg.Notice, func() { g.line.FirstToken(l.key, g.now); g.room = true })
}

// hear tells the queue what the ranks' records say.
func (g *group) hear(e *routing.Event) {
	if e.Kind == routing.EvFinished {
		g.ended++
	}
	if g.line == nil {
		return
	}
	switch e.Kind {
	case routing.EvProgress:
		g.line.Progress(e.ReqID, e.Out, g.now)
	case routing.EvFinished:
		g.line.End(e.ReqID, e.Out, g.now)
		g.room = true
	default:
	}
}
