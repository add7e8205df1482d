package kvindex

import "time"

// Tier is where an engine keeps a block. Each tier has its own block set: a block on disk is no hit in the
// GPU.
type Tier uint8

// The tiers.
const (
	GPU Tier = iota
	CPU
	Disk
	Sent // not a place: what the rank was sent, by its own record. Its blocks need not be token blocks
)

// Owner identifies the rank start that a block set belongs to.
type Owner struct {
	Rank        uint32 // routing.RankID
	Tier        Tier
	Epoch       uint64
	Incarnation uint64 // random: equal or not, never older
}

// place is a rank and tier; at most one block set is open for it.
type place struct {
	rank uint32
	tier Tier
}

// Feed is the source that fills a block set. Calls of another feed are dropped and counted.
type Feed uint8

// The feeds.
const (
	// Stored and Removed: an engine's events, counted per physical copy, by engine handle
	FromEvents Feed = iota + 1
	FromDeltas      // Apply: a replica's records, by chain hash; storing twice is storing once
	// Record and Forget: what was routed, for a time (identity text; engines without events)
	FromRecords
)

// Options of a block set.
type Options struct {
	Feed Feed
	// BlockSize is that of the chain hashes, tokens or bytes. 0 with FromEvents: learned from the first
	// event.
	BlockSize int
	// TTL of a record, with FromRecords; 0 is DefaultRecord.
	TTL time.Duration
	// Capacity, with FromRecords, is the most blocks the rank holds: over it the least recently recorded
	// blocks are dropped. 0: no bound.
	Capacity int
	// Shown block sets are visible to look-ups at once; others after Show, because their snapshot comes
	// first.
	Shown bool
}

// DefaultRecord is how long a routed prompt counts as cached without events of the engine.
const DefaultRecord = 120 * time.Second

// BlockSet is the set of blocks that one incarnation of a rank holds in one tier. Only the writer may call
// its methods.
type BlockSet struct {
	ix    *Index
	bit   int // -1: another incarnation or Close ended the block set for good
	owner Owner
	opt   Options
	shown bool

	count   int // blocks held
	orphans int // held blocks whose parent is not held; unless it is 0, look-ups scan this block set

	handles  handleTable
	side     side
	once     bool // the engine repeats what it has stored: copies are not counted
	stale    bool // evictions may have left handles without a block
	aside    aside
	filtered map[int]struct{} // attention groups that are not indexed

	ends    map[slot]time.Duration // of recorded prompts → expiry
	prompts []prompt               // what was recorded, by expiry
	endFee  int                    // bytes charged for the two above
}

// prompt is one Record: every block from leaf up to block 0 lives until at, unless a later prompt renewed it.
// Prompts are sorted by expiry, so that the oldest is dropped first.
type prompt struct {
	at   time.Duration
	leaf slot
	hash uint64 // of leaf: another one there means that the leaf is gone
}

// Owner of the block set.
func (c *BlockSet) Owner() Owner { return c.owner }

// Len is the number of blocks held.
func (c *BlockSet) Len() int { return c.count }

// BlockSize of the block set, 0 until the first event. Requests that are cut into blocks of another size
// cannot hit; the caller should report that as a fault.
func (c *BlockSet) BlockSize() int { return c.opt.BlockSize }

// Shown reports whether look-ups see the block set.
func (c *BlockSet) Shown() bool { return c.shown }

// usable reports whether a call of feed may go on, and counts those that may not.
func (c *BlockSet) usable(feed Feed) bool {
	switch {
	case c.bit < 0:
		c.ix.counters.Fenced++
	case c.opt.Feed != feed:
		c.ix.counters.WrongFeed++
	default:
		return true
	}
	return false
}

func (c *BlockSet) has(s slot) bool { return c.ix.holds(s, c.bit) }

