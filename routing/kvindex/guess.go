package kvindex

import (
	"slices"
	"sort"
	"time"
)

// prompt is what was routed at one time: every block from leaf up to block 0 lives until at, unless a later prompt
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

// guess holds a chain until now + TTL.
func (c *Column) guess(hashes []uint64, now time.Duration) {
	ix := c.ix
	if len(hashes) == 0 {
		return
	}
	if !c.payPrompt() {
		ix.counters.Refused++
		return
	}
	at := now + c.opt.TTL
	if n := len(c.prompts); n > 0 {
		at = max(at, c.prompts[n-1].at)
	}
	last := none
	for _, hash := range hashes {
		ix.pin = last
		s, ok := ix.descend(last, hash)
		if !ok {
			break
		}
		ix.pin = s
		if !c.claim(s, at) {
			break
		}
		last = s
	}
	ix.unpin()
	p := prompt{at: at, leaf: last}
	if last != none {
		p.hash = ix.hash(last)
	}
	c.addPrompt(p)
}

// claim holds s until at, or for certain if it was; false without room.
func (c *Column) claim(s slot, at time.Duration) bool {
	ix := c.ix
	if c.has(s) {
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
		c.lapsePrompt()
	}
	if !c.ix.pay(promptBytes) {
		c.lapsePrompt()
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

// coverGuess sees to it that up still expires: the block behind it, through which it lived until at, is gone.
func (c *Column) coverGuess(up slot, at time.Duration) {
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
		c.lapsePrompt()
	}
}

// lapsePrompt drops the oldest prompt, if there is one.
func (c *Column) lapsePrompt() {
	switch {
	case len(c.prompts) == 0:
	case c.opt.Feed == FromRecords:
		c.lapseRecord(-1)
	default:
		c.lapseGuess()
	}
}

// lapseGuess drops its blocks, the last first, as far as no later prompt renewed them.
func (c *Column) lapseGuess() {
	p := c.prompts[0]
	s := p.leaf
	if s != none && c.ix.hash(s) != p.hash {
		s = none
	}
	for s >= firstSlot {
		up := c.ix.cold(s).parent
		at, ok := c.guesses[s]
		if ok && at > p.at {
			break
		}
		if ok {
			c.unguess(s)
			c.lack(s)
			c.ix.reap(s)
			c.ix.counters.Expired++
		}
		s = up // a freed slot keeps its parent until it is used again, and nothing is stored here
	}
	c.popPrompt()
}

// popPrompt forgets the oldest prompt.
func (c *Column) popPrompt() {
	c.prompts = c.prompts[1:]
	c.guessFee -= promptBytes
	c.ix.charge -= promptBytes
}
