package kvindex

import (
	"slices"
	"sort"
	"time"
)

// StoredEvent is one BlockStored of an engine, decoded. The slices are read during the call only.
type StoredEvent struct {
	Root      uint64 // Hasher.Root of the event's salt; read when the chain begins here
	HasParent bool
	Parent    Handle
	Blocks    []Handle
	Tokens    []uint32 // len(Blocks) × BlockSize
	BlockSize int
	Extras    []Extra // ascending by Block
	Group     int     // group_idx, 0 when absent
	Kind      string  // kv_cache_spec_kind, "" when absent
}

// indexed reports whether blocks of this kind of attention hold every token of a prefix. Groups with a
// sliding window, Mamba states and the like keep only a part of a prefix, so their blocks do not prove a hit;
// the index leaves them out.
func indexed(kind string) bool {
	switch kind {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	default:
		return false
	}
}

// maxGroups bounds the attention groups of a block set that are remembered as left out; models have a
// handful.
const maxGroups = 64

// Stored applies a BlockStored: hashes are computed from the tokens, the engine's own are handles. Blocks
// count per physical copy: each further Stored of a block needs a further Removed. An event that is malformed
// or contradicts itself is dropped whole and counted. Blocks behind an unknown parent are kept aside until it
// is stored. FromEvents.
func (c *BlockSet) Stored(h Hasher, ev *StoredEvent) {
	if !c.usable(FromEvents) || !c.isValid(ev) {
		return
	}
	ix := c.ix
	prev, up, at := ev.Root, none, 0
	if ev.HasParent {
		if up = c.resolve(ev.Parent); up == none {
			if at, up = c.setAside(h, ev); up == none {
				return
			}
		}
		prev = ix.hash(up)
	}
	c.attach(h, ev, at, prev, up)
	c.attachAside(h, ev.Blocks[at:])
}

// isValid checks an event without its context and counts its fault.
func (c *BlockSet) isValid(ev *StoredEvent) bool {
	n := &c.ix.counters
	switch {
	case !c.groupIndexed(ev.Group, ev.Kind):
		n.OtherGroup++
	case ev.BlockSize < 1 || ev.BlockSize > MaxBlockSize || len(ev.Tokens)/ev.BlockSize != len(ev.Blocks) ||
		len(ev.Tokens)%ev.BlockSize != 0:
		n.BadLength++
	case c.opt.BlockSize != 0 && c.opt.BlockSize != ev.BlockSize:
		n.BadBlockSize++
	case ev.HasParent && slices.Contains(ev.Blocks, ev.Parent):
		n.SelfParent++
	default:
		if len(ev.Blocks) > 0 {
			c.opt.BlockSize = ev.BlockSize
		}
		return len(ev.Blocks) > 0
	}
	return false
}

// groupIndexed reports whether a group is indexed, and remembers those that are not: removals do not name the
// kind.
func (c *BlockSet) groupIndexed(group int, kind string) bool {
	if indexed(kind) {
		_, out := c.filtered[group]
		return !out
	}
	if c.filtered == nil {
		c.filtered = make(map[int]struct{})
	}
	if len(c.filtered) < maxGroups {
		c.filtered[group] = struct{}{}
	}
	return false
}

// attach stores the event's blocks from at on behind up, whose hash is prev. If a block is known under
// another parent, the whole event is undone.
func (c *BlockSet) attach(h Hasher, ev *StoredEvent, at int, prev uint64, up slot) {
	ix := c.ix
	ix.scratch = ev.hashes(h, ix.scratch[:0], at, prev)
	c.prefetchStore(ev.Blocks[at:], ix.scratch)
	ix.pin = up
	for i, hash := range ix.scratch {
		s, v := c.retain(ev.Blocks[at+i], hash, up, 0)
		if v == conflicts {
			ix.counters.Cycle++
			ix.unpin()
			ix.endRun(c)
			c.removeAll(ev.Blocks[at : at+i])
			return
		}
		if v == full {
			break
		}
		up = s
	}
	ix.unpin()
	ix.endRun(c)
}

// hashes appends the chain hashes of the blocks from at on.
func (ev *StoredEvent) hashes(h Hasher, dst []uint64, at int, prev uint64) []uint64 {
	if len(ev.Extras) == 0 {
		return h.Tokens(dst, prev, ev.Tokens[at*ev.BlockSize:], ev.BlockSize, nil)
	}
	extras := ev.Extras
	for i := at; i < len(ev.Blocks); i++ {
		var d uint64
		d, extras = h.digest(i, ev.Tokens[i*ev.BlockSize:(i+1)*ev.BlockSize], extras)
		prev = h.fold(prev, d)
		dst = append(dst, prev)
	}
	return dst
}

// retainResult is the result of retain.
type retainResult uint8

