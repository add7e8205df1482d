package kvindex

import "sync/atomic"

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

func home(word uint64, n int) int { return int(word >> 32 * uint64(n) >> 32) } //nolint:gosec // below n

func pack(hash uint64, s slot) uint64 { return hash<<32 | uint64(s) }

// find is hash's slot or none. Any goroutine may call it.
func (t *table) find(p *pool, hash uint64) slot {
	words := t.segments[hash>>56].Load().words
	tag := uint32(hash) //nolint:gosec // the low half is wanted
	i := home(hash<<32, len(words))
	for range words {
		w := words[i].Load()
		if w == 0 {
			return none
		}
		//nolint:gosec // the halves are wanted
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
