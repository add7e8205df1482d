package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
)

// admit asks the rank's DPServer for a ticket and waits for its answer, the end of ctx, or the end of the actor, which
// answers nobody any more. The message carries the request's context and not the attempt's, which ends at the same moment
// as the ticket: the DPServer would take that for an abandoned one.
func (c *call) admit(ctx, request context.Context, rk *rank) (msg.AdmitReply, cause) {
	reply, _ := c.in.replies.Get().(chan msg.AdmitReply)
	m := &msg.Admit{Ctx: request, Reply: reply}
	c.admission(m, rk)
	if err := rk.mailbox.TrySend(m); err != nil {
		c.in.replies.Put(reply)
		return msg.AdmitReply{}, unsent(rk)
	}
	select {
	case rep := <-reply:
		c.in.replies.Put(reply)
		return rep, refusedAs(rep.Refusal)
	case <-rk.mailbox.Stopped():
		c.prompt.shared = true
		return c.in.afterStop(reply)
	case <-ctx.Done():
		c.prompt.shared = true
		c.in.awaitLate(rk.mailbox, reply)
		return msg.AdmitReply{}, ended(ctx)
	}
}

// admission fills in what an admission says of its request.
func (c *call) admission(m *msg.Admit, rk *rank) {
	m.ReqID, m.Epoch, m.Class, m.Tokens, m.Estimated = c.query.ID, rk.epoch, msg.ClassBoth, c.query.Tokens, c.query.Estimated
	m.Deadline, m.Ingress, m.Session = c.due, c.in.node, routing.SessionKey(c.query.Session)
	m.Weight = c.scan.Choices
	m.Whole = c.r != nil && !c.scan.Stream // a reservation has no request: its owner says when prefill is done
	if c.prompt.looked {
		m.Hit, m.Blocks, m.HitBlocks = c.query.HitOn(rk.id), c.prompt.blocks, c.prompt.held(rk.id)
	}
}

// unsent tells a full mailbox from a stopped one.
func unsent(rk *rank) cause {
	select {
	case <-rk.mailbox.Stopped():
		return causeGone
	default:
		return causeOverloaded
	}
}

// afterStop takes an answer that came just before the actor ended.
func (in *Ingress) afterStop(reply chan msg.AdmitReply) (msg.AdmitReply, cause) {
	select {
	case rep := <-reply:
		in.replies.Put(reply)
		return rep, refusedAs(rep.Refusal)
	default:
		return msg.AdmitReply{}, causeGone // the channel is not used again: the message may still hold it
	}
}

// awaitLate takes a ticket that comes after its request has left, and gives it back. One goroutine per such request, ended
// by the answer, the actor's end or a deadline.
func (in *Ingress) awaitLate(box msg.Mailbox, reply chan msg.AdmitReply) {
	in.running.Go(func() {
		timeout := time.NewTimer(in.timers.LateTicket)
		defer timeout.Stop()
		select {
		case rep := <-reply:
			in.replies.Put(reply)
			if rep.Refusal == msg.Granted {
				box.Send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.Refused, Cause: "late_ticket"})
			}
		case <-box.Stopped():
		case <-timeout.C:
		}
	})
}