// setHolder sets the block set's bit of s, which is not set, and updates the orphans. Readers must never see
// a hole that is not announced, so the hole is announced before the bit changes and withdrawn after it.
func (c *BlockSet) setHolder(s slot) {
	ix := c.ix
	up := ix.cold(s).parent
	if up == unknown || up >= firstSlot && !c.has(up) {
		c.addOrphans(1)
	}
	w := &ix.hot(s)[1+c.bit>>6]
	w.Store(w.Load() | 1<<(c.bit&63))
	if c.orphans > 0 {
		c.addOrphans(-ix.childrenHolding(s, c.bit))
	}
}

// unsetHolder clears the block set's bit of s, which is set.
func (c *BlockSet) unsetHolder(s slot) {
	ix := c.ix
	if ix.cold(s).child != none {
		c.addOrphans(ix.childrenHolding(s, c.bit))
	}
	w := &ix.hot(s)[1+c.bit>>6]
	w.Store(w.Load() &^ (1 << (c.bit & 63)))
	up := ix.cold(s).parent
	if up == unknown || up >= firstSlot && !c.has(up) {
		c.addOrphans(-1)
	}
}

func (c *BlockSet) addOrphans(n int) {
	was := c.orphans
	c.orphans += n
	w, b := &c.ix.holed[c.bit>>6], uint64(1)<<(c.bit&63)
	switch {
	case was == 0 && c.orphans > 0:
		w.Store(w.Load() | b)
		c.ix.holes.Add(1)
	case was > 0 && c.orphans == 0:
		w.Store(w.Load() &^ b)
	}
}

// dropBlock removes s from the block set, whatever holds it; the caller calls freeUnheld.
func (c *BlockSet) dropBlock(s slot, hash uint64) {
	at, end := c.ends[s]
	if end {
		c.removeEnd(s)
	}
	c.side.aliases.forget(c.ix, s)
	c.stale = true
	up := c.ix.cold(s).parent
	c.unsetHolder(s)
	c.count--
	c.ix.notify(c, Removed, hash)
	if end {
		c.addEndAbove(up, at)
	}
}

// Show lets look-ups see the block set: its snapshot is complete.
func (c *BlockSet) Show() {
	if c.bit >= 0 && !c.shown {
		c.shown = true
		c.ix.publish()
	}
}

// Close hides the block set for good and leaves its blocks to Sweep. Idempotent.
func (c *BlockSet) Close() {
	if c.bit < 0 {
		return
	}
	ix := c.ix
	ix.notify(c, Cleared, 0)
	delete(ix.owners, place{c.owner.Rank, c.owner.Tier})
	c.drop()
	c.bit = -1
	ix.publish()
}

// Clear empties the block set (AllBlocksCleared); the owner keeps it. It takes constant time: the blocks move
// to a block set that Sweep clears.
func (c *BlockSet) Clear() {
	if c.bit < 0 {
		c.ix.counters.Fenced++
		return
	}
	ix := c.ix
	ix.notify(c, Cleared, 0)
	c.drop()
	ix.publish()
	c.bit = ix.bit() // there is one: the old, once it is swept
	ix.sets[c.bit] = c
	ix.publish()
}

// drop empties the block set and leaves its bit to Sweep.
func (c *BlockSet) drop() {
	ix := c.ix
	ix.sets[c.bit] = nil
	ix.sweep.add(c.bit)
	ix.handles -= c.handles.n
	ix.charge -= c.handles.bytes() + c.aside.bytes() + c.side.bytes() + c.endFee
	c.handles, c.side, c.aside, c.ends, c.prompts = handleTable{}, side{}, aside{}, nil, nil
	c.count, c.orphans, c.endFee, c.stale = 0, 0, 0, false
}

// Change is the kind of a Delta.
type Change uint8

// The changes.
const (
	// Hashes is a chain: the first follows Parent (0: it is a block 0), each other the one in front
	Stored  Change = iota + 1
	Removed        // Hashes in any order
	Cleared        // nothing is left
)

