// Package kvindex knows, per rank, which prefixes of prompts its engine holds. One writer applies what the
// ranks' streams say; any number of readers ask without a lock. It is pure: no clock, goroutine or IO.
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
	DefaultBytes   = 512 << 20 // the hard cap on memory
	MinBytes       = 1 << 20
	DefaultColumns = 64
	MaxColumns     = 1 << 14
	wordBits       = 64
	tick           = 100 * time.Millisecond // how finely matches are told apart by age
)

// Config sizes an index.
type Config struct {
	// Columns is how many (rank, tier, incarnation) triples fit at once, rounded up to a multiple of 64; 0 is
	// DefaultColumns. A column that was replaced counts until it is swept: leave room for restarts. 8 more
	// bytes per block for every 64.
	Columns int
	// Bytes is the hard cap, 0 is DefaultBytes: over it the least recently matched leaves go. It counts what
	// the index allocates; garbage that the collector has not taken yet comes on top.
	Bytes int
	// OnChange, if set, hears of every change of what a column holds, in order and inside the writer's call:
	// the record that the replica's stream carries. Hashes is valid during the call only.
	OnChange func(*Column, Delta)
}

// Index maps chain hashes to the columns (ranks) holding them.
//
// Match is safe from any goroutine at any time. Everything else, Columns included, belongs to the writer:
// such calls must not overlap.
type Index struct {
	pool
	table  *table
	leaves leaves
	noted  slot // a leaf that is not in leaves yet
	pin    slot // the end of the chain that is being stored: not to be evicted

	live   atomic.Pointer[liveSet]
	holed  []atomic.Uint64 // columns with orphans: not closed under prefixes
	holes  atomic.Uint64   // +1 whenever a column gets its first orphan
	ticks  atomic.Uint32   // time in ticks
	now    time.Duration
	cap    int
	charge int // bytes charged against cap

	columns []*Column // by bit; nil: free or dying
	owners  map[place]*Column
	epochs  map[place]uint64 // highest ever; outlives the column
	free    []int            // bits
	sweep   sweep
	handles int // in all columns

	onChange func(*Column, Delta)
	run      run
	scratch  []uint64 // hashes of the event at hand
	slots    []slot   // slots of the event at hand
	warmth   uint64   // what warming loads ends up here, or the compiler would leave it out
	counters Counters
}

// What can go wrong with New and Open.
var (
	ErrNoColumn = errors.New("kvindex: every column is taken; build an index with more columns and restore " +
		"it from snapshots")
	ErrFenced = errors.New("kvindex: a higher epoch of this rank has been seen; the stream is of an " +
		"older start and must be dropped")
)

// New is an empty index.
func New(c Config) (*Index, error) {
	if c.Columns == 0 {
		c.Columns = DefaultColumns
	}
	if c.Bytes == 0 {
		c.Bytes = DefaultBytes
	}
	if c.Columns < 1 || c.Columns > MaxColumns {
		return nil, fmt.Errorf("kvindex: %d columns; use 1 to %d", c.Columns, MaxColumns)
	}
	words := (c.Columns + wordBits - 1) / wordBits
	ix := &Index{
		pool: pool{stride: 1 + words}, table: newTable(), holed: make([]atomic.Uint64, words), cap: c.Bytes,
		columns: make([]*Column, words*wordBits), owners: make(map[place]*Column),
		epochs:   make(map[place]uint64),
		onChange: c.OnChange, sweep: newSweep(words),
	}
	most := c.Bytes / ix.chargePerChunk()
	ix.chunks = make([]atomic.Pointer[chunk], min(most+1, 1<<(32-chunkBits)))
	ix.charge = 8*len(ix.chunks) + tableSegments*(segmentMin*8+64)
	if least := max(MinBytes, ix.charge+2*ix.chargePerChunk()); c.Bytes < least {
		return nil, fmt.Errorf("kvindex: a cap of %d bytes holds nothing; use at least %d", c.Bytes, least)
	}
	for bit := len(ix.columns) - 1; bit >= 0; bit-- {
		ix.free = append(ix.free, bit)
	}
	ix.publish()
	return ix, nil
}

// Advance tells the time (monotonic, any origin; going back is ignored): matches from now on are younger than
// those before, and what was stored for a limited time expires.
func (ix *Index) Advance(now time.Duration) {
	if now <= ix.now {
		return
	}
	ix.now = now
	ix.ticks.Store(uint32(now / tick)) //nolint:gosec // wraps after 13 years
	for _, c := range ix.columns {
		if c != nil {
			c.expire(now)
		}
	}
}

