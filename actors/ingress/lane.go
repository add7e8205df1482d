package ingress

import (
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/telemetry"
)

// appRouter is the state that an ingress keeps for one application across its revisions: ranks, Router,
// queue, retry budget and estimates.
type appRouter struct {
	in          *Ingress
	name        string
	queue       requestQueue
	retryBudget *budget
	revision    atomic.Pointer[appRevision] // nil until the route table has the application
	// for requests; nil as revision; replaced when the file's routing part changes
	router  atomic.Pointer[routing.Router]
	metrics atomic.Pointer[telemetry.App]

	policyInputs atomic.Pointer[policyInputs] // nil as revision
	cachingOff   atomic.Bool                  // every ready rank runs without prefix caching
	blockTokens  atomic.Int32                 // tokens per KV block of most ranks; 0: unknown
	resyncs      atomic.Uint64                // snapshots asked for
	decisions    decisionLog                  // for replays

	reservations reservations
	demand       queueDemand

	estimators  openai.Estimators
	meanService atomic.Int64 // EWMA of the time that a request holds its place, in ns

	unreadableRevision uint64 // revision that could not be read; only rebuild uses it

	mu sync.Mutex
	// receives the events; differs from router while replaceRouter prepares a new one
	eventRouter *routing.Router
	ranks       map[routing.RankID]*rank
	readyUnits  map[string]uint64 // units that are ready in the replicated state → epoch
	// of these, units that a stream showed as fenced, ahead of the state → epoch
	fencedUnits    map[string]uint64
	unseenUnits    map[string]struct{}    // of these, units of which no stream has reported a rank yet
	pendingUnits   int                    // units that may still become ready, by the state
	noRoom         string                 // why other units cannot be placed; "" if there are none
	outageSince    time.Time              // since when no attached engine is ready; zero: no outage
	outageTimer    *time.Timer            // ends the wait for attached engines; nil: never started
	eventScratch   routing.Event          // reused: the Router does not keep it
	openScratch    []routing.Open         // reused
	closed         bool                   // no timer may start any more
	fullTimers     map[*rank]*time.Timer  // end the time in which a rank counts as full
	suspectedNodes map[string]*time.Timer // nodes whose data port a request could not reach
	tripCount      int                    // trips of ranks since the start: the order of the trips
}

func newAppRouter(in *Ingress, name string) *appRouter {
	ar := &appRouter{in: in, name: name, ranks: map[routing.RankID]*rank{}, readyUnits: map[string]uint64{},
		fencedUnits: map[string]uint64{}, unseenUnits: map[string]struct{}{},
		fullTimers: map[*rank]*time.Timer{}, suspectedNodes: map[string]*time.Timer{}}
	ar.retryBudget = newBudget(in.timers.BudgetWindow)
	ar.queue.onChange = func(n int, tokens int64) {
		if m := ar.metrics.Load(); m != nil {
			m.Queue(n, tokens)
		}
	}
	return ar
}

// deliver applies one record of a rank's stream. All parts of a snapshot share one sequence number, and a
// record that is delivered twice in a row has no effect the second time. deliver drops a record with an older
// number. When numbers are missing, it asks the rank for a snapshot.
func (ar *appRouter) deliver(rec *msg.Record) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if rec.Kind == msg.RecSnapshot {
		ar.applySnapshot(rec)
		return
	}
	r := ar.ranks[rec.Rank]
	switch {
	case r == nil || !r.isIncarnation(rec):
		return // from an incarnation that has ended
	case rec.Kind == msg.RecGone:
		ar.removeRank(r)
		return
	case rec.Kind == msg.RecSilent:
		r.silent = rec.Silent
		ar.publish(r)
		return
	case rec.Seq < r.seq:
		return
	case rec.Seq > r.seq+1:
		ar.handleGap(r)
	}
	r.seq = rec.Seq
	ar.applyRecord(r, rec)
}

// applyRecord applies a record whose sequence number is valid.
func (ar *appRouter) applyRecord(r *rank, rec *msg.Record) {
	switch rec.Kind {
	case msg.RecState:
		ar.applyState(r, rec)
	case msg.RecStatus:
		ar.applyStatus(r, rec)
	case msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		ar.queueKV(r, rec)
	default:
		ar.applyLoad(r, rec)
	}
}

