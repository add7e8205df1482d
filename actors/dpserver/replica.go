package dpserver

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// phase is the DPServer's own state; the phase of its unit belongs to the node.
type phase uint8

const (
	phaseStarting phase = iota
	phaseOpen
	phaseDraining
	phaseFenced
	phaseEnded
)

var phaseRefusals = [...]msg.Refusal{
	phaseStarting: msg.NotReady, phaseOpen: msg.Granted,
	phaseDraining: msg.Draining, phaseFenced: msg.Fenced, phaseEnded: msg.Gone,
}

// Messages that the Server, the Hub and the timers send to the replica.
type (
	registerRequest  struct{}
	subscribeRequest struct{ sub *msg.Subscription }
	// snapshotRequest: the recorder sends the KV block sets to sink when done is closed
	snapshotRequest struct {
		sink msg.Sink
		done chan struct{}
	}
	unsubscribeRequest struct{ sub *msg.Subscription }
	readyRequest       struct {
		facts msg.Facts
		done  chan struct{} // closed when the actor has applied it
	}
	fenceRequest struct {
		cause string
		done  chan struct{} // closed when every sink has the record
	}
	drainRequest struct{ cause string }

	controlledRequest struct{ effect openai.Effect }
	stopRequest       struct{}
	lapseTimer        struct{} // an orphaned ticket may be due
	pruneRequest      struct{} // many orphans wait, and most of their tickets have ended
	busyTimer         struct{ round uint64 }
	offerTimer        struct{} // room that is held for an ingress may be free again
)

// replica is the actor: one per start. Its methods never block.
type replica struct {
	*Server
	account      account
	rec          msg.Record // reused: a record is valid only during Deliver
	monitor      healthMonitor
	ejection     ejection
	busy         busy
	away         away
	shares       fairShare
	offerTimerAt time.Time // of the next offerTimer; zero: no timer runs

	prefills prefills

	app    *app.Application // the application's current file, for routing
	kv     replicaKV
	scrape scrape
}

func newReplica(s *Server) *replica {
	r := &replica{Server: s, account: newAccount(), app: s.currentApplication()}
	r.kv.r, r.prefills.r, r.ejection.r = r, r, r
	if s.state.isRegistered { // after a panic: the account is lost, and a snapshot tells every sink
		s.log.Error("the account of a rank was lost, it begins anew",
			slog.Uint64("incarnation", s.state.incarnation))
		r.stream.add(r.node.Hub.AddRank(r.Server)...) // its message may be the one that was lost
		r.kv.beginStream(true)
		r.updateStats()
		r.startMonitor()
		r.closeDrainedIfIdle()
	}
	return r
}

// Receive implements inbox.Receiver: it handles the messages of requests, and passes all others on.
func (r *replica) Receive(m any) {
	switch m := m.(type) {
	case *msg.Admit:
		r.admit(m)
	case msg.Admit:
		r.admit(&m)
	case *msg.FirstToken:
		r.recordFirstToken(m)
	case *msg.Progress:
		r.recordProgress(m)
	case *msg.Done:
		r.endTicket(m)
	case *msg.Pardon:
		r.ejection.pardon()
	case *msg.Demand:
		r.applyDemand(m)
	case msg.Demand:
		r.applyDemand(&m)
	case lapseTimer:
		r.lapseTickets()
	case pruneRequest:
		r.orphans.prune(r.account.tickets)
	case prefillTimer:
		r.prefills.onTimer()
	case promptShown:
		r.prefills.onPromptShown(m)
	default:
		r.receiveControl(m)
	}
}

// receiveControl handles the messages of the node, the Hub and the rank's own subscriptions.
func (r *replica) receiveControl(m any) {
	switch m := m.(type) {
	case registerRequest:
		r.state.isRegistered = true
		r.joinHub()
	case subscribeRequest:
		r.sendSnapshot(m.sub, nil)
	case msg.List:
		r.sendSnapshot(m.Sink, m.Done)
	case snapshotRequest:
		defer close(m.done) // also after a panic
		r.stream.sendSnapshot(m.sink, r.snapshot(), true)
	case recorderRestarted:
		r.kv.beginStream(true)
	case unsubscribeRequest:
		r.stream.remove(m.sub)
	case readyRequest:
		r.applyReady(m)
		close(m.done)
	case fenceRequest:
		r.fence(m.cause)
		close(m.done)
	case drainRequest:
		r.drain(m.cause)
	case controlledRequest:
		r.onControlled(m.effect)
	case stopRequest:
		r.endStream()
	case busyTimer:
		if m.round == r.busy.round {
			r.clearBusy()
		}
	case offerTimer:
		r.onOfferTimer()
	case subscriptionResult:
		r.kv.onSubscriptionResult(m)
	case eventsApplied:
		r.kv.checkEventHealth()
	case scrapeTimer:
		r.onScrapeTick(m)
	case scrapeResult:
		r.onScraped(m)
	default:
		r.receiveMonitor(m)
	}
}

