package kvindex

import (
	"math"
	"slices"
	"sort"
	"time"
)

// prompt is what was recorded at one time: every block from leaf up to block 0 lives until at, unless a later prompt
// renewed it. Prompts are kept by expiry, so that the oldest goes first, its last block first.
type prompt struct {
	at   time.Duration
	leaf slot
	hash uint64 // of leaf: another one there means that the leaf is gone
}

const (
	guessBytes  = 56      // charged per block held for a time
	promptBytes = 32      // charged per prompt
	maxPrompts  = 1 << 18 // per column; beyond it the oldest expires early
)

// Speculate counts a routed prompt's blocks as held until Options.TTL from now (monotonic, as Advance), or until an event
// stores them for certain. They are in no snapshot and no delta. FromEvents, FromDeltas.
func (c *Column) Speculate(hashes []uint64, now time.Duration) {
	if c.bit >= 0 && c.opt.Feed == FromRecords {
		c.ix.counters.WrongFeed++
		return
	}
	if c.usable(c.opt.Feed) {
		c.guess(hashes, now)
	}
}

// Recorded is what one Record did.
type Recorded struct {
	Held int           // leading blocks that the record had before
	At   time.Duration // when the blocks expire, unless they are renewed
}

// Record counts a routed prompt's blocks as cached on the rank for Options.TTL from now; each routing renews them. Over
// Options.Capacity the least recently recorded go. FromRecords.
func (c *Column) Record(hashes []uint64, now time.Duration) Recorded {
	if !c.usable(FromRecords) {
		return Recorded{}
	}
	r := c.guess(hashes, now)
	if c.opt.Capacity > 0 {
		c.trimTo(c.opt.Capacity)
	}
	return r
}

// SetCapacity changes Options.Capacity; 0 is no bound. FromRecords.
func (c *Column) SetCapacity(blocks int) {
	if c.opt.Capacity = max(0, blocks); c.opt.Capacity > 0 && c.usable(FromRecords) {
		c.trimTo(c.opt.Capacity)
	}
}

// Expires says when the first of what is held for a time may expire; false if there is nothing.
func (c *Column) Expires() (at time.Duration, ok bool) {
	if len(c.prompts) == 0 {
		return 0, false
	}
	return c.prompts[0].at, true
}

// Forget takes blocks out of the record: the engine reported fewer cached tokens than were expected. FromRecords.
func (c *Column) Forget(hashes []uint64) { c.Withdraw(hashes, math.MaxInt64) }

// Withdraw is Forget of the blocks that no Record has renewed since the one that said latest (Recorded.At): its request
// was not served, and what others were routed for stays. FromRecords.
func (c *Column) Withdraw(hashes []uint64, latest time.Duration) {
	if !c.usable(FromRecords) {
		return
	}
	for i := len(hashes) - 1; i >= 0; i-- {
		s := c.ix.table.find(&c.ix.pool, hashes[i])
		if s == none || !c.has(s) {
			c.ix.counters.UnknownRemove++
			continue
		}
		at, up := c.guesses[s], c.ix.cold(s).parent
		if at > latest {
			continue
		}
		c.lapse(s)
		if i == 0 || up < firstSlot || c.ix.hash(up) != hashes[i-1] {
			c.cover(up, at)
		}
	}
}

// Trim drops the n least recently recorded blocks: the engine removed as many of its own. FromRecords.
func (c *Column) Trim(n int) {
	if c.usable(FromRecords) {
		c.trimTo(max(0, c.count-n))
	}
}

// guess holds a chain until now + TTL.
func (c *Column) guess(hashes []uint64, now time.Duration) (r Recorded) {
	ix := c.ix
	if len(hashes) == 0 {
		return r
	}
	if !c.payPrompt() {
		ix.counters.Refused++
		return r
	}
	at := now + c.opt.TTL
	if n := len(c.prompts); n > 0 {
		at = max(at, c.prompts[n-1].at)
	}
	r.At = at
	last := none
	for i, hash := range hashes {
		ix.pin = last
		s, ok := ix.descend(last, hash)
		if !ok {
			break
		}
		ix.pin = s
		if r.Held == i && c.has(s) {
			r.Held++
		}
		if !c.claim(s, hash, at) {
			break
		}
		last = s
	}
	ix.unpin()
	ix.endRun(c)
	p := prompt{at: at, leaf: last}
	if last != none {
		p.hash = ix.hash(last)
	}
	c.addPrompt(p)
	return r
}

