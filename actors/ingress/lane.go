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

// lane is what an ingress keeps of one application over its revisions: ranks, Router, queue, retry budget, estimates.
type lane struct {
	in     *Ingress
	name   string
	queue  fifo
	budget *budget
	spec   atomic.Pointer[served]         // nil until the table has seen the application
	router atomic.Pointer[routing.Router] // of requests. Nil as spec; replaced when the routing part of the file changes
	meter  atomic.Pointer[telemetry.App]

	reading     atomic.Pointer[reading] // nil as spec
	cachingOff  atomic.Bool             // every ready rank runs without prefix caching
	blockTokens atomic.Int32            // tokens per KV block of most ranks; 0: not known
	resyncs     atomic.Uint64
	recent      recent // decisions, for replays

	reservations reservations
	queueDemand  demand

	ratios openai.Estimators
	mean   atomic.Int64 // EWMA of how long a request holds its place, in ns

	unreadable uint64 // revision that could not be read; only rebuild touches it

	mu      sync.Mutex
	learner *routing.Router // that events go to: router, but for the moment before a new one is shown to requests
	ranks   map[routing.RankID]*rank
	epochs  map[string]uint64   // units that the state says are ready → epoch
	fenced  map[string]uint64   // of these, units that a stream showed fenced, ahead of the state → epoch
	unseen  map[string]struct{} // of these, units whose streams have not told the Router of a rank yet
	coming  int                 // units that the state says are on their way
	noRoom  string              // why other units are not, "" if there are none
	down    time.Time           // since when no attached engine is ready; zero: one is, or dpserve starts the engines itself
	outage  *time.Timer         // when requests wait no more for them; nil: never was
	event   routing.Event       // scratch: the Router does not keep it
	opens   []routing.Open      // scratch
	ended   bool                // no timer may start any more
	timers  map[*rank]*time.Timer
	doubts  map[string]*time.Timer // nodes whose data port was not reached a moment ago
	trips   int                    // of ranks, ever: the order in which they tripped
}

func newLane(in *Ingress, name string) *lane {
	l := &lane{in: in, name: name, ranks: map[routing.RankID]*rank{}, epochs: map[string]uint64{}, fenced: map[string]uint64{}, unseen: map[string]struct{}{}, timers: map[*rank]*time.Timer{}, doubts: map[string]*time.Timer{}}
	l.budget = newBudget(in.timers.BudgetWindow)
	l.queue.onChange = func(n int, tokens int64) {
		if m := l.meter.Load(); m != nil {
			m.Queue(n, tokens)
		}
	}
	return l
}

// deliver applies one record of a rank's stream. The parts of a snapshot share its number, and all that may come twice does no
// harm when it comes at once; what comes late is dropped, and so is what came before a jump: the rank is asked for a snapshot.
func (l *lane) deliver(rec *msg.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if rec.Kind == msg.RecSnapshot {
		l.snapshot(rec)
		return
	}
	r := l.ranks[rec.Rank]
	switch {
	case r == nil || !r.is(rec):
		return // of an incarnation that is over
	case rec.Kind == msg.RecGone:
		l.drop(r)
		return
	case rec.Kind == msg.RecSilent:
		r.silent = rec.Silent
		l.show(r)
		return
	case rec.Seq < r.seq:
		return
	case rec.Seq > r.seq+1:
		l.miss(r)
	}
	r.seq = rec.Seq
	l.apply(r, rec)
}

func (l *lane) apply(r *rank, rec *msg.Record) {
	switch rec.Kind {
	case msg.RecState:
		l.state(r, rec)
	case msg.RecStatus:
		l.status(r, rec)
	case msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		l.kv(r, rec)
	default:
		l.account(r, rec)
	}
}

// snapshot begins an incarnation, or begins a known one's account anew after a new subscription.
func (l *lane) snapshot(rec *msg.Record) {
	r := l.ranks[rec.Rank]
	if r != nil && (r.epoch > rec.Epoch || r.is(rec) && rec.Seq < r.seq) {
		return // a ghost: its successor serves. Or it comes too late
	}
	if r == nil || !r.is(rec) {
		fresh, err := newRank(rec, l.in.node)
		if err != nil {
			l.in.log.Error("rank cannot be used", slog.String("app", l.name), slog.String("unit", rec.Unit), slog.Any("err", err))
			return
		}
		if r != nil {
			r.lose()
			l.forgetFull(r)
			l.told(r)
			if r.epoch == fresh.epoch {
				delete(l.fenced, r.unit) // it came back in place
			}
		}
		fresh.local = fresh.local || l.in.remote == nil
		r = fresh
		l.ranks[rec.Rank] = r
	}
	r.accepting, r.busy, r.maxOngoing, r.seq, r.silent = rec.Snapshot.Accepting, false, rec.Snapshot.MaxOngoing, rec.Seq, false
	r.cachingOff, r.maxModelLen = rec.Snapshot.CachingOff, rec.Snapshot.MaxModelLen
	r.turn, r.offered = "", 0
	l.noteTrip(r, rec.Snapshot.Tripped)
	l.told(r)
	l.resize(r, rec.Snapshot.BlockSize, false)
	l.raise(r, rec.Seq, rec.Snapshot)
	l.show(r)
	l.hope()
}

