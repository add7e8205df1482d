package ingress

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
)

// appRouter is the state that an ingress keeps for one application across its revisions: ranks, Router,
// queue, retry budget and estimates.
type appRouter struct {
	in   *Ingress
	name string
	appQueues
	retryBudget *budget
	revision    atomic.Pointer[appRevision] // nil until the route table has the application
	// for requests; nil as revision; replaced when the file's routing part changes
	router  atomic.Pointer[routing.Router]
	metrics atomic.Pointer[telemetry.App]

	policyInputs atomic.Pointer[policyInputs] // nil as revision
	cachingOff   atomic.Bool                  // every ready rank runs without prefix caching
	adapters     atomic.Pointer[adapterRanks] // of the engines; nil before any has one
	blockTokens  atomic.Int32                 // tokens per KV block of most ranks; 0: unknown
	decisions    decisionLog                  // for replays

	reservations routerapi.Reservations
	estimates    estimates

	unreadableRevision uint64 // revision that could not be read; only rebuild uses it

	mu sync.Mutex // guards what follows
	rankTable
	unitTable
	outage
}

// rankTable is what the ranks' streams say, as the Router gets it.
type rankTable struct {
	// receives the events; differs from router while replaceRouter prepares a new one
	eventRouter    *routing.Router
	ranks          map[routing.RankID]*rank
	fullTimers     map[*rank]*time.Timer  // end the time in which a rank counts as full
	suspectedNodes map[string]*time.Timer // nodes whose data port a request could not reach
	ejectionCount  int                    // ejections of ranks since the start: the order of the ejections
	closed         bool                   // no timer may start any more
	uncounted      uncountedWaiters
	eventScratch   routing.Event  // reused: the Router does not keep it
	openScratch    []routing.Open // reused
}

// unitTable is what the replicated state says of the units, corrected by the streams where these are ahead.
type unitTable struct {
	readyUnits   map[string]uint64   // units that are ready in the replicated state → epoch
	fencedUnits  map[string]uint64   // of these, units that a stream showed as fenced → epoch
	unseenUnits  map[string]struct{} // of these, units of which no rank was heard yet
	olderUnits   map[string]bool     // units that a roll-out replaces next
	pendingUnits int                 // units that may still become ready, by the state
	noRoom       string              // why other units cannot be placed; "" if there are none
	coming       comings
}

// isReady reports whether the replicated state has the rank's unit as ready, at the rank's epoch.
func (t *unitTable) isReady(r *rank) bool {
	epoch, ok := t.readyUnits[r.Unit]
	return ok && epoch == r.Epoch
}

// comingUnits is the number of units that may still become ready.
func (t *unitTable) comingUnits() int {
	return t.pendingUnits + len(t.unseenUnits) + len(t.fencedUnits)
}

// outage is a time in which an application of attached engines has no ready rank.
type outage struct {
	outageSince time.Time   // zero: no outage
	outageTimer *time.Timer // ends the wait for attached engines; nil: never started
}

// estimates are learnt from requests that have ended. Safe for concurrent use.
type estimates struct {
	tokens  openai.Estimators
	answers goodAnswers
}

func newAppRouter(in *Ingress, name string) *appRouter {
	ar := &appRouter{
		in: in, name: name,
		rankTable: rankTable{
			ranks:      map[routing.RankID]*rank{},
			fullTimers: map[*rank]*time.Timer{}, suspectedNodes: map[string]*time.Timer{},
		},
		unitTable: unitTable{
			readyUnits: map[string]uint64{}, fencedUnits: map[string]uint64{},
			unseenUnits: map[string]struct{}{}, coming: comings{units: map[string]comingUnit{}},
		},
	}
	ar.retryBudget, ar.demand.ar = newBudget(in.timers.BudgetWindow), ar
	ar.groups.init(ar)
	ar.queue.onChange = func(n int, tokens int64) {
		if m := ar.metrics.Load(); m != nil {
			m.Queue(n, tokens)
		}
	}
	return ar
}

// setRevision makes spec the present revision.
func (ar *appRouter) setRevision(spec *appRevision) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	ar.revision.Store(spec)
	ar.forgetRemovedRanks()
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

