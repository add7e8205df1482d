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

// maxGroups is how many attention groups of a column are remembered as left out; models have a handful.
const maxGroups = 64

// Stored applies a BlockStored: hashes are computed from the tokens, the engine's own are handles. Per
// physical copy: each further Stored of a block wants a further Removed. An event that is malformed or
// contradicts itself is dropped whole and counted. Blocks behind an unknown parent are kept aside until it is
// stored. FromEvents.
func (c *Column) Stored(h Hasher, ev *StoredEvent) {
	if !c.usable(FromEvents) || !c.admits(ev) {
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

// admits checks an event by itself.
func (c *Column) admits(ev *StoredEvent) bool {
	n := &c.ix.counters
	switch {
	case !c.groupIndexed(ev.Group, ev.Kind):
		n.OtherGroup++
	case ev.BlockSize < 1 || ev.BlockSize > MaxBlockSize || len(ev.Tokens)/ev.BlockSize != len(ev.Blocks) ||
		len(ev.Tokens)%ev.BlockSize != 0:
		n.BadLength++
	case c.opt.BlockSize != 0 && c.opt.BlockSize != ev.BlockSize:
		n.BadBlockSize++
	case ev.HasParent && contains(ev.Blocks, ev.Parent):
		n.SelfParent++
	default:
		if len(ev.Blocks) > 0 {
			c.opt.BlockSize = ev.BlockSize
		}
		return len(ev.Blocks) > 0
	}
	return false
}

func contains(blocks []Handle, h Handle) bool {
	for _, b := range blocks {
		if b == h {
			return true
		}
	}
	return false
}

// groupIndexed says whether a group counts, and remembers those that do not: removals name no kind.
func (c *Column) groupIndexed(group int, kind string) bool {
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

// attach stores the event's blocks from at on behind up, whose hash is prev. A block that is known elsewhere
// undoes the whole event: nothing of it stays.
func (c *Column) attach(h Hasher, ev *StoredEvent, at int, prev uint64, up slot) {
	ix := c.ix
	ix.scratch = ev.hashes(h, ix.scratch[:0], at, prev)
	c.warmStore(ev.Blocks[at:], ix.scratch)
	ix.pin = up
	for i, hash := range ix.scratch {
		s, v := c.retain(ev.Blocks[at+i], hash, up, 0)
		if v == clashes {
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

// verdict of retain.
type verdict uint8

const (
	kept    verdict = iota
	full            // no room
	clashes         // the handle or the hash is known elsewhere
)

// retain stores one block: 1 + more copies under a handle. On success it is pinned.
func (c *Column) retain(name Handle, hash uint64, up slot, more uint32) (slot, verdict) {
	ix := c.ix
	r := c.handles.find(name)
	if r != nil && c.fresh(r) {
		s := r.slot
		if ix.hash(s) != hash {
			return none, clashes
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
	} else if ix.cold(s).parent != up && !ix.adopt(s, up) {
		return none, clashes
	}
	ix.pin = s
	if !c.bind(r, name, s, hash) { // nothing since find has moved r: evictions leave records alone
		ix.counters.Refused++
		return none, full
	}
	if len(c.aside.blocks) > 0 {
		_, copies := c.aside.take(ix, name)
		more += copies
	}
	c.addCopies(name, more)
	if c.has(s) {
		c.side.alias(ix, s)
	}
	c.settle(s, hash)
	return s, kept
}

// addCopies counts n more copies of a block, unless the engine repeats itself.
func (c *Column) addCopies(name Handle, n uint32) {
	if !c.once {
		c.side.copy(c.ix, name, n)
	}
}

// LimitCopies holds the column against the number of blocks that its engine has; cleared says that it was
// emptied. An engine that has told of more copies than that stores some of them again without having removed
// them (vLLM does when a request asks it to report whole prompts): each removal takes one copy away, so
// blocks that it has no more would stay for ever. From then on a block stored again counts once. FromEvents.
func (c *Column) LimitCopies(blocks int) (cleared bool) {
	if c.once || blocks <= 0 || c.count+c.side.n <= blocks || !c.usable(FromEvents) {
		return false
	}
	c.once = true
	c.ix.counters.Repeated++
	c.Clear()
	return true
}

// Removed applies a BlockRemoved: one physical copy less of each. FromEvents.
func (c *Column) Removed(group int, blocks []Handle) {
	if !c.usable(FromEvents) {
		return
	}
	if _, out := c.filtered[group]; out {
		c.ix.counters.OtherGroup++
		return
	}
	c.removeAll(blocks)
}

// removeAll takes a copy of each block away, the last first.
func (c *Column) removeAll(blocks []Handle) {
	c.warmRemove(blocks)
	for i := len(blocks) - 1; i >= 0; i-- {
		c.removeCopy(blocks[i])
	}
}

func (c *Column) removeCopy(name Handle) {
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
	case c.side.uncopy(c.ix, name):
	default:
		c.unbind(seg, i)
		if !c.side.unalias(c.ix, s) {
			c.release(s, c.ix.hash(s))
		}
	}
}

// setAside keeps the event's blocks, whose parent is unknown. It stops at a block that is held: at and up say
// where the chain goes on. up is none if all were kept, or the event was dropped.
func (c *Column) setAside(h Hasher, ev *StoredEvent) (at int, up slot) {
	if contains(ev.Blocks, c.aside.top(ev.Parent)) {
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
		case clashes:
			c.ix.counters.Conflict++
			c.removeAll(ev.Blocks[:i])
			return 0, none
		case full:
			c.ix.counters.AsideDropped += uint64(len(ev.Blocks) - i) //nolint:gosec // not negative
			return 0, none
		case kept:
		}
		parent = b
	}
	return 0, none
}

// attachAside stores what waited for these blocks, and what waited for that.
func (c *Column) attachAside(h Hasher, blocks []Handle) {
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
func (c *Column) attachOne(h Hasher, parent, b Handle) bool {
	ix := c.ix
	up := c.resolve(parent)
	if up == none {
		return false
	}
	w, copies := c.aside.take(ix, b)
	ix.pin = up
	_, v := c.retain(b, h.fold(ix.hash(up), w.digest), up, copies-1)
	if v == clashes {
		ix.counters.Conflict++
	}
	ix.unpin()
	ix.endRun(c)
	return v == kept
}

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
