package kvindex

import (
	"sort"
	"time"
)

// A record holds the blocks of every prompt that was routed and has not expired. Only a prompt's last block,
// its end, has a time (Column.ends): each block in front of it is held because one behind it is. So a prompt
// that is known costs a few look-ups to renew, however long it is. A held block without a held child is an
// end.

// Recorded is what one Record did.
type Recorded struct {
	Held int           // leading blocks that the record had before
	At   time.Duration // when the prompt expires; later for every later Record
}

// Record counts a routed prompt's blocks as cached on the rank for Options.TTL from now; each routing renews
// them. Over Options.Capacity the least recently recorded go. FromRecords.
func (c *Column) Record(hashes []uint64, now time.Duration) Recorded {
	if !c.usable(FromRecords) || len(hashes) == 0 {
		return Recorded{}
	}
	if !c.payEnd() {
		c.ix.counters.Refused++
		return Recorded{}
	}
	r := Recorded{Held: c.depth(hashes), At: now + c.opt.TTL}
	if n := len(c.prompts); n > 0 {
		r.At = max(r.At, c.prompts[n-1].at+1)
	}
	c.setEnd(c.extend(hashes, r.Held), r.At)
	if c.opt.Capacity > 0 {
		c.trimTo(c.opt.Capacity)
	}
	return r
}

// Withdraw takes a Record back, because its request was not served: all blocks behind the first keep, as far
// as no other prompt that was recorded goes through them. at is its Recorded.At. FromRecords.
func (c *Column) Withdraw(hashes []uint64, keep int, at time.Duration) {
	if !c.usable(FromRecords) {
		return
	}
	n := c.depth(hashes)
	if n <= max(keep, 0) {
		return
	}
	s := c.ix.table.find(&c.ix.pool, hashes[n-1])
	end, ok := c.ends[s]
	if !ok || end > at {
		return
	}
	c.unend(s)
	for ; n > keep && c.loose(s); n-- {
		up := c.ix.cold(s).parent
		c.leaveRecord(s)
		s = up
	}
	c.cover(s, end)
}

// Trim drops the n least recently recorded blocks: the engine removed as many of its own. FromRecords.
func (c *Column) Trim(n int) {
	if c.usable(FromRecords) {
		c.trimTo(max(0, c.count-n))
	}
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

// Holds says whether the column holds the block.
func (c *Column) Holds(hash uint64) bool {
	s := c.ix.table.find(&c.ix.pool, hash)
	return s != none && c.has(s)
}

// depth is how many leading blocks the column holds.
func (c *Column) depth(hashes []uint64) int {
	if c.orphans == 0 { // closed under prefixes
		return sort.Search(len(hashes), func(i int) bool { return !c.Holds(hashes[i]) })
	}
	n := 0
	for n < len(hashes) && c.Holds(hashes[n]) {
		n++
	}
	return n
}

// extend holds the blocks behind the first held ones and gives the last that found room; none if there is not
// one.
func (c *Column) extend(hashes []uint64, held int) slot {
	ix, last := c.ix, none
	if held > 0 {
		last = ix.table.find(&ix.pool, hashes[held-1])
	}
	ix.pin = last
	ix.warmHashes(hashes[held:])
	for _, hash := range hashes[held:] {
		s, ok := ix.descend(last, hash)
		if !ok {
			break
		}
		ix.pin = s
		c.settle(s, hash)
		last = s
	}
	ix.unpin()
	ix.endRun(c)
	return last
}

// loose says that s is held and nothing needs it: it is no end, and no child is held.
func (c *Column) loose(s slot) bool {
	return s >= firstSlot && c.has(s) && !c.isEnd(s) && !c.ix.holdsChild(s, c.bit)
}

// leaveRecord ends the holding of s.
func (c *Column) leaveRecord(s slot) { c.release(s, c.ix.hash(s)) }

// payEnd charges for one more prompt with an end of its own, at the cost of the oldest if need be.
func (c *Column) payEnd() bool {
	if !c.payPrompt() {
		return false
	}
	for !c.ix.pay(endBytes) {
		if len(c.prompts) == 0 {
			c.endFee -= promptBytes
			c.ix.charge -= promptBytes
			return false
		}
		c.lapseRecord(-1)
	}
	c.endFee += endBytes
	return true
}

// setEnd makes s, paid for by payEnd, the end of a prompt that expires at.
func (c *Column) setEnd(s slot, at time.Duration) {
	if s == none || !c.has(s) {
		c.endFee -= promptBytes + endBytes
		c.ix.charge -= promptBytes + endBytes
		return
	}
	if c.isEnd(s) { // one end of it is enough
		c.endFee -= endBytes
		c.ix.charge -= endBytes
	}
	if c.ends == nil {
		c.ends = make(map[slot]time.Duration)
	}
	c.ends[s] = max(at, c.ends[s])
	c.addPrompt(prompt{at, s, c.ix.hash(s)})
}

// cover makes s the end of what went on behind it until at, if nothing else needs s; without room for that, s
// goes too.
func (c *Column) cover(s slot, at time.Duration) {
	for c.loose(s) {
		if c.payEnd() {
			if c.loose(s) {
				c.setEnd(s, at)
			} else {
				c.setEnd(none, at) // what was dropped for the room was what s belonged to
			}
			return
		}
		up := c.ix.cold(s).parent
		c.leaveRecord(s)
		s = up
	}
}

// lapseRecord drops the blocks of the oldest prompt that no other prompt goes through, the last first; at
// most n if n is not negative: then the prompt stays with the rest.
func (c *Column) lapseRecord(n int) {
	p := c.prompts[0]
	s := p.leaf
	if at, ok := c.ends[s]; !ok || at != p.at || c.ix.hash(s) != p.hash {
		c.popPrompt() // renewed since, or gone
		return
	}
	c.unend(s)
	for c.loose(s) {
		if n == 0 {
			c.ends[s] = p.at
			c.endFee += endBytes
			c.ix.charge += endBytes // just given back
			c.prompts[0].leaf, c.prompts[0].hash = s, c.ix.hash(s)
			return
		}
		up := c.ix.cold(s).parent
		c.leaveRecord(s)
		c.ix.counters.Expired++
		n--
		s = up
	}
	c.popPrompt()
}

// trimTo drops the least recently recorded blocks until n are left.
func (c *Column) trimTo(n int) {
	for c.count > n && len(c.prompts) > 0 {
		c.lapseRecord(c.count - n)
	}
}
