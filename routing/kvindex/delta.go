package kvindex

// Change is what a Delta says.
type Change uint8

// The changes.
const (
	// Hashes is a chain: the first follows Parent (0: it is a block 0), each other the one in front
	Stored  Change = iota + 1
	Removed                   // Hashes in any order
	Cleared                   // nothing is left
)

// Delta is a change of what a column holds, in chain hashes: what the replica's stream carries and an ingress
// applies.
type Delta struct {
	Change Change
	Parent uint64
	Hashes []uint64
}

// Apply takes a delta over. Storing what is held and removing what is not change nothing. A chain that
// contradicts a block's known place or runs in a circle is dropped from there on. FromDeltas.
func (c *Column) Apply(d Delta) {
	if !c.usable(FromDeltas) {
		return
	}
	switch d.Change {
	case Stored:
		c.put(d.Parent, d.Hashes)
	case Removed:
		c.remove(d.Hashes)
	case Cleared:
		c.Clear()
	}
}

// put stores a chain behind parent, which need not be held or known.
func (c *Column) put(parent uint64, hashes []uint64) {
	if len(hashes) == 0 {
		return
	}
	ix := c.ix
	ix.warmHashes(hashes)
	up, ok := ix.place(parent)
	ix.pin = up
	for i := 0; ok && i < len(hashes); i++ {
		if up, ok = ix.descend(up, hashes[i]); ok {
			ix.pin = up
			c.settle(up, hashes[i])
		}
	}
	ix.unpin()
	ix.endRun(c)
}

// place is the slot of a parent; one that was never heard of becomes a ghost.
func (ix *Index) place(parent uint64) (slot, bool) {
	if parent == 0 {
		return none, true
	}
	s := ix.table.find(&ix.pool, parent)
	if s == none {
		s = ix.add(parent, unknown)
	}
	return s, s != none
}

// descend is hash's slot under up, made if need be; false without room, or if hash is known elsewhere.
func (ix *Index) descend(up slot, hash uint64) (slot, bool) {
	if hash == 0 {
		ix.counters.Conflict++
		return up, false
	}
	s := ix.table.find(&ix.pool, hash)
	if s == none {
		if s = ix.add(hash, up); s == none {
			return up, false
		}
		return s, true
	}
	if c := ix.cold(s); c.parent != up && !ix.adopt(s, up) || s == up {
		ix.counters.Conflict++
		return up, false
	}
	return s, true
}

// settle makes the column hold s.
func (c *Column) settle(s slot, hash uint64) {
	if c.has(s) {
		c.ix.endRun(c) // the chain goes on with a block that was held
		return
	}
	c.gain(s)
	c.enter(hash)
	c.ix.addRun(hash, c.ix.cold(s).parent)
}

// remove takes blocks from a column fed by hash, the last first: what stays is closed under prefixes at every
// moment.
func (c *Column) remove(hashes []uint64) {
	for i := len(hashes) - 1; i >= 0; i-- {
		s := c.ix.table.find(&c.ix.pool, hashes[i])
		if s == none || !c.has(s) {
			c.ix.counters.UnknownRemove++
			continue
		}
		c.release(s, hashes[i])
	}
}

// release ends the holding of s.
func (c *Column) release(s slot, hash uint64) {
	c.lack(s)
	c.leave(hash)
	c.ix.tell(c, Removed, hash)
	c.ix.reap(s)
}

// Snapshot hands out what the column holds as Stored deltas of at most n hashes, such that applying them to
// an empty column makes an equal one. A chain is one run as far as it is the first branch of its parent.
// Delta.Hashes is reused between calls of emit.
func (c *Column) Snapshot(n int, emit func(Delta)) {
	if c.bit < 0 {
		return
	}
	ix := c.ix
	n = max(n, 1)
	chain := make([]uint64, 0, n)
	for s := firstSlot; int(s) < ix.end(); s++ {
		if ix.hash(s) == 0 || !c.has(s) || c.continues(s) {
			continue
		}
		parent := uint64(0)
		if up := ix.cold(s).parent; up >= firstSlot {
			parent = ix.hash(up)
		}
		for k := s; k != none && c.has(k); k = ix.cold(k).child {
			if len(chain) == n {
				emit(Delta{Change: Stored, Parent: parent, Hashes: chain})
				parent, chain = chain[n-1], chain[:0]
			}
			chain = append(chain, ix.hash(k))
		}
		emit(Delta{Change: Stored, Parent: parent, Hashes: chain})
		chain = chain[:0]
	}
}

// continues says that s comes in the run of its parent.
func (c *Column) continues(s slot) bool {
	up := c.ix.cold(s).parent
	return up >= firstSlot && c.ix.cold(up).child == s && c.has(up)
}

// run collects blocks of one chain that a column newly holds, so that they are told together.
type run struct {
	parent uint64
	hashes []uint64
	one    [1]uint64
}

// addRun adds a block; the first names its parent.
func (ix *Index) addRun(hash uint64, parent slot) {
	if ix.onChange == nil {
		return
	}
	if len(ix.run.hashes) == 0 {
		ix.run.parent = 0
		if parent >= firstSlot {
			ix.run.parent = ix.hash(parent)
		}
	}
	ix.run.hashes = append(ix.run.hashes, hash)
}

// endRun tells the run.
func (ix *Index) endRun(c *Column) {
	if len(ix.run.hashes) > 0 {
		ix.onChange(c, Delta{Change: Stored, Parent: ix.run.parent, Hashes: ix.run.hashes})
		ix.run.hashes = ix.run.hashes[:0]
	}
}

// tell hands a change of one block, or of all, to the listener.
func (ix *Index) tell(c *Column, what Change, hash uint64) {
	if ix.onChange == nil {
		return
	}
	d := Delta{Change: what}
	if hash != 0 {
		ix.run.one[0] = hash
		d.Hashes = ix.run.one[:]
	}
	ix.onChange(c, d)
}