// applySnapshot registers a new incarnation of a rank, or replaces the account of a known incarnation after a
// new subscription.
func (ar *appRouter) applySnapshot(rec *msg.Record) {
	r := ar.ranks[rec.Rank]
	if r != nil && (r.epoch > rec.Epoch || r.isIncarnation(rec) && rec.Seq < r.seq) {
		return // from an incarnation that was replaced, or too late
	}
	if r == nil || !r.isIncarnation(rec) {
		fresh, err := newRank(rec, ar.in.node)
		if err != nil {
			ar.in.log.Error("rank cannot be used", slog.String("app", ar.name), slog.String("unit", rec.Unit),
				slog.Any("err", err))
			return
		}
		if r != nil {
			r.failPendingAttempts()
			ar.clearFull(r)
			ar.snapshotReceived(r)
			if r.epoch == fresh.epoch {
				delete(ar.fencedUnits, r.unit) // the unit is back at the same epoch
			}
		}
		fresh.local = fresh.local || ar.in.remote == nil
		r = fresh
		ar.ranks[rec.Rank] = r
	}
	r.accepting, r.busy, r.maxOngoing, r.seq, r.silent = rec.Snapshot.Accepting, false,
		rec.Snapshot.MaxOngoing, rec.Seq, false
	r.cachingOff, r.maxModelLen = rec.Snapshot.CachingOff, rec.Snapshot.MaxModelLen
	r.turn, r.offered = "", 0
	ar.recordTrip(r, rec.Snapshot.Tripped)
	ar.snapshotReceived(r)
	ar.setBlockSize(r, rec.Snapshot.BlockSize, false)
	ar.addRank(r, rec.Seq, rec.Snapshot)
	ar.publish(r)
	ar.publishPendingUnits()
}

