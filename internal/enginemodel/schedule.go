package enginemodel

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// schedule fills the batch of the step that begins at now and returns how long it takes. Running requests
// come first, in the order of their admission (so decodes before the one prefill that may be unfinished),
// then waiting ones first come first served while sequences, blocks and the token budget allow.
func (c *Core) schedule(now time.Duration) time.Duration {
	c.batch = c.batch[:0]
	if c.cfg.PromptSteps && c.schedulePrompts(now) {
		return c.duration()
	}
	budget, preempted := c.scheduleRunning(c.cfg.MaxBatchedTokens, false)
	if !preempted || len(c.batch) == 0 { // what is loaded may hold the memory that is missing
		budget = c.scheduleLoaded(now, budget)
	}
	if !preempted {
		c.scheduleWaiting(now, budget)
	}
	return c.duration()
}

// schedulePrompts fills the batch with prompts alone and reports whether there are any.
func (c *Core) schedulePrompts(now time.Duration) bool {
	budget, preempted := c.scheduleRunning(c.cfg.MaxBatchedTokens, true)
	if !preempted {
		c.scheduleWaiting(now, budget)
	}
	return len(c.batch) > 0
}

// scheduleRunning takes running requests into the batch, or with promptsOnly those whose prompt is not
// computed.
func (c *Core) scheduleRunning(budget int, promptsOnly bool) (left int, preempted bool) {
	for i := 0; i < len(c.running) && budget > 0; i++ {
		r := c.running[i]
		if promptsOnly && r.decoding() {
			continue
		}
		n := min(r.total()-r.computed, budget)
		for !c.grow(r, r.computed+n) {
			victim := c.running[len(c.running)-1]
			c.preempt(victim)
			preempted = true
			if victim == r {
				return budget, true
			}
		}
		c.batch = append(c.batch, slice{req: r, tokens: n})
		budget -= n
	}
	return budget, preempted
}

// scheduleLoaded lets requests run whose KV came from another engine. They have all blocks they need.
func (c *Core) scheduleLoaded(now time.Duration, budget int) int {
	for i := 0; c.ready > 0 && i < len(c.loading) && budget > 0 && len(c.running) < c.cfg.MaxSeqs; {
		r := c.loading[i]
		if r.kv.load != loadReady {
			i++
			continue
		}
		c.removeLoading(r)
		c.countStart(r)
		budget = c.run(now, r, budget)
	}
	return budget
}

func (c *Core) scheduleWaiting(now time.Duration, budget int) {
	for budget > 0 && c.waiting.len() > 0 && len(c.running) < c.cfg.MaxSeqs {
		r := c.waiting.front()
		if r.kv.load == loadWanted {
			if !c.beginLoad(r) {
				return
			}
			continue
		}
		if !c.start(r, budget) {
			return
		}
		c.waiting.popFront()
		budget = c.run(now, r, budget)
	}
}

// run puts r into the batch with its first chunk, and returns what is left of the budget.
func (c *Core) run(now time.Duration, r *Request, budget int) int {
	r.state = stateRunning
	c.running = append(c.running, r)
	if r.times.Scheduled == 0 {
		r.times.Scheduled = max(now, 1)
	}
	n := min(r.total()-r.computed, budget)
	c.batch = append(c.batch, slice{req: r, tokens: n})
	return budget - n
}

// beginLoad takes the first request off the queue and gives it its cached prefix and blocks for the rest of
// its prompt, which another engine fills; false = there are not enough blocks.
func (c *Core) beginLoad(r *Request) bool {
	hits, idle := c.match(r)
	need := c.blocksFor(r.Prompt) - len(hits)
	if need > c.pool.free-idle {
		return false
	}
	c.waiting.popFront()
	for _, b := range hits {
		c.pool.ref(b)
	}
	r.blocks, r.hashed, r.kv.local = hits, len(hits), len(hits)*c.cfg.BlockSize
	for range need {
		b := c.pool.take()
		c.memory.clear(b)
		r.blocks = append(r.blocks, b)
	}
	r.state, r.kv.load = stateLoading, loadRunning
	c.loading = append(c.loading, r)
	c.emit(Effect{Kind: EffectLoad, Req: r})
	return true
}

