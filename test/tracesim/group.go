package tracesim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/routing"
)

// GroupConfig is the shape of a run in which the ranks of Config are one lockstep group. Its engines' Law is
// DeepSeek's.
type GroupConfig struct {
	Config

	Slots       int  // requests per rank
	PromptSteps bool // a rank that has a prompt does not decode in that step
	Decode      bool // the prompts come computed
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

// LockstepGroup is one ingress before ranks with slots requests each, 1M tokens of KV, records 100 ms old and
// a dispatch of 1 to 3 ms.
func LockstepGroup(ranks, slots int) GroupConfig {
	c := GroupConfig{
		Config: Default(), Slots: slots,
		Dispatch: [2]time.Duration{time.Millisecond, 3 * time.Millisecond},
	}
	c.Ranks, c.Blocks, c.Lag = ranks, 2048, 100*time.Millisecond
	return c
}

// group is the part of a run that concerns its lockstep group.
type group struct {
	*sim
	cfg    GroupConfig
	steps  *enginemodel.Group
	wake   time.Duration // of steps
	line   *routing.GroupLine
	askAt  time.Duration // of line; 0 = never
	queues [][]*call     // by ingress, without a line
	room   bool          // the queues are to be looked at
	agenda agenda
	seq    int // of agenda
	next   int // of the workload
	// requests that left a queue, and that ended
	released, ended int
	rnd             *rand.Rand

	words []enginemodel.GroupInput // of ranks
	loads []enginemodel.Input      // KV that has come, for the rank at hand
	rows  []routing.GroupRank
	look  routing.GroupLook

	meter groupMeter
}

// agenda is what will happen, in the order of time.
type agenda []entry

type entry struct {
	at  time.Duration
	seq int
	do  func()
}

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, k int) bool {
	return a[i].at < a[k].at || a[i].at == a[k].at && a[i].seq < a[k].seq
}
func (a agenda) Swap(i, k int) { a[i], a[k] = a[k], a[i] }
func (a *agenda) Push(e any)   { *a = append(*a, e.(entry)) }
func (a *agenda) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

// RunGroup plays a workload, which is in the order of time, against a lockstep group.
func RunGroup(cfg GroupConfig, work []Request, newPolicy func() (routing.Policy, error),
) (*GroupResult, error) {
	engine := cfg.engine()
	engine.Lockstep, engine.PromptSteps, engine.Transfer = true, cfg.PromptSteps, cfg.Decode
	law, shared := steptime.DeepSeek(cfg.Ranks)
	engine.Law = law
	s, err := newSim(cfg.Config, engine, work, cfg.Slots, newPolicy)
	if err != nil {
		return nil, err
	}
	steps, err := enginemodel.NewGroup(enginemodel.GroupConfig{
		Ranks: cfg.Ranks, SyncInterval: enginemodel.DefaultSyncInterval, Shared: shared,
	})
	if err != nil {
		return nil, fmt.Errorf("group: %w", err)
	}
	g := &group{
		sim: s, cfg: cfg, steps: steps, wake: enginemodel.Never, queues: make([][]*call, cfg.Ingresses),
		rnd:   rand.New(rand.NewPCG(cfg.Seed, 5)),
		meter: groupMeter{cfg: &cfg, took: make([]time.Duration, cfg.Ranks)},
	}
	s.group = g
	if cfg.Rule != nil {
		g.line = routing.NewGroupLine(*cfg.Rule)
	}
	for _, r := range s.routers {
		r.OnRoom = func() { g.room = true }
	}
	g.refill()
	g.play()
	return g.meter.result(s.calls), nil
}