// claim holds s until at, or for certain if it was; false without room.
func (c *Column) claim(s slot, hash uint64, at time.Duration) bool {
	ix := c.ix
	if c.has(s) {
		ix.endRun(c)
		if c.guessed(s) {
			c.guesses[s] = at
		}
		return true
	}
	if !ix.pay(guessBytes) {
		ix.counters.Refused++
		return false
	}
	c.guessFee += guessBytes
	if c.guesses == nil {
		c.guesses = make(map[slot]time.Duration)
	}
	c.guesses[s] = at
	c.gain(s)
	if c.opt.Feed == FromRecords {
		c.enter(hash)
		ix.addRun(hash, ix.cold(s).parent)
	}
	return true
}

func (c *Column) guessed(s slot) bool {
	_, ok := c.guesses[s]
	return ok
}

func (c *Column) unguess(s slot) {
	delete(c.guesses, s)
	c.guessFee -= guessBytes
	c.ix.charge -= guessBytes
}

// payPrompt charges for one more prompt, at the cost of the oldest if need be.
func (c *Column) payPrompt() bool {
	if len(c.prompts) >= maxPrompts {
		c.lapsePrompt(-1)
	}
	if !c.ix.pay(promptBytes) {
		c.lapsePrompt(-1)
		if !c.ix.pay(promptBytes) {
			return false
		}
	}
	c.guessFee += promptBytes
	return true
}

// addPrompt puts p, which is paid for, behind those that expire no later.
func (c *Column) addPrompt(p prompt) {
	n := len(c.prompts)
	i := n
	if n > 0 && c.prompts[n-1].at > p.at {
		i = sort.Search(n, func(i int) bool { return c.prompts[i].at > p.at })
	}
	c.prompts = slices.Insert(c.prompts, i, p)
}

// cover sees to it that up still expires: the block behind it, through which it lived until at, is gone.
func (c *Column) cover(up slot, at time.Duration) {
	if up < firstSlot {
		return
	}
	if t, ok := c.guesses[up]; ok && t == at && c.payPrompt() {
		c.addPrompt(prompt{at, up, c.ix.hash(up)})
	}
}

// expire ends what was held until now.
func (c *Column) expire(now time.Duration) {
	for len(c.prompts) > 0 && c.prompts[0].at <= now {
		c.lapsePrompt(-1)
	}
}

// trimTo drops the least recently recorded blocks until n are left.
func (c *Column) trimTo(n int) {
	for c.count > n && len(c.prompts) > 0 {
		c.lapsePrompt(c.count - n)
	}
}

// lapsePrompt drops the oldest prompt's blocks, the last first, as far as no later prompt renewed them; at most n if n
// is not negative: then the prompt stays with the rest.
func (c *Column) lapsePrompt(n int) {
	if len(c.prompts) == 0 {
		return
	}
	p := c.prompts[0]
	s := p.leaf
	if s != none && c.ix.hash(s) != p.hash {
		s = none
	}
	for s >= firstSlot {
		up := c.ix.cold(s).parent
		switch at, ok := c.guesses[s]; {
		case ok && at > p.at:
			s = none
			continue
		case ok && n == 0:
			c.prompts[0].leaf, c.prompts[0].hash = s, c.ix.hash(s)
			return
		case ok:
			c.lapse(s)
			c.ix.counters.Expired++
			n--
		}
		s = up // a freed slot keeps its parent until it is used again, and nothing is stored here
	}
	c.prompts = c.prompts[1:]
	c.guessFee -= promptBytes
	c.ix.charge -= promptBytes
}

// lapse ends the holding of s, which is for a time.
func (c *Column) lapse(s slot) {
	hash := c.ix.hash(s)
	c.unguess(s)
	c.lack(s)
	if c.opt.Feed == FromRecords {
		c.leave(hash)
		c.ix.tell(c, Removed, hash)
	}
	c.ix.reap(s)
}
