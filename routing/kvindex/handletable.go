package kvindex

import "github.com/zeebo/xxh3"

// handleTable maps an engine's handles to slots: 16 bytes per record in open addressing by linear probing, in
// segments that grow by a seventh, so that a record costs 19.8 to 22.5 bytes. The writer's alone.
//
// A record holds a part of its block's chain hash: when the slot was evicted, and perhaps used again, the two
// differ and the record counts as stale. (A stale record passes for a live one with odds of 2^-32, if the
// same block set also holds what is now in the slot.)
type handleTable struct {
	segments []handleSegment // none until the first record
	n        int
}

type handleSegment struct {
	records []record
	n       int
}

type record struct {
	handle Handle
	slot   slot // none: empty
	proof  uint32
}

const (
	handleSegments = 16
	handleMin      = 4  // records
	recordBytes    = 16 // size of a record
	handleReserve  = 24 // bytes put by for each handle that a new slot may get

	// At most 81 % of a segment are used, 95 % when the cap forbids growth; a rebuild leaves 71 %.
	handleLoadNum, handleLoadDen = 81, 100
	handleFullNum                = 95
	handleSizeNum, handleSizeDen = 100, 71
)

func (t *handleTable) bytes() int {
	n := 0
	for i := range t.segments {
		n += len(t.segments[i].records)
	}
	return n * recordBytes
}

func (t *handleTable) segment(h Handle) *handleSegment {
	if t.segments == nil {
		t.segments = make([]handleSegment, handleSegments)
	}
	return &t.segments[h>>60]
}

func handleHome(h Handle, n int) int {
	return int(uint64(h) & 0xffffffff * uint64(n) >> 32)
}

// find is h's record, or nil. It stays valid until the next insert or remove.
func (t *handleTable) find(h Handle) *record {
	seg, i := t.locate(h)
	if i < 0 {
		return nil
	}
	return &seg.records[i]
}

// locate is where h's record is; i is -1 if it is nowhere.
func (t *handleTable) locate(h Handle) (seg *handleSegment, i int) {
	if t.n == 0 {
		return nil, -1
	}
	seg = t.segment(h)
	n := len(seg.records)
	if n == 0 {
		return seg, -1
	}
	for i = handleHome(h, n); seg.records[i].slot != none; i = after(i, n) {
		if seg.records[i].handle == h {
			return seg, i
		}
	}
	return seg, -1
}

func (seg *handleSegment) put(r record) {
	n := len(seg.records)
	i := handleHome(r.handle, n)
	for seg.records[i].slot != none {
		i = after(i, n)
	}
	seg.records[i] = r
	seg.n++
}

// remove deletes the record at i and closes the gap.
func (t *handleTable) remove(seg *handleSegment, i int) {
	n := len(seg.records)
	for j := after(i, n); seg.records[j].slot != none; j = after(j, n) {
		// j may move up to i if that does not pass its home: if home is as far behind j as i is, or further.
		if back(j, handleHome(seg.records[j].handle, n), n) >= back(j, i, n) {
			seg.records[i] = seg.records[j]
			i = j
		}
	}
	seg.records[i] = record{}
	seg.n--
	t.n--
}

// after is the place behind i in a ring of n.
func after(i, n int) int {
	if i++; i == n {
		return 0
	}
	return i
}

// back is how far i lies in front of j in a ring of n.
func back(j, i, n int) int {
	if d := j - i; d >= 0 {
		return d
	}
	return j - i + n
}

// rebuild copies the records into a segment of n.
func (seg *handleSegment) rebuild(n int) {
	old := seg.records
	seg.records, seg.n = make([]record, n), 0
	for _, r := range old {
		if r.slot != none {
			seg.put(r)
		}
	}
}

// peek reads the record at h's home.
func (t *handleTable) peek(h Handle) uint64 {
	if t.n == 0 {
		return 0
	}
	seg := t.segment(h)
	n := len(seg.records)
	if n == 0 {
		return 0
	}
	return uint64(seg.records[handleHome(h, n)].slot)
}

// Handle names a block in its engine's own words: an opaque key for parents and removals, never for look-up.
// It is tagged by type and attention group: the integer 1, the bytes {1} and the 1 of another group are three
// handles. Integers map to handles one to one inside a tag; byte strings (16 and 32 byte digests) by xxh3.
type Handle uint64

// Tags of a handle's type.
const (
	tagUint  = 0x9e3779b97f4a7c15
	tagInt   = 0xc2b2ae3d27d4eb4f
	tagBytes = 0x165667b19e3779f9
)

// UintHandle is the handle of an unsigned integer hash (vLLM).
func UintHandle(group int, v uint64) Handle { return Handle(scramble(v ^ tag(tagUint, group))) }

// IntHandle is the handle of a signed integer hash (SGLang). What is not negative has two forms on the wire,
// and one handle.
func IntHandle(group int, v int64) Handle {
	if v >= 0 {
		return UintHandle(group, uint64(v))
	}
	return Handle(scramble(uint64(v) ^ tag(tagInt, group)))
}

// BytesHandle is the handle of a digest.
func BytesHandle(group int, b []byte) Handle { return Handle(xxh3.HashSeed(b, tag(tagBytes, group))) }

func tag(kind uint64, group int) uint64 {
	return scramble(kind + uint64(group))
}

// scramble is a bijection that spreads its input over all bits (the finalizer of MurmurHash3).
func scramble(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
