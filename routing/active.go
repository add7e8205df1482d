package routing

import "math/bits"

const (
	// maxTrackedBlocks bounds what is remembered of one prompt (131,072 tokens at 16 per block); the rest
	// counts, but is not shared.
	maxTrackedBlocks = 8192
	// blockJump is how many blocks of a prompt are skipped at a time while nothing changes.
	blockJump = 32
	wordBits  = 64
)

// activeBlocks counts the distinct KV blocks of the sequences that are active on each rank: blocks that
// several of them share (by chain hash) count once. A sequence holds its whole prefix, so what is active on a
// rank is closed under prefixes, and the overlap of a prompt with a rank is one number. Bounded by the
// requests that the ranks hold open.
type activeBlocks struct {
	ranks   []activeRank // by slot
	slotOf  table        // rank id + 1 → slot + 1
	rows    []int32      // by row of the view: slot
	words   int          // of one holder set
	holders table        // chain hash → index into sets, +1
	sets    []uint64     // words per entry: the slots that hold the block
	spare   []uint32     // free entries of sets
	counts  table        // (hash, slot) → active requests that hold it
	openOf  table        // (request, slot) → index into opens, +1
	opens   []activeOpen
	closed  []uint32 // free entries of opens
}

type activeRank struct {
	id     RankID
	used   bool
	single int64  // blocks that cannot be shared: unknown ones, and partial ones
	shared int64  // distinct blocks by hash
	list   uint32 // its opens, +1
}

type activeOpen struct {
	key        uint64
	hashes     []uint64
	single     int64
	next, prev uint32 // of the same rank, +1
}

func newActiveBlocks(v *View) *activeBlocks {
	b := &activeBlocks{words: 1}
	for i := range v.Ranks {
		b.slot(v.Ranks[i].ID)
	}
	b.align(v)
	return b
}

// slot returns the rank's place in the tables and adds it if necessary.
func (b *activeBlocks) slot(id RankID) int {
	if s := b.slotOf.get(uint64(id) + 1); s != 0 {
		return int(s - 1)
	}
	s := 0
	for s < len(b.ranks) && b.ranks[s].used {
		s++
	}
	if s == len(b.ranks) {
		b.ranks = append(b.ranks, activeRank{})
	}
	if s >= b.words*wordBits {
		b.widen()
	}
	b.ranks[s] = activeRank{id: id, used: true}
	b.slotOf.set(uint64(id)+1, uint32(s+1))
	return s
}

// widen gives every holder set one more word.
func (b *activeBlocks) widen() {
	old, n := b.sets, b.words
	b.words++
	b.sets = make([]uint64, len(old)/n*b.words)
	for i := 0; i*n < len(old); i++ {
		copy(b.sets[i*b.words:], old[i*n:(i+1)*n])
	}
}

// align records the slot of each row of the view.
func (b *activeBlocks) align(v *View) {
	b.rows = b.rows[:0]
	for i := range v.Ranks {
		b.rows = append(b.rows, int32(b.slot(v.Ranks[i].ID)))
	}
}

// removeRank forgets a rank and all that was active on it.
func (b *activeBlocks) removeRank(id RankID) {
	s := b.slotOf.get(uint64(id) + 1)
	if s == 0 {
		return
	}
	slot := int(s - 1)
	for b.ranks[slot].list != 0 {
		b.drop(slot, b.ranks[slot].list)
	}
	b.slotOf.remove(uint64(id) + 1)
	b.ranks[slot] = activeRank{}
}

// mix folds a slot into a key. Hashes are random, so two pairs collide as rarely as two hashes.
func mix(key uint64, slot int) uint64 {
	return key ^ bits.RotateLeft64(uint64(slot+1)*fibonacci, 29)
}

// open notes that request key is active on rank id. blocks is all of its prompt, hashes the chain of its full
// blocks as far as it is known. hashes is copied.
func (b *activeBlocks) open(id RankID, key uint64, blocks int64, hashes []uint64) {
	slot := b.slot(id)
	if b.openOf.get(mix(key, slot)) != 0 {
		return
	}
	hashes = hashes[:min(int64(len(hashes)), blocks, maxTrackedBlocks)]
	i := b.newOpen()
	o := &b.opens[i-1]
	o.key, o.hashes, o.single = key, append(o.hashes[:0], hashes...), blocks-int64(len(hashes))
	rank := &b.ranks[slot]
	o.prev, o.next = 0, rank.list
	if rank.list != 0 {
		b.opens[rank.list-1].prev = i
	}
	rank.list = i
	rank.single += o.single
	b.openOf.set(mix(key, slot), i)
	for _, h := range hashes {
		b.hold(slot, h)
	}
}