// raise puts the rank and its account into the Router, without room until show says how much it has.
func (l *lane) raise(r *rank, seq uint64, s *msg.Snapshot) {
	l.opens = l.opens[:0]
	for _, o := range s.Open {
		l.opens = append(l.opens, routing.Open{ReqID: l.in.fold(o.Ingress, o.ReqID), Tokens: o.Tokens, Hit: o.Hit, Out: o.Out, Decoding: o.Decoding})
	}
	l.observe(routing.Event{
		Kind: routing.EvRankUp, Rank: r.id, Epoch: r.epoch, Incarnation: r.incarnation, Seq: seq, Local: r.local, Snapshot: l.opens,
		Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
	r.shownReady, r.shownMax, r.shownSilent, r.shownTripped = true, 0, false, -1
	if l.epochs[r.unit] == r.epoch {
		delete(l.unseen, r.unit)
	}
	l.judgeCaching()
}

// show tells the Router what has changed of a rank since it was told last.
func (l *lane) show(r *rank) {
	epoch, ok := l.epochs[r.unit]
	ready, maxOngoing := r.want(ok && epoch == r.epoch && l.doubts[r.node] == nil)
	if ready != r.shownReady {
		r.shownReady = ready
		defer l.judgeCaching()
		l.observe(routing.Event{Kind: routing.EvAccepting, Rank: r.id, Incarnation: r.incarnation, Accepting: ready})
		if l.watchOutage() {
			l.hope()
		}
	}
	if r.tripped != r.shownTripped {
		r.shownTripped = r.tripped
		l.observe(routing.Event{Kind: routing.EvTripped, Rank: r.id, Incarnation: r.incarnation, N: r.tripped})
	}
	if r.silent != r.shownSilent {
		r.shownSilent = r.silent
		l.observe(routing.Event{Kind: routing.EvSilent, Rank: r.id, Incarnation: r.incarnation, Silent: r.silent})
	}
	if maxOngoing != r.shownMax {
		r.shownMax = maxOngoing
		l.observe(routing.Event{Kind: routing.EvMaxOngoing, Rank: r.id, Incarnation: r.incarnation, N: maxOngoing})
	}
}

// noteTrip notes whether a rank is tripped, and since which trip.
func (l *lane) noteTrip(r *rank, tripped bool) {
	switch {
	case !tripped:
		r.tripped = 0
	case r.tripped == 0:
		l.trips++
		r.tripped = l.trips
	}
}

func (l *lane) state(r *rank, rec *msg.Record) {
	r.accepting, r.busy = rec.Accepting, !rec.Accepting && rec.Cause == causeBusy
	r.draining = rec.Draining
	l.noteTrip(r, rec.Tripped)
	if r.turn = rec.Turn; r.turn == l.in.node {
		r.offered++
	}
	l.forgetFull(r)
	if r.turn != "" && r.offered == 0 {
		l.fill(r)
	}
	if rec.Fenced && rec.Cause != causeDrained.String() && l.epochs[r.unit] == r.epoch {
		l.fenced[r.unit] = r.epoch // it will be back: nobody is refused before the state says so too
		l.hope()
	}
	l.show(r) // out of routing first
	if rec.Fenced {
		l.fence(r, !r.draining)
	}
	if rec.Fenced && r.draining && !r.target.Owned {
		r.cut()
	}
}

// fence gives up what has not begun on a fenced rank; failed: because of its engine. A lockstep unit fails as one: unless this is the end of a drain, its other
// ranks, wherever they run, are out with the first of them, and stay so until they come back as another incarnation.
func (l *lane) fence(r *rank, failed bool) {
	lost := []*rank{r}
	for _, s := range l.ranks {
		if !r.draining && s != r && !s.lost && s.unit == r.unit && s.epoch == r.epoch && l.lockstep() {
			s.accepting, s.busy, s.tripped = false, false, 0
			l.forgetFull(s)
			l.show(s)
			lost = append(lost, s)
		}
	}
	for _, s := range lost { // when none of them is picked any more
		s.failed = s.failed || failed
		s.lose()
	}
}

func (l *lane) lockstep() bool {
	spec := l.spec.Load()
	return spec != nil && spec.app.DataParallel.Coupling == app.Lockstep
}

func (l *lane) account(r *rank, rec *msg.Record) {
	kind, assumed := routing.EvAdmitted, false
	switch rec.Kind {
	case msg.RecFirstToken:
		if kind, assumed = routing.EvFirstToken, rec.Cause == msg.CausePredicted; !assumed {
			r.steps++
		}
	case msg.RecProgress:
		kind, r.steps = routing.EvProgress, r.steps+1
	case msg.RecDone:
		kind = routing.EvFinished
	default:
	}
	e := routing.Event{
		Kind: kind, Rank: r.id, ReqID: l.in.fold(rec.Ingress, rec.ReqID), Seq: rec.Seq, Incarnation: rec.Incarnation, Tokens: rec.Tokens, Hit: rec.Hit, Out: rec.Out,
		Session: rec.Session, Assumed: assumed, At: rec.At,
	}
	if rec.Kind == msg.RecDone {
		l.finished(r, e, rec.Turn)
		return
	}
	l.observe(e)
	if rec.Kind == msg.RecAdmitted && rec.Ingress == l.in.node {
		l.tookTurn(r)
	}
}

// drop takes a rank out for good. If it was not asked to end, it will be back, on this node or another: nobody is refused before the
// state says so too.
func (l *lane) drop(r *rank) {
	delete(l.ranks, r.id)
	if !r.draining && l.epochs[r.unit] == r.epoch {
		l.fenced[r.unit] = r.epoch
		l.hope()
		l.fence(r, false) // its node may be silent, or have ended: that says nothing of the engine
	}
	l.forgetFull(r)
	l.told(r)
	l.judgeCaching()
	l.observe(routing.Event{Kind: routing.EvRankDown, Rank: r.id, Incarnation: r.incarnation})
	l.watchOutage()
	r.lose()
}

// succeed puts a new Router in the place of the old one. It knows the ranks at once, and what they have in hand with their next
// snapshots; requests see it when it knows the ranks.
func (l *lane) succeed(router *routing.Router) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.learner = router
	l.configure()
	for _, r := range l.ranks {
		l.raise(r, r.seq, &msg.Snapshot{BlockSize: r.blockSize})
		l.show(r)
	}
	l.survey()
	l.hope()
	l.router.Store(router)
	l.queue.room()
}

// observe hands an event to the Router, which may wake the queue. Call with mu held.
func (l *lane) observe(e routing.Event) {
	if l.learner != nil {
		l.event = e
		l.event.Now = l.in.clock()
		l.learner.Observe(&l.event)
	}
}

// find gives the live incarnation of a rank; nil if it has gone since it was picked.
func (l *lane) find(id routing.RankID) *rank {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ranks[id]
}

// marked says that the Router's picture of a rank is wrong: it said full as of its record seq. It counts as full until its
// stream tells of a request that ended, at most for a while, so that a wrong "full" never blocks either.
func (l *lane) marked(r *rank, seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || r.seq > seq || r.full || r.lost {
		return // the stream is ahead of the refusal: the picture is newer than the answer
	}
	r.offered = 0
	l.fill(r)
	l.show(r)
}

func (l *lane) unmark(r *rank) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timers[r] == nil {
		return
	}
	l.forgetFull(r)
	if !r.lost {
		l.show(r)
	}
}

