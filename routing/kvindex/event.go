package kvindex

// StoredEvent is one BlockStored of an engine, decoded. The slices are read during the call only.
type StoredEvent struct {
	Root      uint64 // Hasher.Root of the event's salt; read when the chain begins here
	HasParent bool
	Parent    Handle
	Blocks    []Handle
	Tokens    []uint32 // len(Blocks) × BlockSize
	BlockSize int
	Extras    []Extra // ascending by Block
	Group     int     // group_idx, 0 when absent
	Kind      string  // kv_cache_spec_kind, "" when absent
}

// indexed reports whether blocks of this kind of attention hold every token of a prefix. Groups with a
// sliding window, Mamba states and the like keep only a part of a prefix, so their blocks do not prove a hit;
// the index leaves them out.
func indexed(kind string) bool {
	switch kind {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	default:
		return false
	}
}

// maxGroups is how many attention groups of a column are remembered as left out; models have a handful.
const maxGroups = 64

// Stored applies a BlockStored: hashes are computed from the tokens, the engine's own are handles. Per
// physical copy: each further Stored of a block wants a further Removed. An event that is malformed or
// contradicts itself is dropped whole and counted. Blocks behind an unknown parent are kept aside until it is
// stored. FromEvents.
func (c *Column) Stored(h Hasher, ev *StoredEvent) {
	if !c.usable(FromEvents) || !c.admits(ev) {
		return
	}
	ix := c.ix
	prev, up, at := ev.Root, none, 0
	if ev.HasParent {
		if up = c.resolve(ev.Parent); up == none {
			if at, up = c.setAside(h, ev); up == none {
				return
			}
		}
		prev = ix.hash(up)
	}
	c.attach(h, ev, at, prev, up)
	c.attachAside(h, ev.Blocks[at:])
}

// admits checks an event by itself.
func (c *Column) admits(ev *StoredEvent) bool {
	n := &c.ix.counters
	switch {
	case !c.groupIndexed(ev.Group, ev.Kind):
		n.OtherGroup++
	case ev.BlockSize < 1 || ev.BlockSize > MaxBlockSize || len(ev.Tokens)/ev.BlockSize != len(ev.Blocks) ||
		len(ev.Tokens)%ev.BlockSize != 0:
		n.BadLength++
	case c.opt.BlockSize != 0 && c.opt.BlockSize != ev.BlockSize:
		n.BadBlockSize++
	case ev.HasParent && contains(ev.Blocks, ev.Parent):
		n.SelfParent++
	default:
		if len(ev.Blocks) > 0 {
			c.opt.BlockSize = ev.BlockSize
		}
		return len(ev.Blocks) > 0
	}
	return false
}

func contains(blocks []Handle, h Handle) bool {
	for _, b := range blocks {
		if b == h {
			return true
		}
	}
	return false
}

// groupIndexed says whether a group counts, and remembers those that do not: removals name no kind.
func (c *Column) groupIndexed(group int, kind string) bool {
	if indexed(kind) {
		_, out := c.filtered[group]
		return !out
	}
	if c.filtered == nil {
		c.filtered = make(map[int]struct{})
	}
	if len(c.filtered) < maxGroups {
		c.filtered[group] = struct{}{}
	}
	return false
}

// attach stores the event's blocks from at on behind up, whose hash is prev. A block that is known elsewhere
// undoes the whole event: nothing of it stays.
func (c *Column) attach(h Hasher, ev *StoredEvent, at int, prev uint64, up slot) {
	ix := c.ix
	ix.scratch = ev.hashes(h, ix.scratch[:0], at, prev)
	c.warmStore(ev.Blocks[at:], ix.scratch)
	ix.pin = up
	for i, hash := range ix.scratch {
		s, v := c.retain(ev.Blocks[at+i], hash, up, 0)
		if v == clashes {
			ix.counters.Cycle++
			ix.unpin()
			ix.endRun(c)
			c.removeAll(ev.Blocks[at : at+i])
			return
		}
		if v == full {
			break
		}
		up = s
	}
	ix.unpin()
	ix.endRun(c)
}

