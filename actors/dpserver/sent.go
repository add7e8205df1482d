package dpserver

import (
	"cmp"
	"math"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// averageWeight is the weight of one request in the average of tokens per block.
const averageWeight = 1.0 / 16

// liveSentTTL is how long a routed prompt counts as cached while events are live: until its own events must
// have come.
const liveSentTTL = 2 * time.Second

// sentOptions are the present options of the record of sent prompts. While events are live and count the same
// blocks, a prompt counts until its events must have come. Without events, or in blocks of text, it counts
// for as long as an engine may keep it.
func (r *replica) sentOptions() kvindex.Options {
	opt := kvindex.Options{Feed: kvindex.FromRecords, BlockSize: kvindex.DefaultTextBlock,
		TTL: kvindex.DefaultRecord}
	if r.app.Routing.Identity == app.IdentityTokens {
		opt.BlockSize = 0
		if r.eventHealth.isLive {
			opt.TTL = liveSentTTL
		}
	}
	return opt
}

// recordSent records that the rank was sent a request.
func (r *replica) recordSent(t *ticket) {
	l := r.ensureKVRecord()
	if l == nil {
		return
	}
	l.seedAverage(t)
	now := l.advanceClock()
	if l.columns[kvindex.Sent] == nil {
		l.sentOptions = r.sentOptions()
	}
	if c := l.openColumn(kvindex.Sent, l.sentOptions); c != nil {
		c.SetCapacity(l.toBlocks(r.cacheCapacity()))
		t.recorded = c.Record(t.blocks, now)
	}
	l.flushRemovals()
	r.armExpiry()
}

// cacheCapacity is the tokens that the engine's KV cache holds; 0: not known.
func (r *replica) cacheCapacity() int64 {
	return int64(r.state.facts.Blocks) * int64(r.knownBlockSize())
}

// deviceBlocks is the most blocks that the engine's events can report at a time; 0: not known. An engine that
// counts its blocks in a larger size than its events has more blocks of the events' size.
func (r *replica) deviceBlocks() int {
	f := &r.state.facts
	size := r.eventBlockSize()
	if size == 0 || f.BlockSize <= size {
		return f.Blocks
	}
	return f.Blocks * ((f.BlockSize + size - 1) / size)
}

// seedAverage starts the average with the first request.
func (l *kvRecord) seedAverage(t *ticket) {
	if l.tokensPerBlock == 0 && t.req.Tokens > 0 {
		l.tokensPerBlock = float64(t.req.Tokens) / float64(len(t.blocks))
	}
}

// updateAverage averages how many tokens a block stands for.
func (l *kvRecord) updateAverage(t *ticket, tokens int) {
	if tokens > 0 && l.tokensPerBlock > 0 {
		l.tokensPerBlock += averageWeight * (float64(tokens)/float64(len(t.blocks)) - l.tokensPerBlock)
	}
}

// toBlocks is how many blocks of the record tokens fill, rounded up; 0 if the average is not known.
func (l *kvRecord) toBlocks(tokens int64) int {
	if l.tokensPerBlock <= 0 {
		return 0
	}
	return int(math.Ceil(float64(tokens) / l.tokensPerBlock))
}

// correctSent adjusts the record after a request ends. Without a first token its blocks are withdrawn, unless
// another request shares them. Clearly fewer cached tokens than expected mean that the engine evicts faster
// than the record does.
func (r *replica) correctSent(t *ticket, m *msg.Done) {
	l := r.kv
	if l == nil || len(t.blocks) == 0 || l.columns[kvindex.Sent] == nil {
		return
	}
	c := l.columns[kvindex.Sent]
	if (m.Outcome != msg.OK || m.Cause == msg.CauseClientError) && !t.hasFirstToken() && m.FirstToken == 0 {
		c.Withdraw(t.blocks, max(t.recorded.Held, t.hitBlocks), t.recorded.At)
	} else {
		l.updateAverage(t, m.PromptTokens)
		if short := r.cacheShortfall(t, m); short > 0 {
			c.Trim(l.toBlocks(short))
		}
	}
	l.flushRemovals()
}

// cacheShortfall is how many tokens fewer were cached than expected; 0 within a block. An estimated prompt
// length is scaled to the reported one.
func (r *replica) cacheShortfall(t *ticket, m *msg.Done) int64 {
	if !m.HasCached || t.req.Tokens <= 0 {
		return 0
	}
	expected := float64(t.req.Hit)
	if m.PromptTokens > 0 {
		expected *= float64(m.PromptTokens) / float64(t.req.Tokens)
	}
	block := max(float64(r.blockSizeOrDefault()), r.kv.tokensPerBlock)
	if short := expected - float64(m.CachedTokens); short > block {
		return int64(short)
	}
	return 0
}

// blockSizeOrDefault is the engine's tokens per block, or the default.
func (r *replica) blockSizeOrDefault() int {
	return cmp.Or(r.knownBlockSize(), routing.DefaultBlockSize)
}

// boundSent keeps the record of sent prompts no larger than what the engine holds by its events, after they
// reported removals. Prompts without a first token are added, because their events are still to come.
func (r *replica) boundSent() {
	l := r.kv
	if !l.hasRemovals {
		return
	}
	l.hasRemovals = false
	if c := l.columns[kvindex.Sent]; c != nil && r.eventHealth.isLive && l.tokensPerBlock > 0 {
		held := int64(l.columnLen(kvindex.GPU))*int64(r.blockSizeOrDefault()) + int64(r.account.prefillTokens)
		c.Trim(c.Len() - l.toBlocks(held))
		l.flushRemovals()
	}
}

// minExpiryInterval is the shortest time between two expiry ticks.
const minExpiryInterval = 250 * time.Millisecond

// expiryTick says that blocks of the KV record expire or are to be swept.
type expiryTick struct{ of *kvRecord }

// expiryTimer runs only while there is something to expire or to sweep.
type expiryTimer struct {
	timer *time.Timer
	due   time.Duration // on the record's clock; 0: the timer does not run
}

func (c *expiryTimer) stop() {
	if c.timer != nil {
		c.timer.Stop()
	}
	c.due = 0
}

// armExpiry sets the timer for the next expiry.
func (r *replica) armExpiry() {
	l := r.kv
	if l == nil {
		return
	}
	now := time.Since(l.startedAt)
	due, some := now+minExpiryInterval, l.needsSweep
	if c := l.columns[kvindex.Sent]; c != nil && !some {
		at, any := c.Expires()
		due, some = max(due, at), any
	}
	if !some || r.expiry.due > 0 && r.expiry.due <= due {
		return
	}
	r.expiry.stop()
	r.expiry.due, r.expiry.timer = due, r.sendAfter(due-now, expiryTick{l})
}

func (r *replica) onExpiryTick(m expiryTick) {
	if m.of != r.kv || r.kv == nil {
		return
	}
	r.expiry.stop()
	m.of.advanceClock()
	m.of.sweepStep()
	m.of.flushRemovals()
	r.armExpiry()
}
