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

// appRouter is what an ingress keeps of one application over its revisions: ranks, Router, queue, retry budget, estimates.
type appRouter struct {
	in          *Ingress
	name        string
	queue       requestQueue
	retryBudget *budget
	revision    atomic.Pointer[appRevision]    // nil until the route table has the application
	router      atomic.Pointer[routing.Router] // for requests; nil as revision; replaced when the file's routing part changes
	metrics     atomic.Pointer[telemetry.App]

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

	mu             sync.Mutex
	eventRouter    *routing.Router // receives the events; differs from router while replaceRouter prepares a new one
	ranks          map[routing.RankID]*rank
	readyUnits     map[string]uint64      // units that are ready in the replicated state → epoch
	fencedUnits    map[string]uint64      // of these, units that a stream showed as fenced, ahead of the state → epoch
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
	ar := &appRouter{in: in, name: name, ranks: map[routing.RankID]*rank{}, readyUnits: map[string]uint64{}, fencedUnits: map[string]uint64{}, unseenUnits: map[string]struct{}{}, fullTimers: map[*rank]*time.Timer{}, suspectedNodes: map[string]*time.Timer{}}
	ar.retryBudget = newBudget(in.timers.BudgetWindow)
	ar.queue.onChange = func(n int, tokens int64) {
		if m := ar.metrics.Load(); m != nil {
			m.Queue(n, tokens)
		}
	}
	return ar
}

// deliver applies one record of a rank's stream. The parts of a snapshot share its number, and all that may come twice does no
// harm when it comes at once; what comes late is dropped, and so is what came before a jump: the rank is asked for a snapshot.
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
		return // of an incarnation that is over
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

// applySnapshot begins an incarnation, or begins a known one's account anew after a new subscription.
func (ar *appRouter) applySnapshot(rec *msg.Record) {
	r := ar.ranks[rec.Rank]
	if r != nil && (r.epoch > rec.Epoch || r.isIncarnation(rec) && rec.Seq < r.seq) {
		return // a ghost: its successor serves. Or it comes too late
	}
	if r == nil || !r.isIncarnation(rec) {
		fresh, err := newRank(rec, ar.in.node)
		if err != nil {
			ar.in.log.Error("rank cannot be used", slog.String("app", ar.name), slog.String("unit", rec.Unit), slog.Any("err", err))
			return
		}
		if r != nil {
			r.failPendingAttempts()
			ar.clearFull(r)
			ar.snapshotReceived(r)
			if r.epoch == fresh.epoch {
				delete(ar.fencedUnits, r.unit) // it came back in place
			}
		}
		fresh.local = fresh.local || ar.in.remote == nil
		r = fresh
		ar.ranks[rec.Rank] = r
	}
	r.accepting, r.busy, r.maxOngoing, r.seq, r.silent = rec.Snapshot.Accepting, false, rec.Snapshot.MaxOngoing, rec.Seq, false
	r.cachingOff, r.maxModelLen = rec.Snapshot.CachingOff, rec.Snapshot.MaxModelLen
	r.turn, r.offered = "", 0
	ar.recordTrip(r, rec.Snapshot.Tripped)
	ar.snapshotReceived(r)
	ar.setBlockSize(r, rec.Snapshot.BlockSize, false)
	ar.addRank(r, rec.Seq, rec.Snapshot)
	ar.publish(r)
	ar.publishPendingUnits()
}

