// Package kvindex records, per rank, which prefixes of prompts its engine holds. One writer applies the
// ranks' streams; any number of readers look prompts up without a lock. It is pure: no clock, goroutine or
// IO.
package kvindex

import (
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"
)

// Limits and defaults of an index.
const (
	DefaultBytes = 512 << 20 // the hard cap on memory
	minBytes     = 1 << 20
	defaultSets  = 64
	MaxSets      = 1 << 14
	wordBits     = 64
	tick         = 100 * time.Millisecond // the resolution of ages of matches
)

// Config sizes an index.
type Config struct {
	// Sets is how many (rank, tier, incarnation) triples fit at once, rounded up to a multiple of 64; 0 is
	// defaultSets. A replaced block set counts until it is swept, so leave room for restarts. Every 64
	// block sets cost 8 more bytes per block.
	Sets int
	// Bytes is the hard cap, 0 is DefaultBytes: over it the index evicts the least recently matched leaves.
	// It counts the index's allocations, without garbage that the collector has not freed yet.
	Bytes int
	// OnChange, if set, is called for every change of a block set's blocks, in order and inside the writer's
	// call; the replica's stream sends these as records. Hashes is valid during the call only.
	OnChange func(*BlockSet, Delta)
}

// Index maps chain hashes to the block sets (ranks) holding them.
//
// Match is safe from any goroutine at any time. Everything else, Sets included, belongs to the writer:
// such calls must not overlap.
type Index struct {
	pool
	table  *table
	leaves leaves
	noted  slot // a leaf that is not in leaves yet
	pin    slot // the end of the chain that is being stored; it is not evicted

	live   atomic.Pointer[liveSet]
	holed  []atomic.Uint64 // block sets with orphans: not closed under prefixes
	holes  atomic.Uint64   // +1 whenever a block set gets its first orphan
	ticks  atomic.Uint32   // time in ticks
	now    time.Duration
	cap    int
	charge int // bytes charged against cap

	seats
	sweep sweep

	onChange   func(*BlockSet, Delta)
	run        run
	scratch    []uint64 // hashes of the current event
	slots      []slot   // slots of the current event
	prefetched uint64   // what warming loads ends up here, or the compiler would leave it out
	counters   Counters
}

// seats are the bits of an Index and the block sets that have them.
type seats struct {
	sets     []*BlockSet // by bit; nil: free or dying
	owners   map[place]*BlockSet
	epochs   map[place]uint64 // highest ever; outlives the block set
	freeBits []int
	handles  int // in all block sets
}

// What can go wrong with New and Open.
var (
	ErrNoBlockSet = errors.New("kvindex: every block set is taken; build an index with more of them " +
		"and restore it from snapshots")
	ErrFenced = errors.New("kvindex: a higher epoch of this rank has been seen; the stream is of an " +
		"older start and must be dropped")
)

// New is an empty index.
func New(c Config) (*Index, error) {
	if c.Sets == 0 {
		c.Sets = defaultSets
	}
	if c.Bytes == 0 {
		c.Bytes = DefaultBytes
	}
	if c.Sets < 1 || c.Sets > MaxSets {
		return nil, fmt.Errorf("kvindex: %d block sets; use 1 to %d", c.Sets, MaxSets)
	}
	words := (c.Sets + wordBits - 1) / wordBits
	ix := &Index{
		pool: pool{stride: 1 + words}, table: newTable(), holed: make([]atomic.Uint64, words), cap: c.Bytes,
		seats: seats{
			sets: make([]*BlockSet, words*wordBits), owners: make(map[place]*BlockSet),
			epochs: make(map[place]uint64),
		},
		onChange: c.OnChange, sweep: newSweep(words),
	}
	most := c.Bytes / ix.chargePerChunk()
	ix.chunks = make([]atomic.Pointer[chunk], min(most+1, 1<<(32-chunkBits)))
	ix.charge = 8*len(ix.chunks) + tableSegments*(segmentMin*8+64)
	if least := max(minBytes, ix.charge+2*ix.chargePerChunk()); c.Bytes < least {
		return nil, fmt.Errorf("kvindex: a cap of %d bytes holds nothing; use at least %d", c.Bytes, least)
	}
	for bit := len(ix.sets) - 1; bit >= 0; bit-- {
		ix.freeBits = append(ix.freeBits, bit)
	}
	ix.publish()
	return ix, nil
}