// findRef returns the incarnation that ref names, nil if it serves no longer.
func (ar *appRouter) findRef(ref routing.RankRef) *rank {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if r := ar.ranks[ref.ID]; r != nil && !r.lost && r.Incarnation == ref.Incarnation {
		return r
	}
	return nil
}

// liveRefs appends the incarnations that are ready by the state and by their streams, full or not.
func (ar *appRouter) liveRefs(dst []routing.RankRef) []routing.RankRef {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for _, r := range ar.ranks {
		if !r.lost && r.Incarnation != 0 && ar.isReady(r) {
			dst = append(dst, r.ref())
		}
	}
	return dst
}

// factsOf is what the stream of an incarnation says of its engine.
func (ar *appRouter) factsOf(ref routing.RankRef) engineFacts {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if r := ar.ranks[ref.ID]; r != nil && r.Incarnation == ref.Incarnation {
		return r.engineFacts
	}
	return engineFacts{}
}

// readyRank returns the rank if it is ready, full or not; nil otherwise.
func (ar *appRouter) readyRank(id routing.RankID) *rank {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if r := ar.ranks[id]; r != nil && r.publishedReady {
		return r
	}
	return nil
}

// hasRank reports whether the application has the rank: it is wanted, or it still runs.
func (ar *appRouter) hasRank(id routing.RankID) bool {
	return ar.findRank(id) != nil || ar.revision.Load().wants(id)
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

// lossOf reports whether the rank's stream shows it as fenced or gone, and whether that is because its engine
// failed, and not because its node is unreachable or the rank was drained.
func (ar *appRouter) lossOf(r *rank) (isLost, engineFailed bool) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.lost, r.engineFailed
}

// appendExcluded appends the ranks among excluded that still serve. units: of a lockstep application, all
// ranks of a unit that is excluded.
func (ar *appRouter) appendExcluded(dst []routing.RankID, excluded []dispatch.Excluded, units bool,
) []routing.RankID {
	if len(excluded) == 0 {
		return dst
	}
	units = units && ar.isLockstep()
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for _, x := range excluded {
		if r := ar.ranks[x.Rank.ID]; r != nil && r.Incarnation == x.Rank.Incarnation {
			dst = append(dst, r.ID)
		}
		for _, r := range ar.ranks {
			if units && x.Unit != 0 && r.unitKey == x.Unit && r.ref() != x.Rank {
				dst = append(dst, r.ID)
			}
		}
	}
	return dst
}

// hasDoubtfulUnit reports whether a rank of an excluded unit is ready, as far as its stream says.
func (ar *appRouter) hasDoubtfulUnit(excluded []dispatch.Excluded) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	for _, r := range ar.ranks {
		if r.publishedReady && slices.ContainsFunc(excluded, func(x dispatch.Excluded) bool {
			return x.Unit != 0 && x.Unit == r.unitKey
		}) {
			return true
		}
	}
	return false
}

// isDraining reports whether the rank takes no new requests and lets its streams end.
func (ar *appRouter) isDraining(r *rank) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return r.draining
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
// it. It returns false if the loss was faster.
func (ar *appRouter) markFirstByte(a *attempt) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	a.hasFirstByte = a.hasFirstByte || !a.rank.lost
	return a.hasFirstByte
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

// setUnits stores what the replicated state says of the units: the ready ones with their epochs, those that
// may still become ready, and why others have no room.
func (ar *appRouter) setUnits(ready map[string]uint64, coming map[string]*state.Unit, noRoom string) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	before := ar.comingUnits()
	ar.readyUnits, ar.pendingUnits, ar.noRoom = ready, len(coming), noRoom
	maps.DeleteFunc(ar.fencedUnits, func(unit string, epoch uint64) bool { return ready[unit] != epoch })
	ar.followUnits(coming, time.Now())
	ar.refreshUnseenUnits()
	if ar.comingUnits() > before {
		ar.publishPendingUnits() // before the ranks leave routing, so that requests in between wait
	}
	for _, r := range ar.ranks {
		ar.publish(r)
	}
	ar.publishPendingUnits() // after the ranks of units that are ready now have come
	if !ar.hasReadyRank() {
		ar.queue.room() // who waits looks again: the next start may take too long
		ar.groups.room()
	}
}