// pay charges n bytes, unless that goes over the cap.
func (ix *Index) pay(n int) bool {
	if ix.charge+n > ix.cap {
		return false
	}
	ix.charge += n
	return true
}

// add makes a slot for hash under parent; none if the cap leaves no room. The parent is pinned by the caller.
func (ix *Index) add(hash uint64, parent slot) slot {
	s := ix.vacant()
	if s == none {
		ix.counters.Refused++
		return none
	}
	ix.hot(s)[0].Store(hash)
	ix.link(s, parent)
	ix.table.insert(hash, s)
	return s
}

// vacant is a free slot: a used one, one of a new chunk, or that of the least recently matched leaf.
func (ix *Index) vacant() slot {
	if s := ix.take(); s != none {
		return s
	}
	// A new chunk leaves room for the handles that its slots will need at the present number of holders.
	need := ix.chargePerChunk()
	if reserve := chunkSlots * ix.handles / max(ix.pool.live, 1) * handleReserve; ix.n < len(ix.chunks) &&
		ix.charge+need+reserve <= ix.cap && ix.pay(need) {
		ix.addChunk()
		return ix.take()
	}
	ix.evict()
	return ix.take()
}

// reap frees s if nothing needs it, and then its ancestors that only it kept.
func (ix *Index) reap(s slot) {
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
		ix.pool.free(s)
		if s = up; s >= firstSlot {
			if p := ix.cold(s); p.stamp.Load() < stamp { // a match of the child matched the parent
				p.stamp.Store(stamp)
			}
		}
	}
}

// unpin ends the storing of a chain: its last block is as young as can be.
func (ix *Index) unpin() {
	s := ix.pin
	ix.pin = none
	if s >= firstSlot {
		ix.cold(s).stamp.Store(ix.ticks.Load())
		ix.reap(s)
	}
}

// adopt gives a ghost that was only named its parent; false if that would close a circle or contradicts its
// place.
func (ix *Index) adopt(s, parent slot) bool {
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

func trailing(x uint64) int { return bits.TrailingZeros64(x) }

// Open gives o a fresh column, in place of the one its rank and tier had: that one is masked at once, closed,
// and swept later. The same owner may open again: a gap in its stream is mended by a snapshot into a fresh
// column. A lower epoch than ever seen for the place is ErrFenced.
func (ix *Index) Open(o Owner, opt Options) (*Column, error) {
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
		return nil, ErrNoColumn
	}
	if opt.TTL <= 0 {
		opt.TTL = DefaultRecord
	}
	c := &Column{ix: ix, bit: bit, owner: o, opt: opt, shown: opt.Shown}
	ix.columns[bit], ix.owners[p], ix.epochs[p] = c, c, o.Epoch
	ix.publish()
	return c, nil
}