func (l *lane) forgetFull(r *rank) {
	r.full = false
	if t := l.timers[r]; t != nil {
		t.Stop()
		delete(l.timers, r)
	}
}

// isLost says that a failure is the unit's, not the request's: its stream shows it fenced or gone.
func (l *lane) isLost(r *rank) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return r.lost
}

// hasFailed says that the rank is lost because its engine failed, not because its node is not heard or it was asked to end.
func (l *lane) hasFailed(r *rank) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return r.failed
}

func (l *lane) isDraining(r *rank) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return r.draining
}

// steps counts what the rank's stream has told of its progress.
func (l *lane) steps(r *rank) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return r.steps
}

// begin registers an attempt, which may be given up while it has no first byte; false if the rank is lost already.
func (l *lane) begin(r *rank, a *attempt) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.lost {
		return false
	}
	r.track(a)
	return true
}

func (l *lane) begun(a *attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.begun = true
}

func (l *lane) over(r *rank, a *attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.untrack(a)
}

// slots is how many requests the ready ranks may hold together.
func (l *lane) slots() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, r := range l.ranks {
		if r.shownReady {
			n += r.maxOngoing
		}
	}
	return n
}

// canServe says that some rank is ready.
func (l *lane) canServe() bool { return l.slots() > 0 }