func (r *replica) joinHub() {
	for _, sub := range r.node.Hub.AddRank(r.Server) {
		r.sendSnapshot(sub, nil)
	}
	r.updateStats()
}

// applyReady opens the rank for an engine. The first engine published its events to the present subscription.
// Any later one is another process, or one that the rank did not follow meanwhile, so the subscription starts
// again.
func (r *replica) applyReady(m readyRequest) {
	if r.state.phase == phaseEnded || r.state.phase == phaseDraining {
		return
	}
	anew := r.state.incarnation != 0
	if r.spec.Events == nil {
		anew = anew || m.facts.Events != nil
		r.state.eventSource = m.facts.Events
	}
	r.startIncarnation(m.facts, anew)
	r.log.Debug("rank is ready", slog.String("incarnation", formatIncarnation(m.facts.Incarnation)),
		slog.String("url", r.spec.Target.URL))
}

// startIncarnation begins an incarnation with an empty account: the requests of the one before ended with its
// engine. newEvents says that the subscription to KV events begins again too.
func (r *replica) startIncarnation(f msg.Facts, anew bool) {
	r.account.reset()
	r.prefills.stop()
	stopTimer(r.ejection.timer)
	r.ejection, r.busy, r.shares, r.away = ejection{r: r}, busy{round: r.busy.round + 1}, fairShare{}, away{}
	r.state.phase, r.state.incarnation, r.state.facts = phaseOpen, f.Incarnation, f
	r.state.lastTicket = max(r.state.lastTicket, f.Base)
	if anew {
		r.kv.restartSubscription()
	}
	r.startMonitor()
	r.kv.beginStream(false)
	r.updateStats()
	r.refreshRouting()
}

// restartIncarnation begins a new incarnation of an attached engine whose process was replaced although its
// health check never failed. The epoch stays, because only this rank serves it. For an engine that dpserve
// started, the node decides.
func (r *replica) restartIncarnation(why string, anew bool) {
	if r.spec.Target.Owned || r.state.phase != phaseOpen {
		return
	}
	f := r.state.facts
	f.Incarnation = drawIncarnation()
	r.startIncarnation(f, anew)
	r.log.Warn("engine was restarted in place", slog.String("cause", why),
		slog.String("incarnation", formatIncarnation(f.Incarnation)))
}

// causeDrained is the cause of the fence that ends a requested stop: the requests that still run are cut.
const causeDrained = "drained"

// fence closes the rank. Running requests stay on the account until their Done, because the ingress ends
// them.
func (r *replica) fence(cause string) {
	if r.state.phase == phaseFenced || r.state.phase == phaseEnded {
		return
	}
	r.state.phase, r.shares = phaseFenced, fairShare{}
	r.monitor.reportedBack, r.monitor.probeSent = false, time.Time{} // of the engine before the fence
	r.publishState(cause)
	r.log.Debug("rank is fenced", slog.String("cause", cause), slog.Int("in_flight", r.account.openCount()))
	r.closeDrainedIfIdle()
}

// fenceAndReport fences the rank and reports the loss to the node, which did not ask for the fence.
func (r *replica) fenceAndReport(cause string) {
	if r.state.phase != phaseOpen && r.state.phase != phaseDraining {
		return
	}
	r.fence(cause)
	r.reportToNode(msg.ReplicaLost, cause)
}

func (r *replica) drain(cause string) {
	if r.state.phase == phaseEnded {
		return
	}
	if r.state.phase != phaseFenced {
		r.state.phase, r.shares = phaseDraining, fairShare{}
		r.publishState(cause)
	}
	r.closeDrainedIfIdle()
}

// closeDrainedIfIdle closes Drained when a rank that drains, or that dpserve has fenced, has no open
// requests.
func (r *replica) closeDrainedIfIdle() {
	if r.account.openCount() == 0 && (r.state.phase == phaseDraining || r.state.phase == phaseFenced &&
		r.spec.Target.Owned) || r.state.phase == phaseEnded {
		r.drainOnce.Do(func() { close(r.drained) })
	}
}

