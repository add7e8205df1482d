package ingress

import (
	"errors"
	"log/slog"

	"github.com/dpserve/dpserve/routing/kvindex"
)

// write applies a batch.
func (c *cache) write(b *kvBatch) {
	hashes := b.hashes
	for i := range b.ops {
		op := &b.ops[i]
		var mine []uint64
		if op.kind == opDelta {
			mine, hashes = hashes[:op.n], hashes[op.n:]
		}
		switch {
		case op.kind == opDrop:
			c.drop(op.owner.Rank)
		case op.kind == opMask:
			c.mask(op.owner.Rank)
		case c.deaf[op.owner.Rank]: // of what came before the snapshot that was asked for
		case op.kind == opBegin:
			c.begin(op)
		case op.kind == opDelta:
			c.apply(op, mine)
		case op.kind == opEnd:
			c.end(op)
		}
	}
}

// drop closes a rank's columns: what follows is a snapshot, or nothing.
func (c *cache) drop(rank uint32) {
	delete(c.deaf, rank)
	for tier := range kvindex.Sent + 1 {
		if col := c.held[place{rank, tier}]; col != nil {
			col.Close()
			delete(c.held, place{rank, tier})
		}
	}
}

// mask hides a rank's columns until its next snapshot.
func (c *cache) mask(rank uint32) {
	c.deaf[rank] = true
	for tier := range kvindex.Sent + 1 {
		if col := c.held[place{rank, tier}]; col != nil {
			col.Mask()
			col.loading = false
		}
	}
}

// begin opens a column, hidden until its snapshot is whole.
func (c *cache) begin(op *kvOp) {
	at := place{op.owner.Rank, op.owner.Tier}
	delete(c.held, at) // Open closes it
	col, err := c.index.Open(op.owner, kvindex.Options{Feed: kvindex.FromDeltas, BlockSize: op.size})
	switch {
	case errors.Is(err, kvindex.ErrFenced): // the index counts them
	case err != nil:
		c.lane.in.log.Error("what a rank has cached is not followed", slog.String("app", c.lane.name), slog.Uint64("epoch", op.owner.Epoch), slog.Any("err", err))
	default:
		c.held[at] = &column{Column: col, loading: true, heard: c.clock(), given: c.givenUp()}
	}
}

// givenUp counts what the index dropped or did not take for want of memory.
func (c *cache) givenUp() uint64 {
	s := c.index.Stats()
	return s.Evicted + s.Refused
}

// find is the column of exactly this owner; one that never began was lost.
func (c *cache) find(op *kvOp) *column {
	col := c.held[place{op.owner.Rank, op.owner.Tier}]
	if col == nil || col.Owner() != op.owner {
		c.miss(op.owner)
		return nil
	}
	return col
}

func (c *cache) apply(op *kvOp, hashes []uint64) {
	col := c.find(op)
	if col == nil {
		return
	}
	if col.loading {
		col.heard = c.clock()
	}
	col.Apply(kvindex.Delta{Change: op.change, Parent: op.parent, Hashes: hashes})
}

// end shows a column that is equal to the replica's. One that had to give up blocks to the cap meanwhile is shown too: what it
// holds is true, and asking again would not make it whole.
func (c *cache) end(op *kvOp) {
	col := c.find(op)
	if col == nil {
		return
	}
	if equal := col.Len() == op.n && col.Sum() == op.sum; !equal && col.given == c.givenUp() {
		c.miss(op.owner)
		return
	}
	col.loading = false
	col.Show()
}

// miss says that a rank's columns are not what the replica's are: hidden until the rank has told all of them again.
func (c *cache) miss(owner kvindex.Owner) {
	c.mask(owner.Rank)
	c.lane.missed(owner)
}
