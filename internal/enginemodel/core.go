// Package enginemodel is the simulated inference engine of one rank without its process: continuous batching
// with chunked prefill, a FCFS queue, preemption, a block cache with prefix reuse, lockstep waves and failure
// states. It is pure: time is an argument, nothing blocks. engine/sim drives it by wall time, tests by fake
// time, a simulator by its event queue.
//
// A step takes the running requests in the order of their admission, then waiting ones, while MaxSeqs, blocks
// and MaxBatchedTokens allow; prefills are chunked. The first token comes at the end of the step that
// completes the prompt. When no block is left, the youngest running request loses its blocks and computes
// everything again. A full block enters the prefix cache when it is scheduled and survives its request; a hit
// is whole blocks, at most all but the last token. EffectBlocks tells what a step changed in the cache:
// whoever counts the events holds what the pool holds.
//
// In a lockstep group the Core of every rank and the Group of rank 0 exchange wave, begin, report, end and
// lost; a step lasts as long as its slowest rank and what all ranks do together. Blocks that another engine
// reads remember what was written last: a read after the end of its lease gives a wrong text, as with real
// engines. Property tests: every request ends exactly once with its number of tokens; used blocks, running
// requests and step tokens keep their bounds; a step allocates nothing but growing block lists.
package enginemodel

import (
	"math"
	"slices"
	"time"
)

// How a rank notices a dead peer over Gloo: a busy one when its collective breaks, an idle one at its next
// request.
const (
	glooBusyNotice = 300 * time.Millisecond
	glooIdleNotice = 40 * time.Millisecond
)

// Never is the wake-up of a core that waits for input only.
const Never = time.Duration(math.MaxInt64)

// Core is one rank's engine core. Not safe for concurrent use.
type Core struct {
	cfg     Config
	pool    *blockPool
	log     *blockLog
	waiting queue
	running []*Request
	batch   []slice
	effects []Effect
	stats   Stats

	stepping    bool          // a step is under way, or reported to the group
	startedAt   time.Duration // of that step
	endsAt      time.Duration // of that step; lockstep: unused
	batchTokens int
	// of batchTokens: of prompts
	promptTokens int
	slow         float64
	hung         bool
	dead         bool
	failAt       time.Duration

	wave
	transfer
}

// wave is what a core knows of its lockstep group.
type wave struct {
	waveAsked bool
	inWave    bool
	held      []Input // group inputs that came while hung: at most one begin and one end
	peerLost  bool
}

// transfer is what a core knows of blocks that other engines read or bring.
type transfer struct {
	memory  *memory
	leases  leases
	loading []*Request // the KV of their prompts is on its way, or there (ready)
	ready   int        // of loading
}

// slice is one request's share of a step.
type slice struct {
	req    *Request
	tokens int
}

// New makes an idle core.
func New(cfg Config) (*Core, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	log := &blockLog{on: cfg.BlockEvents}
	return &Core{
		cfg: cfg, pool: newBlockPool(cfg.Blocks, log), log: log, slow: 1, failAt: Never,
		transfer: transfer{memory: newMemory(&cfg), leases: newLeases(cfg.Lease)},
	}, nil
}

// Stats is a snapshot.
func (c *Core) Stats() Stats {
	s := c.stats
	s.Running, s.Loading = len(c.running), len(c.loading)
	s.Waiting = c.waiting.len() + s.Loading
	s.Leases = len(c.leases.byName)
	s.UsedBlocks, s.Blocks = c.pool.used(), c.cfg.Blocks
	return s
}

// Dead reports that the core died and ends everything it is given with FinishError.
func (c *Core) Dead() bool { return c.dead }

// Step is the whole engine: at now it ends a due step, takes the inputs in order, and begins the next step if
// there is work. At most one step ends per call; the result says when to call again at the latest (it may be
// now or earlier: at once). The effects are valid until the next call. now must not go backwards.
func (c *Core) Step(now time.Duration, in []Input) ([]Effect, time.Duration) {
	c.effects = c.effects[:0]
	if now >= c.failAt {
		c.die()
	}
	c.endLeases(now)
	ended := !c.cfg.Lockstep && c.stepping && !c.hung && now >= c.endsAt
	if ended {
		c.endStep(c.endsAt)
	}
	for i := range in {
		c.take(now, &in[i])
	}
	c.beginSteps(now, ended)
	return c.effects, c.wakeUp()
}

func (c *Core) wakeUp() time.Duration {
	wake := min(c.failAt, c.leases.next)
	if c.stepping && !c.cfg.Lockstep && !c.hung {
		wake = min(wake, c.endsAt)
	}
	return wake
}