// addRank registers the rank and its open requests with max_ongoing 0; publish sets the real limit. In
// between, no request is routed to it.
func (ar *appRouter) addRank(r *rank, seq uint64, s *msg.Snapshot) {
	ar.openScratch = ar.openScratch[:0]
	for _, o := range s.Open {
		ar.openScratch = append(ar.openScratch, routing.Open{
			ReqID: ar.in.routerKey(o.Ingress, o.ReqID), Tokens: o.Tokens, Hit: o.Hit, Out: o.Out,
			Decoding: o.Decoding})
	}
	ar.observe(routing.Event{
		Kind: routing.EvRankUp, Rank: r.id, Epoch: r.epoch, Incarnation: r.incarnation, Seq: seq,
		Local: r.local, Snapshot: ar.openScratch,
		Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
	r.publishedReady, r.publishedMax, r.publishedSilent, r.publishedTrip = true, 0, false, -1
	if ar.readyUnits[r.unit] == r.epoch {
		delete(ar.unseenUnits, r.unit)
	}
	ar.updateCachingOff()
}

// publish sends the Router every value of a rank that has changed since the last call.
func (ar *appRouter) publish(r *rank) {
	epoch, ok := ar.readyUnits[r.unit]
	ready, maxOngoing := r.routerState(ok && epoch == r.epoch && ar.suspectedNodes[r.node] == nil)
	if ready != r.publishedReady {
		r.publishedReady = ready
		defer ar.updateCachingOff()
		ar.observe(routing.Event{Kind: routing.EvAccepting, Rank: r.id, Incarnation: r.incarnation,
			Accepting: ready})
		if ar.updateOutage() {
			ar.publishPendingUnits()
		}
	}
	if r.tripOrder != r.publishedTrip {
		r.publishedTrip = r.tripOrder
		ar.observe(routing.Event{Kind: routing.EvTripped, Rank: r.id, Incarnation: r.incarnation,
			N: r.tripOrder})
	}
	if r.silent != r.publishedSilent {
		r.publishedSilent = r.silent
		ar.observe(routing.Event{Kind: routing.EvSilent, Rank: r.id, Incarnation: r.incarnation,
			Silent: r.silent})
	}
	if maxOngoing != r.publishedMax {
		r.publishedMax = maxOngoing
		ar.observe(routing.Event{Kind: routing.EvMaxOngoing, Rank: r.id, Incarnation: r.incarnation,
			N: maxOngoing})
	}
}

// recordTrip stores whether a rank is tripped, and its place in the order of trips.
func (ar *appRouter) recordTrip(r *rank, tripped bool) {
	switch {
	case !tripped:
		r.tripOrder = 0
	case r.tripOrder == 0:
		ar.tripCount++
		r.tripOrder = ar.tripCount
	}
}

// applyState applies a RecState: whether the rank accepts requests, is fenced, drains or is tripped, and
// whose turn its free room is.
func (ar *appRouter) applyState(r *rank, rec *msg.Record) {
	r.accepting, r.busy = rec.Accepting, !rec.Accepting && rec.Cause == causeBusy
	r.draining = rec.Draining
	ar.recordTrip(r, rec.Tripped)
	if r.turn = rec.Turn; r.turn == ar.in.node {
		r.offered++
	}
	ar.clearFull(r)
	if r.turn != "" && r.offered == 0 {
		ar.setFull(r)
	}
	if rec.Fenced && rec.Cause != causeDrained.String() && ar.readyUnits[r.unit] == r.epoch {
		// the unit will restart: requests wait until the replicated state says that it is not ready
		ar.fencedUnits[r.unit] = r.epoch
		ar.publishPendingUnits()
	}
	ar.publish(r) // first, so that no further request is routed there
	if rec.Fenced {
		ar.failFenced(r, !r.draining)
	}
	if rec.Fenced && r.draining && !r.target.Owned {
		r.cutStreams()
	}
}

// failFenced cancels the attempts without a first byte on a fenced rank; failed says that the engine was the
// reason. The ranks of a lockstep unit fail together: unless a drain has ended, the first fenced rank takes
// the other ranks of its unit out of routing on all nodes, until they return as another incarnation.
func (ar *appRouter) failFenced(r *rank, failed bool) {
	lost := []*rank{r}
	for _, s := range ar.ranks {
		if !r.draining && s != r && !s.lost && s.unit == r.unit && s.epoch == r.epoch && ar.isLockstep() {
			s.accepting, s.busy, s.tripOrder = false, false, 0
			ar.clearFull(s)
			ar.publish(s)
			lost = append(lost, s)
		}
	}
	for _, s := range lost { // only now, when none of them is picked any more
		s.engineFailed = s.engineFailed || failed
		s.failPendingAttempts()
	}
}

// isLockstep reports whether the ranks of a unit fail together.
func (ar *appRouter) isLockstep() bool {
	spec := ar.revision.Load()
	return spec != nil && spec.app.DataParallel.Coupling == app.Lockstep
}

// applyLoad passes a record of a request (admitted, first token, progress, done) to the Router.
func (ar *appRouter) applyLoad(r *rank, rec *msg.Record) {
	kind, assumed := routing.EvAdmitted, false
	switch rec.Kind {
	case msg.RecFirstToken:
		if kind, assumed = routing.EvFirstToken, rec.Cause == msg.CausePredicted; !assumed {
			r.progress++
		}
	case msg.RecProgress:
		kind, r.progress = routing.EvProgress, r.progress+1
	case msg.RecDone:
		kind = routing.EvFinished
	default:
	}
	e := routing.Event{
		Kind: kind, Rank: r.id, ReqID: ar.in.routerKey(rec.Ingress, rec.ReqID), Seq: rec.Seq,
		Incarnation: rec.Incarnation, Tokens: rec.Tokens, Hit: rec.Hit, Out: rec.Out,
		Session: rec.Session, Assumed: assumed, At: rec.At,
	}
	if rec.Kind == msg.RecDone {
		ar.applyDone(r, e, rec.Turn)
		return
	}
	ar.observe(e)
	if rec.Kind == msg.RecAdmitted && rec.Ingress == ar.in.node {
		ar.useOffer(r)
	}
}

// removeRank removes a rank. Unless the rank was asked to drain, it will start again on this node or another.
// So requests keep waiting until the replicated state says that its unit is not ready.
func (ar *appRouter) removeRank(r *rank) {
	delete(ar.ranks, r.id)
	if !r.draining && ar.readyUnits[r.unit] == r.epoch {
		ar.fencedUnits[r.unit] = r.epoch
		ar.publishPendingUnits()
		ar.failFenced(r, false) // the node may be gone: this says nothing about the engine
	}
	ar.clearFull(r)
	ar.snapshotReceived(r)
	ar.updateCachingOff()
	ar.observe(routing.Event{Kind: routing.EvRankDown, Rank: r.id, Incarnation: r.incarnation})
	ar.updateOutage()
	r.failPendingAttempts()
}

// replaceRouter installs a new Router. The new Router gets all ranks before requests use it, and their open
// requests with their next snapshots.
func (ar *appRouter) replaceRouter(router *routing.Router) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	ar.eventRouter = router
	ar.publishConfig()
	for _, r := range ar.ranks {
		ar.addRank(r, r.seq, &msg.Snapshot{BlockSize: r.blockSize})
		ar.publish(r)
	}
	ar.refreshUnseenUnits()
	ar.publishPendingUnits()
	ar.router.Store(router)
	ar.queue.room()
}

// observe passes an event to the Router, which may wake the queue. The caller holds mu.
func (ar *appRouter) observe(e routing.Event) {
	if ar.eventRouter != nil {
		ar.eventScratch = e
		ar.eventScratch.Now = ar.in.clock()
		ar.eventRouter.Observe(&ar.eventScratch)
	}
}

// findRank returns the live incarnation of a rank, or nil if the rank is gone since it was picked.
func (ar *appRouter) findRank(id routing.RankID) *rank {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return ar.ranks[id]
}

// markFull corrects the Router after rank r refused a request as full in its record seq. The rank counts as
// full until its stream reports a finished request, and at most for FullRecheck, so that a wrong "full" does
// not block the queue.
func (ar *appRouter) markFull(r *rank, seq uint64) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.closed || r.seq > seq || r.full || r.lost {
		return // the stream is newer than the refusal
	}
	r.offered = 0
	ar.setFull(r)
	ar.publish(r)
}