// endStream ends the stream with RecGone, and the actor.
func (r *replica) endStream() {
	if r.state.phase == phaseEnded {
		return
	}
	r.state.phase = phaseEnded
	r.node.Hub.Remove(r.Server)
	r.account.reset()
	r.prefills.stop()
	stopTimer(r.monitor.timer)
	stopTimer(r.ejection.timer)
	stopTimer(r.scrape.timer)
	r.stream.end()
	r.closeDrainedIfIdle()
	r.updateStats()
	r.box.Halt()
}

func (r *replica) isAccepting() bool {
	return r.state.phase == phaseOpen && !r.ejection.isEjected && !r.refusesAll()
}

// refusesAll says whether the rank takes no request although it may have room.
func (r *replica) refusesAll() bool { return r.busy.on || r.monitor.holdsBack || r.away.reason() != "" }

// isEjected says whether the rank is open and its last answers failed.
func (r *replica) isEjected() bool { return r.state.phase == phaseOpen && r.ejection.isEjected }

// publishState tells the sinks whether the rank accepts requests, and why not.
func (r *replica) publishState(cause string) {
	isFenced := r.state.phase == phaseFenced
	if why := r.away.reason(); why != "" && r.state.phase == phaseOpen {
		cause = why // the main reason, whatever else happens meanwhile
	}
	r.stream.emit(&msg.Record{
		Kind: msg.RecState, Cause: cause, OfferedTo: r.nextOffer(),
		RankState: msg.RankState{
			Accepting: r.isAccepting(), Ejected: r.isEjected(), Fenced: isFenced,
			Draining: r.state.phase == phaseDraining || isFenced && cause == causeDrained,
		},
	})
	r.updateStats()
}

// sendSnapshot sends one sink the whole account, and closes done, if there is one. If the stream has KV
// block sets, the recorder asks for the account, and sends the block sets behind it.
func (r *replica) sendSnapshot(sink msg.Sink, done chan struct{}) {
	r.scrape.published = msg.Status{} // the sink gets the next report even if its values are the same
	if !r.stream.sendSnapshot(sink, r.snapshot(), false) {
		r.recorder.box.Send(setsRequest{sink, done})
	} else if done != nil {
		close(done)
	}
}

// snapshot is the whole account, as of the last record.
func (r *replica) snapshot() *msg.Record {
	f := &r.state.facts
	state, cause := msg.RankState{Accepting: r.isAccepting()}, ""
	if r.state.phase == phaseOpen {
		cause = r.away.reason()
	}
	return &msg.Record{Kind: msg.RecSnapshot, RankState: state, Cause: cause, Snapshot: &msg.Snapshot{
		Accepting: r.isAccepting(), Ejected: r.isEjected(), MaxOngoing: f.MaxOngoing,
		Capacity: r.kv.cacheCapacity(), BlockSize: r.kv.knownBlockSize(), CachingOff: f.CachingOff,
		MaxModelLen: f.MaxModelLen, Node: r.spec.Node, Target: r.spec.Target, Mailbox: r.box,
		Adapters: f.Adapters,
		Open:     r.account.listRequests(),
	}}
}

func (r *replica) updateStats() {
	r.stats.setOpen(&r.account)
	r.stats.setState(r.state.facts.MaxOngoing, r.state.incarnation, r.isEjected(), r.away.reason(),
		r.state.facts.Adapters)
	r.kv.updateKVStats()
}

