package ingress

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// resyncInterval is the time a rank has to answer a request for a snapshot, and the least time between two
// such requests.
const resyncInterval = time.Second

// columnOwner is the key of a rank's column of a tier in the index.
func (r *rank) columnOwner(tier kvindex.Tier) kvindex.Owner {
	return kvindex.Owner{Rank: uint32(r.id), Tier: tier, Epoch: r.epoch, Incarnation: r.incarnation}
}

// queueKV passes a KV record to the goroutine that writes the index. The caller holds mu.
func (ar *appRouter) queueKV(r *rank, rec *msg.Record) {
	if rec.Kind == msg.RecKVBegin && rec.KV.Tier == kvindex.GPU {
		ar.setBlockSize(r, rec.KV.BlockSize, true)
	}
	c := ar.inputs().cache
	if c == nil || r.resyncing || rec.KV.Tier > kvindex.Sent {
		return
	}
	op := kvOp{kind: opDelta, owner: r.columnOwner(rec.KV.Tier), change: rec.KV.Delta.Change,
		parent: rec.KV.Delta.Parent}
	hashes := rec.KV.Delta.Hashes
	switch rec.Kind {
	case msg.RecKVBegin:
		op.kind, op.size, hashes = opBegin, rec.KV.BlockSize, nil
	case msg.RecKVEnd:
		op.kind, op.n, op.sum, hashes = opEnd, rec.KV.Len, rec.KV.Sum, nil
	default:
	}
	if !c.queue.push(op, hashes) {
		ar.maskColumns(r)
		c.queue.addLost(op.owner)
	}
}

// handleGap asks a rank for a snapshot because a record of its stream is missing. Its load is still updated
// by the records that follow.
func (ar *appRouter) handleGap(r *rank) {
	if r.resyncing {
		return // a snapshot is already asked for
	}
	ar.maskColumns(r)
	ar.requestSnapshot(r)
}

// maskColumns hides a rank's columns from look-ups until its next snapshot.
func (ar *appRouter) maskColumns(r *rank) {
	r.resyncing = true
	if c := ar.inputs().cache; c != nil {
		c.queue.push(kvOp{kind: opMask, owner: r.columnOwner(0)}, nil)
	}
	if m := ar.metrics.Load(); m != nil {
		m.IndexGap()
	}
}

// resyncOwner asks a rank for a snapshot because the index's writer found a column of it incomplete.
func (ar *appRouter) resyncOwner(owner kvindex.Owner) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	r := ar.ranks[routing.RankID(owner.Rank)]
	if r == nil || r.epoch != owner.Epoch || r.incarnation != owner.Incarnation {
		return // its columns are gone too
	}
	if !r.resyncing {
		ar.maskColumns(r)
	}
	ar.requestSnapshot(r)
}

// requestSnapshot asks a rank for a snapshot, and repeats the request every second until one arrives.
func (ar *appRouter) requestSnapshot(r *rank) {
	if r.resyncTimer != nil || ar.closed || !r.resyncing {
		return
	}
	wait := resyncInterval
	if since := ar.in.clock() - r.resyncAt; r.resyncAt != 0 && since < resyncInterval {
		wait -= since
	} else {
		ar.postResync(r)
	}
	r.resyncTimer = time.AfterFunc(wait, func() { ar.repeatRequest(r) })
}

func (ar *appRouter) repeatRequest(r *rank) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if r.resyncTimer != nil && ar.ranks[r.id] == r {
		r.resyncTimer = nil
		ar.requestSnapshot(r)
	}
}

// postResync posts the request for a snapshot. If the rank's mailbox is full, the resync timer posts it
// again.
func (ar *appRouter) postResync(r *rank) {
	r.resyncAt = ar.in.clock()
	if err := r.mailbox.TrySend(msg.Resync{Sink: ar.in}); err != nil {
		ar.in.log.Debug("a rank could not be asked for a snapshot", slog.String("app", ar.name),
			slog.Int("group", r.id.Group()), slog.Int("rank", r.id.Rank()), slog.Any("err", err))
		return
	}
	ar.resyncs.Add(1)
}

