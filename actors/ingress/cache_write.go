package ingress

import (
	"errors"
	"log/slog"

	"github.com/dpserve/dpserve/routing/kvindex"
)

// applyBatch applies a batch to the index.
func (c *cache) applyBatch(b *kvBatch) {
	hashes := b.hashes
	for i := range b.ops {
		op := &b.ops[i]
		var mine []uint64
		if op.kind == opDelta {
			mine, hashes = hashes[:op.n], hashes[op.n:]
		}
		switch {
		case op.kind == opDrop:
			c.closeColumns(op.owner.Rank)
		case op.kind == opMask:
			c.maskColumns(op.owner.Rank)
		case c.resyncing[op.owner.Rank]: // records before the requested snapshot
		case op.kind == opBegin:
			c.openColumn(op)
		case op.kind == opDelta:
			c.applyDelta(op, mine)
		case op.kind == opEnd:
			c.showColumn(op)
		}
	}
}

// closeColumns closes a rank's columns: a snapshot follows, or the rank is gone.
func (c *cache) closeColumns(rank uint32) {
	delete(c.resyncing, rank)
	for tier := range kvindex.Sent + 1 {
		if col := c.open[columnKey{rank, tier}]; col != nil {
			col.Close()
			delete(c.open, columnKey{rank, tier})
		}
	}
}

// maskColumns hides a rank's columns until its next snapshot.
func (c *cache) maskColumns(rank uint32) {
	c.resyncing[rank] = true
	for tier := range kvindex.Sent + 1 {
		if col := c.open[columnKey{rank, tier}]; col != nil {
			col.Mask()
			col.loading = false
		}
	}
}

// openColumn opens a column, which stays hidden until its snapshot is complete.
func (c *cache) openColumn(op *kvOp) {
	at := columnKey{op.owner.Rank, op.owner.Tier}
	delete(c.open, at) // Open closes it
	col, err := c.index.Open(op.owner, kvindex.Options{Feed: kvindex.FromDeltas, BlockSize: op.size})
	switch {
	case errors.Is(err, kvindex.ErrFenced): // the index counts these
	case err != nil:
		c.router.in.log.Error("what a rank has cached is not followed", slog.String("app", c.router.name),
			slog.Uint64("epoch", op.owner.Epoch), slog.Any("err", err))
	default:
		c.open[at] = &column{Column: col, loading: true, lastPart: c.clock(), discardedAtOpen: c.discarded()}
	}
}

// discarded counts the blocks that the index dropped or refused because its memory limit was reached.
func (c *cache) discarded() uint64 {
	s := c.index.Stats()
	return s.Evicted + s.Refused
}

// findColumn returns the column of exactly this owner. If the column never began, a record was lost and the
// rank is asked for a snapshot.
func (c *cache) findColumn(op *kvOp) *column {
	col := c.open[columnKey{op.owner.Rank, op.owner.Tier}]
	if col == nil || col.Owner() != op.owner {
		c.resyncRank(op.owner)
		return nil
	}
	return col
}

// applyDelta applies one change to a column.
func (c *cache) applyDelta(op *kvOp, hashes []uint64) {
	col := c.findColumn(op)
	if col == nil {
		return
	}
	if col.loading {
		col.lastPart = c.clock()
	}
	col.Apply(kvindex.Delta{Change: op.change, Parent: op.parent, Hashes: hashes})
}

// showColumn makes a column visible if it equals the replica's. A column that lost blocks to the index's
// memory limit is shown too: the blocks that it holds are correct, and another snapshot would not fit either.
func (c *cache) showColumn(op *kvOp) {
	col := c.findColumn(op)
	if col == nil {
		return
	}
	if equal := col.Len() == op.n && col.Sum() == op.sum; !equal && col.discardedAtOpen == c.discarded() {
		c.resyncRank(op.owner)
		return
	}
	col.loading = false
	col.Show()
}

// resyncRank hides a rank's columns, because they differ from the replica's, and asks the rank for a
// snapshot.
func (c *cache) resyncRank(owner kvindex.Owner) {
	c.maskColumns(owner.Rank)
	c.router.resyncOwner(owner)
}
