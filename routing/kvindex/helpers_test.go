package kvindex

import (
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var testHasher = NewHasher([]byte("secret"))

func rootOf(size int) uint64 {
	return testHasher.Root(Salt{Unit: Tokens, BlockSize: size, Model: "m"})
}

func newIndex(t require.TestingT, c Config) *Index {
	ix, err := New(c)
	require.NoError(t, err)
	return ix
}

// small makes ix hold at most so many slots, whatever its cap.
func small(ix *Index, chunks int) {
	ix.cap = ix.charge + chunks*ix.chargePerChunk()
}

func open(t require.TestingT, ix *Index, rank uint32, feed Feed) *BlockSet {
	c, err := ix.Open(Owner{Rank: rank, Epoch: 1, Incarnation: 1}, Options{Feed: feed, Shown: true})
	require.NoError(t, err)
	return c
}

// sumOf adds the hashes of the blocks that a block set holds: equal block sets have equal sums.
func sumOf(c *BlockSet) (sum uint64) {
	c.Snapshot(c.Len(), func(d Delta) {
		for _, h := range d.Hashes {
			sum += h
		}
	})
	return sum
}

// count is 0, 1, 2, … as token ids.
func count(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

func chain(ids []uint32, size int) []uint64 {
	return testHasher.Tokens(nil, rootOf(size), ids, size, nil)
}

// named gives blocks engine hashes 1000·salt + i.
func named(salt, n int) []Handle {
	out := make([]Handle, n)
	for i := range out {
		out[i] = UintHandle(0, uint64(1000*salt+i))
	}
	return out
}

// event is ids from block 0 on, named by salt.
func event(ids []uint32, size, salt int) *StoredEvent {
	return &StoredEvent{
		Root: rootOf(size), Blocks: named(salt, len(ids)/size),
		Tokens: ids[:len(ids)/size*size], BlockSize: size,
	}
}

func hitsOf(ix *Index, hashes []uint64) map[uint32]int {
	out := map[uint32]int{}
	for _, h := range ix.Match(hashes, nil) {
		out[h.Rank] = int(h.Blocks)
	}
	return out
}

// same is assert.Equal without reflection: verify compares millions of numbers.
func same[T comparable](t assert.TestingT, want, got T, what string) {
	if want != got {
		assert.Equal(t, want, got, what)
	}
}

// verify recomputes everything the index keeps count of.
func verify(t assert.TestingT, ix *Index) {
	live := 0
	queued := map[slot]bool{ix.noted: true}
	for i := range ix.leaves.n {
		queued[ix.leaves.at(i).slot] = true
		same(t, true, ix.queued(ix.leaves.at(i).slot), "heap has a slot that is not marked")
	}
	for s := firstSlot; int(s) < ix.end(); s++ {
		hash := ix.hash(s)
		if hash == 0 {
			continue
		}
		live++
		same(t, s, ix.table.find(&ix.pool, hash), "table")
		c := ix.cold(s)
		same(t, false, s == c.parent, "self-parent")
		if c.child == none {
			same(t, false, ix.holderless(s), "useless slot kept")
			same(t, true, queued[s], "leaf that cannot be evicted")
		}
		prev := none
		for k := c.child; k != none; k = ix.cold(k).next {
			same(t, s, ix.cold(k).parent, "parent of a child")
			same(t, prev, ix.cold(k).prev, "order of children")
			prev = k
		}
	}
	assert.Equal(t, live, ix.pool.live, "slots in use")
	verifyTable(t, ix)
	verifySets(t, ix)
	assert.LessOrEqual(t, ix.charge, ix.cap)
}

func verifyTable(t assert.TestingT, ix *Index) {
	for k := range ix.table.segments {
		used, full := 0, 0
		words := ix.table.segments[k].Load().words
		for i := range words {
			if w := words[i].Load(); w != 0 {
				full++
				if w > tombstone {
					used++
				}
			}
		}
		same(t, used, ix.table.used[k], "words used")
		same(t, full, ix.table.full[k], "words full")
	}
}

func verifySets(t assert.TestingT, ix *Index) {
	charge := 8*len(ix.chunks) + tableSegments*(segmentMin*8+64) + ix.n*ix.chargePerChunk()
	handles := 0
	for bit, c := range ix.sets {
		if c == nil {
			continue
		}
		n, ends, orphans := 0, 0, 0
		for s := firstSlot; int(s) < ix.end(); s++ {
			if ix.hash(s) == 0 || !ix.holds(s, bit) {
				continue
			}
			if up := ix.cold(s).parent; up == unknown || up >= firstSlot && !ix.holds(up, bit) {
				orphans++
			}
			if c.isEnd(s) {
				ends++
			}
			n++
			if c.opt.Feed == FromRecords && !c.isEnd(s) {
				same(t, true, ix.holdsChild(s, bit), "a recorded block that never expires")
			}
		}
		assert.Equal(t, c.count, n, "blocks of block set %d", bit)
		assert.Equal(t, c.orphans, orphans, "orphans of block set %d", bit)
		assert.Len(t, c.ends, ends, "ends of block set %d", bit)
		assert.Equal(t, orphans > 0, ix.holed[bit>>6].Load()>>(bit&63)&1 == 1, "hole mark of set %d", bit)
		records := 0
		for i := range c.handles.segments {
			for j, r := range c.handles.segments[i].records {
				if r.slot != none {
					records++
					same(t, &c.handles.segments[i].records[j], c.handles.find(r.handle), "record")
				}
			}
		}
		assert.Equal(t, records, c.handles.n)
		handles += records
		assert.Equal(t, endBytes*len(c.ends)+promptBytes*len(c.prompts), c.endFee)
		beyond := 0
		for _, n := range c.side.copies.counts {
			beyond += int(n)
		}
		for _, n := range c.side.aliases.counts {
			beyond += int(n)
		}
		assert.Equal(t, beyond, c.side.copies.n+c.side.aliases.n, "copies and aliases of block set %d", bit)
		charge += c.handles.bytes() + c.side.bytes() + c.aside.bytes() + c.endFee
	}
	assert.Equal(t, handles, ix.handles)
	assert.Equal(t, charge, ix.charge, "charge")
}

const second = time.Second