// addRank puts the rank and its account into the Router, without room until show says how much it has.
func (ar *appRouter) addRank(r *rank, seq uint64, s *msg.Snapshot) {
	ar.openScratch = ar.openScratch[:0]
	for _, o := range s.Open {
		ar.openScratch = append(ar.openScratch, routing.Open{ReqID: ar.in.routerKey(o.Ingress, o.ReqID), Tokens: o.Tokens, Hit: o.Hit, Out: o.Out, Decoding: o.Decoding})
	}
	ar.observe(routing.Event{
		Kind: routing.EvRankUp, Rank: r.id, Epoch: r.epoch, Incarnation: r.incarnation, Seq: seq, Local: r.local, Snapshot: ar.openScratch,
		Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
	r.publishedReady, r.publishedMax, r.publishedSilent, r.publishedTrip = true, 0, false, -1
	if ar.readyUnits[r.unit] == r.epoch {
		delete(ar.unseenUnits, r.unit)
	}
	ar.updateCachingOff()
}

// publish tells the Router what has changed of a rank since it was told last.
func (ar *appRouter) publish(r *rank) {
	epoch, ok := ar.readyUnits[r.unit]
	ready, maxOngoing := r.routerState(ok && epoch == r.epoch && ar.suspectedNodes[r.node] == nil)
	if ready != r.publishedReady {
		r.publishedReady = ready
		defer ar.updateCachingOff()
		ar.observe(routing.Event{Kind: routing.EvAccepting, Rank: r.id, Incarnation: r.incarnation, Accepting: ready})
		if ar.updateOutage() {
			ar.publishPendingUnits()
		}
	}
	if r.tripOrder != r.publishedTrip {
		r.publishedTrip = r.tripOrder
		ar.observe(routing.Event{Kind: routing.EvTripped, Rank: r.id, Incarnation: r.incarnation, N: r.tripOrder})
	}
	if r.silent != r.publishedSilent {
		r.publishedSilent = r.silent
		ar.observe(routing.Event{Kind: routing.EvSilent, Rank: r.id, Incarnation: r.incarnation, Silent: r.silent})
	}
	if maxOngoing != r.publishedMax {
		r.publishedMax = maxOngoing
		ar.observe(routing.Event{Kind: routing.EvMaxOngoing, Rank: r.id, Incarnation: r.incarnation, N: maxOngoing})
	}
}

// recordTrip notes whether a rank is tripped, and since which trip.
func (ar *appRouter) recordTrip(r *rank, tripped bool) {
	switch {
	case !tripped:
		r.tripOrder = 0
	case r.tripOrder == 0:
		ar.tripCount++
		r.tripOrder = ar.tripCount
	}
}

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
		ar.fencedUnits[r.unit] = r.epoch // it will be back: nobody is refused before the state says so too
		ar.publishPendingUnits()
	}
	ar.publish(r) // out of routing first
	if rec.Fenced {
		ar.failFenced(r, !r.draining)
	}
	if rec.Fenced && r.draining && !r.target.Owned {
		r.cutStreams()
	}
}

// failFenced gives up what has not begun on a fenced rank; failed: because of its engine. A lockstep unit fails as one: unless this is the end of a drain, its other
// ranks, wherever they run, are out with the first of them, and stay so until they come back as another incarnation.
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
	for _, s := range lost { // when none of them is picked any more
		s.engineFailed = s.engineFailed || failed
		s.failPendingAttempts()
	}
}

func (ar *appRouter) isLockstep() bool {
	spec := ar.revision.Load()
	return spec != nil && spec.app.DataParallel.Coupling == app.Lockstep
}

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
		Kind: kind, Rank: r.id, ReqID: ar.in.routerKey(rec.Ingress, rec.ReqID), Seq: rec.Seq, Incarnation: rec.Incarnation, Tokens: rec.Tokens, Hit: rec.Hit, Out: rec.Out,
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

// removeRank takes a rank out for good. If it was not asked to end, it will be back, on this node or another: nobody is refused before the
// state says so too.
func (ar *appRouter) removeRank(r *rank) {
	delete(ar.ranks, r.id)
	if !r.draining && ar.readyUnits[r.unit] == r.epoch {
		ar.fencedUnits[r.unit] = r.epoch
		ar.publishPendingUnits()
		ar.failFenced(r, false) // its node may be silent, or have ended: that says nothing of the engine
	}
	ar.clearFull(r)
	ar.snapshotReceived(r)
	ar.updateCachingOff()
	ar.observe(routing.Event{Kind: routing.EvRankDown, Rank: r.id, Incarnation: r.incarnation})
	ar.updateOutage()
	r.failPendingAttempts()
}

// replaceRouter puts a new Router in the place of the old one. It knows the ranks at once, and what they have in hand with their next
// snapshots; requests see it when it knows the ranks.
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

// observe hands an event to the Router, which may wake the queue. Call with mu held.
func (ar *appRouter) observe(e routing.Event) {
	if ar.eventRouter != nil {
		ar.eventScratch = e
		ar.eventScratch.Now = ar.in.clock()
		ar.eventRouter.Observe(&ar.eventScratch)
	}
}

// findRank gives the live incarnation of a rank; nil if it has gone since it was picked.
func (ar *appRouter) findRank(id routing.RankID) *rank {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return ar.ranks[id]
}

// markFull says that the Router's picture of a rank is wrong: it said full as of its record seq. It counts as full until its
// stream tells of a request that ended, at most for a while, so that a wrong "full" never blocks either.
func (ar *appRouter) markFull(r *rank, seq uint64) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.closed || r.seq > seq || r.full || r.lost {
		return // the stream is ahead of the refusal: the picture is newer than the answer
	}
	r.offered = 0
	ar.setFull(r)
	ar.publish(r)
}

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