// Delta is a change of what a block set holds, in chain hashes: what the replica's stream carries and an
// ingress applies.
type Delta struct {
	Change Change
	Parent uint64
	Hashes []uint64
}

// Apply applies a delta. Storing a held block and removing a block that is not held change nothing. A chain
// that contradicts a block's known parent or forms a cycle is dropped from there on. FromDeltas.
func (c *BlockSet) Apply(d Delta) {
	if !c.usable(FromDeltas) {
		return
	}
	switch d.Change {
	case Stored:
		c.put(d.Parent, d.Hashes)
	case Removed:
		c.remove(d.Hashes)
	case Cleared:
		c.Clear()
	}
}

// put stores a chain behind parent; the parent need not be held or known.
func (c *BlockSet) put(parent uint64, hashes []uint64) {
	if len(hashes) == 0 {
		return
	}
	ix := c.ix
	ix.prefetchHashes(hashes)
	up, ok := ix.findOrAddParent(parent)
	ix.pin = up
	for i := 0; ok && i < len(hashes); i++ {
		if up, ok = ix.findOrAddChild(up, hashes[i]); ok {
			ix.pin = up
			c.hold(up, hashes[i])
		}
	}
	ix.unpin()
	ix.endRun(c)
}

// hold makes the block set hold s.
func (c *BlockSet) hold(s slot, hash uint64) {
	if c.has(s) {
		c.ix.endRun(c) // the chain goes on with a block that was held
		return
	}
	c.setHolder(s)
	c.count++
	c.ix.addRun(hash, c.ix.cold(s).parent)
}

// remove removes blocks of a block set that is fed by hash, the last first, so that the block set is closed
// under prefixes at every moment.
func (c *BlockSet) remove(hashes []uint64) {
	for i := len(hashes) - 1; i >= 0; i-- {
		s := c.ix.table.find(&c.ix.pool, hashes[i])
		if s == none || !c.has(s) {
			c.ix.counters.UnknownRemove++
			continue
		}
		c.release(s, hashes[i])
	}
}

// release removes s from the block set.
func (c *BlockSet) release(s slot, hash uint64) {
	c.unsetHolder(s)
	c.count--
	c.ix.notify(c, Removed, hash)
	c.ix.freeUnheld(s)
}

// Snapshot hands out what the block set holds as Stored deltas of at most n hashes, such that applying them
// to an empty block set makes an equal one. A chain is one run as far as it is the first branch of its
// parent. Delta.Hashes is reused between calls of emit.
func (c *BlockSet) Snapshot(n int, emit func(Delta)) {
	if c.bit < 0 {
		return
	}
	ix := c.ix
	n = max(n, 1)
	chain := make([]uint64, 0, n)
	for s := firstSlot; int(s) < ix.end(); s++ {
		if ix.hash(s) == 0 || !c.has(s) || c.continues(s) {
			continue
		}
		parent := uint64(0)
		if up := ix.cold(s).parent; up >= firstSlot {
			parent = ix.hash(up)
		}
		for k := s; k != none && c.has(k); k = ix.cold(k).child {
			if len(chain) == n {
				emit(Delta{Change: Stored, Parent: parent, Hashes: chain})
				parent, chain = chain[n-1], chain[:0]
			}
			chain = append(chain, ix.hash(k))
		}
		emit(Delta{Change: Stored, Parent: parent, Hashes: chain})
		chain = chain[:0]
	}
}

// continues reports whether Snapshot emits s in the run of its parent.
func (c *BlockSet) continues(s slot) bool {
	up := c.ix.cold(s).parent
	return up >= firstSlot && c.ix.cold(up).child == s && c.has(up)
}

// resolve is the slot of a handle, none if unknown or evicted.
func (c *BlockSet) resolve(h Handle) slot {
	r := c.handles.find(h)
	if r == nil || !c.fresh(r) {
		return none
	}
	return r.slot
}

// fresh reports whether the record's block is still held.
func (c *BlockSet) fresh(r *record) bool {
	return uint32(c.ix.hash(r.slot)) == r.proof && c.has(r.slot)
}