// expireFull ends the time in which a rank counts as full.
func (ar *appRouter) expireFull(r *rank) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.fullTimers[r] == nil {
		return
	}
	ar.clearFull(r)
	if !r.lost {
		ar.publish(r)
	}
}

// clearFull removes a rank's full mark and its timer. The caller publishes the rank.
func (ar *appRouter) clearFull(r *rank) {
	r.full = false
	if t := ar.fullTimers[r]; t != nil {
		t.Stop()
		delete(ar.fullTimers, r)
	}
}

// isLost reports whether the rank's stream shows it as fenced or gone. A failure on it is then the unit's,
// not the request's.
func (ar *appRouter) isLost(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.lost
}

// hasFailed reports whether the rank is lost because its engine failed, not because its node is unreachable
// or the rank was drained.
func (ar *appRouter) hasFailed(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.engineFailed
}

// isDraining reports whether the rank takes no new requests and lets its streams end.
func (ar *appRouter) isDraining(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.draining
}

// progressOf counts the progress records of a rank's stream.
func (ar *appRouter) progressOf(r *rank) uint64 {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.progress
}

// trackAttempt registers an attempt, which can be cancelled while it has no first byte. It returns false if
// the rank is already lost.
func (ar *appRouter) trackAttempt(r *rank, a *attempt) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if r.lost {
		return false
	}
	r.track(a)
	return true
}

// markFirstByte records that the attempt has a first byte: from now on the loss of its unit does not cancel
// it.
func (ar *appRouter) markFirstByte(a *attempt) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	a.hasFirstByte = true
}

// untrackAttempt removes an attempt that has ended.
func (ar *appRouter) untrackAttempt(r *rank, a *attempt) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	r.untrack(a)
}

// totalSlots is the number of requests that the ready ranks may hold together.
func (ar *appRouter) totalSlots() int {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	n := 0
	for _, r := range ar.ranks {
		if r.publishedReady {
			n += r.maxOngoing
		}
	}
	return n
}

// canServe reports whether a rank is ready.
func (ar *appRouter) canServe() bool { return ar.totalSlots() > 0 }

// setUnits stores what the replicated state says of the units: the ready ones with their epochs, the number
// of those that may still become ready, and why others have no room.
func (ar *appRouter) setUnits(ready map[string]uint64, onTheWay int, noRoom string) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	ar.readyUnits = ready
	maps.DeleteFunc(ar.fencedUnits, func(unit string, epoch uint64) bool { return ready[unit] != epoch })
	for _, r := range ar.ranks {
		ar.publish(r)
	}
	ar.pendingUnits, ar.noRoom = onTheWay, noRoom
	ar.refreshUnseenUnits()
	ar.publishPendingUnits()
}

// publishPendingUnits tells the Router how many units may still become ready. Somebody outside dpserve
// restarts attached engines: after Timers.Outage without a ready one, requests no longer wait for them.
func (ar *appRouter) publishPendingUnits() {
	ar.updateOutage()
	n := ar.pendingUnits + len(ar.unseenUnits) + len(ar.fencedUnits)
	if ar.isDown() {
		n = 0
	}
	ar.observe(routing.Event{Kind: routing.EvOnTheWay, N: n + len(ar.suspectedNodes)})
}

// updateOutage records since when an application of attached engines has had no ready rank. ended reports
// that a rank is ready again.
func (ar *appRouter) updateOutage() (ended bool) {
	spec := ar.revision.Load()
	if ar.closed || spec == nil || spec.app.Engine.Kind != app.KindAttach || ar.hasReadyRank() {
		ended = !ar.outageSince.IsZero()
		ar.outageSince = time.Time{}
		if ar.outageTimer != nil {
			ar.outageTimer.Stop()
		}
		return ended
	}
	if ar.outageSince.IsZero() {
		ar.outageSince = time.Now()
		ar.outageTimer = time.AfterFunc(ar.in.timers.Outage, ar.endOutageWait)
	}
	return false
}