// hashes appends the chain hashes of the blocks from at on.
func (ev *StoredEvent) hashes(h Hasher, dst []uint64, at int, prev uint64) []uint64 {
	if len(ev.Extras) == 0 {
		return h.Tokens(dst, prev, ev.Tokens[at*ev.BlockSize:], ev.BlockSize, nil)
	}
	extras := ev.Extras
	for i := at; i < len(ev.Blocks); i++ {
		var d uint64
		d, extras = h.digest(i, ev.Tokens[i*ev.BlockSize:(i+1)*ev.BlockSize], extras)
		prev = h.fold(prev, d)
		dst = append(dst, prev)
	}
	return dst
}

// verdict of retain.
type verdict uint8

const (
	kept    verdict = iota
	full            // no room
	clashes         // the handle or the hash is known elsewhere
)

// retain stores one block: 1 + more copies under a handle. On success it is pinned.
func (c *Column) retain(name Handle, hash uint64, up slot, more uint32) (slot, verdict) {
	ix := c.ix
	r := c.handles.find(name)
	if r != nil && c.fresh(r) {
		s := r.slot
		if ix.hash(s) != hash {
			return none, clashes
		}
		c.addCopies(name, 1+more)
		ix.endRun(c)
		ix.pin = s
		return s, kept
	}
	s := ix.table.find(&ix.pool, hash)
	if s == none {
		if s = ix.add(hash, up); s == none {
			return none, full
		}
	} else if ix.cold(s).parent != up && !ix.adopt(s, up) {
		return none, clashes
	}
	ix.pin = s
	if !c.bind(r, name, s, hash) { // nothing since find has moved r: evictions leave records alone
		ix.counters.Refused++
		return none, full
	}
	if len(c.aside.blocks) > 0 {
		_, copies := c.aside.take(ix, name)
		more += copies
	}
	c.addCopies(name, more)
	if c.has(s) {
		c.side.alias(ix, s)
	}
	c.settle(s, hash)
	return s, kept
}

// addCopies counts n more copies of a block, unless the engine repeats itself.
func (c *Column) addCopies(name Handle, n uint32) {
	if !c.once {
		c.side.copy(c.ix, name, n)
	}
}

// LimitCopies holds the column against the number of blocks that its engine has; cleared says that it was
// emptied. An engine that has told of more copies than that stores some of them again without having removed
// them (vLLM does when a request asks it to report whole prompts): each removal takes one copy away, so
// blocks that it has no more would stay for ever. From then on a block stored again counts once. FromEvents.
func (c *Column) LimitCopies(blocks int) (cleared bool) {
	if c.once || blocks <= 0 || c.count+c.side.n <= blocks || !c.usable(FromEvents) {
		return false
	}
	c.once = true
	c.ix.counters.Repeated++
	c.Clear()
	return true
}

// Removed applies a BlockRemoved: one physical copy less of each. FromEvents.
func (c *Column) Removed(group int, blocks []Handle) {
	if !c.usable(FromEvents) {
		return
	}
	if _, out := c.filtered[group]; out {
		c.ix.counters.OtherGroup++
		return
	}
	c.removeAll(blocks)
}

// removeAll takes a copy of each block away, the last first.
func (c *Column) removeAll(blocks []Handle) {
	c.warmRemove(blocks)
	for i := len(blocks) - 1; i >= 0; i-- {
		c.removeCopy(blocks[i])
	}
}

func (c *Column) removeCopy(name Handle) {
	seg, i := c.handles.locate(name)
	if i < 0 {
		if !c.aside.remove(c.ix, name, c.once) {
			c.ix.counters.UnknownRemove++
		}
		return
	}
	s, fresh := seg.records[i].slot, c.fresh(&seg.records[i])
	switch {
	case !fresh:
		c.unbind(seg, i)
		c.ix.counters.UnknownRemove++
	case c.side.uncopy(c.ix, name):
	default:
		c.unbind(seg, i)
		if !c.side.unalias(c.ix, s) {
			c.release(s, c.ix.hash(s))
		}
	}
}