// publishPendingUnits tells the Router how many units may still become ready. Somebody outside dpserve
// restarts attached engines: after Timers.Outage without a ready one, requests no longer wait for them.
func (ar *appRouter) publishPendingUnits() {
	ar.updateOutage()
	n := ar.comingUnits()
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

// whyNotReady continues the sentence that no rank is ready with what is known of the reasons.
func (ar *appRouter) whyNotReady() string {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	text, away := "", ar.awayRanks()
	for _, why := range slices.Sorted(maps.Keys(away)) {
		text += fmt.Sprintf(", %d say that their engine is %s", away[why], why)
	}
	text += ar.coming.text(time.Now())
	if ar.noRoom != "" {
		text += ", and there is no room to start one: " + ar.noRoom
	}
	return text
}

// refreshUnseenUnits finds the ready units of which no rank was heard yet: the replicated state is ahead of
// their streams, or their node has started again and is taking its engines over. Requests wait for these
// units.
func (ar *appRouter) refreshUnseenUnits() {
	clear(ar.unseenUnits)
	for unit := range ar.readyUnits {
		if _, fenced := ar.fencedUnits[unit]; !fenced {
			ar.unseenUnits[unit] = struct{}{}
		}
	}
	for _, r := range ar.ranks {
		ar.noteHeard(r)
	}
}

// noteHeard ends the wait for a ready unit one of whose ranks was heard.
func (ar *appRouter) noteHeard(r *rank) {
	if r.heard && ar.isReady(r) {
		delete(ar.unseenUnits, r.Unit)
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
		if r.Node == node {
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
	for node, t := range ar.suspectedNodes {
		t.Stop()
		delete(ar.suspectedNodes, node)
	}
	ar.mu.Unlock()
	ar.groups.close()
	ar.demand.end()
	ar.reservations.End()
	if c := ar.inputs().cache; c != nil {
		c.close()
	}
	ar.setUnits(nil, nil, "")
	ar.queue.room()
}

// retryAfter is queue length × mean time of an answer / slots, in whole seconds from 1 to maxRetryAfter.
func (ar *appRouter) retryAfter() int {
	n, _ := ar.queue.size()
	s := time.Duration(n) * ar.router.Load().AnswerTime() / time.Duration(max(ar.totalSlots(), 1))
	return int(min(max(s/time.Second, 1), maxRetryAfter))
}

// describeRequest writes p into q, with what the ranks' caches hold of it now. The caller sets q's other
// fields (ID, Tried, Override). q shares p's memory and is valid until p is filled or described again.
func (ar *appRouter) describeRequest(q *routing.Request, p *prompt) {
	r := ar.inputs()
	q.Now = ar.in.clock()
	q.Tokens, q.Estimated = p.tokens, p.estimated
	q.Direct, q.HasDirect, q.Force = p.direct, p.hasDirect, p.hasDirect
	q.Released = p.isReleased
	q.Priority, q.TTFTms, q.TPOTms = p.priority, p.ttftMs, p.tpotMs
	q.Session, q.Adapter, q.Text = p.session, p.adapter, p.text
	q.Only = ar.ranksWith(p.adapter)
	q.Blocks, q.BlockSize, q.Hits = nil, 0, nil
	if len(p.blocks) > 0 {
		q.Blocks, q.BlockSize = p.blocks, max(p.spanTokens(1), 1)
	}
	if r.cache != nil && !ar.cachingOff.Load() {
		p.lookUp(r, ar.in.clock())
		q.Hits = p.hits
	}
}

// inputs is what the application's policy reads; nothing before the route table has the application.
func (ar *appRouter) inputs() *policyInputs {
	if r := ar.policyInputs.Load(); r != nil {
		return r
	}
	return noPolicyInputs
}

// anyReadyRank returns a ready rank that is not excluded, of this node if there is one; nil if there is none.
func (ar *appRouter) anyReadyRank(but []dispatch.Excluded) *rank {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	var far *rank
	for _, r := range ar.ranks { // map order is random, so the requests are spread
		switch {
		case !r.publishedReady,
			slices.ContainsFunc(but, func(x dispatch.Excluded) bool { return x.Rank == r.ref() }):
		case r.local:
			return r
		default:
			far = r
		}
	}
	return far
}

// modelID is the application's own model id, whatever name the client used.
func (ar *appRouter) modelID() string {
	if spec := ar.revision.Load(); spec != nil {
		return spec.app.Model.ID
	}
	return ""
}