// bind records that h names s; old is the result of find for h. False if there is no room.
func (c *BlockSet) bind(old *record, h Handle, s slot, hash uint64) bool {
	r := record{handle: h, slot: s, proof: uint32(hash)}
	if old != nil {
		*old = r
		c.side.copies.forget(c.ix, h)
		return true
	}
	seg := c.handles.segment(h)
	if (seg.n+1)*handleLoadDen > len(seg.records)*handleLoadNum && !c.grow(seg) {
		return false
	}
	seg.put(r)
	c.handles.n++
	c.ix.handles++
	return true
}

// unbind deletes the record at i.
func (c *BlockSet) unbind(seg *handleSegment, i int) {
	c.side.copies.forget(c.ix, seg.records[i].handle)
	c.handles.remove(seg, i)
	c.ix.handles--
}

// grow makes room for one more record: it removes stale records, allocates memory, or evicts blocks, which
// makes records stale.
func (c *BlockSet) grow(seg *handleSegment) bool {
	c.purge(seg)
	if c.resize(seg) {
		return true
	}
	for range max(64, c.ix.pool.live/64) {
		if !c.ix.evict() {
			break
		}
	}
	c.purge(seg)
	return c.resize(seg) || (seg.n+1)*handleLoadDen <= len(seg.records)*handleFullNum
}

// resize gives seg the length its records need, if the cap allows it.
func (c *BlockSet) resize(seg *handleSegment) bool {
	want := max(handleMin, (seg.n+1)*handleSizeNum/handleSizeDen+1)
	if (seg.n+1)*handleLoadDen <= len(seg.records)*handleLoadNum && want >= len(seg.records)/2 {
		return true
	}
	if !c.ix.chargeBytes((want - len(seg.records)) * recordBytes) {
		return false
	}
	seg.rebuild(want)
	return true
}

// purge takes stale records out of seg.
func (c *BlockSet) purge(seg *handleSegment) {
	if !c.stale {
		return
	}
	n := len(seg.records)
	for i := 0; i < n; {
		r := &seg.records[i]
		if r.slot == none || c.fresh(r) {
			i++
			continue
		}
		c.unbind(seg, i) // may move another record to i
	}
}

// An apply reads a few words spread over tens of megabytes, and its atomic writes keep the processor from
// fetching those of the next block meanwhile. So the block set first reads the words of all blocks of an
// event, where the reads overlap: that doubles the applies per second. Callers should therefore pass whole
// events, and consecutive removals in one call.

// prefetchMin is the number of blocks from which prefetching is faster.
const prefetchMin = 4

// prefetchStore fetches what storing blocks under hashes will read.
func (c *BlockSet) prefetchStore(blocks []Handle, hashes []uint64) {
	if len(blocks) < prefetchMin {
		return
	}
	sum := uint64(0)
	for _, b := range blocks {
		sum += c.handles.peek(b)
	}
	for _, hash := range hashes {
		sum += c.ix.table.peek(hash)
	}
	c.ix.prefetched += sum
}

// prefetchRemove fetches what removing blocks will read: records, then slots, then the table.
func (c *BlockSet) prefetchRemove(blocks []Handle) {
	if len(blocks) < prefetchMin {
		return
	}
	ix := c.ix
	sum := uint64(0)
	for _, b := range blocks {
		sum += c.handles.peek(b)
	}
	ix.slots, ix.scratch = ix.slots[:0], ix.scratch[:0]
	for _, b := range blocks {
		if r := c.handles.find(b); r != nil {
			ix.slots = append(ix.slots, r.slot)
		}
	}
	for _, s := range ix.slots {
		ix.scratch = append(ix.scratch, ix.hash(s))
		sum += uint64(ix.cold(s).parent)
	}
	for _, hash := range ix.scratch {
		sum += ix.table.peek(hash)
	}
	ix.prefetched += sum
}