// admit grants a ticket or refuses with a reason. m belongs to the sender again when its reply is sent.
func (r *replica) admit(m *msg.Admit) {
	if refusal := r.checkAdmission(m); refusal != msg.Granted {
		if refusal == msg.Full {
			r.shares.addWait(time.Now(), m.Ingress, r.requestWeight(m))
		}
		r.sendReply(m.Reply,
			&msg.AdmitReply{Refusal: refusal, Epoch: r.spec.Epoch, Seq: r.stream.seq.Load()})
		return
	}
	id := r.state.lastTicket + 1
	req := msg.OpenRequest{ReqID: m.ReqID, Ingress: m.Ingress, Tokens: m.Tokens, Hit: m.Hit}
	whole, session, weight, prompt := m.Whole, m.Session, r.requestWeight(m), r.kv.promptOf(m, id)
	ctx, idle := m.Ctx, r.account.openCount() == 0
	granted := msg.Ticket{
		ID: id, Epoch: r.spec.Epoch, Incarnation: r.state.incarnation, Rank: r.id,
		Seq: r.stream.seq.Load() + 1,
	}
	if !r.sendReply(m.Reply, &msg.AdmitReply{Ticket: granted, Epoch: r.spec.Epoch, Seq: granted.Seq}) {
		return // the reply channel is full: the sender cannot give a ticket back
	}
	now := time.Now()
	r.state.lastTicket = id
	t := r.account.add(id, req, weight, r.watchContext(ctx, id))
	t.admittedAt, t.lastAt = now, now
	if len(r.shares.places) > 0 {
		r.shares.useRoom(now, req.Ingress, weight)
	}
	if idle {
		r.monitor.gate.noteIdle(now) // the stall clock starts with the first open request
	}
	r.rec = msg.Record{
		Kind: msg.RecAdmitted, ReqID: req.ReqID, Ingress: req.Ingress, Tokens: req.Tokens, Hit: req.Hit,
		Session: session, At: r.toRankTime(now),
	}
	r.stream.emit(&r.rec)
	r.stats.setOpen(&r.account)
	if prompt != nil && r.recorder.box.TrySend(prompt) == nil {
		t.prompt = prompt
	}
	r.prefills.predict(id, t, whole)
}

// holdsTooMuch reports whether a prefill rank holds so many prompts for decode ranks that its engine would
// not compute another one. The ingresses count only what they have sent themselves.
func (r *replica) holdsTooMuch(m *msg.Admit) bool {
	return r.spec.App.Pool == app.PoolPrefill && routing.IsFullOfLeases(int64(r.account.computedTokens),
		int64(m.Tokens), r.kv.cacheCapacity())
}

// checkAdmission checks in this order: caller, lease, epoch, state, room. The caller comes first: if it has
// left or its deadline is over, an answer is useless. An ejected rank admits, because only the Routers see
// all ranks of the application and can decide to leave it out.
func (r *replica) checkAdmission(m *msg.Admit) msg.Refusal {
	switch {
	case m.Ctx != nil && m.Ctx.Err() != nil, !m.Deadline.IsZero() && !time.Now().Before(m.Deadline):
		return msg.Expired
	case r.node.Lease != nil && !r.node.Lease():
		return msg.NoLease
	case m.Epoch != r.spec.Epoch:
		return msg.StaleEpoch
	case r.state.phase != phaseOpen:
		return phaseRefusals[r.state.phase]
	case r.refusesAll(), r.holdsTooMuch(m),
		!r.shares.canUse(m.Ingress, r.requestWeight(m), r.freeSequences()):
		return msg.Full
	}
	return msg.Granted
}

func (r *replica) freeSequences() int { return r.state.facts.MaxOngoing - r.account.weight }

// requestWeight is how many sequences a request counts as. It is at most max_ongoing, so that an empty rank
// takes every request.
func (r *replica) requestWeight(m *msg.Admit) int {
	return max(1, min(m.Weight, r.state.facts.MaxOngoing))
}

func (r *replica) sendReply(reply chan msg.AdmitReply, a *msg.AdmitReply) bool {
	select {
	case reply <- *a:
		return true
	default:
		return false
	}
}

// watchContext ends a ticket that gets no Done: when the context of its admission ends, the ticket lapses
// after TicketLapse.
func (r *replica) watchContext(ctx context.Context, id uint64) func() bool {
	if ctx == nil {
		return nil
	}
	s := r.Server
	return context.AfterFunc(ctx, func() { s.orphans.add(id, s.timers.TicketLapse) })
}

func (r *replica) recordFirstToken(m *msg.FirstToken) {
	r.noteSign(signTokens)
	if t, first := r.account.markDecoding(m.TicketID, false); first {
		at := t.clampFirstToken(m.At, time.Now())
		r.prefills.pace.addSample(at.Sub(t.admittedAt), t.prefillPredicted)
		r.emitRequestRecord(msg.RecFirstToken, &t.req, "", at)
	}
}

func (r *replica) recordProgress(m *msg.Progress) {
	r.noteSign(signTokens)
	t := r.account.tickets[m.TicketID]
	if t == nil || m.Out <= t.req.Out {
		return
	}
	now := time.Now()
	r.stats.addGenerated(now, m.Out-t.req.Out)
	r.account.addOutput(t, m.Out)
	t.lastAt = now
	r.emitRequestRecord(msg.RecProgress, &t.req, "", now)
}

