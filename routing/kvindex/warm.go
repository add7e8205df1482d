package kvindex

// An apply reads a handful of places spread over tens of megabytes, and its atomic writes keep the processor
// from fetching the next block's meanwhile. So an event's blocks are first looked at all together, when the
// reads overlap: about twice as many applies per second. So hand over whole events, and in one call the
// removals that follow each other.

// warmLeast is the event size from which that pays.
const warmLeast = 4

// warmStore fetches what storing blocks under hashes will read.
func (c *Column) warmStore(blocks []Handle, hashes []uint64) {
	if len(blocks) < warmLeast {
		return
	}
	sum := uint64(0)
	for _, b := range blocks {
		sum += c.handles.peek(b)
	}
	for _, hash := range hashes {
		sum += c.ix.table.peek(hash)
	}
	c.ix.warmth += sum
}

// warmHashes fetches what storing chain hashes will read of the table.
func (ix *Index) warmHashes(hashes []uint64) {
	if len(hashes) < warmLeast {
		return
	}
	sum := uint64(0)
	for _, hash := range hashes {
		sum += ix.table.peek(hash)
	}
	ix.warmth += sum
}

// warmRemove fetches what removing blocks will read: records, then slots, then the table.
func (c *Column) warmRemove(blocks []Handle) {
	if len(blocks) < warmLeast {
		return
	}
	ix := c.ix
	sum := uint64(0)
	for _, b := range blocks {
		sum += c.handles.peek(b)
	}
	ix.slots, ix.scratch = ix.slots[:0], ix.scratch[:0]
	for _, b := range blocks {
		if r := c.handles.find(b); r != nil {
			ix.slots = append(ix.slots, r.slot)
		}
	}
	for _, s := range ix.slots {
		ix.scratch = append(ix.scratch, ix.hash(s))
		sum += uint64(ix.cold(s).parent)
	}
	for _, hash := range ix.scratch {
		sum += ix.table.peek(hash)
	}
	ix.warmth += sum
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

// peek reads the word at hash's home.
func (t *table) peek(hash uint64) uint64 {
	words := t.segments[hash>>56].Load().words
	return words[home(hash<<32, len(words))].Load()
}