const (
	kept      retainResult = iota
	full                   // no room
	conflicts              // the handle or the hash is known elsewhere
)

// retain stores one block: 1 + more copies under a handle. On success it is pinned.
func (c *BlockSet) retain(name Handle, hash uint64, up slot, more uint32) (slot, retainResult) {
	ix := c.ix
	r := c.handles.find(name)
	if r != nil && c.fresh(r) {
		s := r.slot
		if ix.hash(s) != hash {
			return none, conflicts
		}
		c.addCopies(name, 1+more)
		ix.endRun(c)
		ix.pin = s
		return s, kept
	}
	s := ix.table.find(&ix.pool, hash)
	if s == none {
		if s = ix.add(hash, up); s == none {
			return none, full
		}
	} else if ix.cold(s).parent != up && !ix.setParent(s, up) {
		return none, conflicts
	}
	ix.pin = s
	if !c.bind(r, name, s, hash) { // r is still valid: evictions do not move records
		ix.counters.Refused++
		return none, full
	}
	if len(c.aside.blocks) > 0 {
		_, copies := c.aside.take(ix, name)
		more += copies
	}
	c.addCopies(name, more)
	if c.has(s) {
		c.side.aliases.add(ix, s, 1)
	}
	c.hold(s, hash)
	return s, kept
}

// addCopies counts n more copies of a block, unless the engine is known to store blocks again without
// removing them.
func (c *BlockSet) addCopies(name Handle, n uint32) {
	if !c.once {
		c.side.copies.add(c.ix, name, n)
	}
}

// LimitCopies compares the block set with the number of blocks that its engine has; cleared reports that it
// emptied the block set. An engine that reported more copies than it has blocks stores some of them again
// without having removed them (vLLM does when a request asks it to report whole prompts). Each removal
// removes one copy, so evicted blocks would stay for ever. From then on a block that is stored again counts
// once. FromEvents.
func (c *BlockSet) LimitCopies(blocks int) (cleared bool) {
	if c.once || blocks <= 0 || c.count+c.side.copies.n+c.side.aliases.n <= blocks || !c.usable(FromEvents) {
		return false
	}
	c.once = true
	c.ix.counters.Repeated++
	c.Clear()
	return true
}

// Removed applies a BlockRemoved: it removes one physical copy of each block. FromEvents.
func (c *BlockSet) Removed(group int, blocks []Handle) {
	if !c.usable(FromEvents) {
		return
	}
	if _, out := c.filtered[group]; out {
		c.ix.counters.OtherGroup++
		return
	}
	c.removeAll(blocks)
}

// removeAll removes a copy of each block, the last block first.
func (c *BlockSet) removeAll(blocks []Handle) {
	c.prefetchRemove(blocks)
	for i := len(blocks) - 1; i >= 0; i-- {
		c.removeCopy(blocks[i])
	}
}

func (c *BlockSet) removeCopy(name Handle) {
	seg, i := c.handles.locate(name)
	if i < 0 {
		if !c.aside.remove(c.ix, name, c.once) {
			c.ix.counters.UnknownRemove++
		}
		return
	}
	s, fresh := seg.records[i].slot, c.fresh(&seg.records[i])
	switch {
	case !fresh:
		c.unbind(seg, i)
		c.ix.counters.UnknownRemove++
	case c.side.copies.take(c.ix, name):
	default:
		c.unbind(seg, i)
		if !c.side.aliases.take(c.ix, s) {
			c.release(s, c.ix.hash(s))
		}
	}
}

// setAside keeps the event's blocks, whose parent is unknown, until the parent is stored. It stops at a block
// that is held; the chain continues there, at index at behind slot up. up is none if all blocks were kept or
// the event was dropped.
func (c *BlockSet) setAside(h Hasher, ev *StoredEvent) (at int, up slot) {
	if slices.Contains(ev.Blocks, c.aside.top(ev.Parent)) {
		c.ix.counters.Cycle++
		return 0, none
	}
	parent, extras := ev.Parent, ev.Extras
	for i, b := range ev.Blocks {
		var d uint64
		d, extras = h.digest(i, ev.Tokens[i*ev.BlockSize:(i+1)*ev.BlockSize], extras)
		if s := c.resolve(b); s != none {
			c.addCopies(b, 1)
			return i + 1, s
		}
		switch c.aside.add(c.ix, b, parent, d) {
		case conflicts:
			c.ix.counters.Conflict++
			c.removeAll(ev.Blocks[:i])
			return 0, none
		case full:
			c.ix.counters.AsideDropped += uint64(len(ev.Blocks) - i)
			return 0, none
		case kept:
		}
		parent = b
	}
	return 0, none
}