// endTicket gives a ticket's load back exactly once: a second Done does not find the ticket.
func (r *replica) endTicket(m *msg.Done) {
	t := r.account.remove(m.TicketID)
	if t == nil {
		return
	}
	if !t.req.Decoding {
		r.prefills.remove(m.TicketID)
	}
	now := time.Now()
	if m.Outcome != msg.Refused {
		r.stats.addEnded(now, max(0, m.CompletionTokens-t.req.Out), m.FirstToken, t.timePerToken(m, now))
		if m.HasCached {
			r.stats.addCached(m.PromptTokens, m.CachedTokens)
		}
		t.req.Out = max(t.req.Out, m.CompletionTokens)
	}
	r.emitRequestRecord(msg.RecDone, &t.req, m.Cause, now)
	r.offerRemaining()
	if isGood(m) {
		r.noteSign(signTokens)
	}
	r.kv.countExpectedEvents(m)
	r.kv.endPrompt(t, m)
	r.account.recycle(t)
	r.applyOutcome(m)
	r.closeDrainedIfIdle()
}

func (r *replica) applyOutcome(m *msg.Done) {
	switch {
	case m.BusyFor > 0:
		r.setBusy(m.BusyFor)
	case !r.busy.holds:
		r.clearBusy()
	}
	if m.Charge || isGood(m) {
		r.ejection.note(m.Charge)
	}
	if m.CheckHealth {
		r.checkHealth()
	}
}

// emitRequestRecord emits a record of what happened to one request at an instant.
func (r *replica) emitRequestRecord(kind msg.RecordKind, req *msg.OpenRequest, cause string, at time.Time) {
	r.rec = msg.Record{
		Kind: kind, ReqID: req.ReqID, Ingress: req.Ingress, Tokens: req.Tokens, Hit: req.Hit, Out: req.Out,
		Cause: cause, At: r.toRankTime(at),
	}
	if kind == msg.RecDone {
		r.rec.OfferedTo = r.nextOffer()
	}
	r.stream.emit(&r.rec)
	r.stats.setOpen(&r.account)
}

func (r *replica) lapseTickets() {
	for _, ticket := range r.orphans.takeDue(time.Now(), r.account.tickets) {
		r.endTicket(&msg.Done{TicketID: ticket, Outcome: msg.Cancelled, Cause: "ticket_lapsed"})
	}
}

func (r *replica) applyDemand(m *msg.Demand) {
	if m.Waits {
		r.shares.addWait(time.Now(), m.Ingress, 0)
	} else if r.shares.removeWait(m.Ingress) {
		r.publishFreeRoom()
	}
}

// nextOffer holds free room for the ingress that comes next, and returns which ingress may use the free
// room.
func (r *replica) nextOffer() string {
	if len(r.shares.places) == 0 || r.state.phase != phaseOpen || r.refusesAll() {
		return ""
	}
	now := time.Now()
	r.shares.offerRoom(now, r.freeSequences())
	if at, ok := r.shares.nextExpiry(); ok && (r.offerTimerAt.IsZero() || at.Before(r.offerTimerAt)) {
		r.offerTimerAt = at
		r.sendAfter(at.Sub(now), offerTimer{})
	}
	return r.shares.roomOwner(r.freeSequences())
}

func (r *replica) publishFreeRoom() {
	r.publishState("")
	r.offerRemaining()
}

// offerRemaining offers room to further ingresses if more than one place is free.
func (r *replica) offerRemaining() {
	if len(r.shares.places) == 0 || r.state.phase != phaseOpen || r.refusesAll() {
		return
	}
	for range r.freeSequences() - r.shares.held { // each offer holds some of it
		if !r.shares.canOffer(time.Now(), r.freeSequences()) {
			return
		}
		r.publishState("")
	}
}

// onOfferTimer frees the room that was held for ingresses that did not use it.
func (r *replica) onOfferTimer() {
	r.offerTimerAt = time.Time{}
	held := r.shares.held
	r.shares.expireOffers(time.Now())
	if r.shares.held < held {
		r.publishFreeRoom()
	} else if at, ok := r.shares.nextExpiry(); ok {
		r.offerTimerAt = at
		r.sendAfter(time.Until(at), offerTimer{})
	}
}
