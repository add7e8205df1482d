package kvindex

import "math/bits"

// Hit is the part of a prompt that a block set holds.
type Hit struct {
	Rank   uint32 // routing.RankID
	Blocks int32  // leading blocks held
	Tier   Tier
}

const (
	// jumpBlocks is how many blocks a look-up skips while all block sets in question hold the block it lands
	// on.
	jumpBlocks = 32

	// a look-up is repeated if a restart, a clear or a new hole happened meanwhile; the last try scans and
	// counts
	matchTries = 3
	memoSlots  = 64
)

// liveSet is the set of shown block sets, replaced as a whole.
type liveSet struct {
	mask []uint64
	base []int // row of the first block set of a word
	rows []Hit // one per shown block set, by bit, with 0 blocks
}

// publish makes a new liveSet of the shown block sets.
func (ix *Index) publish() {
	words := ix.stride - 1
	set := &liveSet{mask: make([]uint64, words), base: make([]int, words)}
	for bit, c := range ix.sets {
		if bit&63 == 0 {
			set.base[bit>>6] = len(set.rows)
		}
		if c != nil && c.shown {
			set.mask[bit>>6] |= 1 << (bit & 63)
			set.rows = append(set.rows, Hit{Rank: c.owner.Rank, Tier: c.owner.Tier})
		}
	}
	ix.live.Store(set)
}

// Match appends to out, per shown block set, the number of leading blocks of the prompt that it holds, and
// marks the match's end as recently used. Safe from any goroutine, without locks; it allocates only if out is
// too small.
//
// Without a concurrent writer the answer is exact. With one, each block set's answer is a number of leading
// blocks that were held while the call ran; it never reports a block set that was masked before the call. (A
// reader that sleeps while a slot is freed and used 2 times, first for another block and then for the same,
// may see bits of the other: the free list makes that need every free slot to be used in between.)
func (ix *Index) Match(hashes []uint64, out []Hit) []Hit {
	from := len(out)
	for try := 1; ; try++ {
		set, holes := ix.live.Load(), ix.holes.Load()
		out = append(out[:from], set.rows...)
		if len(hashes) == 0 || len(set.rows) == 0 {
			return out
		}
		m := matcher{ix: ix, set: set, hashes: hashes, rows: out[from:]}
		for w := range set.mask {
			m.word(w, try == matchTries)
		}
		if try < matchTries && (ix.live.Load() != set || ix.holes.Load() != holes) {
			continue
		}
		m.touch()
		return out
	}
}

// matcher is one look-up. m.w is the current word of 64 block sets; slots found for one word are used for the
// others.
type matcher struct {
	ix         *Index
	set        *liveSet
	hashes     []uint64
	rows       []Hit
	w          int
	deep       int // blocks of the longest match
	memo       [memoSlots]memo
	prefetched uint64 // what warming loads ends up here, or the compiler would leave it out
}

type memo struct {
	at   int32 // position + 1; 0: empty
	slot slot
}

// word answers for 64 block sets: by jumps for those closed under prefixes, by a scan for the others.
func (m *matcher) word(w int, scanAll bool) {
	live := m.set.mask[w]
	if live == 0 {
		return
	}
	m.w = w
	first := m.holders(0) & live
	if first == 0 {
		return
	}
	holed := m.ix.holed[w].Load()
	if scanAll {
		holed = live
	}
	if first&^holed != 0 {
		m.jump(first &^ holed)
	}
	if first&holed != 0 {
		m.scan(first & holed)
	}
}

// jump finds where each of the block sets in set stops, all of which hold block 0 and are closed under
// prefixes: while the block Jump further on has the same holders, no block set stopped in between.
func (m *matcher) jump(set uint64) {
	last := len(m.hashes) - 1
	for at := 0; ; {
		if at == last {
			m.assign(set, last+1)
			return
		}
		next := min(at+jumpBlocks, last)
		on := m.holders(next) & set
		if stopped := set &^ on; stopped != 0 {
			m.split(at, next, stopped)
		}
		if on == 0 {
			return
		}
		set, at = on, next
	}
}

// split finds where each block set of set stops; all of them hold block lo and none holds block hi.
func (m *matcher) split(lo, hi int, set uint64) {
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		// The processor cannot predict which of them is next and would wait.
		m.prefetch((lo+mid)/2, (mid+hi)/2)
		on := m.holders(mid) & set
		switch on {
		case set:
			lo = mid
		case 0:
			hi = mid
		default:
			m.split(mid, hi, on)
			set, hi = set&^on, mid
		}
	}
	m.assign(set, hi)
}

// prefetch fetches the table's words of two blocks.
func (m *matcher) prefetch(a, b int) {
	m.prefetched += m.ix.table.peek(m.hashes[a]) + m.ix.table.peek(m.hashes[b])
}

// scan follows block sets block by block.
func (m *matcher) scan(set uint64) {
	for at := 1; at < len(m.hashes); at++ {
		on := m.holders(at) & set
		if on != set {
			m.assign(set&^on, at)
			if set = on; set == 0 {
				return
			}
		}
	}
	m.assign(set, len(m.hashes))
}

// assign writes the answer of the block sets in set.
func (m *matcher) assign(set uint64, blocks int) {
	m.deep = max(m.deep, blocks)
	base, live := m.set.base[m.w], m.set.mask[m.w]
	for ; set != 0; set &= set - 1 {
		below := set&-set - 1

		m.rows[base+bits.OnesCount64(live&below)].Blocks = int32(blocks)
	}
}

// holders is the word's holders of block at.
func (m *matcher) holders(at int) uint64 {
	hash := m.hashes[at]
	e := &m.memo[at%memoSlots]
	if e.at != int32(at)+1 {
		e.at, e.slot = int32(at)+1, m.ix.table.find(&m.ix.pool, hash)
	}
	if e.slot == none {
		return 0
	}
	hot := m.ix.hot(e.slot)
	held := hot[1+m.w].Load()
	if hot[0].Load() != hash { // freed, or used for another block, since it was found
		e.slot = none
		return 0
	}
	return held
}

// touch marks the end of the longest match as used now. That covers the blocks in front of it: eviction takes
// leaves only and passes a leaf's age on to its parent.
func (m *matcher) touch() {
	if m.deep == 0 {
		return
	}
	at := m.deep - 1
	s := m.memo[at%memoSlots].slot
	if m.memo[at%memoSlots].at != int32(at)+1 {
		s = m.ix.table.find(&m.ix.pool, m.hashes[at])
	}
	if s == none {
		return
	}
	if stamp, now := &m.ix.cold(s).stamp, m.ix.ticks.Load(); stamp.Load() != now {
		stamp.Store(now)
	}
}