// snapshotReceived stops the requests for a snapshot, because a snapshot has arrived or the rank is gone, and
// drops the rank's columns from the index.
func (ar *appRouter) snapshotReceived(r *rank) {
	r.resyncing = false
	if r.resyncTimer != nil {
		r.resyncTimer.Stop()
		r.resyncTimer = nil
	}
	if c := ar.inputs().cache; c != nil {
		c.queue.push(kvOp{kind: opDrop, owner: r.columnOwner(0)}, nil)
	}
}

// setBlockSize stores a rank's tokens per KV block; proven says that its KV events use that size. Prompts are
// cut into the block size of most ranks. A rank with another size has no hits, and a log line says why.
func (ar *appRouter) setBlockSize(r *rank, tokens int, proven bool) {
	if tokens <= 0 || r.sizeFromEvents && !proven || tokens == r.blockSize && r.sizeFromEvents == proven {
		return
	}
	r.blockSize, r.sizeFromEvents = tokens, proven
	best, known := ar.commonBlockSize()
	ar.blockTokens.Store(int32(best)) //nolint:gosec // tokens of a block
	if best != tokens && (r.sizeFromEvents || !known) {
		ar.in.log.Warn("a rank's KV blocks are of another size than the other ranks': its cache is not seen",
			slog.String("app", ar.name),
			slog.String("unit", r.unit), slog.Int("block_size", tokens), slog.Int("others", best))
	}
}

// commonBlockSize is the block size of most ranks; on a tie the smaller size. The sizes of KV events have
// priority over the sizes that engines report, because some engines use another size than they report. proven
// says that the size comes from events.
func (ar *appRouter) commonBlockSize() (best int, proven bool) {
	votes := map[bool]map[int]int{true: {}, false: {}}
	for _, r := range ar.ranks {
		if r.blockSize > 0 {
			votes[r.sizeFromEvents][r.blockSize]++
		}
	}
	proven = len(votes[true]) > 0
	for n, count := range votes[proven] {
		if most := votes[proven][best]; count > most || count == most && n < best {
			best = n
		}
	}
	return best, proven
}

// tokensPerBlock is the block size, in tokens, into which prompts are cut.
func (ar *appRouter) tokensPerBlock() int {
	if n := ar.blockTokens.Load(); n > 0 {
		return int(n)
	}
	return routing.DefaultBlockSize
}

// applyStatus applies an engine's status report.
func (ar *appRouter) applyStatus(r *rank, rec *msg.Record) {
	s := &rec.Status
	ar.setBlockSize(r, s.BlockSize, false)
	ar.observe(routing.Event{
		Kind: routing.EvStatus, Rank: r.id, Incarnation: r.incarnation, Seq: rec.Seq, KVUsage: s.KVUsage,
		NoKVUsage: !s.HasKVUsage,
		Capacity:  s.Capacity, BlockSize: s.BlockSize,
	})
}

// updateCachingOff checks whether every ready rank runs without prefix caching, and tells the Router when
// that changes.
func (ar *appRouter) updateCachingOff() {
	ready, off := 0, 0
	for _, r := range ar.ranks {
		if r.publishedReady {
			ready++
			if r.cachingOff {
				off++
			}
		}
	}
	if now := ready > 0 && ready == off; ready > 0 && now != ar.cachingOff.Load() {
		ar.cachingOff.Store(now)
		if now && ar.inputs().needs.Hits {
			ar.in.log.Warn("every engine runs without prefix caching: routing goes by load alone",
				slog.String("app", ar.name))
		}
		ar.publishConfig()
	}
}

// publishConfig sends the application's routing settings to the Router.
func (ar *appRouter) publishConfig() {
	spec := ar.revision.Load()
	if spec == nil {
		return
	}
	ar.observe(routing.Event{Kind: routing.EvConfigured, Config: &routing.Config{
		BusyThreshold: spec.app.Routing.BusyThreshold, PrefixCachingOff: ar.cachingOff.Load(),
	}})
}

// modelID is the application's own model id, whatever name the client used.
func (ar *appRouter) modelID() string {
	if spec := ar.revision.Load(); spec != nil {
		return spec.app.Model.ID
	}
	return ""
}

// adapterOf is the LoRA adapter that a model name selects; "" for none.
func (ar *appRouter) adapterOf(model []byte) string {
	if spec := ar.revision.Load(); spec != nil {
		return spec.adapters[string(model)]
	}
	return ""
}
