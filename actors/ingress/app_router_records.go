package ingress

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// dropSets drops what the index has of a rank. If the rank lives, its block sets follow.
func (ar *appRouter) dropSets(r *rank, lives bool) {
	c := ar.inputs().cache
	switch {
	case c == nil:
	case lives:
		c.beginRank(r.blockSetOwner(0))
	default:
		c.endRank(r.blockSetOwner(0))
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
	ar.blockTokens.Store(int32(best))
	if best != tokens && (r.sizeFromEvents || !known) {
		ar.in.log.Warn("a rank's KV blocks are of another size than the other ranks': its cache is not seen",
			slog.String("app", ar.name),
			slog.String("unit", r.Unit), slog.Int("block_size", tokens), slog.Int("others", best))
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
		Kind: routing.EvStatus, Rank: r.ID, Incarnation: r.Incarnation, Seq: rec.Seq, KVUsage: s.KVUsage,
		NoKVUsage: !s.HasKVUsage, Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
	if r.hasStatus && s.LateReads > r.lateReads {
		ar.reportLateReads(r)
	}
	r.hasStatus, r.lateReads = true, s.LateReads
}

// reportLateReads reports that prompts of a prefill rank were read after their lease: the caches of the
// decode ranks that it served may hold wrong blocks. What was read before the first status is not news.
func (ar *appRouter) reportLateReads(r *rank) {
	spec := ar.revision.Load()
	if spec == nil || spec.app.Pool != app.PoolPrefill {
		return
	}
	if p := ar.in.findPair(spec.app.Name); p != nil {
		p.proxy.PrefillAlarm(r.ref())
	}
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

// deliver applies one record of a rank's stream. What the record says of the KV cache is applied without mu,
// so that no request waits for it.
func (ar *appRouter) deliver(rec *msg.Record) {
	ar.mu.Lock()
	if rec.Kind == msg.RecSnapshot {
		ar.applySnapshot(rec)
		ar.mu.Unlock()
		return
	}
	var cache *cache
	var owner kvindex.Owner
	if r := ar.ranks[rec.Rank]; r != nil && r.isIncarnation(rec) { // else of one that has ended
		ar.applyRecord(r, rec)
		cache, owner = ar.inputs().cache, r.blockSetOwner(rec.KV.Tier)
	}
	ar.mu.Unlock()
	if isKV := rec.Kind == msg.RecKVBegin || rec.Kind == msg.RecKV || rec.Kind == msg.RecKVEnd; isKV &&
		cache != nil {
		cache.apply(owner, rec)
	}
}

func (ar *appRouter) applyRecord(r *rank, rec *msg.Record) {
	switch rec.Kind {
	case msg.RecGone:
		ar.removeRank(r)
		return
	case msg.RecSilent:
		r.silent = rec.Silent
		ar.publish(r)
		return
	case msg.RecState:
		ar.applyState(r, rec)
	case msg.RecStatus:
		ar.applyStatus(r, rec)
	case msg.RecAdapters:
		ar.setAdapters(r, rec.Adapters)
	case msg.RecKVBegin:
		if rec.KV.Tier == kvindex.GPU {
			ar.setBlockSize(r, rec.KV.BlockSize, true)
		}
	case msg.RecKV, msg.RecKVEnd:
	default:
		ar.applyLoad(r, rec)
	}
	r.seq = rec.Seq
}

// applySnapshot registers a new incarnation of a rank, or replaces the account of a known incarnation that
// was listed again.
func (ar *appRouter) applySnapshot(rec *msg.Record) {
	r := ar.ranks[rec.Rank]
	if r != nil && r.Epoch > rec.Epoch {
		return // from an incarnation that was replaced
	}
	isBack := rec.Snapshot.Accepting && (r == nil || r.draining) ||
		r != nil && r.Epoch == rec.Epoch && !r.isIncarnation(rec)
	if r == nil || !r.isIncarnation(rec) {
		fresh, err := newRank(rec, ar.in)
		if err != nil {
			ar.in.log.Error("rank cannot be used", slog.String("app", ar.name), slog.String("unit", rec.Unit),
				slog.Any("err", err))
			return
		}
		if r != nil {
			r.failPendingAttempts()
			ar.clearFull(r)
			fresh.adapters = r.adapters // until the snapshot's are stored
		}
		r = fresh
		ar.ranks[rec.Rank] = r
	}
	ar.setAdapters(r, rec.Snapshot.Adapters)
	r.accepting, r.busy, r.away = rec.Snapshot.Accepting, rec.Cause == msg.CauseScaling, rec.Cause
	r.maxOngoing, r.seq, r.silent = rec.Snapshot.MaxOngoing, rec.Seq, false
	r.heard = r.heard || r.accepting || rec.Snapshot.Ejected
	r.draining = r.draining && !r.accepting
	if isBack {
		ar.unitReturns(r)
	}
	r.cachingOff, r.maxModelLen = rec.Snapshot.CachingOff, rec.Snapshot.MaxModelLen
	r.offeredTo, r.offered = "", 0
	ar.recordEjection(r, rec.Snapshot.Ejected)
	ar.dropSets(r, true)
	ar.setBlockSize(r, rec.Snapshot.BlockSize, false)
	ar.addRank(r, rec.Seq, rec.Snapshot)
	ar.publish(r)
	ar.publishPendingUnits()
}

// unitReturns ends the wait for a unit whose rank is back at the same epoch: another engine, or the same one
// under another process of its node.
func (ar *appRouter) unitReturns(r *rank) {
	if ar.fencedUnits[r.Unit] != r.Epoch {
		return
	}
	delete(ar.fencedUnits, r.Unit)
	ar.coming.noteReady(r.Unit, time.Now())
}

// addRank registers the rank and its open requests with max_ongoing 0; publish sets the real limit. In
// between, no request is routed to it.
func (ar *appRouter) addRank(r *rank, seq uint64, s *msg.Snapshot) {
	ar.openScratch = ar.openScratch[:0]
	for _, o := range s.Open {
		ar.openScratch = append(ar.openScratch, routing.Open{
			ReqID: ar.in.routerKey(o.Ingress, o.ReqID), Tokens: o.Tokens, Hit: o.Hit, Out: o.Out,
			Decoding: o.Decoding,
		})
	}
	ar.observe(routing.Event{
		Kind: routing.EvRankUp, Rank: r.ID, Epoch: r.Epoch, Incarnation: r.Incarnation, Seq: seq,
		Local: r.local, Machine: r.Machine(), Snapshot: ar.openScratch,
		Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
	r.publishedReady, r.publishedMax, r.publishedSilent, r.publishedEjection = true, 0, false, -1
	ar.noteHeard(r)
	ar.updateCachingOff()
}

// publish sends the Router every value of a rank that has changed since the last call.
func (ar *appRouter) publish(r *rank) {
	ready, maxOngoing := r.routerState(ar.isReady(r) && ar.suspectedNodes[r.Node] == nil)
	if ready != r.publishedReady {
		r.publishedReady = ready
		defer ar.updateCachingOff()
		ar.observe(routing.Event{
			Kind: routing.EvAccepting, Rank: r.ID, Incarnation: r.Incarnation, Accepting: ready,
		})
		if ar.updateOutage() {
			ar.publishPendingUnits()
		}
	}
	if r.ejectionOrder != r.publishedEjection {
		r.publishedEjection = r.ejectionOrder
		ar.observe(routing.Event{
			Kind: routing.EvEjected, Rank: r.ID, Incarnation: r.Incarnation, N: r.ejectionOrder,
		})
	}
	if r.silent != r.publishedSilent {
		r.publishedSilent = r.silent
		ar.observe(routing.Event{
			Kind: routing.EvSilent, Rank: r.ID, Incarnation: r.Incarnation, Silent: r.silent,
		})
	}
	if maxOngoing != r.publishedMax {
		r.publishedMax = maxOngoing
		ar.observe(routing.Event{
			Kind: routing.EvMaxOngoing, Rank: r.ID, Incarnation: r.Incarnation, N: maxOngoing,
		})
	}
}

// pardon takes a failure back that counts towards the ejection of an incarnation.
func (ar *appRouter) pardon(ref routing.RankRef) {
	if r := ar.findRef(ref); r != nil {
		r.Mailbox.Send(&msg.Pardon{})
	}
}

// recordEjection stores whether a rank is ejected, and its place in the order of ejections.
func (ar *appRouter) recordEjection(r *rank, ejected bool) {
	switch {
	case !ejected:
		r.ejectionOrder = 0
	case r.ejectionOrder == 0:
		ar.ejectionCount++
		r.ejectionOrder = ar.ejectionCount
	}
}

// applyState applies a RecState: whether the rank accepts requests, is fenced, drains or is ejected, and
// to which ingress its free slots are offered.
func (ar *appRouter) applyState(r *rank, rec *msg.Record) {
	r.accepting, r.away = rec.Accepting, ""
	if !rec.Accepting && (rec.Cause == msg.CauseAsleep || rec.Cause == msg.CauseScaling) {
		r.away = rec.Cause
	}
	// an engine that scales is back soon: requests wait for it as for a full one
	r.busy = !rec.Accepting && (rec.Cause == causeBusy || rec.Cause == msg.CauseScaling)
	r.draining = rec.Draining
	ar.recordEjection(r, rec.Ejected)
	if r.offeredTo = rec.OfferedTo; r.offeredTo == ar.in.node {
		r.offered++
	}
	ar.clearFull(r)
	if r.offeredTo != "" && r.offered == 0 {
		ar.setFull(r)
	}
	failed := rec.Fenced && rec.Cause != dispatch.Drained.String()
	restarts := rec.Draining && rec.Cause == msg.CauseRestarting
	if (failed || restarts) && ar.isReady(r) {
		// requests wait until the unit is back or the replicated state says that it is not ready
		ar.noteFenced(r, rec.Cause)
	}
	ar.publish(r) // first, so that no further request is routed there
	if !r.heard {
		r.heard = true
		ar.noteHeard(r)
		ar.publishPendingUnits()
	}
	if rec.Fenced {
		for _, s := range ar.failFenced(r, !r.draining) {
			if rec.Cause == msg.CauseStalled {
				s.cutStreams(errStalled)
			}
		}
	}
	if rec.Fenced && r.draining && !r.Target.Owned {
		r.cutStreams(errDrained)
	}
}

// noteFenced stores that a unit which the replicated state has as ready has left: requests wait for its
// return.
func (ar *appRouter) noteFenced(r *rank, cause string) {
	ar.fencedUnits[r.Unit] = r.Epoch
	ar.coming.note(r.Unit, unknownPhase, cause, true, time.Now())
	ar.publishPendingUnits()
}

// failFenced cancels the attempts without a first byte on a fenced rank, and returns the ranks that are lost;
// failed says that the engine was the reason. The ranks of a lockstep unit fail together: unless a drain has
// ended, the first fenced rank takes the other ranks of its unit out of routing on all nodes, until they
// return as another incarnation.
func (ar *appRouter) failFenced(r *rank, failed bool) (lost []*rank) {
	lost = append(lost, r)
	for _, s := range ar.ranks {
		if !r.draining && s != r && !s.lost && s.Unit == r.Unit && s.Epoch == r.Epoch && ar.isLockstep() {
			s.accepting, s.busy, s.ejectionOrder = false, false, 0
			ar.clearFull(s)
			ar.publish(s)
			lost = append(lost, s)
		}
	}
	for _, s := range lost { // only now, when none of them is picked any more
		s.engineFailed = s.engineFailed || failed
		s.failPendingAttempts()
	}
	return lost
}

// isLockstep reports whether the ranks of a unit fail together.
func (ar *appRouter) isLockstep() bool {
	spec := ar.revision.Load()
	return spec != nil && spec.app.DataParallel.Coupling == app.Lockstep
}

// applyLoad passes a record of a request (admitted, first token, progress, done) to the Router.
func (ar *appRouter) applyLoad(r *rank, rec *msg.Record) {
	kind, assumed, end := routing.EvAdmitted, false, routing.EndUnknown
	switch rec.Kind {
	case msg.RecFirstToken:
		kind, assumed = routing.EvFirstToken, rec.Cause == msg.CausePredicted
	case msg.RecProgress:
		kind = routing.EvProgress
	case msg.RecDone:
		kind, end = routing.EvFinished, endOf(rec.Cause)
	default:
	}
	e := routing.Event{
		Kind: kind, Rank: r.ID, ReqID: ar.in.routerKey(rec.Ingress, rec.ReqID), Seq: rec.Seq,
		Incarnation: rec.Incarnation, Tokens: rec.Tokens, Hit: rec.Hit, Out: rec.Out,
		Session: rec.Session, Assumed: assumed, End: end, At: rec.At,
	}
	if rec.Kind == msg.RecDone {
		ar.applyDone(r, e, rec.OfferedTo)
		return
	}
	ar.observe(e)
	ar.groups.observe(e.Kind, e.Rank, e.ReqID, e.Out)
	if rec.Kind == msg.RecAdmitted && rec.Ingress == ar.in.node {
		ar.useOffer(r)
	}
}

// removeRank removes a rank. Unless the rank was asked to drain, it will start again on this node or another.
// So requests keep waiting until the replicated state says that its unit is not ready.
func (ar *appRouter) removeRank(r *rank) {
	delete(ar.ranks, r.ID)
	if len(r.adapters) > 0 {
		ar.listAdapters()
	}
	if !r.draining && ar.isReady(r) {
		ar.noteFenced(r, "")
		ar.failFenced(r, false) // the node may be gone: this says nothing about the engine
	}
	ar.clearFull(r)
	ar.dropSets(r, false)
	ar.updateCachingOff()
	ar.observe(routing.Event{Kind: routing.EvRankDown, Rank: r.ID, Incarnation: r.Incarnation})
	ar.updateOutage()
	r.failPendingAttempts()
	ar.forgetRemovedRanks()
}

// forgetRemovedRanks deletes the metrics of ranks that the application does not have any more: the present
// revision has none of that number, and none runs. The caller holds mu.
func (ar *appRouter) forgetRemovedRanks() {
	spec := ar.revision.Load()
	if spec == nil {
		return
	}
	ar.in.metrics.KeepRanks(ar.name, func(group, rank int) bool {
		id := routing.ID(group, rank)
		return spec.wants(id) || ar.ranks[id] != nil
	})
}

// applyOffer marks a rank as full before the Router learns of room that is for another ingress. Room that was
// offered to this ingress before stays its own.
func (ar *appRouter) applyOffer(r *rank, offeredTo string) {
	if r.offeredTo = offeredTo; offeredTo == "" || offeredTo == ar.in.node || r.offered > 0 {
		return
	}
	ar.setFull(r)
	ar.publish(r)
}

// openForOffer removes a rank's full mark if the room of a record is for this ingress.
func (ar *appRouter) openForOffer(r *rank) {
	if r.offeredTo == ar.in.node {
		r.offered++
	} else if r.offeredTo != "" {
		return
	}
	if r.full {
		ar.clearFull(r)
		ar.publish(r)
	}
}

// useOffer records that this ingress has used the room that it was offered; other free room may be for
// another ingress.
func (ar *appRouter) useOffer(r *rank) {
	if r.offered == 0 {
		return
	}
	r.offered--
	if r.offered == 0 && r.offeredTo != "" && r.offeredTo != ar.in.node {
		ar.setFull(r)
		ar.publish(r)
	}
}

// setFull makes a rank count as full until its stream reports room for this ingress, at most for FullRecheck.
// The caller publishes the rank.
func (ar *appRouter) setFull(r *rank) {
	if ar.closed || r.full || r.lost {
		return
	}
	r.full = true
	ar.fullTimers[r] = time.AfterFunc(ar.in.timers.FullRecheck, func() { ar.expireFull(r) })
}

// applyDone tells the Router that a request has ended, and opens the rank if its room is for this ingress.
func (ar *appRouter) applyDone(r *rank, e routing.Event, offeredTo string) {
	ar.applyOffer(r, offeredTo)
	ar.groups.observe(e.Kind, e.Rank, e.ReqID, e.Out)
	ar.observe(e)
	ar.openForOffer(r)
}

// resetCache drops every block set of the index. It returns the number of ranks.
func (ar *appRouter) resetCache() int {
	if c := ar.inputs().cache; c != nil {
		c.clear()
	}
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return len(ar.ranks)
}

// setOlderUnits stores which units a roll-out replaces next.
func (ar *appRouter) setOlderUnits(units map[string]bool) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	ar.olderUnits = units
}

// appendOlder appends the ranks of the units that a roll-out replaces next.
func (ar *appRouter) appendOlder(dst []routing.RankID) []routing.RankID {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for _, r := range ar.ranks {
		if ar.olderUnits[r.Unit] {
			dst = append(dst, r.ID)
		}
	}
	return dst
}
