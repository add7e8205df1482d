package kvindex

import "sync/atomic"

// A slot is one chain hash known to the index: its holders and its place in the tree of prefixes.
//
// Hot words are shared with readers: [hash, holders…], one bit per block set. hash 0 is a free slot. Cold
// fields belong to the writer, but for the stamp. A slot without holders lives on while it has children
// ("ghost"): it keeps their place.
type slot = uint32

const (
	none      slot = 0 // root's parent; end of a list; not found
	unknown   slot = 1 // the parent of a ghost that was only ever named
	firstSlot slot = 2

	chunkBits  = 10 // slots are allocated by 1024
	chunkSlots = 1 << chunkBits
)

type cold struct {
	parent, child, next, prev slot // child: the first of a list linked by next and prev
	// tick of the last match that ended here, or of the store; readers write it
	stamp atomic.Uint32
}

type chunk struct {
	hot    []atomic.Uint64
	cold   []cold
	queued [chunkSlots / 64]uint64 // slot has an element in the heap
}

// What a slot is charged against the cap: cold fields, its share of the table (8 B per word at a load of at
// least 0.4) and an element of the heap.
const slotCharge = 20 + 20 + 8

// pool hands out slots.
type pool struct {
	stride int                     // words per slot: 1 + block sets/64
	chunks []atomic.Pointer[chunk] // as long as the cap allows; filled from the left
	n      int                     // chunks in use
	live   int                     // slots in use
	// free slots, oldest first, linked by next: a freed slot is reused as late as possible
	head, tail slot
}

func (p *pool) chargePerChunk() int { return chunkSlots * (8*p.stride + slotCharge) }

func (p *pool) hot(s slot) []atomic.Uint64 {
	i := int(s%chunkSlots) * p.stride
	return p.chunks[s>>chunkBits].Load().hot[i : i+p.stride]
}

func (p *pool) cold(s slot) *cold { return &p.chunks[s>>chunkBits].Load().cold[s%chunkSlots] }

func (p *pool) hash(s slot) uint64 {
	return p.chunks[s>>chunkBits].Load().hot[int(s%chunkSlots)*p.stride].Load()
}

func (p *pool) queued(s slot) bool {
	return p.chunks[s>>chunkBits].Load().queued[s%chunkSlots/64]>>(s%64)&1 == 1
}

func (p *pool) setQueued(s slot, on bool) {
	w := &p.chunks[s>>chunkBits].Load().queued[s%chunkSlots/64]
	if on {
		*w |= 1 << (s % 64)
		return
	}
	*w &^= 1 << (s % 64)
}

// addChunk puts chunkSlots free slots at the end of the free list.
func (p *pool) addChunk() {
	p.chunks[p.n].Store(&chunk{
		hot:  make([]atomic.Uint64, chunkSlots*p.stride),
		cold: make([]cold, chunkSlots),
	})
	first := slot(p.n << chunkBits)
	p.n++
	for s := max(first, firstSlot); s < first+chunkSlots; s++ {
		p.append(s)
	}
}

// end is one beyond the highest slot.
func (p *pool) end() int { return p.n << chunkBits }

// append puts s at the end of the free list.
func (p *pool) append(s slot) {
	p.cold(s).next = none
	if p.tail == none {
		p.head = s
	} else {
		p.cold(p.tail).next = s
	}
	p.tail = s
}

// take is the oldest free slot, if any.
func (p *pool) take() slot {
	s := p.head
	if s == none {
		return none
	}
	c := p.cold(s)
	p.head = c.next
	if p.head == none {
		p.tail = none
	}
	c.parent, c.child, c.next, c.prev = none, none, none, none
	p.live++
	return s
}

// free returns s to the pool. It has no holders and is in no table or list.
func (p *pool) free(s slot) {
	p.hot(s)[0].Store(0)
	p.live--
	p.append(s)
}