// Advance sets the time (monotonic, any origin; going back is ignored). Later matches are younger than
// earlier ones, and records expire.
func (ix *Index) Advance(now time.Duration) {
	if now <= ix.now {
		return
	}
	ix.now = now
	ix.ticks.Store(uint32(now / tick))
	for _, c := range ix.sets {
		if c != nil {
			c.expire(now)
		}
	}
}

// chargeBytes charges n bytes against the cap; false if that would exceed it.
func (ix *Index) chargeBytes(n int) bool {
	if ix.charge+n > ix.cap {
		return false
	}
	ix.charge += n
	return true
}

// add makes a slot for hash under parent; none if the cap leaves no room. The parent is pinned by the caller.
func (ix *Index) add(hash uint64, parent slot) slot {
	s := ix.allocateSlot()
	if s == none {
		ix.counters.Refused++
		return none
	}
	ix.hot(s)[0].Store(hash)
	ix.link(s, parent)
	ix.table.insert(hash, s)
	return s
}

// allocateSlot returns a free slot: a freed one, one of a new chunk, or the slot of the least recently
// matched leaf, which it evicts.
func (ix *Index) allocateSlot() slot {
	if s := ix.take(); s != none {
		return s
	}
	// A new chunk leaves room for the handles that its slots will need at the present number of holders.
	need := ix.chargePerChunk()
	if reserve := chunkSlots * ix.handles / max(ix.pool.live, 1) * handleReserve; ix.n < len(ix.chunks) &&
		ix.charge+need+reserve <= ix.cap && ix.chargeBytes(need) {
		ix.addChunk()
		return ix.take()
	}
	ix.evict()
	return ix.take()
}

// freeUnheld frees s if no block set holds it and it has no child, and then its ancestors for which the same
// became true.
func (ix *Index) freeUnheld(s slot) {
	for s >= firstSlot && s != ix.pin {
		c := ix.cold(s)
		if c.child != none {
			return
		}
		if !ix.holderless(s) {
			ix.noteLeaf(s)
			return
		}
		up, stamp := c.parent, c.stamp.Load()
		ix.unlink(s)
		ix.table.remove(ix.hash(s), s)
		ix.free(s)
		if s = up; s >= firstSlot {
			if p := ix.cold(s); p.stamp.Load() < stamp { // a match of the child matched the parent
				p.stamp.Store(stamp)
			}
		}
	}
}

// unpin ends the storing of a chain and marks its last block as used now.
func (ix *Index) unpin() {
	s := ix.pin
	ix.pin = none
	if s >= firstSlot {
		ix.cold(s).stamp.Store(ix.ticks.Load())
		ix.freeUnheld(s)
	}
}

// setParent sets the parent of a ghost, a slot that so far was only named as a parent. It returns false if
// that would form a cycle or contradicts the slot's known parent.
func (ix *Index) setParent(s, parent slot) bool {
	c := ix.cold(s)
	if c.parent == parent {
		return s != parent
	}
	if c.parent != unknown {
		return false
	}
	for up := parent; up >= firstSlot; up = ix.cold(up).parent {
		if up == s {
			return false
		}
	}
	ix.link(s, parent)
	return true
}

// Open gives o a new block set that replaces the one of its rank and tier: the old block set is masked at
// once, closed, and swept later. The same owner may open again, because a gap in its stream is repaired by a
// snapshot into a new block set. An epoch below the highest one seen for the place is ErrFenced.
func (ix *Index) Open(o Owner, opt Options) (*BlockSet, error) {
	p := place{o.Rank, o.Tier}
	if o.Epoch < ix.epochs[p] {
		ix.counters.Fenced++
		return nil, ErrFenced
	}
	if old := ix.owners[p]; old != nil {
		old.Close()
	}
	bit := ix.bit()
	if bit < 0 {
		return nil, ErrNoBlockSet
	}
	if opt.TTL <= 0 {
		opt.TTL = DefaultRecord
	}
	c := &BlockSet{ix: ix, bit: bit, owner: o, opt: opt, shown: opt.Shown}
	ix.sets[bit], ix.owners[p], ix.epochs[p] = c, c, o.Epoch
	ix.publish()
	return c, nil
}

