package dpserver

import (
	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// changeKind is the closed list of what an engine's events say.
type changeKind uint8

const (
	changeStored changeKind = iota
	changeRemoved
	changeCleared
	changeReset // the subscription begins again
	changeLost  // the queue dropped events
)

// change is one event. Its blocks, tokens and extras are the next ones of the batch.
type change struct {
	kind      changeKind
	tier      kvindex.Tier
	hasParent bool
	root      uint64
	parent    kvindex.Handle
	blockSize int
	group     int
	blocks    int
	tokens    int
	extras    int
}

// changeBytes is the memory of one change.
const changeBytes = 88

// stepBlocks is the most blocks of one change, and what the actor applies before it reads its mailbox again:
// about a millisecond.
const stepBlocks = 4096

// eventBatch is copies of events in the engine's order. It is written, then read, then used again: in the
// steady state events cost no allocation.
type eventBatch struct {
	changes []change
	blocks  []kvindex.Handle
	tokens  []uint32
	extras  []kvindex.Extra

	read struct{ changes, blocks, tokens, extras int }
}

func (b *eventBatch) isEmpty() bool { return b.read.changes == len(b.changes) }

func (b *eventBatch) bytes() int {
	return changeBytes*len(b.changes) + 8*len(b.blocks) + 4*len(b.tokens) + 16*len(b.extras)
}

func (b *eventBatch) clear() {
	*b = eventBatch{changes: b.changes[:0], blocks: b.blocks[:0], tokens: b.tokens[:0], extras: b.extras[:0]}
}

func (b *eventBatch) add(c change) { b.changes = append(b.changes, c) }

// addStored copies an event. A long one becomes several changes, each the child of the one before.
func (b *eventBatch) addStored(t kvindex.Tier, h kvindex.Hasher, model string, ev *kvevents.Stored) {
	c := change{kind: changeStored, tier: t, hasParent: !ev.Parent.IsZero(), blockSize: ev.BlockSize,
		group: ev.Group}
	salt, extras := b.addExtras(h, ev)
	if c.hasParent {
		c.parent = handleOf(ev.Group, ev.Parent)
	} else {
		c.root = h.Root(kvindex.Salt{Unit: kvindex.Tokens, BlockSize: ev.BlockSize, Model: model,
			Adapter: ev.LoraName, CacheSalt: salt})
	}
	for _, name := range ev.Hashes {
		b.blocks = append(b.blocks, handleOf(ev.Group, name))
	}
	b.tokens = append(b.tokens, ev.Tokens...)
	b.addSplit(c, b.blocks[len(b.blocks)-len(ev.Hashes):], len(ev.Tokens), extras)
}

// addSplit adds c as changes of at most stepBlocks blocks. An event whose counts contradict each other stays
// whole: the index counts it as malformed.
func (b *eventBatch) addSplit(c change, names []kvindex.Handle, tokens, extras int) {
	c.blocks, c.tokens, c.extras = len(names), tokens, extras
	for len(names) > stepBlocks && tokens == len(names)*c.blockSize {
		part := c
		part.blocks, part.tokens, part.extras = stepBlocks, stepBlocks*c.blockSize, b.rebaseExtras(c.extras)
		b.add(part)
		c.hasParent, c.parent = true, names[stepBlocks-1]
		names, tokens = names[stepBlocks:], tokens-part.tokens
		c.blocks, c.tokens, c.extras = len(names), tokens, c.extras-part.extras
	}
	b.add(c)
}

// rebaseExtras returns how many of the last n extras belong to the first stepBlocks blocks, and numbers the
// others from there.
func (b *eventBatch) rebaseExtras(n int) (first int) {
	rest := b.extras[len(b.extras)-n:]
	for first < n && rest[first].Block < stepBlocks {
		first++
	}
	for i := first; i < n; i++ {
		rest[i].Block -= stepBlocks
	}
	return first
}

// addExtras returns what distinguishes an event's blocks beside their tokens: the cache_salt of their chain,
// and the number of extras it added, one per block with an image or the like. Such a block matches no text
// prompt, and another such block only if the engine reports the same extra.
func (b *eventBatch) addExtras(h kvindex.Hasher, ev *kvevents.Stored) (salt string, extras int) {
	salt, ok := ev.Salt()
	if ok {
		return salt, 0
	}
	one := kvevents.Stored{LoraName: ev.LoraName, Parent: ev.Parent}
	for i := range min(len(ev.Extra), len(ev.Hashes)) {
		one.Extra = ev.Extra[i : i+1]
		text, plain := one.Salt()
		if plain && i == 0 {
			salt = text
		}
		if !plain {
			b.extras = append(b.extras, kvindex.Extra{Block: i, Key: h.Key(string(ev.Extra[i]))})
			extras++
		}
		one.Parent = ev.Hashes[i] // only the first block of a prompt has a salt
	}
	return salt, extras
}

func (b *eventBatch) addRemoved(t kvindex.Tier, ev *kvevents.Removed) {
	for left := ev.Hashes; len(left) > 0; {
		n := min(len(left), stepBlocks)
		for _, name := range left[:n] {
			b.blocks = append(b.blocks, handleOf(ev.Group, name))
		}
		b.add(change{kind: changeRemoved, tier: t, group: ev.Group, blocks: n})
		left = left[n:]
	}
}

// nextChange reads one change. ev is valid until the batch is cleared.
func (b *eventBatch) nextChange() (c change, ev kvindex.StoredEvent) {
	r := &b.read
	c = b.changes[r.changes]
	ev = kvindex.StoredEvent{
		Root: c.root, HasParent: c.hasParent, Parent: c.parent, BlockSize: c.blockSize, Group: c.group,
		Blocks: b.blocks[r.blocks : r.blocks+c.blocks], Tokens: b.tokens[r.tokens : r.tokens+c.tokens],
		Extras: b.extras[r.extras : r.extras+c.extras],
	}
	r.changes, r.blocks, r.tokens, r.extras = r.changes+1, r.blocks+c.blocks, r.tokens+c.tokens,
		r.extras+c.extras
	return c, ev
}