// holderless reports that no block set holds s.
func (p *pool) holderless(s slot) bool {
	for w := range p.hot(s)[1:] {
		if p.hot(s)[1+w].Load() != 0 {
			return false
		}
	}
	return true
}

func (p *pool) holds(s slot, bit int) bool { return p.hot(s)[1+bit>>6].Load()>>(bit&63)&1 == 1 }

// link makes s a child of parent.
func (p *pool) link(s, parent slot) {
	c := p.cold(s)
	c.parent = parent
	if parent < firstSlot {
		return
	}
	up := p.cold(parent)
	c.next, c.prev = up.child, none
	if up.child != none {
		p.cold(up.child).prev = s
	}
	up.child = s
}

// unlink takes s from its parent's children.
func (p *pool) unlink(s slot) {
	c := p.cold(s)
	if c.next != none {
		p.cold(c.next).prev = c.prev
	}
	if c.prev != none {
		p.cold(c.prev).next = c.next
	} else if c.parent >= firstSlot {
		p.cold(c.parent).child = c.next
	}
	c.next, c.prev = none, none
}

// holdsChild reports whether the block set of bit holds a child of s.
func (p *pool) holdsChild(s slot, bit int) bool {
	for k := p.cold(s).child; k != none; k = p.cold(k).next {
		if p.holds(k, bit) {
			return true
		}
	}
	return false
}

// childrenHolding counts the children of s that the block set of bit holds.
func (p *pool) childrenHolding(s slot, bit int) int {
	n := 0
	for k := p.cold(s).child; k != none; k = p.cold(k).next {
		if p.holds(k, bit) {
			n++
		}
	}
	return n
}

// leaves is a binary heap of leaf slots by stamp with delayed updates: an element's stamp is at most its
// slot's, so a top whose stamps are equal is the least recently matched leaf. Slots that are no leaves any
// more are removed when they reach the top.
type leaves struct {
	chunks [][]leaf // by 1024: growth copies nothing
	n      int
}

type leaf struct{ stamp, slot uint32 }

func (l *leaves) at(i int) *leaf { return &l.chunks[i>>chunkBits][i%chunkSlots] }

func (l *leaves) push(x leaf) {
	if l.n>>chunkBits == len(l.chunks) {
		l.chunks = append(l.chunks, make([]leaf, chunkSlots))
	}
	i := l.n
	l.n++
	for i > 0 && l.at((i-1)/2).stamp > x.stamp {
		*l.at(i) = *l.at((i - 1) / 2)
		i = (i - 1) / 2
	}
	*l.at(i) = x
}

// sink puts x at the top and lets it fall to its place.
func (l *leaves) sink(x leaf) {
	i := 0
	for {
		k := 2*i + 1
		if k >= l.n {
			break
		}
		if k+1 < l.n && l.at(k+1).stamp < l.at(k).stamp {
			k++
		}
		if l.at(k).stamp >= x.stamp {
			break
		}
		*l.at(i) = *l.at(k)
		i = k
	}
	*l.at(i) = x
}

func (l *leaves) pop() {
	l.n--
	if l.n > 0 {
		l.sink(*l.at(l.n))
	}
}

// sweep clears the bits of closed block sets, so that they can be used again.
type sweep struct {
	dying  []uint64 // bits to wipe in the next pass
	pass   []uint64 // bits being wiped
	cursor int      // slot to go on at; 0: no pass
	n      int      // dying bits
}

func newSweep(words int) sweep {
	return sweep{dying: make([]uint64, words), pass: make([]uint64, words)}
}

func (w *sweep) add(bit int) {
	w.dying[bit>>6] |= 1 << (bit & 63)
	w.n++
}

// begin starts a pass over all dying bits; false if there are none.
func (w *sweep) begin() bool {
	if w.n == 0 {
		return false
	}
	w.pass, w.dying = w.dying, w.pass
	clear(w.dying)
	w.n, w.cursor = 0, int(firstSlot)
	return true
}

