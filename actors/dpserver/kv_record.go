package dpserver

import (
	"math"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Sizes of a KV record.
const (
	recordBytes = 64 << 20 // hard cap on its index: some 700,000 blocks with their engine handles
	// the smallest number that the index takes: four are in use, the others give time to sweep
	recordSets = 64
	partBlocks = 4096    // hashes of one record at most
	listBlocks = 512     // hashes of one record of a list, so that other ranks' records come between
	sweepSlots = 1 << 16 // of one step: below a millisecond
	tiers      = kvindex.Sent + 1
)

// kvRecord is what a rank's KV cache is known to hold: by the rank's own record of the prompts it was sent
// (tier Sent), and by its engine's events. Every change goes to emit, in order. It belongs to the recorder
// and ends with it: after a panic a new one begins empty.
type kvRecord struct {
	index        *kvindex.Index
	hasher       kvindex.Hasher
	rank         uint32
	epoch        uint64
	emit         func(kind msg.RecordKind, kv msg.KV)
	deviceBlocks func() int // of the engine's GPU; 0: not known
	startedAt    time.Time  // origin of the index's clock
	sets         [tiers]*kvindex.BlockSet
	published    [tiers]bool // the stream has its RecKVBegin

	removals     []uint64 // blocks that left a block set and were not emitted yet
	removalsTier kvindex.Tier

	isPartial   bool // the queue dropped events: the engine may hold blocks that are not known
	hasRemovals bool // removals were applied since the sent prompts were compared with the events
	needsSweep  bool

	tokensPerBlock float64 // prompt tokens per block of tier Sent, averaged; 0: no prompt was sent yet
	sentOptions    kvindex.Options
}

func newKVRecord(s *Server, emit func(kind msg.RecordKind, kv msg.KV), blocks func() int) (*kvRecord, error) {
	l := &kvRecord{
		hasher: s.hasher, rank: uint32(s.id), epoch: s.spec.Epoch, emit: emit,
		deviceBlocks: blocks, startedAt: time.Now(),
	}
	var err error
	l.index, err = kvindex.New(kvindex.Config{
		Bytes: recordBytes, Sets: recordSets, OnChange: l.onChange,
	})
	return l, err
}

// advanceClock tells the index the time, and returns it; expired blocks leave the index.
func (l *kvRecord) advanceClock() time.Duration {
	now := time.Since(l.startedAt)
	l.index.Advance(now)
	return now
}

// openSet returns the block set of a tier and opens it at its first use. It returns nil if the index has no
// room for it.
func (l *kvRecord) openSet(tier kvindex.Tier, opt kvindex.Options) *kvindex.BlockSet {
	if l.sets[tier] == nil {
		c, err := l.index.Open(kvindex.Owner{Rank: l.rank, Tier: tier, Epoch: l.epoch}, opt)
		if err != nil {
			return nil // the index counts the failure
		}
		l.sets[tier], l.published[tier] = c, false
	}
	return l.sets[tier]
}

// dropSets ends the block sets of tiers; their next use begins them again.
func (l *kvRecord) dropSets(which ...kvindex.Tier) {
	for _, t := range which {
		if c := l.sets[t]; c != nil {
			c.Close()
			l.sets[t], l.published[t], l.needsSweep = nil, false, true
		}
	}
	l.flushRemovals()
}

func (l *kvRecord) dropEventSets() { l.dropSets(kvindex.GPU, kvindex.CPU, kvindex.Disk) }

// publishSets begins every block set that has blocks in a stream that has none.
func (l *kvRecord) publishSets() {
	for t, c := range l.sets {
		l.published[t] = c != nil && c.Len() > 0
	}
	l.writeSnapshot(l.emit)
}

// eventBlockSize is the tokens per block of the engine's events; 0: no event came.
func (l *kvRecord) eventBlockSize() int {
	if c := l.sets[kvindex.GPU]; c != nil {
		return c.BlockSize()
	}
	return 0
}

func (l *kvRecord) blockSetLen(tier kvindex.Tier) int {
	if c := l.sets[tier]; c != nil {
		return c.Len()
	}
	return 0
}

// onChange receives every change, inside the index's writer call.
func (l *kvRecord) onChange(c *kvindex.BlockSet, d kvindex.Delta) {
	tier := c.Owner().Tier
	switch {
	case d.Change != kvindex.Stored && !l.published[tier]:
	case d.Change == kvindex.Removed:
		l.queueRemoval(tier, d.Hashes)
	default:
		l.flushRemovals()
		l.beginSet(tier, c)
		l.splitDelta(tier, d, func(kv msg.KV) { l.emit(msg.RecKV, kv) })
	}
}

// beginSet begins a block set in the stream with its first block, when its block size is known.
func (l *kvRecord) beginSet(tier kvindex.Tier, c *kvindex.BlockSet) {
	if l.published[tier] {
		return
	}
	l.published[tier] = true
	l.emit(msg.RecKVBegin, msg.KV{Tier: tier, BlockSize: c.BlockSize()})
	l.emit(msg.RecKVEnd, msg.KV{Tier: tier})
}

// queueRemoval collects removals, which come one by one, into few records.
func (l *kvRecord) queueRemoval(tier kvindex.Tier, hashes []uint64) {
	if l.removalsTier != tier || len(l.removals) >= partBlocks {
		l.flushRemovals()
		l.removalsTier = tier
	}
	l.removals = append(l.removals, hashes...)
}

// flushRemovals emits the collected removals. Every call that may change a block set ends with it.
func (l *kvRecord) flushRemovals() {
	if len(l.removals) == 0 {
		return
	}
	slices.Reverse(l.removals) // a reader removes the last hash first: the order of the removals here
	l.emit(msg.RecKV, msg.KV{
		Tier: l.removalsTier, Delta: kvindex.Delta{Change: kvindex.Removed, Hashes: l.removals},
	})
	l.removals = l.removals[:0]
}

// splitDelta splits a delta to the size of a record.
func (l *kvRecord) splitDelta(tier kvindex.Tier, d kvindex.Delta, give func(kv msg.KV)) {
	for len(d.Hashes) > partBlocks {
		part := d
		part.Hashes = d.Hashes[:partBlocks]
		give(msg.KV{Tier: tier, Delta: part})
		d.Parent, d.Hashes = d.Hashes[partBlocks-1], d.Hashes[partBlocks:]
	}
	give(msg.KV{Tier: tier, Delta: d})
}

// writeSnapshot writes every block set that is in the stream.
func (l *kvRecord) writeSnapshot(give func(kind msg.RecordKind, kv msg.KV)) {
	for t, c := range l.sets {
		if !l.published[t] {
			continue
		}
		tier := kvindex.Tier(t)
		give(msg.RecKVBegin, msg.KV{Tier: tier, BlockSize: c.BlockSize()})
		c.Snapshot(listBlocks, func(d kvindex.Delta) { give(msg.RecKV, msg.KV{Tier: tier, Delta: d}) })
		give(msg.RecKVEnd, msg.KV{Tier: tier})
	}
}

func (l *kvRecord) applyBatch(b *eventBatch) {
	b.forEach(l.applyChange)
	l.flushRemovals()
}

func (l *kvRecord) applyChange(c *change, ev *kvindex.StoredEvent) {
	switch c.kind {
	case changeStored:
		if col := l.openSet(c.tier, kvindex.Options{Feed: kvindex.FromEvents}); col != nil {
			col.Stored(l.hasher, ev)
			if c.tier == kvindex.GPU && col.LimitCopies(l.deviceBlocks()) {
				l.needsSweep, l.hasRemovals = true, true
			}
		}
	case changeRemoved:
		if col := l.sets[c.tier]; col != nil {
			col.Removed(c.group, ev.Blocks)
		}
		l.hasRemovals = true
	case changeCleared:
		l.clearEvents()
		l.isPartial = false
	case changeReset, changeLost:
		l.dropEventSets()
		l.isPartial, l.hasRemovals = c.kind == changeLost, true
	}
}

// clearEvents empties the block sets of events: the engine holds nothing.
func (l *kvRecord) clearEvents() {
	for _, c := range l.sets[:kvindex.Sent] {
		if c != nil {
			c.Clear()
			l.needsSweep = true
		}
	}
	l.flushRemovals()
	l.hasRemovals = true
}

// averageWeight is the weight of one request in the average of tokens per block.
const averageWeight = 1.0 / 16

// seedAverage starts the average with the first request.
func (l *kvRecord) seedAverage(p *sentPrompt) {
	if l.tokensPerBlock == 0 && p.tokens > 0 {
		l.tokensPerBlock = float64(p.tokens) / float64(len(p.blocks))
	}
}

// updateAverage averages how many tokens a block stands for.
func (l *kvRecord) updateAverage(p *sentPrompt) {
	if tokens := p.end.promptTokens; tokens > 0 && l.tokensPerBlock > 0 {
		l.tokensPerBlock += averageWeight * (float64(tokens)/float64(len(p.blocks)) - l.tokensPerBlock)
	}
}

// toBlocks is how many blocks of the record tokens fill, rounded up; 0 if the average is not known.
func (l *kvRecord) toBlocks(tokens int64) int {
	if l.tokensPerBlock <= 0 {
		return 0
	}
	return int(math.Ceil(float64(tokens) / l.tokensPerBlock))
}
