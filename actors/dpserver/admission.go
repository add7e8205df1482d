package dpserver

import (
	"context"
	"runtime"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// yieldBlocks is the longest prompt whose blocks are recorded before the sender of the Admit runs on: it
// takes some microseconds.
const yieldBlocks = 32

// admit grants a ticket or refuses with a reason. m belongs to the sender again when its reply is sent.
func (r *replica) admit(m *msg.Admit) {
	if refusal := r.checkAdmission(m); refusal != msg.Granted {
		if refusal == msg.Full {
			r.turns.addWait(time.Now(), m.Ingress, r.requestWeight(m))
		}
		r.sendReply(m.Reply, &msg.AdmitReply{Refusal: refusal, Epoch: r.spec.Epoch, Seq: r.state.seq})
		return
	}
	id := r.state.lastTicket + 1
	req := msg.OpenRequest{ReqID: m.ReqID, Ingress: m.Ingress, Tokens: m.Tokens, Hit: m.Hit}
	hitBlocks, whole, session, weight := m.HitBlocks, m.Whole, m.Session, r.requestWeight(m)
	r.admitBlocks = append(r.admitBlocks[:0], m.Blocks...) // they belong to the sender again with the reply
	ctx, idle := m.Ctx, r.account.openCount() == 0
	granted := msg.Ticket{
		ID: id, Epoch: r.spec.Epoch, Incarnation: r.state.incarnation, Seq: r.state.seq + 1, Rank: r.id,
		Target: r.spec.Target,
	}
	if !r.sendReply(m.Reply, &msg.AdmitReply{Ticket: granted, Epoch: r.spec.Epoch, Seq: granted.Seq}) {
		return // the reply channel is full: the sender cannot give a ticket back
	}
	now := time.Now()
	r.state.lastTicket = id
	t := r.account.add(id, req, weight, r.watchContext(ctx, id))
	t.admittedAt = now
	t.blocks, r.admitBlocks, t.hitBlocks = r.admitBlocks, t.blocks, hitBlocks
	if len(r.turns.places) > 0 {
		r.turns.useRoom(now, req.Ingress, weight)
	}
	if idle {
		r.monitor.noteProgress() // the stall clock starts with the first open request
	}
	r.rec = msg.Record{
		Kind: msg.RecAdmitted, ReqID: req.ReqID, Ingress: req.Ingress, Tokens: req.Tokens, Hit: req.Hit,
		Session: session, At: r.toRankTime(now),
	}
	r.emit(&r.rec)
	r.stats.setOpen(r.account.openCount())
	if len(t.blocks) > yieldBlocks {
		runtime.Gosched() // let the sender, which the reply woke on this processor, run first
	}
	if len(t.blocks) > 0 {
		r.recordSent(t)
	}
	r.predictPrefill(id, t, whole)
}

// checkAdmission checks in this order: caller, lease, epoch, state, room. The caller comes first: if it has
// left or its deadline is over, an answer is useless. A tripped rank admits, because only the Routers see all
// ranks of the application and can decide to leave it out.
func (r *replica) checkAdmission(m *msg.Admit) msg.Refusal {
	switch {
	case m.Ctx != nil && m.Ctx.Err() != nil, !m.Deadline.IsZero() && !time.Now().Before(m.Deadline):
		return msg.Expired
	case r.lease != nil && !r.lease():
		return msg.NoLease
	case m.Epoch != r.spec.Epoch:
		return msg.StaleEpoch
	case r.state.phase != phaseOpen:
		return phaseRefusals[r.state.phase]
	case r.busy.on, !r.turns.canUse(m.Ingress, r.requestWeight(m), r.freeSequences()):
		return msg.Full
	}
	return msg.Granted
}

// freeSequences is how many more sequences the rank has room for.
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
	return context.AfterFunc(ctx, func() { s.addOrphan(id) })
}

func (r *replica) recordFirstToken(m msg.FirstToken) {
	r.monitor.noteProgress()
	if t, first := r.account.markDecoding(m.TicketID); first {
		at := t.clampFirstToken(m.At, time.Now())
		r.prefills.pace.addSample(at.Sub(t.admittedAt), t.prefillPredicted)
		r.emitRequestRecord(msg.RecFirstToken, &t.req, "", at)
	}
}

func (r *replica) recordProgress(m msg.Progress) {
	r.monitor.noteProgress()
	t := r.account.tickets[m.TicketID]
	if t == nil || m.Out <= t.req.Out {
		return
	}
	now := time.Now()
	r.stats.addGenerated(now, m.Out-t.req.Out)
	t.req.Out = m.Out
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
	r.monitor.noteProgress()
	now := time.Now()
	if m.Outcome != msg.Refused {
		r.stats.addEnded(now, max(0, m.CompletionTokens-t.req.Out), m.FirstToken)
		if m.HasCached {
			r.stats.addCached(m.PromptTokens, m.CachedTokens)
		}
		t.req.Out = max(t.req.Out, m.CompletionTokens)
	}
	r.emitRequestRecord(msg.RecDone, &t.req, m.Cause, now)
	r.offerRemaining()
	r.countExpectedEvents(m)
	r.correctSent(t, m)
	r.account.recycle(t)
	r.applyOutcome(m)
	r.closeDrainedIfIdle()
}

// applyOutcome updates busy, trip and health from how a request ended.
func (r *replica) applyOutcome(m *msg.Done) {
	switch {
	case m.Busy:
		r.setBusy()
	case r.busy.on:
		r.clearBusy()
	}
	if m.Trip {
		r.countFailure()
	} else if m.Outcome == msg.OK {
		r.trip.failures = 0
	}
	if m.Probe {
		r.probeHealth()
	}
}

// emitRequestRecord emits a record of what happened to one request at an instant.
func (r *replica) emitRequestRecord(kind msg.RecordKind, req *msg.OpenRequest, cause string, at time.Time) {
	r.rec = msg.Record{
		Kind: kind, ReqID: req.ReqID, Ingress: req.Ingress, Tokens: req.Tokens, Hit: req.Hit, Out: req.Out,
		Cause: cause, At: r.toRankTime(at),
	}
	if kind == msg.RecDone {
		r.rec.Turn = r.offerTurn()
	}
	r.emit(&r.rec)
	r.stats.setOpen(r.account.openCount())
}

// setBusy treats the rank as full after an engine_busy answer: until the next Done, at most BusyHold. The
// sinks get a record when it ends, because a rank without open requests has no Done that would wake a queue.
func (r *replica) setBusy() {
	r.busy.round++
	r.sendAfter(r.timers.BusyHold, busyTimer{r.busy.round})
	if !r.busy.on {
		r.busy.on = true
		r.turns.releaseAll()
		r.publishState("engine_busy")
	}
}

func (r *replica) clearBusy() {
	if r.busy.on {
		r.busy.on = false
		r.publishState("")
	}
}