// attachAside stores the blocks that waited for these blocks, and recursively those that waited for them.
func (c *BlockSet) attachAside(h Hasher, blocks []Handle) {
	if len(c.aside.blocks) == 0 {
		return
	}
	todo := slices.Clone(blocks)
	for len(todo) > 0 {
		parent := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, b := range slices.Clone(c.aside.children[parent]) {
			if c.attachOne(h, parent, b) {
				todo = append(todo, b)
			}
		}
	}
}

// attachOne stores a block that waited for parent, if that is held now.
func (c *BlockSet) attachOne(h Hasher, parent, b Handle) bool {
	ix := c.ix
	up := c.resolve(parent)
	if up == none {
		return false
	}
	w, copies := c.aside.take(ix, b)
	ix.pin = up
	_, v := c.retain(b, h.fold(ix.hash(up), w.digest), up, copies-1)
	if v == conflicts {
		ix.counters.Conflict++
	}
	ix.unpin()
	ix.endRun(c)
	return v == kept
}

// A record holds the blocks of every prompt that was routed and has not expired. Only a prompt's last block,
// its end, has an expiry (BlockSet.ends); the blocks in front of it are held because a block behind them is.
// So renewing a known prompt costs a few look-ups, however long it is. A held block without a held child is
// an end.

// Recorded is what one Record did.
type Recorded struct {
	Held int           // leading blocks that the record had before
	At   time.Duration // when the prompt expires; later for every later Record
}

