package kvindex

import "time"

// Tier is where an engine keeps a block. Tiers are columns of their own: what is on disk is no hit in the
// GPU.
type Tier uint8

// The tiers.
const (
	GPU Tier = iota
	CPU
	Disk
	Sent // not a place: what the rank was sent, by its own record. Its blocks need not be token blocks
)

// Owner is whom a column belongs to.
type Owner struct {
	Rank        uint32 // routing.RankID
	Tier        Tier
	Epoch       uint64
	Incarnation uint64 // random: equal or not, never older
}

// place is what at most one column is open for.
type place struct {
	rank uint32
	tier Tier
}

// Feed is what a column is filled from. Calls of another feed are dropped and counted.
type Feed uint8

// The feeds.
const (
	// Stored and Removed: an engine's events, counted per physical copy, by engine handle
	FromEvents  Feed = iota + 1
	FromDeltas                  // Apply: a replica's records, by chain hash; storing twice is storing once
	// Record and Forget: what was routed, for a time (identity text; engines without events)
	FromRecords
)

// Options of a column.
type Options struct {
	Feed Feed
	// BlockSize is that of the chain hashes, tokens or bytes. 0 with FromEvents: learned from the first
	// event.
	BlockSize int
	// TTL of a record, with FromRecords; 0 is DefaultRecord.
	TTL time.Duration
	// Capacity, with FromRecords, is the most blocks the rank holds: over it the least recently recorded go.
	// 0: no bound.
	Capacity int
	// Shown columns answer at once; others after Show (a snapshot comes first).
	Shown bool
}

// DefaultRecord is how long a routed prompt counts as cached while no event says more.
const DefaultRecord = 120 * time.Second

// Column is what one incarnation of a rank holds in one tier. Its methods are the writer's.
type Column struct {
	ix    *Index
	bit   int // -1: closed
	owner Owner
	opt   Options
	shown bool

	count   int    // blocks held
	sum     uint64 // sum of their hashes mod 2^64: equal columns have equal sums
	orphans int    // held blocks whose parent is not held

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

// Owner of the column.
func (c *Column) Owner() Owner { return c.owner }

// Len is the number of blocks held.
func (c *Column) Len() int { return c.count }

// Sum is the sum of the hashes of the blocks held: two columns with equal Len and Sum hold the same.
func (c *Column) Sum() uint64 { return c.sum }

// Orphans is the number of held blocks whose parent is not held. While it is not 0, look-ups scan this
// column.
func (c *Column) Orphans() int { return c.orphans }

// Aside is the number of stored blocks that wait for an unknown parent.
func (c *Column) Aside() int { return len(c.aside.blocks) }

// BlockSize of the column, 0 until an event told. Requests cut otherwise cannot hit: that is an error to
// show.
func (c *Column) BlockSize() int { return c.opt.BlockSize }

// Shown says whether look-ups see the column.
func (c *Column) Shown() bool { return c.shown }

// Closed says that another incarnation or Close ended the column for good.
func (c *Column) Closed() bool { return c.bit < 0 }

// usable is whether a call of feed may go on.
func (c *Column) usable(feed Feed) bool {
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

func (c *Column) has(s slot) bool { return c.ix.holds(s, c.bit) }

// gain sets the column's bit of s, which is not set, and keeps count of orphans: a hole is announced before
// it can be seen, and taken back after it is gone.
func (c *Column) gain(s slot) {
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

// lack clears the column's bit of s, which is set.
func (c *Column) lack(s slot) {
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

func (c *Column) addOrphans(n int) {
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

// enter and leave keep the account of what is held.
func (c *Column) enter(hash uint64) { c.count++; c.sum += hash }
func (c *Column) leave(hash uint64) { c.count--; c.sum -= hash }

// lose takes s from the column whatever it is held for; the caller reaps s.
func (c *Column) lose(s slot, hash uint64) {
	at, end := c.ends[s]
	if end {
		c.unend(s)
	}
	c.side.forgetAliases(c.ix, s)
	c.stale = true
	up := c.ix.cold(s).parent
	c.lack(s)
	c.leave(hash)
	c.ix.tell(c, Removed, hash)
	if end {
		c.cover(up, at)
	}
}