// table finds slots by hash: 256 segments (the hash's top byte) of open addressing, linear probing.
//
// A word is the hash's low 32 bits and the slot; a word never moves inside a segment, so that readers never
// miss an entry that is there. Removal leaves a tombstone, or nothing when the next word is empty; a segment
// that is too full is rebuilt and published anew, readers of the old one finish on it. A word's home is its
// own upper half scaled to the length: lengths need not be powers of two, and a rebuild reads no slot.
type table struct {
	segments [tableSegments]atomic.Pointer[segment]
	used     [tableSegments]int // words with a slot
	full     [tableSegments]int // words with a slot or a tombstone
}

const (
	tableSegments = 256
	segmentMin    = 32 // words
	tombstone     = 1

	// A segment of n words holds at most n·4/5 entries and tombstones, and is rebuilt to hold 5/2 words per
	// entry: a rebuild for as many inserts as there are entries.
	loadNum, loadDen = 4, 5
	sizeNum, sizeDen = 5, 2
)

type segment struct{ words []atomic.Uint64 }

func newTable() *table {
	t := &table{}
	for i := range t.segments {
		t.segments[i].Store(&segment{words: make([]atomic.Uint64, segmentMin)})
	}
	return t
}

func home(word uint64, n int) int { return int(word >> 32 * uint64(n) >> 32) }

func pack(hash uint64, s slot) uint64 { return hash<<32 | uint64(s) }

// find is hash's slot or none. Any goroutine may call it.
func (t *table) find(p *pool, hash uint64) slot {
	words := t.segments[hash>>56].Load().words
	tag := uint32(hash)
	i := home(hash<<32, len(words))
	for range words {
		w := words[i].Load()
		if w == 0 {
			return none
		}

		if s := slot(w); uint32(w>>32) == tag && s >= firstSlot && p.hash(s) == hash {
			return s
		}
		i = after(i, len(words))
	}
	return none
}

// insert adds a hash that is not there.
func (t *table) insert(hash uint64, s slot) {
	k := hash >> 56
	seg := t.segments[k].Load()
	if (t.full[k]+1)*loadDen > len(seg.words)*loadNum {
		seg = t.rebuild(int(k))
	}
	word := pack(hash, s)
	i := home(word, len(seg.words))
	for seg.words[i].Load() > tombstone {
		i = after(i, len(seg.words))
	}
	if seg.words[i].Load() == 0 {
		t.full[k]++
	}
	t.used[k]++
	seg.words[i].Store(word)
}

// remove deletes a hash that is there.
func (t *table) remove(hash uint64, s slot) {
	k := hash >> 56
	words := t.segments[k].Load().words
	word := pack(hash, s)
	n := len(words)
	i := home(word, n)
	for words[i].Load() != word {
		i = after(i, n)
	}
	t.used[k]--
	if words[after(i, n)].Load() != 0 {
		words[i].Store(tombstone)
		return
	}
	// Nothing probes past i: it and the tombstones in front of it may be empty again.
	words[i].Store(0)
	t.full[k]--
	for {
		if i--; i < 0 {
			i = n - 1
		}
		if words[i].Load() != tombstone {
			return
		}
		words[i].Store(0)
		t.full[k]--
	}
}

// rebuild publishes segment k without tombstones and with room.
func (t *table) rebuild(k int) *segment {
	old := t.segments[k].Load()
	fresh := &segment{words: make([]atomic.Uint64, max(segmentMin, (t.used[k]+1)*sizeNum/sizeDen+1))}
	for i := range old.words {
		w := old.words[i].Load()
		if w <= tombstone {
			continue
		}
		j := home(w, len(fresh.words))
		for fresh.words[j].Load() != 0 {
			j = after(j, len(fresh.words))
		}
		fresh.words[j].Store(w)
	}
	t.full[k] = t.used[k]
	t.segments[k].Store(fresh)
	return fresh
}

// peek reads the word at hash's home.
func (t *table) peek(hash uint64) uint64 {
	words := t.segments[hash>>56].Load().words
	return words[home(hash<<32, len(words))].Load()
}