// units takes over what the state says: the ready units with their epochs, how many are on their way, and why
// others are not.
func (l *lane) units(ready map[string]uint64, onTheWay int, noRoom string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.epochs = ready
	maps.DeleteFunc(l.fenced, func(unit string, epoch uint64) bool { return ready[unit] != epoch })
	for _, r := range l.ranks {
		l.show(r)
	}
	l.coming, l.noRoom = onTheWay, noRoom
	l.survey()
	l.hope()
}

// hope tells the Router how many units may still come up. Attached engines come when somebody else starts them: after a while
// without any, nobody waits for them.
func (l *lane) hope() {
	l.watchOutage()
	n := l.coming + len(l.unseen) + len(l.fenced)
	if l.isDown() {
		n = 0
	}
	l.observe(routing.Event{Kind: routing.EvOnTheWay, N: n + len(l.doubts)})
}

// watchOutage notes since when an application of attached engines has no ready rank; ended: it has one again.
func (l *lane) watchOutage() (ended bool) {
	spec := l.spec.Load()
	if l.ended || spec == nil || spec.app.Engine.Kind != app.KindAttach || l.hasReady() {
		ended = !l.down.IsZero()
		l.down = time.Time{}
		if l.outage != nil {
			l.outage.Stop()
		}
		return ended
	}
	if l.down.IsZero() {
		l.down = time.Now()
		l.outage = time.AfterFunc(l.in.timers.Outage, l.endWaiting)
	}
	return false
}

// hasReady says whether the Router has a ready rank.
func (l *lane) hasReady() bool {
	for _, r := range l.ranks {
		if r.shownReady {
			return true
		}
	}
	return false
}

// isDown says that the outage has lasted so long that requests are refused instead of waiting.
func (l *lane) isDown() bool { return !l.down.IsZero() && time.Since(l.down) >= l.in.timers.Outage }

// endWaiting refuses what waits for attached engines, unless one came back.
func (l *lane) endWaiting() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isDown() {
		l.hope()
	}
}

// maxModelLen is the smallest length of a request that the ready ranks tell, in tokens; 0: none tells.
func (l *lane) maxModelLen() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	least := 0
	for _, r := range l.ranks {
		if n := r.maxModelLen; r.shownReady && n > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// whyNoRoom is why units of the application are not on their way, "" if there are none.
func (l *lane) whyNoRoom() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.noRoom
}

// survey finds the units that are ready, and no rank of which the Router has been told of: the state is ahead of their streams.
// Requests wait for them.
func (l *lane) survey() {
	clear(l.unseen)
	for unit := range l.epochs {
		if _, fenced := l.fenced[unit]; !fenced {
			l.unseen[unit] = struct{}{}
		}
	}
	for _, r := range l.ranks {
		if l.epochs[r.unit] == r.epoch {
			delete(l.unseen, r.unit)
		}
	}
}

// doubt takes the ranks of a node out for a moment, because a request has not reached it: others are picked, and if there are none,
// requests wait instead of failing one after the other until the node's stream says how it is.
func (l *lane) doubt(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.doubts[node] != nil {
		return
	}
	l.doubts[node] = time.AfterFunc(l.in.timers.Doubt, func() { l.trust(node) })
	l.hope() // before the ranks are out: whoever is asked meanwhile waits
	l.showNode(node)
}

func (l *lane) trust(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.doubts[node] == nil || l.ended {
		return
	}
	delete(l.doubts, node)
	l.showNode(node)
	l.hope()
}

func (l *lane) showNode(node string) {
	for _, r := range l.ranks {
		if r.node == node {
			l.show(r)
		}
	}
}

// end stops the lane's timers. Requests that wait find no rank and leave.
func (l *lane) end() {
	l.mu.Lock()
	l.ended = true
	for r := range l.timers {
		l.forgetFull(r)
	}
	for _, r := range l.ranks {
		l.told(r)
	}
	for node, t := range l.doubts {
		t.Stop()
		delete(l.doubts, node)
	}
	l.mu.Unlock()
	l.endDemand()
	l.reservations.end()
	if c := l.reads().cache; c != nil {
		c.close()
	}
	l.units(nil, 0, "")
	l.queue.room()
}

// meanShare is the weight of the newest request in the mean service time: 1/16.
const meanShare = 16

// took notes how long a request held its place on a rank.
func (l *lane) took(d time.Duration) {
	old := l.mean.Load()
	if old == 0 {
		l.mean.Store(int64(d))
		return
	}
	l.mean.Store(old + (int64(d)-old)/meanShare) // a lost update of a mean does no harm
}

// retryAfter is queue length × mean service time / slots, in whole seconds from 1 to 60.
func (l *lane) retryAfter() int {
	n, _ := l.queue.size()
	s := time.Duration(int64(n) * l.mean.Load() / int64(max(l.slots(), 1)))
	return int(min(max(s/time.Second, 1), maxRetryAfter))
}
