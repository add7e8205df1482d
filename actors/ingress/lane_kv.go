package ingress

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// resyncInterval is how long a rank has to answer when it is asked for a snapshot, and the least time between two such questions.
const resyncInterval = time.Second

// columnOwner names a rank's column of a tier.
func (r *rank) columnOwner(tier kvindex.Tier) kvindex.Owner {
	return kvindex.Owner{Rank: uint32(r.id), Tier: tier, Epoch: r.epoch, Incarnation: r.incarnation}
}

// queueKV hands a KV record to the index's writer. Call with mu held.
func (ar *appRouter) queueKV(r *rank, rec *msg.Record) {
	if rec.Kind == msg.RecKVBegin && rec.KV.Tier == kvindex.GPU {
		ar.setBlockSize(r, rec.KV.BlockSize, true)
	}
	c := ar.inputs().cache
	if c == nil || r.resyncing || rec.KV.Tier > kvindex.Sent {
		return
	}
	op := kvOp{kind: opDelta, owner: r.columnOwner(rec.KV.Tier), change: rec.KV.Delta.Change, parent: rec.KV.Delta.Parent}
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

// handleGap says that a record of a rank did not come: it is asked for all it has. Its load goes on from what is known.
func (ar *appRouter) handleGap(r *rank) {
	if r.resyncing {
		return // it was asked already
	}
	ar.maskColumns(r)
	ar.requestSnapshot(r)
}

// maskColumns takes a rank's columns out of look-ups until its next snapshot.
func (ar *appRouter) maskColumns(r *rank) {
	r.resyncing = true
	if c := ar.inputs().cache; c != nil {
		c.queue.push(kvOp{kind: opMask, owner: r.columnOwner(0)}, nil)
	}
	if m := ar.metrics.Load(); m != nil {
		m.IndexGap()
	}
}

// resyncOwner is miss for the index's writer: an owner's column did not come out equal.
func (ar *appRouter) resyncOwner(owner kvindex.Owner) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	r := ar.ranks[routing.RankID(owner.Rank)]
	if r == nil || r.epoch != owner.Epoch || r.incarnation != owner.Incarnation {
		return // its columns are gone, too
	}
	if !r.resyncing {
		ar.maskColumns(r)
	}
	ar.requestSnapshot(r)
}

// requestSnapshot asks a rank for a snapshot, and again every second until one comes.
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

// postResync posts the question. A mailbox that is full is asked again.
func (ar *appRouter) postResync(r *rank) {
	r.resyncAt = ar.in.clock()
	if err := r.mailbox.TrySend(msg.Resync{Sink: ar.in}); err != nil {
		ar.in.log.Debug("a rank could not be asked for a snapshot", slog.String("app", ar.name), slog.Int("group", r.id.Group()), slog.Int("rank", r.id.Rank()), slog.Any("err", err))
		return
	}
	ar.resyncs.Add(1)
}

// snapshotReceived ends the questions: a snapshot is here, or the rank is gone. What the index holds of the rank is dropped.
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

// setBlockSize notes a rank's tokens per KV block; proven: its events came in them. Prompts are cut to the size that most ranks have; a
// rank of another size hits nothing, and its log line says why.
func (ar *appRouter) setBlockSize(r *rank, tokens int, proven bool) {
	if tokens <= 0 || r.sizeFromEvents && !proven || tokens == r.blockSize && r.sizeFromEvents == proven {
		return
	}
	r.blockSize, r.sizeFromEvents = tokens, proven
	best, known := ar.commonBlockSize()
	ar.blockTokens.Store(int32(best)) //nolint:gosec // tokens of a block
	if best != tokens && (r.sizeFromEvents || !known) {
		ar.in.log.Warn("a rank's KV blocks are of another size than the other ranks': its cache is not seen", slog.String("app", ar.name),
			slog.String("unit", r.unit), slog.Int("block_size", tokens), slog.Int("others", best))
	}
}

// commonBlockSize is the block size of most ranks, the smaller of two. What events came in counts, before what engines report: some
// settle on another size than they report. proven: it was seen in events.
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

// tokensPerBlock is the size to which prompts are cut.
func (ar *appRouter) tokensPerBlock() int {
	if n := ar.blockTokens.Load(); n > 0 {
		return int(n)
	}
	return routing.DefaultBlockSize
}

// applyStatus takes over an engine's report.
func (ar *appRouter) applyStatus(r *rank, rec *msg.Record) {
	s := &rec.Status
	ar.setBlockSize(r, s.BlockSize, false)
	ar.observe(routing.Event{
		Kind: routing.EvStatus, Rank: r.id, Incarnation: r.incarnation, Seq: rec.Seq, KVUsage: s.KVUsage, NoKVUsage: !s.HasKVUsage,
		Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
}

// updateCachingOff looks whether every ready rank runs without prefix caching.
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
			ar.in.log.Warn("every engine runs without prefix caching: routing goes by load alone", slog.String("app", ar.name))
		}
		ar.publishConfig()
	}
}

// publishConfig tells the Router the application's settings.
func (ar *appRouter) publishConfig() {
	spec := ar.revision.Load()
	if spec == nil {
		return
	}
	ar.observe(routing.Event{Kind: routing.EvConfigured, Config: &routing.Config{
		BusyThreshold: spec.app.Routing.BusyThreshold, PrefixCachingOff: ar.cachingOff.Load(),
	}})
}

// modelID is the application's own name of its model, whatever the client called it.
func (ar *appRouter) modelID() string {
	if spec := ar.revision.Load(); spec != nil {
		return spec.app.Model.ID
	}
	return ""
}

// adapterOf is the LoRA adapter that a model's name asks for, "" for none.
func (ar *appRouter) adapterOf(model []byte) string {
	if spec := ar.revision.Load(); spec != nil {
		return spec.adapters[string(model)]
	}
	return ""
}