func (ar *appRouter) clearFull(r *rank) {
	r.full = false
	if t := ar.fullTimers[r]; t != nil {
		t.Stop()
		delete(ar.fullTimers, r)
	}
}

// isLost says that a failure is the unit's, not the request's: its stream shows it fenced or gone.
func (ar *appRouter) isLost(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.lost
}

// hasFailed says that the rank is lost because its engine failed, not because its node is not heard or it was asked to end.
func (ar *appRouter) hasFailed(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.engineFailed
}

func (ar *appRouter) isDraining(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.draining
}

// progressOf counts what the rank's stream has told of its progress.
func (ar *appRouter) progressOf(r *rank) uint64 {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.progress
}

// trackAttempt registers an attempt, which may be given up while it has no first byte; false if the rank is lost already.
func (ar *appRouter) trackAttempt(r *rank, a *attempt) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if r.lost {
		return false
	}
	r.track(a)
	return true
}

func (ar *appRouter) markFirstByte(a *attempt) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	a.hasFirstByte = true
}

func (ar *appRouter) untrackAttempt(r *rank, a *attempt) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	r.untrack(a)
}

// totalSlots is how many requests the ready ranks may hold together.
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

// canServe says that some rank is ready.
func (ar *appRouter) canServe() bool { return ar.totalSlots() > 0 }

// setUnits takes over what the state says: the ready units with their epochs, how many are on their way, and why
// others are not.
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

// publishPendingUnits tells the Router how many units may still come up. Attached engines come when somebody else starts them: after a while
// without any, nobody waits for them.
func (ar *appRouter) publishPendingUnits() {
	ar.updateOutage()
	n := ar.pendingUnits + len(ar.unseenUnits) + len(ar.fencedUnits)
	if ar.isDown() {
		n = 0
	}
	ar.observe(routing.Event{Kind: routing.EvOnTheWay, N: n + len(ar.suspectedNodes)})
}

// updateOutage notes since when an application of attached engines has no ready rank; ended: it has one again.
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

// hasReadyRank says whether the Router has a ready rank.
func (ar *appRouter) hasReadyRank() bool {
	for _, r := range ar.ranks {
		if r.publishedReady {
			return true
		}
	}
	return false
}

// isDown says that the outage has lasted so long that requests are refused instead of waiting.
func (ar *appRouter) isDown() bool {
	return !ar.outageSince.IsZero() && time.Since(ar.outageSince) >= ar.in.timers.Outage
}

// endOutageWait refuses what waits for attached engines, unless one came back.
func (ar *appRouter) endOutageWait() {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.isDown() {
		ar.publishPendingUnits()
	}
}

// minModelLen is the smallest length of a request that the ready ranks tell, in tokens; 0: none tells.
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

// noRoomReason is why units of the application are not on their way, "" if there are none.
func (ar *appRouter) noRoomReason() string {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return ar.noRoom
}

// refreshUnseenUnits finds the units that are ready, and no rank of which the Router has been told of: the state is ahead of their streams.
// Requests wait for them.
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

// suspectNode takes the ranks of a node out for a moment, because a request has not reached it: others are picked, and if there are none,
// requests wait instead of failing one after the other until the node's stream says how it is.
func (ar *appRouter) suspectNode(node string) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if ar.closed || ar.suspectedNodes[node] != nil {
		return
	}
	ar.suspectedNodes[node] = time.AfterFunc(ar.in.timers.Doubt, func() { ar.clearSuspicion(node) })
	ar.publishPendingUnits() // before the ranks are out: whoever is asked meanwhile waits
	ar.publishNode(node)
}

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

func (ar *appRouter) publishNode(node string) {
	for _, r := range ar.ranks {
		if r.node == node {
			ar.publish(r)
		}
	}
}

// close stops the appRouter's timers. Requests that wait find no rank and leave.
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

// recordServiceTime notes how long a request held its place on a rank.
func (ar *appRouter) recordServiceTime(d time.Duration) {
	old := ar.meanService.Load()
	if old == 0 {
		ar.meanService.Store(int64(d))
		return
	}
	ar.meanService.Store(old + (int64(d)-old)/meanShare) // a lost update of a mean does no harm
}

// retryAfter is queue length × mean service time / slots, in whole seconds from 1 to 60.
func (ar *appRouter) retryAfter() int {
	n, _ := ar.queue.size()
	s := time.Duration(int64(n) * ar.meanService.Load() / int64(max(ar.totalSlots(), 1)))
	return int(min(max(s/time.Second, 1), maxRetryAfter))
}
