package kvindex

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

// Mask hides the column from look-ups at once: a gap, a reset, a lost stream.
func (c *Column) Mask() { c.show(false) }

// Show lets look-ups see the column: its snapshot is complete.
func (c *Column) Show() { c.show(true) }

func (c *Column) show(on bool) {
	if c.bit >= 0 && c.shown != on {
		c.shown = on
		c.ix.publish()
	}
}

// Close hides the column for good and leaves its blocks to Sweep. Idempotent.
func (c *Column) Close() {
	if c.bit < 0 {
		return
	}
	ix := c.ix
	ix.tell(c, Cleared, 0)
	delete(ix.owners, place{c.owner.Rank, c.owner.Tier})
	c.drop()
	c.bit = -1
	ix.publish()
}

// Clear empties the column (AllBlocksCleared); the owner keeps it. Constant time: the blocks move to a dying
// column.
func (c *Column) Clear() {
	if c.bit < 0 {
		c.ix.counters.Fenced++
		return
	}
	ix := c.ix
	ix.tell(c, Cleared, 0)
	c.drop()
	ix.publish()
	c.bit = ix.bit() // there is one: the old, once it is swept
	ix.columns[c.bit] = c
	ix.publish()
}

// drop forgets what the column holds and leaves its bit to Sweep.
func (c *Column) drop() {
	ix := c.ix
	ix.columns[c.bit] = nil
	ix.sweep.add(c.bit)
	ix.handles -= c.handles.n
	ix.charge -= c.handles.bytes() + c.aside.bytes() + c.side.bytes() + c.endFee
	c.handles, c.side, c.aside, c.ends, c.prompts = handleTable{}, side{}, aside{}, nil, nil
	c.count, c.sum, c.orphans, c.endFee, c.stale = 0, 0, 0, 0, false
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
