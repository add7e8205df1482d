package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
)

// admit asks the rank's DPServer for a ticket and waits for the reply, the end of ctx, or the end of the
// actor, which then replies to nothing. The message carries the context of the request, not of the attempt:
// the attempt's context ends at the same moment as its ticket, and the DPServer would take that for an
// abandoned request.
func (req *request) admit(ctx, request context.Context, rk *rank) (msg.AdmitReply, cause) {
	reply, _ := req.in.replyPool.Get().(chan msg.AdmitReply)
	m := &msg.Admit{Ctx: request, Reply: reply}
	req.fillAdmit(m, rk)
	if err := rk.mailbox.TrySend(m); err != nil {
		req.in.replyPool.Put(reply)
		return msg.AdmitReply{}, sendRefusal(rk)
	}
	select {
	case rep := <-reply:
		req.in.replyPool.Put(reply)
		return rep, refusedAs(rep.Refusal)
	case <-rk.mailbox.Stopped():
		req.prompt.shared = true
		return req.in.replyAfterStop(reply)
	case <-ctx.Done():
		req.prompt.shared = true
		req.in.awaitLateTicket(rk.mailbox, reply)
		return msg.AdmitReply{}, contextCause(ctx)
	}
}

// fillAdmit sets the fields of an Admit that describe the request.
func (req *request) fillAdmit(m *msg.Admit, rk *rank) {
	m.ReqID, m.Epoch, m.Class, m.Tokens, m.Estimated = req.query.ID, rk.epoch, msg.ClassBoth,
		req.query.Tokens, req.query.Estimated
	m.Deadline, m.Ingress, m.Session = req.deadline, req.in.node, routing.SessionKey(req.query.Session)
	m.Weight = req.scan.Choices
	// a reservation has no HTTP request: its caller reports the end of prefill
	m.Whole = req.r != nil && !req.scan.Stream
	if req.prompt.lookedUp {
		m.Hit, m.Blocks, m.HitBlocks = req.query.HitOn(rk.id), req.prompt.blocks,
			req.prompt.cachedPrefix(rk.id)
	}
}

// sendRefusal distinguishes a stopped mailbox from a full one.
func sendRefusal(rk *rank) cause {
	select {
	case <-rk.mailbox.Stopped():
		return causeGone
	default:
		return causeOverloaded
	}
}

// replyAfterStop takes a reply that arrived just before the actor ended.
func (in *Ingress) replyAfterStop(reply chan msg.AdmitReply) (msg.AdmitReply, cause) {
	select {
	case rep := <-reply:
		in.replyPool.Put(reply)
		return rep, refusedAs(rep.Refusal)
	default:
		return msg.AdmitReply{}, causeGone // the channel is not used again: the message may still hold it
	}
}

// awaitLateTicket waits for the ticket of a request that has already left, and returns it. It uses one
// goroutine per such request, which ends with the reply, the actor or Timers.LateTicket.
func (in *Ingress) awaitLateTicket(box msg.Mailbox, reply chan msg.AdmitReply) {
	in.background.Go(func() {
		timeout := time.NewTimer(in.timers.LateTicket)
		defer timeout.Stop()
		select {
		case rep := <-reply:
			in.replyPool.Put(reply)
			if rep.Refusal == msg.Granted {
				box.Send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.Refused, Cause: "late_ticket"})
			}
		case <-box.Stopped():
		case <-timeout.C:
		}
	})
}