// Find is the open block set of exactly this owner. It is nil, and counted, if the event is of an older epoch
// or incarnation, or the rank was not opened.
func (ix *Index) Find(o Owner) *BlockSet {
	c := ix.owners[place{o.Rank, o.Tier}]
	switch {
	case c != nil && c.owner == o:
		return c
	case c == nil && o.Epoch >= ix.epochs[place{o.Rank, o.Tier}]:
		ix.counters.Unopened++
	default:
		ix.counters.Fenced++
	}
	return nil
}

// bit returns a free block set bit without holes; -1 if all are used.
func (ix *Index) bit() int {
	if len(ix.freeBits) == 0 {
		for ix.Sweep(ix.end()) {
		}
	}
	if len(ix.freeBits) == 0 {
		return -1
	}
	bit := ix.freeBits[len(ix.freeBits)-1]
	ix.freeBits = ix.freeBits[:len(ix.freeBits)-1]
	w := &ix.holed[bit>>6]
	w.Store(w.Load() &^ (1 << (bit & 63)))
	return bit
}

// findOrAddParent returns the slot of a parent; an unknown parent becomes a ghost.
func (ix *Index) findOrAddParent(parent uint64) (slot, bool) {
	if parent == 0 {
		return none, true
	}
	s := ix.table.find(&ix.pool, parent)
	if s == none {
		s = ix.add(parent, unknown)
	}
	return s, s != none
}

// findOrAddChild returns hash's slot under up and adds it if necessary; false without room, or if hash is
// known under another parent.
func (ix *Index) findOrAddChild(up slot, hash uint64) (slot, bool) {
	if hash == 0 {
		ix.counters.Conflict++
		return up, false
	}
	s := ix.table.find(&ix.pool, hash)
	if s == none {
		if s = ix.add(hash, up); s == none {
			return up, false
		}
		return s, true
	}
	if c := ix.cold(s); c.parent != up && !ix.setParent(s, up) || s == up {
		ix.counters.Conflict++
		return up, false
	}
	return s, true
}

// run collects blocks of one chain that a block set newly holds, so that one Delta reports them.
type run struct {
	parent uint64
	hashes []uint64
	one    [1]uint64
}

// addRun adds a block; the first names its parent.
func (ix *Index) addRun(hash uint64, parent slot) {
	if ix.onChange == nil {
		return
	}
	if len(ix.run.hashes) == 0 {
		ix.run.parent = 0
		if parent >= firstSlot {
			ix.run.parent = ix.hash(parent)
		}
	}
	ix.run.hashes = append(ix.run.hashes, hash)
}

// endRun reports the run to OnChange.
func (ix *Index) endRun(c *BlockSet) {
	if len(ix.run.hashes) > 0 {
		ix.onChange(c, Delta{Change: Stored, Parent: ix.run.parent, Hashes: ix.run.hashes})
		ix.run.hashes = ix.run.hashes[:0]
	}
}

// notify reports a change of one block, or of all, to OnChange.
func (ix *Index) notify(c *BlockSet, what Change, hash uint64) {
	if ix.onChange == nil {
		return
	}
	d := Delta{Change: what}
	if hash != 0 {
		ix.run.one[0] = hash
		d.Hashes = ix.run.one[:]
	}
	ix.onChange(c, d)
}

// prefetchHashes fetches what storing chain hashes will read of the table.
func (ix *Index) prefetchHashes(hashes []uint64) {
	if len(hashes) < prefetchMin {
		return
	}
	sum := uint64(0)
	for _, hash := range hashes {
		sum += ix.table.peek(hash)
	}
	ix.prefetched += sum
}

// noteLeaf puts s into the heap, if it is a leaf and not there. It does so one call later, because removing a
// chain from its end makes every block a leaf for a moment.
func (ix *Index) noteLeaf(s slot) {
	if s != ix.noted {
		ix.flushLeaf()
		ix.noted = s
	}
}

func (ix *Index) flushLeaf() {
	s := ix.noted
	ix.noted = none
	if s == none || ix.hash(s) == 0 || ix.cold(s).child != none || ix.queued(s) {
		return
	}
	ix.setQueued(s, true)
	ix.leaves.push(leaf{stamp: ix.cold(s).stamp.Load(), slot: s})
}

