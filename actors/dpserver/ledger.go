package dpserver

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Sizes of a ledger.
const (
	ledgerBytes   = 64 << 20 // hard cap on its index: some 700,000 blocks with their engine handles
	ledgerColumns = 64       // the least there is: four in use, the others leave time to sweep
	partBlocks    = 4096     // hashes of one record at most
	sweepSlots    = 1 << 16  // of one step: below a millisecond
	tiers         = kvindex.Sent + 1
)

// ledger is what a rank's KV cache is known to hold: by the rank's own record of what it was sent (tier Sent), and by its engine's
// events. Every change of it goes to emit, in order. It belongs to the actor's goroutine and ends with it: after a panic a
// new one begins empty.
type ledger struct {
	ix      *kvindex.Index
	hasher  kvindex.Hasher
	rank    uint32
	epoch   uint64
	emit    func(kind msg.RecordKind, kv msg.KV)
	blocks  func() int // of the engine's device; 0: not known
	began   time.Time  // origin of the index's clock
	muted   bool       // nothing is told: the snapshots that follow say it
	columns [tiers]*kvindex.Column
	told    [tiers]bool // the stream has its RecKVBegin

	gone     []uint64 // blocks that left a column and were not told yet
	goneFrom kvindex.Tier

	work    *batch // events at hand
	spare   *batch
	lost    bool // events were lost on this side: the engine may hold more than is known
	shrunk  bool // removals were applied since the record was held against the events
	unswept bool

	perBlock float64 // prompt tokens per block of the record, averaged; 0 = nothing was sent yet
	sentOpt  kvindex.Options
}

func newLedger(s *Server, emit func(kind msg.RecordKind, kv msg.KV), blocks func() int) (*ledger, error) {
	l := &ledger{hasher: s.hasher, rank: uint32(s.id), epoch: s.spec.Epoch, emit: emit, blocks: blocks, began: time.Now()}
	var err error
	l.ix, err = kvindex.New(kvindex.Config{Bytes: ledgerBytes, Columns: ledgerColumns, OnChange: l.changed})
	return l, err
}

// advance tells the index the time; what is over leaves it.
func (l *ledger) advance() time.Duration {
	now := time.Since(l.began)
	l.ix.Advance(now)
	return now
}

// column is the one of tier; it is opened at its first use. nil if the index has no room for it.
func (l *ledger) column(tier kvindex.Tier, opt kvindex.Options) *kvindex.Column {
	if l.columns[tier] == nil {
		c, err := l.ix.Open(kvindex.Owner{Rank: l.rank, Tier: tier, Epoch: l.epoch}, opt)
		if err != nil {
			return nil // the index counts it
		}
		l.columns[tier], l.told[tier] = c, false
	}
	return l.columns[tier]
}

// drop ends the columns of tiers; a later use begins them anew.
func (l *ledger) drop(which ...kvindex.Tier) {
	for _, t := range which {
		if c := l.columns[t]; c != nil {
			c.Close()
			l.columns[t], l.told[t], l.unswept = nil, false, true
		}
	}
	l.flush()
}

// dropEvents forgets what the engine's events said.
func (l *ledger) dropEvents() { l.drop(kvindex.GPU, kvindex.CPU, kvindex.Disk) }

// mute ends the telling; unmute begins it with what the columns hold then.
func (l *ledger) mute() { l.flush(); l.muted = true }

func (l *ledger) unmute() {
	l.flush()
	l.muted = false
	for t, c := range l.columns {
		l.told[t] = c != nil && c.Len() > 0
	}
}

// len is the number of blocks of tier.
func (l *ledger) len(tier kvindex.Tier) int {
	if c := l.columns[tier]; c != nil {
		return c.Len()
	}
	return 0
}

// changed hears of every change, inside the index's writer call.
func (l *ledger) changed(c *kvindex.Column, d kvindex.Delta) {
	tier := c.Owner().Tier
	switch {
	case l.muted || d.Change != kvindex.Stored && !l.told[tier]:
	case d.Change == kvindex.Removed:
		l.leave(tier, d.Hashes)
	default:
		l.flush()
		l.announce(tier, c)
		l.parts(tier, d, func(kv msg.KV) { l.emit(msg.RecKV, kv) })
	}
}

