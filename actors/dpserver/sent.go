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

// ratioShare is the share of one request in the average of tokens per block.
const ratioShare = 1.0 / 16

// untilEvents is how long a routed prompt counts as present beside live events: until they are due.
const untilEvents = 2 * time.Second

// sentOptions are those of the record now. While events tell the truth in the same blocks, a prompt counts until its events are due
// only; without them, or in blocks of text, for as long as an engine may keep it.
func (r *replica) sentOptions() kvindex.Options {
	opt := kvindex.Options{Feed: kvindex.FromRecords, BlockSize: kvindex.DefaultTextBlock, TTL: kvindex.DefaultRecord}
	if r.app.Routing.Identity == app.IdentityTokens {
		opt.BlockSize = 0
		if r.pulse.truth {
			opt.TTL = untilEvents
		}
	}
	return opt
}

// sent writes down that the rank was sent a request.
func (r *replica) sent(t *ticket) {
	l := r.book()
	if l == nil {
		return
	}
	l.seed(t)
	now := l.advance()
	if l.columns[kvindex.Sent] == nil {
		l.sentOpt = r.sentOptions()
	}
	if c := l.column(kvindex.Sent, l.sentOpt); c != nil {
		c.SetCapacity(l.toBlocks(r.capacity()))
		t.sent = c.Record(t.blocks, now)
	}
	l.flush()
	r.keepTime()
}

// capacity is the tokens the engine's KV cache holds; 0 = not known.
func (r *replica) capacity() int64 {
	return int64(r.vitals.facts.Blocks) * int64(r.toldBlockSize())
}

// deviceBlocks is the most blocks that the engine's events can tell of at a time; 0 = not known. An engine that counts its blocks in a
// larger size than its events has more of the events' size.
func (r *replica) deviceBlocks() int {
	f := &r.vitals.facts
	size := r.eventBlockSize()
	if size == 0 || f.BlockSize <= size {
		return f.Blocks
	}
	return f.Blocks * ((f.BlockSize + size - 1) / size)
}

// seed begins the average with the first request.
func (l *ledger) seed(t *ticket) {
	if l.perBlock == 0 && t.req.Tokens > 0 {
		l.perBlock = float64(t.req.Tokens) / float64(len(t.blocks))
	}
}

// learn averages how many tokens a block stands for.
func (l *ledger) learn(t *ticket, tokens int) {
	if tokens > 0 && l.perBlock > 0 {
		l.perBlock += ratioShare * (float64(tokens)/float64(len(t.blocks)) - l.perBlock)
	}
}

// toBlocks is how many blocks of the record tokens fill, rounded up; 0 if nothing is known.
func (l *ledger) toBlocks(tokens int64) int {
	if l.perBlock <= 0 {
		return 0
	}
	return int(math.Ceil(float64(tokens) / l.perBlock))
}

// correct holds the record against how the request ended. Without a first token nothing of it is cached but what others were sent
// too. Clearly fewer cached tokens than expected say that the engine evicts faster than the record does.
func (r *replica) correct(t *ticket, m *msg.Done) {
	l := r.kv
	if l == nil || len(t.blocks) == 0 || l.columns[kvindex.Sent] == nil {
		return
	}
	c := l.columns[kvindex.Sent]
	if (m.Outcome != msg.OK || m.Cause == msg.CauseClientError) && !t.hasFirstToken() && m.FirstToken == 0 {
		c.Withdraw(t.blocks, max(t.sent.Held, t.hitBlocks), t.sent.At)
	} else {
		l.learn(t, m.PromptTokens)
		if short := r.shortfall(t, m); short > 0 {
			c.Trim(l.toBlocks(short))
		}
	}
	l.flush()
}

// shortfall is how many tokens fewer were cached than expected; 0 within a block. An estimated prompt length is made good by the
// reported one.
func (r *replica) shortfall(t *ticket, m *msg.Done) int64 {
	if !m.HasCached || t.req.Tokens <= 0 {
		return 0
	}
	expected := float64(t.req.Hit)
	if m.PromptTokens > 0 {
		expected *= float64(m.PromptTokens) / float64(t.req.Tokens)
	}
	block := max(float64(r.blockSize()), r.kv.perBlock)
	if short := expected - float64(m.CachedTokens); short > block {
		return int64(short)
	}
	return 0
}

// blockSize is the engine's tokens per block, or the best guess.
func (r *replica) blockSize() int { return cmp.Or(r.toldBlockSize(), routing.DefaultBlockSize) }

// bound keeps the record no larger than what the engine holds by its own events, once they said that blocks left it. Prompts whose
// prefill is not seen to be done are still to come.
func (r *replica) bound() {
	l := r.kv
	if !l.shrunk {
		return
	}
	l.shrunk = false
	if c := l.columns[kvindex.Sent]; c != nil && r.pulse.truth && l.perBlock > 0 {
		held := int64(l.len(kvindex.GPU))*int64(r.blockSize()) + int64(r.account.prefillTokens)
		c.Trim(c.Len() - l.toBlocks(held))
		l.flush()
	}
}

// minRest is how soon the ledger's clock rings again at the earliest.
const minRest = 250 * time.Millisecond

// chime is the ledger's clock: something expires, or is to be swept.
type chime struct{ of *ledger }

// clock rings while there is something to expire or to sweep, and at no other time.
type clock struct {
	timer *time.Timer
	due   time.Duration // on the ledger's clock; 0 = it does not run
}

func (c *clock) stop() {
	if c.timer != nil {
		c.timer.Stop()
	}
	c.due = 0
}

// keepTime sees to it that the clock rings in time.
func (r *replica) keepTime() {
	l := r.kv
	if l == nil {
		return
	}
	now := time.Since(l.began)
	due, some := now+minRest, l.unswept
	if c := l.columns[kvindex.Sent]; c != nil && !some {
		at, any := c.Expires()
		due, some = max(due, at), any
	}
	if !some || r.clock.due > 0 && r.clock.due <= due {
		return
	}
	r.clock.stop()
	r.clock.due, r.clock.timer = due, r.after(due-now, chime{l})
}

func (r *replica) onChime(m chime) {
	if m.of != r.kv || r.kv == nil {
		return
	}
	r.clock.stop()
	m.of.advance()
	m.of.sweep()
	m.of.flush()
	r.keepTime()
}