// hasReadyRank reports whether the Router has a ready rank.
func (ar *appRouter) hasReadyRank() bool {
	for _, r := range ar.ranks {
		if r.publishedReady {
			return true
		}
	}
	return false
}

// isDown reports whether the outage has lasted so long that requests are refused instead of queued.
func (ar *appRouter) isDown() bool {
	return !ar.outageSince.IsZero() && time.Since(ar.outageSince) >= ar.in.timers.Outage
}

// endOutageWait refuses the requests that wait for attached engines, unless one is ready again.
func (ar *appRouter) endOutageWait() {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.isDown() {
		ar.publishPendingUnits()
	}
}

// minModelLen is the smallest max_model_len that the ready ranks report, in tokens; 0: no rank reports one.
func (ar *appRouter) minModelLen() int {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	least := 0
	for _, r := range ar.ranks {
		if n := r.maxModelLen; r.publishedReady && n > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// noRoomReason is the reason why units of the application cannot be placed; "" if all can.
func (ar *appRouter) noRoomReason() string {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return ar.noRoom
}

// refreshUnseenUnits finds the ready units of which no stream has reported a rank yet: the replicated state
// is ahead of their streams. Requests wait for these units.
func (ar *appRouter) refreshUnseenUnits() {
	clear(ar.unseenUnits)
	for unit := range ar.readyUnits {
		if _, fenced := ar.fencedUnits[unit]; !fenced {
			ar.unseenUnits[unit] = struct{}{}
		}
	}
	for _, r := range ar.ranks {
		if ar.readyUnits[r.unit] == r.epoch {
			delete(ar.unseenUnits, r.unit)
		}
	}
}

// suspectNode takes the ranks of a node out of routing for Timers.Doubt, because a request could not reach
// its data port. Other ranks are picked. If there are none, requests wait instead of failing one after the
// other until the node's stream reports its state.
func (ar *appRouter) suspectNode(node string) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.closed || ar.suspectedNodes[node] != nil {
		return
	}
	ar.suspectedNodes[node] = time.AfterFunc(ar.in.timers.Doubt, func() { ar.clearSuspicion(node) })
	ar.publishPendingUnits() // before the ranks leave routing, so that requests in between wait
	ar.publishNode(node)
}

// clearSuspicion puts the ranks of a suspected node back into routing.
func (ar *appRouter) clearSuspicion(node string) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.suspectedNodes[node] == nil || ar.closed {
		return
	}
	delete(ar.suspectedNodes, node)
	ar.publishNode(node)
	ar.publishPendingUnits()
}

// publishNode publishes the ranks of a node.
func (ar *appRouter) publishNode(node string) {
	for _, r := range ar.ranks {
		if r.node == node {
			ar.publish(r)
		}
	}
}

// close stops the timers of the application. Requests in its queue find no rank and leave.
func (ar *appRouter) close() {
	ar.mu.Lock()
	ar.closed = true
	for r := range ar.fullTimers {
		ar.clearFull(r)
	}
	for _, r := range ar.ranks {
		ar.snapshotReceived(r)
	}
	for node, t := range ar.suspectedNodes {
		t.Stop()
		delete(ar.suspectedNodes, node)
	}
	ar.mu.Unlock()
	ar.endDemand()
	ar.reservations.end()
	if c := ar.inputs().cache; c != nil {
		c.close()
	}
	ar.setUnits(nil, 0, "")
	ar.queue.room()
}

// meanShare is the weight of the newest request in the mean service time: 1/16.
const meanShare = 16

// recordServiceTime updates the mean time that a request holds its place on a rank.
func (ar *appRouter) recordServiceTime(d time.Duration) {
	old := ar.meanService.Load()
	if old == 0 {
		ar.meanService.Store(int64(d))
		return
	}
	ar.meanService.Store(old + (int64(d)-old)/meanShare) // a lost update of a mean does no harm
}

// retryAfter is queue length × mean service time / slots, in whole seconds from 1 to maxRetryAfter.
func (ar *appRouter) retryAfter() int {
	n, _ := ar.queue.size()
	s := time.Duration(int64(n) * ar.meanService.Load() / int64(max(ar.totalSlots(), 1)))
	return int(min(max(s/time.Second, 1), maxRetryAfter))
}