func (b *activeBlocks) newOpen() uint32 {
	if n := len(b.closed); n > 0 {
		i := b.closed[n-1]
		b.closed = b.closed[:n-1]
		return i
	}
	b.opens = append(b.opens, activeOpen{})
	return uint32(len(b.opens))
}

// close notes that request key is no longer active on rank id.
func (b *activeBlocks) close(id RankID, key uint64) {
	s := b.slotOf.get(uint64(id) + 1)
	if s == 0 {
		return
	}
	if i := b.openOf.get(mix(key, int(s-1))); i != 0 {
		b.drop(int(s-1), i)
	}
}

func (b *activeBlocks) drop(slot int, i uint32) {
	o, rank := &b.opens[i-1], &b.ranks[slot]
	for _, h := range o.hashes {
		b.release(slot, h)
	}
	rank.single -= o.single
	if o.prev != 0 {
		b.opens[o.prev-1].next = o.next
	} else {
		rank.list = o.next
	}
	if o.next != 0 {
		b.opens[o.next-1].prev = o.prev
	}
	b.openOf.remove(mix(o.key, slot))
	b.closed = append(b.closed, i)
}

// hold counts one more request that holds block h on the slot.
func (b *activeBlocks) hold(slot int, h uint64) {
	c := b.counts.slot(mix(h, slot))
	if c.val++; c.val > 1 {
		return
	}
	b.ranks[slot].shared++
	e := b.holders.slot(h)
	if e.val == 0 {
		e.val = b.newSet()
	}
	b.set(e.val)[slot/wordBits] |= 1 << (slot % wordBits)
}

func (b *activeBlocks) newSet() uint32 {
	if n := len(b.spare); n > 0 {
		i := b.spare[n-1]
		b.spare = b.spare[:n-1]
		return i
	}
	for range b.words {
		b.sets = append(b.sets, 0)
	}
	return uint32(len(b.sets) / b.words)
}

// set is the holder set of an entry of holders.
func (b *activeBlocks) set(i uint32) []uint64 {
	at := (int(i) - 1) * b.words
	return b.sets[at : at+b.words]
}

func (b *activeBlocks) release(slot int, h uint64) {
	key := mix(h, slot)
	n := b.counts.get(key)
	if n > 1 {
		b.counts.set(key, n-1)
		return
	}
	b.counts.remove(key)
	b.ranks[slot].shared--
	i := b.holders.get(h)
	set := b.set(i)
	set[slot/wordBits] &^= 1 << (slot % wordBits)
	for _, w := range set {
		if w != 0 {
			return
		}
	}
	b.holders.remove(h)
	b.spare = append(b.spare, i)
}

// of is the number of distinct blocks active on a slot.
func (b *activeBlocks) of(slot int) int64 { return b.ranks[slot].single + b.ranks[slot].shared }

// depths is, by slot, how many leading blocks of the chain are active there. It jumps over blocks while the
// holders stay the same and halves the range where they change.
func (b *activeBlocks) depths(hashes []uint64, c *scratch) []int32 {
	out := resize(&c.depths, len(b.ranks))
	clear(out)
	hashes = hashes[:min(len(hashes), maxTrackedBlocks)]
	if len(hashes) == 0 {
		return out
	}
	at := b.find(hashes, 0)
	for lo := 0; at != 0; {
		hi := min(lo+blockJump, len(hashes))
		next := b.find(hashes, hi)
		b.drops(hashes, lo, at, hi, next, out)
		lo, at = hi, next
	}
	return out
}

// find is the holder set of block i, 0 if there is none or the chain has ended.
func (b *activeBlocks) find(hashes []uint64, i int) uint32 {
	if i >= len(hashes) {
		return 0
	}
	return b.holders.get(hashes[i])
}

// drops writes the depth of every slot that holds block lo and not block hi.
func (b *activeBlocks) drops(hashes []uint64, lo int, at uint32, hi int, next uint32, out []int32) {
	if b.same(at, next) {
		return
	}
	if hi-lo == 1 {
		b.write(at, next, hi, out)
		return
	}
	mid := (lo + hi) / 2
	m := b.find(hashes, mid)
	b.drops(hashes, lo, at, mid, m, out)
	if m != 0 {
		b.drops(hashes, mid, m, hi, next, out)
	}
}

func (b *activeBlocks) same(x, y uint32) bool {
	if x == y || y == 0 {
		return x == y
	}
	s, t := b.set(x), b.set(y)
	for i := range s {
		if s[i] != t[i] {
			return false
		}
	}
	return true
}

// write gives depth to the slots that are in set x and not in set y.
func (b *activeBlocks) write(x, y uint32, depth int, out []int32) {
	s := b.set(x)
	for i, w := range s {
		if y != 0 {
			w &^= b.set(y)[i]
		}
		for ; w != 0; w &= w - 1 {
			out[i*wordBits+bits.TrailingZeros64(w)] = int32(depth)
		}
	}
}