// beginSteps begins the next step if this rank decides alone, or asks the group for a wave.
func (c *Core) beginSteps(now time.Duration, ended bool) {
	if c.stepping || c.hung || c.dead || !c.hasWork() {
		return
	}
	if c.cfg.Lockstep {
		c.askWave(now)
		return
	}
	start := now
	if late := now - c.endsAt; ended && late <= c.endsAt-c.startedAt {
		start = c.endsAt // a wake-up a little late does not stretch the cadence
	}
	took := c.schedule(start)
	if len(c.batch) == 0 {
		return // leases hold the blocks that the first request needs, or all requests wait for their KV
	}
	c.stepping, c.startedAt, c.endsAt = true, start, start+took
}

func (c *Core) askWave(now time.Duration) {
	if c.waveAsked || c.inWave {
		return
	}
	c.waveAsked = true
	c.emit(Effect{Kind: EffectWave})
	if c.peerLost {
		c.noticeLoss(now, glooIdleNotice)
	}
}

func (c *Core) hasWork() bool { return len(c.running) > 0 || c.waiting.len() > 0 || c.ready > 0 }

func (c *Core) emit(e Effect) { c.effects = append(c.effects, e) }

func (c *Core) take(now time.Duration, in *Input) {
	switch in.Kind {
	case InputAdd:
		c.add(now, in.Req)
	case InputAbort:
		c.abort(in.Req)
	case InputAbortAll:
		c.endAll(FinishAbort)
	case InputKill:
		c.die()
	case InputHang:
		c.hung = true
	case InputSlow:
		c.slow = in.Factor
	case InputRecover:
		c.recover(now)
	case InputGroupBegin, InputGroupEnd:
		c.group(now, in)
	case InputPeerLost:
		c.losePeer(now)
	case InputLoaded, InputLoadFailed:
		c.loaded(in)
	case InputLeaseExtend, InputLeaseRead, InputLeaseTime:
		c.lease(now, in)
	}
}

func (c *Core) add(now time.Duration, r *Request) {
	r.times.Arrived = now
	if c.dead {
		c.finish(r, FinishError)
		return
	}
	if why := c.admit(r); why != RejectNone {
		c.stats.Rejected[why]++
		r.state = stateDone
		c.emit(Effect{Kind: EffectRejected, Req: r, Reject: why})
		return
	}
	r.state = stateWaiting
	if c.cfg.Transfer {
		r.kv.content, _ = r.Content.(KVContent)
		if r.Remote {
			r.kv.load = loadWanted
		}
	}
	c.waiting.pushBack(r)
}

func (c *Core) admit(r *Request) Reject {
	if c.cfg.MaxQueuedReqs > 0 && c.waiting.len() >= c.cfg.MaxQueuedReqs {
		return RejectRequests
	}
	if c.cfg.MaxQueuedTokens > 0 && c.waiting.tokens+r.Prompt > c.cfg.MaxQueuedTokens {
		return RejectTokens
	}
	return RejectNone
}

// abort ends r without an effect; its blocks and its place are free at once, also in the middle of a step.
func (c *Core) abort(r *Request) {
	if !r.isActive() {
		return
	}
	c.remove(r)
	r.state, r.finish = stateDone, FinishAbort
	c.stats.Aborted++
}

func (c *Core) remove(r *Request) {
	switch r.state {
	case stateWaiting:
		c.waiting.remove(r)
	case stateLoading:
		c.removeLoading(r)
	default:
		c.running = without(c.running, r)
	}
	c.freeBlocks(r)
}

func (c *Core) removeLoading(r *Request) {
	c.loading = without(c.loading, r)
	if r.kv.load == loadReady {
		c.ready--
	}
}

func without(list []*Request, r *Request) []*Request {
	return slices.DeleteFunc(list, func(other *Request) bool { return other == r })
}

func (c *Core) endAll(why FinishReason) {
	for _, list := range [][]*Request{c.running, c.loading} {
		for _, r := range list {
			c.freeBlocks(r)
			c.finish(r, why)
		}
	}
	c.running, c.loading, c.ready = c.running[:0], c.loading[:0], 0
	for c.waiting.len() > 0 {
		c.finish(c.waiting.popFront(), why)
	}
}

func (c *Core) finish(r *Request, why FinishReason) {
	r.state, r.finish = stateDone, why
	c.stats.Finished[why]++
	c.emit(Effect{Kind: EffectFinished, Req: r})
}

func (c *Core) die() {
	c.failAt = Never
	if c.dead {
		return
	}
	c.dead, c.stepping, c.inWave = true, false, false
	c.endAll(FinishError)
	c.emit(Effect{Kind: EffectDied})
}

func (c *Core) recover(now time.Duration) {
	c.hung, c.slow = false, 1
	held := c.held
	c.held = nil
	for i := range held {
		c.group(now, &held[i])
	}
}