// announce begins a column in the stream with its first block: its block size is known then.
func (l *ledger) announce(tier kvindex.Tier, c *kvindex.Column) {
	if l.told[tier] {
		return
	}
	l.told[tier] = true
	l.emit(msg.RecKVBegin, msg.KV{Tier: tier, BlockSize: c.BlockSize()})
	l.emit(msg.RecKVEnd, msg.KV{Tier: tier})
}

// leave collects removals, which come one by one, into few records.
func (l *ledger) leave(tier kvindex.Tier, hashes []uint64) {
	if l.goneFrom != tier || len(l.gone) >= partBlocks {
		l.flush()
		l.goneFrom = tier
	}
	l.gone = append(l.gone, hashes...)
}

// flush tells the removals. Every call that may change a column ends with it.
func (l *ledger) flush() {
	if len(l.gone) == 0 {
		return
	}
	slices.Reverse(l.gone) // a reader takes the last one first, as it was here
	l.emit(msg.RecKV, msg.KV{Tier: l.goneFrom, Delta: kvindex.Delta{Change: kvindex.Removed, Hashes: l.gone}})
	l.gone = l.gone[:0]
}

// parts cuts a delta to the size of a record.
func (l *ledger) parts(tier kvindex.Tier, d kvindex.Delta, give func(kv msg.KV)) {
	for len(d.Hashes) > partBlocks {
		part := d
		part.Hashes = d.Hashes[:partBlocks]
		give(msg.KV{Tier: tier, Delta: part})
		d.Parent, d.Hashes = d.Hashes[partBlocks-1], d.Hashes[partBlocks:]
	}
	give(msg.KV{Tier: tier, Delta: d})
}

// snapshot gives every column that is in the stream.
func (l *ledger) snapshot(give func(kind msg.RecordKind, kv msg.KV)) {
	for t, c := range l.columns {
		if !l.told[t] {
			continue
		}
		tier := kvindex.Tier(t)
		give(msg.RecKVBegin, msg.KV{Tier: tier, BlockSize: c.BlockSize()})
		c.Snapshot(partBlocks, func(d kvindex.Delta) { give(msg.RecKV, msg.KV{Tier: tier, Delta: d}) })
		give(msg.RecKVEnd, msg.KV{Tier: tier, Len: c.Len(), Sum: c.Sum()})
	}
}

// apply takes changes of the batch at hand over, about stepBlocks blocks of them. Those of a batch that panics are not tried again.
func (l *ledger) apply(b *batch) {
	for done := 0; done < stepBlocks && !b.empty(); {
		c, ev := b.next()
		l.change(&c, &ev)
		done += max(1, c.blocks)
	}
	l.flush()
}

func (l *ledger) change(c *change, ev *kvindex.StoredEvent) {
	switch c.kind {
	case stored:
		if col := l.column(c.tier, kvindex.Options{Feed: kvindex.FromEvents}); col != nil {
			col.Stored(l.hasher, ev)
			if c.tier == kvindex.GPU && col.LimitCopies(l.blocks()) {
				l.unswept, l.shrunk = true, true
			}
		}
	case removed:
		if col := l.columns[c.tier]; col != nil {
			col.Removed(c.group, ev.Blocks)
		}
		l.shrunk = true
	case cleared:
		l.clear()
		l.lost = false
	case reset, lost:
		l.dropEvents()
		l.lost, l.shrunk = c.kind == lost, true
	}
}

// clear empties what events said: the engine holds nothing.
func (l *ledger) clear() {
	for _, c := range l.columns[:kvindex.Sent] {
		if c != nil {
			c.Clear()
			l.unswept = true
		}
	}
	l.flush()
	l.shrunk = true
}

// sweep wipes what closed columns left, a step at a time; false when all is done.
func (l *ledger) sweep() bool {
	if l.unswept {
		l.unswept = l.ix.Sweep(sweepSlots)
	}
	return l.unswept
}