// play is the loop: at equal times records are heard of first, then what was on its way comes, then steps
// end, then requests arrive.
func (g *group) play() {
	tick, s := progressEvery, g.sim
	for {
		if g.room {
			g.room = false
			g.pump()
		}
		arrival, told, due := enginemodel.Never, enginemodel.Never, enginemodel.Never
		if g.cfg.Waiting == 0 && g.next < len(s.calls) {
			arrival = s.calls[g.next].At
		}
		if len(s.late) > 0 {
			told = s.late[0].due
		}
		if len(g.agenda) > 0 {
			due = g.agenda[0].at
		}
		ask := enginemodel.Never
		if g.askAt > 0 {
			ask = g.askAt
		}
		now := min(arrival, told, due, g.wake, ask, tick)
		if g.isOver(now) {
			return
		}
		s.now = max(s.now, now)
		switch {
		case told <= s.now:
			s.hear(&s.late[0].event)
			s.late = s.late[1:]
		case due <= s.now:
			heap.Pop(&g.agenda).(entry).do()
		case tick <= s.now:
			s.progress()
			tick += progressEvery
		case g.wake <= s.now:
			g.tellSteps()
		case arrival <= s.now:
			g.arrive(&s.calls[g.next], g.next%len(g.queues))
			g.next++
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

func (g *group) after(d time.Duration, do func()) {
	heap.Push(&g.agenda, entry{g.now + d, g.seq, do})
	g.seq++
}

// soon is after, but at once where nothing lies between.
func (g *group) soon(d time.Duration, do func()) {
	if d > 0 {
		g.after(d, do)
		return
	}
	do()
}

// arrive hands a request to the queue.
func (g *group) arrive(c *call, ingress int) {
	if g.line == nil {
		g.queues[ingress] = append(g.queues[ingress], c)
		g.room = true
		return
	}
	g.soon(g.cfg.Handover, func() {
		g.line.Add(routing.GroupWaiting{ID: c.key, Tokens: c.Prompt, Since: c.At}, g.now)
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
		g.arrive(c, g.next%len(g.queues))
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
	g.q = routing.Request{
		ID: c.key, Now: g.now, Tokens: c.Prompt, BlockSize: BlockSize, Direct: c.named, HasDirect: c.isNamed,
		Force: c.isNamed,
	}
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
	g.after(took, func() { g.send(r, c) })
	return true
}

// send brings a request to its engine.
func (g *group) send(r *routing.Router, c *call) {
	rk := g.ranks[c.rank]
	g.admit(r, rk, c)
	c.sent = enginemodel.Request{
		Prompt: c.Prompt, Output: c.Output, Ending: enginemodel.FinishLength, User: c, Remote: g.cfg.Decode,
	}
	g.step(rk, enginemodel.Input{Kind: enginemodel.InputAdd, Req: &c.sent})
	g.flush(rk)
}

// take notes what an engine says to its group, or of a prompt's KV.
func (g *group) take(rk *rank, e *enginemodel.Effect) {
	switch e.Kind {
	case enginemodel.EffectWave:
		g.words = append(g.words, enginemodel.GroupInput{Kind: enginemodel.GroupWave, Rank: rk.id.Rank()})
	case enginemodel.EffectReport:
		g.words = append(g.words, enginemodel.GroupInput{
			Kind: enginemodel.GroupReport, Rank: rk.id.Rank(), Took: e.Took, Tokens: e.Tokens,
			Unfinished: e.Unfinished,
		})
		g.meter.report(rk.id.Rank(), e)
	default: // EffectLoad
		g.loads = append(g.loads, enginemodel.Input{
			Kind: enginemodel.InputLoaded, Req: e.Req, KV: make([]enginemodel.BlockKV, e.Req.LoadBlocks()),
		})
	}
}

// load gives an engine the KV that it asked for.
func (g *group) load(rk *rank) {
	for len(g.loads) > 0 {
		in := g.loads
		g.loads = nil
		g.step(rk, in...)
	}
}

// flush passes on what an engine said.
func (g *group) flush(rk *rank) {
	g.load(rk)
	if len(g.words) > 0 {
		g.tellSteps()
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
			g.load(rk)
		}
	}
}

// token hears of a token.
func (g *group) token(r *enginemodel.Request) {
	g.meter.token(r, g.now)
	if r.Produced() > 1 || g.line == nil {
		return
	}
	key := r.User.(*call).key
	g.soon(g.cfg.Notice, func() { g.line.FirstToken(key, g.now); g.room = true })
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