// Record counts a routed prompt's blocks as cached on the rank for Options.TTL from now; each routing renews
// them. Over Options.Capacity the least recently recorded blocks are dropped. FromRecords.
func (c *BlockSet) Record(hashes []uint64, now time.Duration) Recorded {
	if !c.usable(FromRecords) || len(hashes) == 0 {
		return Recorded{}
	}
	if !c.chargeEnd() {
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

// Withdraw undoes a Record whose request was not served: it drops all blocks behind the first keep that no
// other recorded prompt contains. at is the Record's Recorded.At. FromRecords.
func (c *BlockSet) Withdraw(hashes []uint64, keep int, at time.Duration) {
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
	c.removeEnd(s)
	for ; n > keep && c.isUnneeded(s); n-- {
		s = c.leaveRecord(s)
	}
	c.addEndAbove(s, end)
}

// Trim drops the n least recently recorded blocks, because the engine evicted as many of its own.
// FromRecords.
func (c *BlockSet) Trim(n int) {
	if c.usable(FromRecords) {
		c.trimTo(max(0, c.count-n))
	}
}

// SetCapacity changes Options.Capacity; 0 is no bound. FromRecords.
func (c *BlockSet) SetCapacity(blocks int) {
	if c.opt.Capacity = max(0, blocks); c.opt.Capacity > 0 && c.usable(FromRecords) {
		c.trimTo(c.opt.Capacity)
	}
}

// Expires returns the time at which the first record may expire; false if there is none.
func (c *BlockSet) Expires() (at time.Duration, ok bool) {
	if len(c.prompts) == 0 {
		return 0, false
	}
	return c.prompts[0].at, true
}

// Holds reports whether the block set holds the block.
func (c *BlockSet) Holds(hash uint64) bool {
	s := c.ix.table.find(&c.ix.pool, hash)
	return s != none && c.has(s)
}

// depth is the number of leading blocks that the block set holds.
func (c *BlockSet) depth(hashes []uint64) int {
	if c.orphans == 0 { // closed under prefixes
		return sort.Search(len(hashes), func(i int) bool { return !c.Holds(hashes[i]) })
	}
	n := 0
	for n < len(hashes) && c.Holds(hashes[n]) {
		n++
	}
	return n
}

// extend adds the blocks behind the first held ones and returns the last one that is held; none if there is
// none.
func (c *BlockSet) extend(hashes []uint64, held int) slot {
	ix, last := c.ix, none
	if held > 0 {
		last = ix.table.find(&ix.pool, hashes[held-1])
	}
	ix.pin = last
	ix.prefetchHashes(hashes[held:])
	for _, hash := range hashes[held:] {
		s, ok := ix.findOrAddChild(last, hash)
		if !ok {
			break
		}
		ix.pin = s
		c.hold(s, hash)
		last = s
	}
	ix.unpin()
	ix.endRun(c)
	return last
}

// isUnneeded reports whether s is held without a reason: it is no end, and no child is held.
func (c *BlockSet) isUnneeded(s slot) bool {
	return s >= firstSlot && c.has(s) && !c.isEnd(s) && !c.ix.holdsChild(s, c.bit)
}

// leaveRecord removes s from the block set and returns its parent.
func (c *BlockSet) leaveRecord(s slot) (up slot) {
	up = c.ix.cold(s).parent
	c.release(s, c.ix.hash(s))
	return up
}

// chargeEnd charges the bytes of one more prompt with an end of its own; if the cap leaves no room, it drops
// the oldest prompts.
func (c *BlockSet) chargeEnd() bool {
	if !c.chargePrompt() {
		return false
	}
	for !c.ix.chargeBytes(endBytes) {
		if len(c.prompts) == 0 {
			c.refund(promptBytes)
			return false
		}
		c.shortenOldestPrompt(-1)
	}
	c.endFee += endBytes
	return true
}

// setEnd makes s the end of a prompt that expires at the given time. chargeEnd has charged for it.
func (c *BlockSet) setEnd(s slot, at time.Duration) {
	if s == none || !c.has(s) {
		c.refund(promptBytes + endBytes)
		return
	}
	if c.isEnd(s) { // one end of it is enough
		c.refund(endBytes)
	}
	if c.ends == nil {
		c.ends = make(map[slot]time.Duration)
	}
	c.ends[s] = max(at, c.ends[s])
	c.addPrompt(prompt{at, s, c.ix.hash(s)})
}

// addEndAbove makes s, the parent of a dropped end, an end that expires at the given time, if nothing else
// needs s. Without room for the end it drops s and goes on with its parent.
func (c *BlockSet) addEndAbove(s slot, at time.Duration) {
	for c.isUnneeded(s) {
		if c.chargeEnd() {
			if c.isUnneeded(s) {
				c.setEnd(s, at)
			} else {
				c.setEnd(none, at) // what was dropped for the room was what s belonged to
			}
			return
		}
		s = c.leaveRecord(s)
	}
}

// shortenOldestPrompt drops the blocks of the oldest prompt that no other prompt contains, the last block
// first. If n is not negative, it drops at most n blocks, and the prompt keeps the rest.
func (c *BlockSet) shortenOldestPrompt(n int) {
	p := c.prompts[0]
	s := p.leaf
	if at, ok := c.ends[s]; !ok || at != p.at || c.ix.hash(s) != p.hash {
		c.popPrompt() // renewed since, or gone
		return
	}
	c.removeEnd(s)
	for c.isUnneeded(s) {
		if n == 0 {
			c.ends[s] = p.at
			c.refund(-endBytes) // just given back
			c.prompts[0].leaf, c.prompts[0].hash = s, c.ix.hash(s)
			return
		}
		s = c.leaveRecord(s)
		c.ix.counters.Expired++
		n--
	}
	c.popPrompt()
}

// trimTo drops the least recently recorded blocks until n are left.
func (c *BlockSet) trimTo(n int) {
	for c.count > n && len(c.prompts) > 0 {
		c.shortenOldestPrompt(c.count - n)
	}
}

const (
	endBytes    = 56      // charged per end of a prompt
	promptBytes = 32      // charged per prompt
	maxPrompts  = 1 << 18 // per block set; beyond it the oldest expires early
)

// isEnd reports whether a recorded prompt ends with s.
func (c *BlockSet) isEnd(s slot) bool {
	_, ok := c.ends[s]
	return ok
}

func (c *BlockSet) removeEnd(s slot) {
	delete(c.ends, s)
	c.refund(endBytes)
}

// refund gives back what was charged for prompts and their ends.
func (c *BlockSet) refund(bytes int) {
	c.endFee -= bytes
	c.ix.charge -= bytes
}

// chargePrompt charges the bytes of one more prompt; if the cap leaves no room, it drops the oldest prompt.
func (c *BlockSet) chargePrompt() bool {
	if len(c.prompts) >= maxPrompts {
		c.dropOldestPrompt()
	}
	if !c.ix.chargeBytes(promptBytes) {
		c.dropOldestPrompt()
		if !c.ix.chargeBytes(promptBytes) {
			return false
		}
	}
	c.endFee += promptBytes
	return true
}

// addPrompt inserts p behind the prompts that expire no later. chargePrompt has charged for it.
func (c *BlockSet) addPrompt(p prompt) {
	n := len(c.prompts)
	i := n
	if n > 0 && c.prompts[n-1].at > p.at {
		i = sort.Search(n, func(i int) bool { return c.prompts[i].at > p.at })
	}
	c.prompts = slices.Insert(c.prompts, i, p)
}

// expire drops the prompts whose time is over.
func (c *BlockSet) expire(now time.Duration) {
	for len(c.prompts) > 0 && c.prompts[0].at <= now {
		c.dropOldestPrompt()
	}
}

// dropOldestPrompt drops the oldest prompt, if there is one.
func (c *BlockSet) dropOldestPrompt() {
	if len(c.prompts) > 0 {
		c.shortenOldestPrompt(-1)
	}
}

// popPrompt removes the oldest prompt from the list.
func (c *BlockSet) popPrompt() {
	c.prompts = c.prompts[1:]
	c.refund(promptBytes)
}
