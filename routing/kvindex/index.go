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
	ErrFenced   = errors.New("kvindex: a higher epoch of this rank has been seen; the stream is of an " +
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
			epochs: make(map[place]uint64),
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