// start gives a waiting request its cached prefix and the blocks of its first chunk, or nothing at all.
func (c *Core) start(r *Request, budget int) bool {
	hits, idle := c.match(r)
	computed := len(hits) * c.cfg.BlockSize
	chunk := min(r.total()-computed, budget)
	if c.blocksFor(computed+chunk)-len(hits) > c.pool.free-idle {
		return false
	}
	for _, b := range hits {
		c.pool.ref(b)
	}
	r.blocks, r.hashed, r.computed = hits, len(hits), computed
	r.kv.written, r.kv.promptWritten = len(hits), false
	c.memory.inspect(r)
	c.grow(r, computed+chunk)
	c.countStart(r)
	return true
}

func (c *Core) countStart(r *Request) {
	if r.preempts > 0 {
		return
	}
	local := r.computed
	r.cached = local
	if r.kv.load == loadReady {
		local, r.cached = r.kv.local, r.Prompt
	}
	c.stats.PromptTokens += uint64(r.Prompt)
	c.stats.PromptCached += uint64(local)
	c.stats.PromptLoaded += uint64(r.cached - local)
	if c.caching(r) {
		c.stats.CacheQueries += uint64(r.Prompt)
		c.stats.CacheHits += uint64(local)
	}
}

func (c *Core) caching(r *Request) bool { return c.cfg.PrefixCaching && r.Content != nil }

// match finds the cached prefix of r in whole blocks, at most total-1 tokens (the last token must be computed
// to get an output). idle is how many of the hits are on the free list, so not available for new blocks.
func (c *Core) match(r *Request) (hits []int32, idle int) {
	hits = r.blocks[:0]
	if !c.caching(r) {
		return hits, 0
	}
	c.eachHit(r.Content, r.total(), func(b int32) {
		if c.pool.blocks[b].refs == 0 {
			idle++
		}
		hits = append(hits, b)
	})
	return hits, idle
}

// eachHit calls hit for the cached blocks with which total tokens begin, but for the last token.
func (c *Core) eachHit(content Content, total int, hit func(int32)) {
	for i := range (total - 1) / c.cfg.BlockSize {
		hash, ok := content.BlockHash(i)
		if !ok {
			return
		}
		b, ok := c.pool.lookup(hash)
		if !ok {
			return
		}
		hit(b)
	}
}

// Cached is how many tokens of a prompt the prefix cache holds now: what a request with this content would
// not compute if it began at once.
func (c *Core) Cached(content Content, prompt int) int {
	n := 0
	if c.cfg.PrefixCaching {
		c.eachHit(content, prompt, func(int32) { n++ })
	}
	return n * c.cfg.BlockSize
}

func (c *Core) blocksFor(tokens int) int { return (tokens + c.cfg.BlockSize - 1) / c.cfg.BlockSize }

// grow gives r blocks for tokens tokens and enters the ones that become full into the cache; false = not
// enough memory, and nothing was taken. Blocks are entered before they are computed, as vLLM does: the same
// step computes them.
func (c *Core) grow(r *Request, tokens int) bool {
	need := c.blocksFor(tokens) - len(r.blocks)
	if need > c.pool.free {
		return false
	}
	for range need {
		b := c.pool.take()
		c.memory.clear(b)
		r.blocks = append(r.blocks, b)
	}
	c.memory.write(r, tokens)
	if c.caching(r) {
		c.enterFull(r, tokens/c.cfg.BlockSize)
	}
	return true
}

func (c *Core) enterFull(r *Request, full int) {
	first := r.hashed
	for r.hashed < full {
		hash, ok := r.Content.BlockHash(r.hashed)
		if !ok {
			break
		}
		c.pool.cache(r.blocks[r.hashed], hash)
		r.hashed++
	}
	c.log.store(r, first, r.hashed-first)
}

// preempt takes the blocks of a running request and puts it first in the queue; it computes everything again,
// but for what is still cached then.
func (c *Core) preempt(r *Request) {
	c.running = c.running[:len(c.running)-1]
	c.freeBlocks(r)
	r.computed = 0
	r.preempts++
	r.state = stateWaiting
	c.waiting.pushFront(r)
	c.stats.Preemptions++
}

