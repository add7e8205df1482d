package kvindex

// handleTable maps an engine's handles to slots: 16 bytes per record in open addressing by linear probing, in
// segments that grow by a seventh, so that a record costs 19.8 to 22.5 bytes. The writer's alone.
//
// A record holds a part of its block's chain hash: when the slot was evicted, and perhaps used again, the two
// differ and the record counts as stale. (A stale record passes for a live one with odds of 2^-32, if the
// same column also holds what is now in the slot.)
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

func handleHome(h Handle, n int) int { return int(uint64(h) & 0xffffffff * uint64(n) >> 32) } //nolint:gosec // below n

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

// resolve is the slot of a handle, none if unknown or evicted.
func (c *Column) resolve(h Handle) slot {
	r := c.handles.find(h)
	if r == nil || !c.fresh(r) {
		return none
	}
	return r.slot
}

// fresh says that the record's block is still there.
func (c *Column) fresh(r *record) bool {
	return uint32(c.ix.hash(r.slot)) == r.proof && c.has(r.slot) //nolint:gosec // the low half is wanted
}

// bind records that h names s; old is what find says of h. False if there is no room for it.
func (c *Column) bind(old *record, h Handle, s slot, hash uint64) bool {
	r := record{handle: h, slot: s, proof: uint32(hash)} //nolint:gosec // the low half is wanted
	if old != nil {
		*old = r
		c.side.forget(c.ix, h)
		return true
	}
	seg := c.handles.segment(h)
	if (seg.n+1)*handleLoadDen > len(seg.records)*handleLoadNum && !c.grow(seg) {
		return false
	}
	seg.put(r)
	c.handles.n++
	c.ix.handles++
	return true
}

// unbind deletes the record at i.
func (c *Column) unbind(seg *handleSegment, i int) {
	c.side.forget(c.ix, seg.records[i].handle)
	c.handles.remove(seg, i)
	c.ix.handles--
}

// grow makes room for one more record: by taking out stale ones, by memory, or by evictions that make records
// stale.
func (c *Column) grow(seg *handleSegment) bool {
	c.purge(seg)
	if c.resize(seg) {
		return true
	}
	for range max(64, c.ix.pool.live/64) {
		if !c.ix.evict() {
			break
		}
	}
	c.purge(seg)
	return c.resize(seg) || (seg.n+1)*handleLoadDen <= len(seg.records)*handleFullNum
}

// resize gives seg the length its records need, if the cap allows it.
func (c *Column) resize(seg *handleSegment) bool {
	want := max(handleMin, (seg.n+1)*handleSizeNum/handleSizeDen+1)
	if (seg.n+1)*handleLoadDen <= len(seg.records)*handleLoadNum && want >= len(seg.records)/2 {
		return true
	}
	if !c.ix.pay((want - len(seg.records)) * recordBytes) {
		return false
	}
	seg.rebuild(want)
	return true
}

// purge takes stale records out of seg.
func (c *Column) purge(seg *handleSegment) {
	if !c.stale {
		return
	}
	n := len(seg.records)
	for i := 0; i < n; {
		r := &seg.records[i]
		if r.slot == none || c.fresh(r) {
			i++
			continue
		}
		c.unbind(seg, i) // may move another record to i
	}
}
