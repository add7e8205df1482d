package enginemodel

// BlockEventKind is what happened to blocks of the prefix cache.
type BlockEventKind uint8

// The kinds.
const (
	BlocksCleared BlockEventKind = iota // every cached block was dropped
	BlockRemoved                        // one copy of one block lost its memory
	BlocksStored                        // consecutive blocks of one request entered the cache
)

// BlockEvent is one change of the prefix cache, as an EffectBlocks carries it.
type BlockEvent struct {
	Kind  BlockEventKind
	Hash  uint64   // BlockRemoved
	Req   *Request // BlocksStored: its blocks First to First+Count-1
	First int
	Count int
}

// blockLog gathers the changes of a step, in the order in which they leave: cleared, removals, stores. Stores
// follow removals because memory is taken before it is filled; no block that was stored in a step can be
// removed in the same one.
type blockLog struct {
	on      bool
	cleared bool
	removed []uint64
	stored  []BlockEvent
	events  []BlockEvent // of the effect; valid until the next Step
}

func (l *blockLog) remove(hash uint64) {
	if l.on {
		l.removed = append(l.removed, hash)
	}
}

func (l *blockLog) store(r *Request, first, count int) {
	if l.on && count > 0 {
		l.stored = append(l.stored, BlockEvent{Kind: BlocksStored, Req: r, First: first, Count: count})
	}
}

// clear follows a reset: what was not told yet is void, and the clear is told with the next step.
func (l *blockLog) clear(silent bool) {
	l.removed, l.stored = l.removed[:0], l.stored[:0]
	l.cleared = l.on && !silent
}

// flush is what the step that ends now has to tell; nil = nothing.
func (l *blockLog) flush() []BlockEvent {
	l.events = l.events[:0]
	if l.cleared {
		l.events = append(l.events, BlockEvent{Kind: BlocksCleared})
	}
	for _, hash := range l.removed {
		l.events = append(l.events, BlockEvent{Kind: BlockRemoved, Hash: hash})
	}
	l.events = append(l.events, l.stored...)
	clear(l.stored)
	l.removed, l.stored, l.cleared = l.removed[:0], l.stored[:0], false
	if len(l.events) == 0 {
		return nil
	}
	return l.events
}

// ResetPrefixCache drops every cached block and says whether that was possible: not while requests hold
// blocks. force takes the blocks of running requests first (they start again). With BlockEvents on,
// BlocksCleared leaves with the next step; silent leaves it out: an engine that begins anew says nothing.
func (c *Core) ResetPrefixCache(force, silent bool) bool {
	for force && len(c.running) > 0 {
		c.preempt(c.running[len(c.running)-1])
	}
	if c.dead || c.pool.used() > 0 {
		return false
	}
	c.pool.forget()
	c.log.clear(silent)
	return true
}

// CachedBlocks calls each with every hash in the prefix cache and its number of copies.
func (c *Core) CachedBlocks(each func(hash uint64, copies int)) {
	for hash, i := range c.pool.byHash {
		copies := 0
		for ; i != none; i = c.pool.blocks[i].sameHash {
			copies++
		}
		each(hash, copies)
	}
}