func (c *Core) freeBlocks(r *Request) {
	c.pool.releaseAll(r.blocks)
	r.blocks, r.hashed = r.blocks[:0], 0
}

// duration is what the step of the current batch takes.
func (c *Core) duration() time.Duration {
	c.batchTokens, c.promptTokens = 0, 0
	var decodes, kv int
	var pairs float64
	for _, s := range c.batch {
		c.batchTokens += s.tokens
		if s.req.decoding() || s.tokens == 1 && s.req.kv.load == loadReady { // the prompt came computed
			decodes++
			kv += s.req.computed
		} else {
			c.promptTokens += s.tokens
			pairs += steptime.Pairs(s.tokens, s.req.computed)
		}
	}
	if c.cfg.Fixed {
		return time.Duration(float64(c.cfg.FixedStep) * c.slow)
	}
	ms := c.cfg.Law.Step(c.batchTokens, decodes, kv, pairs)
	return time.Duration(ms * float64(time.Millisecond) * c.slow / c.cfg.Speed)
}

// endStep books the computed tokens at the instant the step ended: new tokens and ends.
func (c *Core) endStep(at time.Duration) {
	c.stepping = false
	c.stats.Steps++
	c.stats.StepTokens = c.batchTokens
	if events := c.log.flush(); events != nil {
		c.emit(Effect{Kind: EffectBlocks, Blocks: events})
	}
	var gone bool
	for _, s := range c.batch {
		r := s.req
		if r.state != stateRunning {
			continue // aborted meanwhile
		}
		r.computed += s.tokens
		if r.computed == r.total() {
			gone = c.token(r, at) || gone
		}
	}
	c.batch = c.batch[:0]
	if gone {
		c.dropDone()
	}
}

// token books one output token of r; true = it was the last one.
func (c *Core) token(r *Request, at time.Duration) bool {
	r.produced++
	c.stats.GeneratedTokens++
	if r.produced == 1 {
		r.times.First = at
		if r.kv.wrong != 0 {
			c.stats.WrongAnswers++
		}
	}
	r.times.Previous, r.times.Last = r.times.Last, at
	c.emit(Effect{Kind: EffectToken, Req: r})
	if r.produced < r.Output {
		return false
	}
	if r.Lease != "" && c.cfg.Transfer && (r.Ending == FinishLength || r.Ending == FinishStop) {
		c.leases.keep(r.Lease, r.blocks, at)
	} else {
		c.freeBlocks(r)
	}
	c.finish(r, r.Ending)
	return true
}

func (c *Core) dropDone() {
	c.running = slices.DeleteFunc(c.running, func(r *Request) bool { return r.state != stateRunning })
}

// queue is the waiting line: first come first served, but preempted requests return to its front.
type queue struct {
	items  []*Request
	head   int
	tokens int // prompt tokens that wait
}

func (q *queue) len() int { return len(q.items) - q.head }

func (q *queue) front() *Request { return q.items[q.head] }

func (q *queue) pushBack(r *Request) {
	q.items = append(q.items, r)
	q.tokens += r.Prompt
}

func (q *queue) popFront() *Request {
	r := q.items[q.head]
	q.items[q.head] = nil
	q.head++
	q.tokens -= r.Prompt
	switch {
	case q.head == len(q.items):
		q.items, q.head = q.items[:0], 0
	case q.head > 64 && q.head > len(q.items)/2:
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return r
}

func (q *queue) pushFront(r *Request) {
	if q.head == 0 {
		q.items = slices.Insert(q.items, 0, r)
	} else {
		q.head--
		q.items[q.head] = r
	}
	q.tokens += r.Prompt
}

// remove takes r out, wherever it stands.
func (q *queue) remove(r *Request) {
	if i := slices.Index(q.items[q.head:], r); i >= 0 {
		q.items = slices.Delete(q.items, q.head+i, q.head+i+1)
		q.tokens -= r.Prompt
	}
}
