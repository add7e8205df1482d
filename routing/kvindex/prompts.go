package kvindex

import (
	"slices"
	"sort"
	"time"
)

// prompt is what was routed at one time: every block from leaf up to block 0 lives until at, unless a later
// prompt renewed it. Prompts are kept by expiry, so that the oldest goes first, its last block first.
type prompt struct {
	at   time.Duration
	leaf slot
	hash uint64 // of leaf: another one there means that the leaf is gone
}

const (
	endBytes    = 56      // charged per end of a prompt
	promptBytes = 32      // charged per prompt
	maxPrompts  = 1 << 18 // per column; beyond it the oldest expires early
)

// isEnd says that a recorded prompt ends with s.
func (c *Column) isEnd(s slot) bool {
	_, ok := c.ends[s]
	return ok
}

func (c *Column) unend(s slot) {
	delete(c.ends, s)
	c.endFee -= endBytes
	c.ix.charge -= endBytes
}

// payPrompt charges for one more prompt, at the cost of the oldest if need be.
func (c *Column) payPrompt() bool {
	if len(c.prompts) >= maxPrompts {
		c.lapse()
	}
	if !c.ix.pay(promptBytes) {
		c.lapse()
		if !c.ix.pay(promptBytes) {
			return false
		}
	}
	c.endFee += promptBytes
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

// expire ends what was held until now.
func (c *Column) expire(now time.Duration) {
	for len(c.prompts) > 0 && c.prompts[0].at <= now {
		c.lapse()
	}
}

// lapse drops the oldest prompt, if there is one.
func (c *Column) lapse() {
	if len(c.prompts) > 0 {
		c.lapseRecord(-1)
	}
}

// popPrompt forgets the oldest prompt.
func (c *Column) popPrompt() {
	c.prompts = c.prompts[1:]
	c.endFee -= promptBytes
	c.ix.charge -= promptBytes
}