// Find is the open column of exactly this owner. nil: the event is of an older epoch or incarnation, or the
// rank was not opened; counted.
func (ix *Index) Find(o Owner) *Column {
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

// Forget drops what is remembered of a rank that is gone for good, its highest epoch too.
func (ix *Index) Forget(rank uint32, t Tier) {
	p := place{rank, t}
	if c := ix.owners[p]; c != nil {
		c.Close()
	}
	delete(ix.epochs, p)
}

// bit is a free column bit, without holes; -1 if all are taken.
func (ix *Index) bit() int {
	if len(ix.free) == 0 {
		for ix.Sweep(ix.end()) {
		}
	}
	if len(ix.free) == 0 {
		return -1
	}
	bit := ix.free[len(ix.free)-1]
	ix.free = ix.free[:len(ix.free)-1]
	w := &ix.holed[bit>>6]
	w.Store(w.Load() &^ (1 << (bit & 63)))
	return bit
}

// place is the slot of a parent; one that was never heard of becomes a ghost.
func (ix *Index) place(parent uint64) (slot, bool) {
	if parent == 0 {
		return none, true
	}
	s := ix.table.find(&ix.pool, parent)
	if s == none {
		s = ix.add(parent, unknown)
	}
	return s, s != none
}

// descend is hash's slot under up, made if need be; false without room, or if hash is known elsewhere.
func (ix *Index) descend(up slot, hash uint64) (slot, bool) {
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
	if c := ix.cold(s); c.parent != up && !ix.adopt(s, up) || s == up {
		ix.counters.Conflict++
		return up, false
	}
	return s, true
}

// run collects blocks of one chain that a column newly holds, so that they are told together.
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

// endRun tells the run.
func (ix *Index) endRun(c *Column) {
	if len(ix.run.hashes) > 0 {
		ix.onChange(c, Delta{Change: Stored, Parent: ix.run.parent, Hashes: ix.run.hashes})
		ix.run.hashes = ix.run.hashes[:0]
	}
}

// tell hands a change of one block, or of all, to the listener.
func (ix *Index) tell(c *Column, what Change, hash uint64) {
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

// warmHashes fetches what storing chain hashes will read of the table.
func (ix *Index) warmHashes(hashes []uint64) {
	if len(hashes) < warmLeast {
		return
	}
	sum := uint64(0)
	for _, hash := range hashes {
		sum += ix.table.peek(hash)
	}
	ix.warmth += sum
}

// noteLeaf puts s into the heap, if it is a leaf and not there; one call late: a chain that is removed from
// its end makes every block a leaf for a moment.
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

// evict drops the least recently matched leaf from all columns; false if there is none. A parent is never
// dropped before its children, so what a column holds stays closed under prefixes.
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

// dropSlot takes s from every column and frees it.
func (ix *Index) dropSlot(s slot) {
	hash := ix.hash(s)
	for w := 1; w < ix.stride; w++ {
		for held := ix.hot(s)[w].Load(); held != 0; held &= held - 1 {
			bit := (w-1)<<6 + trailing(held)
			if c := ix.columns[bit]; c != nil {
				c.lose(s, hash)
				continue
			}
			ix.hot(s)[w].Store(ix.hot(s)[w].Load() &^ (held & -held)) // a dying column
		}
	}
	ix.reap(s)
}

// Sweep wipes at most n slots (about 10 ns each) for columns that were closed or cleared, and says whether
// there is more to do. Call it when the writer has nothing better to do: an unswept column cannot be used
// again and holds memory.
func (ix *Index) Sweep(n int) (more bool) {
	w := &ix.sweep
	if w.cursor == 0 && !w.begin() {
		return false
	}
	end := ix.end()
	stop := min(end, w.cursor+max(n, 1))
	for ; w.cursor < stop; w.cursor++ {
		ix.wipe(slot(w.cursor)) //nolint:gosec // bounded by New
	}
	if w.cursor < end {
		return true
	}
	for bit := range ix.columns {
		if w.pass[bit>>6]>>(bit&63)&1 == 1 {
			ix.free = append(ix.free, bit)
		}
	}
	clear(w.pass)
	w.cursor = 0
	return w.n > 0
}

// wipe takes the bits of the pass from s.
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
		ix.reap(s)
	}
}

// Counters count, since New, what was dropped or given up, each for one reason. Blocks unless said.
type Counters struct {
	Fenced        uint64 // calls: an older epoch, another incarnation, or a column that is closed
	Unopened      uint64 // calls for a rank without a column
	WrongFeed     uint64 // calls that do not fit the column's feed
	BadLength     uint64 // events: token ids ≠ blocks × block size, or a block size out of bounds
	BadBlockSize  uint64 // events of another block size than the column's (a partial block, a wrong setting)
	OtherGroup    uint64 // events of attention groups that are not indexed
	SelfParent    uint64 // events naming a block its own parent
	Cycle         uint64 // events closing a circle of parents
	Conflict      uint64 // events or records that place a known block elsewhere
	UnknownParent uint64 // stored blocks kept aside because their parent is not known
	AsideDropped  uint64 // blocks kept aside and dropped for want of room
	UnknownRemove uint64 // removals of blocks that are not held
	Repeated      uint64 // columns emptied because their engine told of more copies than it has blocks
	Refused       uint64 // blocks, copies or records not taken: the cap leaves no room
	Evicted       uint64 // blocks dropped at the cap, all holders at once
	Expired       uint64 // blocks whose time or capacity as a speculative store or record ended
}

// Stats are gauges of an index.
type Stats struct {
	Counters
	Blocks      int // chain hashes known, ghosts included
	Columns     int // open
	Bytes       int // charged against Cap
	Cap         int
	Handles     int // engine handles, over all columns
	HandleBytes int // of Bytes
	Aside       int // blocks waiting for their parents
	Orphans     int // held blocks whose parent is not held
	Unswept     bool
}

// Stats is the writer's: call it where events are applied.
func (ix *Index) Stats() Stats {
	s := Stats{
		Counters: ix.counters, Blocks: ix.pool.live, Bytes: ix.charge, Cap: ix.cap, Handles: ix.handles,
		Unswept: ix.sweep.n > 0 || ix.sweep.cursor > 0,
	}
	for _, c := range ix.columns {
		if c == nil {
			continue
		}
		s.Columns++
		s.HandleBytes += c.handles.bytes()
		s.Aside += len(c.aside.blocks)
		s.Orphans += c.orphans
	}
	return s
}
