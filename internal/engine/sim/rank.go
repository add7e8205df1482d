package sim

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// maxInbox bounds the inputs from handlers between two turns of the engine; beyond it the engine answers that
// it is busy.
const maxInbox = 1 << 16

// maxBurst bounds the steps without duration that follow each other before the writers get their turn: with
// many of them a stream is flushed once for several tokens, as a client sees them that is slower than the
// engine.
const maxBurst = 32

// rank drives one engine core by wall time: one goroutine, one bounded inbox, no decisions of its own.
type rank struct {
	label string // of the metrics
	zero  time.Time
	load  atomic.Int64 // requests inside, for internal load balancing
	kick  chan struct{}

	inMu  sync.Mutex
	inbox []em.Input

	mu     sync.Mutex // core and meters: also read by /metrics
	core   *em.Core
	meters meters
	kv     *kvPublisher // nil = no events

	exchange *exchange // nil = blocks are neither given nor taken

	group func(em.GroupInput) // lockstep: tells the coordinator; never blocks long
	died  func()
}

func newRank(label string, cfg em.Config, zero time.Time) (*rank, error) {
	core, err := em.New(cfg)
	if err != nil {
		return nil, err
	}
	return &rank{
		label: label, zero: zero, kick: make(chan struct{}, 1), core: core,
		meters: meters{h: newHistograms(meterTable[:])},
	}, nil
}

// run is the engine's loop; it ends with ctx.
func (r *rank) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var spare []em.Input
	for burst := 0; ; {
		var wake time.Duration
		wake, spare = r.turn(spare)
		now := time.Since(r.zero)
		if wake <= now {
			if burst++; burst < maxBurst {
				continue
			}
			burst = 0
			if ctx.Err() != nil {
				return
			}
			runtime.Gosched() // with one P the writers need their turn
			continue
		}
		burst = 0
		timer.Reset(min(wake-now, time.Hour))
		select {
		case <-r.kick:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}

// turn is one call of the core; it returns when the next one is due, and the input buffer for reuse.
func (r *rank) turn(spare []em.Input) (time.Duration, []em.Input) {
	r.inMu.Lock()
	in := r.inbox
	r.inbox = spare[:0]
	r.inMu.Unlock()

	r.mu.Lock()
	defer r.mu.Unlock()
	effects, wake := r.core.Step(time.Since(r.zero), in)
	r.meters.step(r.core.Stats())
	for i := range effects {
		r.pass(&effects[i])
	}
	clear(in)
	return wake, in
}

// submit hands in what is not a request: few and never refused.
func (r *rank) submit(in em.Input) {
	r.inMu.Lock()
	r.inbox = append(r.inbox, in)
	r.inMu.Unlock()
	r.wake()
}

// add hands in all sequences of a call, as one; false = the inbox is full.
func (r *rank) add(c *call) bool { return r.submitAll(c, em.InputAdd) }

// abort takes the sequences of a call out of the engine.
func (r *rank) abort(c *call) { r.submitAll(c, em.InputAbort) }

func (r *rank) submitAll(c *call, kind em.InputKind) bool {
	r.inMu.Lock()
	if kind == em.InputAdd && len(r.inbox)+len(c.choices) > maxInbox {
		r.inMu.Unlock()
		return false
	}
	for i := range c.choices {
		r.inbox = append(r.inbox, em.Input{Kind: kind, Req: &c.choices[i].req})
	}
	r.inMu.Unlock()
	r.wake()
	return true
}

func (r *rank) wake() { kick(r.kick) }

// kick rings a bell of one slot; it never waits.
func kick(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// stats is a snapshot of the core.
func (r *rank) stats() em.Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.Stats()
}

// pass delivers one effect to its call, the group or the publisher.
func (r *rank) pass(e *em.Effect) {
	switch e.Kind {
	case em.EffectToken:
		c, _ := e.Req.User.(*choice)
		r.meters.token(e.Req)
		if e.Req.Produced() == 1 {
			c.cached.Store(int32(e.Req.Cached()))
			c.wrong.Store(e.Req.Wrong())
		}
		c.produced.Store(int32(e.Req.Produced()))
		if c.call.plan.stream {
			c.call.ring()
		}
	case em.EffectFinished:
		r.meters.finished(e.Req)
		c, _ := e.Req.User.(*choice)
		r.keep(c)
		c.finish(e.Req.Finish())
	case em.EffectRejected:
		c, _ := e.Req.User.(*choice)
		c.rejected.Store(true)
		c.finish(em.FinishError)
	case em.EffectBlocks:
		r.kv.step(e.Blocks)
	case em.EffectLoad:
		c, _ := e.Req.User.(*choice)
		c.load.begin(e.Req.LoadBlocks())
	case em.EffectLeaseOver:
		r.exchange.expired(e.Name)
	case em.EffectDied:
		if r.died != nil {
			r.died()
		}
	case em.EffectWave:
		r.group(em.GroupInput{Kind: em.GroupWave})
	case em.EffectReport:
		r.group(em.GroupInput{
			Kind: em.GroupReport, Took: e.Took, Tokens: e.Tokens, Unfinished: e.Unfinished,
		})
	}
}

// keep notes the blocks that the end of a sequence left behind.
func (r *rank) keep(c *choice) {
	c.kept = namedBlocks(c.req.Kept())
}

// isDead reports whether the engine core is gone.
func (r *rank) isDead() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.Dead()
}

// readBlocks gives what blocks hold now; false = there are no such blocks.
func (r *rank) readBlocks(blocks []int32) ([]em.BlockKV, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.ReadBlocks(nil, blocks)
}

// params counts a call's parameters in the histograms.
func (r *rank) params(c *call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.meters.h[meterN].observe(float64(c.plan.n))
	r.meters.h[meterMaxTokens].observe(float64(c.choices[0].req.Output))
}

func (r *rank) snapshot() snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := snapshot{
		engine: r.label, stats: r.core.Stats(), meters: r.meters, transfer: r.exchange.snapshot(),
	}
	s.meters.h = copied(s.meters.h)
	return s
}
