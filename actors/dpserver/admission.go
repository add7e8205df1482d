package dpserver

import (
	"context"
	"runtime"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// yieldBlocks is the longest prompt that is written down before its sender goes on: some microseconds.
const yieldBlocks = 32

// admit grants a ticket or refuses with a reason. m belongs to the sender again once it has its reply.
func (r *replica) admit(m *msg.Admit) {
	if refusal := r.refusal(m); refusal != msg.Granted {
		if refusal == msg.Full {
			r.turns.wait(time.Now(), m.Ingress, r.weigh(m))
		}
		r.answer(m.Reply, &msg.AdmitReply{Refusal: refusal, Epoch: r.spec.Epoch, Seq: r.vitals.seq})
		return
	}
	id := r.vitals.lastTicket + 1
	req := msg.OpenRequest{ReqID: m.ReqID, Ingress: m.Ingress, Tokens: m.Tokens, Hit: m.Hit}
	hitBlocks, whole, session, weight := m.HitBlocks, m.Whole, m.Session, r.weigh(m)
	r.blocks = append(r.blocks[:0], m.Blocks...) // they are the sender's again with the reply
	ctx, idle := m.Ctx, r.account.open() == 0
	granted := msg.Ticket{
		ID: id, Epoch: r.spec.Epoch, Incarnation: r.vitals.incarnation, Seq: r.vitals.seq + 1, Rank: r.id, Target: r.spec.Target,
	}
	if !r.answer(m.Reply, &msg.AdmitReply{Ticket: granted, Epoch: r.spec.Epoch, Seq: granted.Seq}) {
		return // a reply channel without room: nobody would ever give the ticket back
	}
	now := time.Now()
	r.vitals.lastTicket = id
	t := r.account.add(id, req, weight, r.watchContext(ctx, id))
	t.admitted = now
	t.blocks, r.blocks, t.hitBlocks = r.blocks, t.blocks, hitBlocks
	if len(r.turns.places) > 0 {
		r.turns.take(now, req.Ingress, weight)
	}
	if idle {
		r.keeper.moved() // the stall clock starts with the first request in hand
	}
	r.rec = msg.Record{
		Kind: msg.RecAdmitted, ReqID: req.ReqID, Ingress: req.Ingress, Tokens: req.Tokens, Hit: req.Hit, Session: session, At: r.toRankTime(now),
	}
	r.emit(&r.rec)
	r.stats.inFlight(r.account.open())
	if len(t.blocks) > yieldBlocks {
		runtime.Gosched() // the sender was woken on this very processor: it goes on first
	}
	if len(t.blocks) > 0 {
		r.sent(t)
	}
	r.predictPrefill(id, t, whole)
}

// refusal checks in this order: lease, epoch, state, room. A caller that has left, or whose deadline is over, comes first: its answer
// helps nobody. A tripped rank admits: whether it is left out is decided by those who see all ranks of the application.
func (r *replica) refusal(m *msg.Admit) msg.Refusal {
	switch {
	case m.Ctx != nil && m.Ctx.Err() != nil, !m.Deadline.IsZero() && !time.Now().Before(m.Deadline):
		return msg.Expired
	case r.lease != nil && !r.lease():
		return msg.NoLease
	case m.Epoch != r.spec.Epoch:
		return msg.StaleEpoch
	case r.vitals.phase != open:
		return refusals[r.vitals.phase]
	case r.busy.on, !r.turns.mayTake(m.Ingress, r.weigh(m), r.free()):
		return msg.Full
	}
	return msg.Granted
}

// free is how many sequences the rank has room for.
func (r *replica) free() int { return r.vitals.facts.MaxOngoing - r.account.weight }

// weigh is how many sequences a request counts as: at most all that the rank takes, so that an empty rank takes every request.
func (r *replica) weigh(m *msg.Admit) int { return max(1, min(m.Weight, r.vitals.facts.MaxOngoing)) }

func (r *replica) answer(reply chan msg.AdmitReply, a *msg.AdmitReply) bool {
	select {
	case reply <- *a:
		return true
	default:
		return false
	}
}

// watchContext is the safety net under a ticket: when its admission's context ends and no Done follows, the ticket lapses.
func (r *replica) watchContext(ctx context.Context, id uint64) func() bool {
	if ctx == nil {
		return nil
	}
	s := r.Server
	return context.AfterFunc(ctx, func() { s.orphaned(id) })
}

func (r *replica) firstToken(m msg.FirstToken) {
	r.keeper.moved()
	if t, first := r.account.decoding(m.TicketID); first {
		at := t.firstTokenAt(m.At, time.Now())
		r.prefills.pace.learn(at.Sub(t.admitted), t.predicted)
		r.record(msg.RecFirstToken, &t.req, "", at)
	}
}

func (r *replica) progress(m msg.Progress) {
	r.keeper.moved()
	t := r.account.tickets[m.TicketID]
	if t == nil || m.Out <= t.req.Out {
		return
	}
	now := time.Now()
	r.stats.generated(now, m.Out-t.req.Out)
	t.req.Out = m.Out
	r.record(msg.RecProgress, &t.req, "", now)
}

// done gives a ticket's load back, exactly once: a second Done of a ticket finds nothing.
func (r *replica) done(m *msg.Done) {
	t := r.account.remove(m.TicketID)
	if t == nil {
		return
	}
	if !t.req.Decoding {
		r.prefills.remove(m.TicketID)
	}
	r.keeper.moved()
	now := time.Now()
	if m.Outcome != msg.Refused {
		r.stats.ended(now, max(0, m.CompletionTokens-t.req.Out), m.FirstToken)
		if m.HasCached {
			r.stats.cached(m.PromptTokens, m.CachedTokens)
		}
		t.req.Out = max(t.req.Out, m.CompletionTokens)
	}
	r.record(msg.RecDone, &t.req, m.Cause, now)
	r.offerRest()
	r.countDue(m)
	r.correct(t, m)
	r.account.recycle(t)
	r.judge(m)
	r.settle()
}

// judge is what an outcome says about the engine.
func (r *replica) judge(m *msg.Done) {
	switch {
	case m.Busy:
		r.setBusy()
	case r.busy.on:
		r.clearBusy()
	}
	if m.Trip {
		r.failed()
	} else if m.Outcome == msg.OK {
		r.trip.failures = 0
	}
	if m.Probe {
		r.probeHealth()
	}
}

// record emits an entry about what happened to one request at an instant.
func (r *replica) record(kind msg.RecordKind, req *msg.OpenRequest, cause string, at time.Time) {
	r.rec = msg.Record{
		Kind: kind, ReqID: req.ReqID, Ingress: req.Ingress, Tokens: req.Tokens, Hit: req.Hit, Out: req.Out, Cause: cause, At: r.toRankTime(at),
	}
	if kind == msg.RecDone {
		r.rec.Turn = r.passTurn()
	}
	r.emit(&r.rec)
	r.stats.inFlight(r.account.open())
}

// setBusy takes the rank as full after an engine_busy answer: until the next Done, at most BusyHold. The sinks hear of it,
// because a rank without a request in hand has no Done that would wake a queue.
func (r *replica) setBusy() {
	r.busy.round++
	r.after(r.timers.BusyHold, unbusy{r.busy.round})
	if !r.busy.on {
		r.busy.on = true
		r.turns.release()
		r.state("engine_busy")
	}
}

func (r *replica) clearBusy() {
	if r.busy.on {
		r.busy.on = false
		r.state("")
	}
}