// evict drops the least recently matched leaf from all block sets; false if there is none. A parent is never
// dropped before its children, so a block set stays closed under prefixes.
func (ix *Index) evict() bool {
	ix.flushLeaf()
	for ix.leaves.n > 0 {
		top := *ix.leaves.at(0)
		s := top.slot
		if ix.hash(s) == 0 || ix.cold(s).child != none || s == ix.pin {
			ix.leaves.pop()
			ix.setQueued(s, false)
			continue
		}
		if now := ix.cold(s).stamp.Load(); now != top.stamp {
			ix.leaves.sink(leaf{stamp: now, slot: s})
			continue
		}
		ix.leaves.pop()
		ix.setQueued(s, false)
		ix.dropSlot(s)
		ix.counters.Evicted++
		return true
	}
	return false
}

// dropSlot takes s from every block set and frees it.
func (ix *Index) dropSlot(s slot) {
	hash := ix.hash(s)
	for w := 1; w < ix.stride; w++ {
		for held := ix.hot(s)[w].Load(); held != 0; held &= held - 1 {
			bit := (w-1)<<6 + bits.TrailingZeros64(held)
			if c := ix.sets[bit]; c != nil {
				c.dropBlock(s, hash)
				continue
			}
			ix.hot(s)[w].Store(ix.hot(s)[w].Load() &^ (held & -held)) // a dying block set
		}
	}
	ix.freeUnheld(s)
}

// Sweep clears closed and cleared block sets from at most n slots (about 10 ns each) and reports whether
// there is more to do. Call it when the writer is idle: an unswept block set cannot be used again and holds
// memory.
func (ix *Index) Sweep(n int) (more bool) {
	w := &ix.sweep
	if w.cursor == 0 && !w.begin() {
		return false
	}
	end := ix.end()
	stop := min(end, w.cursor+max(n, 1))
	for ; w.cursor < stop; w.cursor++ {
		ix.wipe(slot(w.cursor))
	}
	if w.cursor < end {
		return true
	}
	for bit := range ix.sets {
		if w.pass[bit>>6]>>(bit&63)&1 == 1 {
			ix.freeBits = append(ix.freeBits, bit)
		}
	}
	clear(w.pass)
	w.cursor = 0
	return w.n > 0
}

// wipe clears the bits of the current pass in s.
func (ix *Index) wipe(s slot) {
	hot := ix.hot(s)
	if hot[0].Load() == 0 {
		return
	}
	wiped := false
	for i, dead := range ix.sweep.pass {
		if held := hot[1+i].Load(); held&dead != 0 {
			hot[1+i].Store(held &^ dead)
			wiped = true
		}
	}
	if wiped {
		ix.freeUnheld(s)
	}
}

// Counters count what the index dropped since New, one counter per reason, in blocks unless a field says
// otherwise.
type Counters struct {
	Fenced        uint64 // calls: an older epoch, another incarnation, or a block set that is closed
	Unopened      uint64 // calls for a rank without a block set
	WrongFeed     uint64 // calls that do not fit the block set's feed
	BadLength     uint64 // events: token ids ≠ blocks × block size, or a block size out of bounds
	BadBlockSize  uint64 // events of another block size than the set's (a partial block, a wrong setting)
	OtherGroup    uint64 // events of attention groups that are not indexed
	SelfParent    uint64 // events naming a block its own parent
	Cycle         uint64 // events closing a circle of parents
	Conflict      uint64 // events or records that place a known block elsewhere
	UnknownParent uint64 // stored blocks kept aside because their parent is not known
	AsideDropped  uint64 // blocks kept aside and dropped for want of room
	UnknownRemove uint64 // removals of blocks that are not held
	Repeated      uint64 // block sets emptied because their engine told of more copies than it has blocks
	Refused       uint64 // blocks, copies or records not taken: the cap leaves no room
	Evicted       uint64 // blocks dropped at the cap, all holders at once
	Expired       uint64 // blocks whose time or capacity as a speculative store or record ended
}

// Stats are gauges of an index.
type Stats struct {
	Counters
	Blocks  int // chain hashes known, ghosts included
	Sets    int // open
	Bytes   int // charged against Cap
	Cap     int
	Handles int // engine handles, over all block sets
	Aside   int // blocks waiting for their parents
	Orphans int // held blocks whose parent is not held
}

// Stats belongs to the writer: call it where events are applied.
func (ix *Index) Stats() Stats {
	s := Stats{
		Counters: ix.counters, Blocks: ix.pool.live, Bytes: ix.charge, Cap: ix.cap, Handles: ix.handles,
	}
	for _, c := range ix.sets {
		if c == nil {
			continue
		}
		s.Sets++
		s.Aside += len(c.aside.blocks)
		s.Orphans += c.orphans
	}
	return s
}