// group applies an input of the lockstep group.
func (c *Core) group(now time.Duration, in *Input) {
	if c.dead {
		return
	}
	if c.hung {
		c.held = append(c.held, *in)
		return
	}
	if in.Kind == InputGroupEnd {
		if c.stepping {
			c.endStep(now)
		}
		c.inWave = in.Continue
	} else {
		c.inWave = true
	}
	c.waveAsked = c.waveAsked && !c.inWave
	if c.inWave && !c.stepping {
		c.report(now)
	}
}

// report schedules a step, a dummy one if there is nothing to do, and tells the group how long it takes.
func (c *Core) report(now time.Duration) {
	took := c.schedule(now)
	c.stepping, c.startedAt = true, now
	c.emit(Effect{
		Kind: EffectReport, Took: took, Tokens: c.batchTokens, Prompt: c.promptTokens,
		Unfinished: c.unfinishedAfter(),
	})
}

// unfinishedAfter reports whether work is left when the scheduled step has ended, barring arrivals.
func (c *Core) unfinishedAfter() bool {
	if c.waiting.len() > 0 || len(c.loading) > 0 || len(c.batch) < len(c.running) {
		return true
	}
	for _, s := range c.batch {
		if s.req.computed+s.tokens < s.req.total() || s.req.produced+1 < s.req.Output {
			return true
		}
	}
	return false
}

func (c *Core) losePeer(now time.Duration) {
	c.peerLost = true
	if c.inWave || c.waveAsked {
		c.noticeLoss(now, glooBusyNotice)
	}
}

func (c *Core) noticeLoss(now, gloo time.Duration) {
	if c.dead || c.failAt != Never {
		return
	}
	if c.cfg.NCCL {
		gloo = c.cfg.CollectiveTimeout
	}
	c.failAt = now + time.Duration(float64(gloo)/max(1, c.cfg.Speed))
}

// ResetPrefixCache drops every cached block and says whether that was possible: not while requests hold
// blocks. force takes the blocks of running requests first (they start again). With BlockEvents on, the next
// step reports BlocksCleared; with silent it does not, because a restarted engine sends no such event.
func (c *Core) ResetPrefixCache(force, silent bool) bool {
	for force && len(c.running) > 0 {
		c.preempt(c.running[len(c.running)-1])
	}
	if c.dead || c.pool.used() > 0 {
		return false
	}
	c.pool.forget()
	c.log.clear(silent)
	return true
}

// ReadBlocks appends what the given blocks hold to dst, whoever owns them; false = there are no such blocks.
func (c *Core) ReadBlocks(dst []BlockKV, blocks []int32) ([]BlockKV, bool) {
	if c.memory == nil {
		return dst, false
	}
	for _, b := range blocks {
		if b < 0 || int(b) >= len(c.memory.blocks) {
			return dst, false
		}
		dst = append(dst, c.memory.blocks[b])
	}
	return dst, true
}

// loaded ends the loading of a request: it runs with the next step then, or failed.
func (c *Core) loaded(in *Input) {
	r := in.Req
	if r.state != stateLoading || r.kv.load != loadRunning {
		return // it was aborted meanwhile
	}
	if in.Kind == InputLoaded && len(in.KV) == r.LoadBlocks() {
		r.kv.load = loadReady
		c.ready++
		c.memory.load(r, r.hashed, in.KV)
		c.memory.inspect(r)
		r.computed = r.Prompt - 1 // the last token is computed once more, for the first one of the answer
		if c.caching(r) {
			c.enterFull(r, r.Prompt/c.cfg.BlockSize)
		}
		return
	}
	c.removeLoading(r)
	c.freeBlocks(r)
	r.kv.load = loadFailed
	if !c.cfg.Recompute {
		c.finish(r, FinishError)
		return
	}
	r.state = stateWaiting
	c.waiting.pushFront(r)
}

// lease applies what a reader of leased blocks says.
func (c *Core) lease(now time.Duration, in *Input) {
	switch in.Kind {
	case InputLeaseExtend:
		c.leases.extend(in.Name, now)
	case InputLeaseTime:
		c.leases.lasts = in.For
	default:
		blocks, ok := c.leases.remove(in.Name)
		if !ok {
			c.stats.LateReads++
		}
		c.pool.releaseAll(blocks)
	}
}

// endLeases frees the blocks that were not read in time.
func (c *Core) endLeases(now time.Duration) {
	for _, name := range c.leases.over(now) {
		blocks, _ := c.leases.remove(name)
		c.pool.releaseAll(blocks)
		c.stats.LeasesOver++
		c.emit(Effect{Kind: EffectLeaseOver, Name: name})
	}
}

// CachedBlocks calls each with every hash in the prefix cache and its number of copies.
func (c *Core) CachedBlocks(each func(hash uint64, copies int)) {
	for hash, i := range c.pool.byHash {
		copies := 0
		for ; i != none; i = c.pool.blocks[i].sameHash {
			copies++
		}
		each(hash, copies)
	}
}
