package remote

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// admit asks the rank's DPServer for a ticket that lives as long as the request's stream; ok is false if the
// stream has ended.
func (p *dataRequest) admit(ctx context.Context) (rep msg.AdmitReply, ok bool) {
	s, box := p.server, p.target.mailbox
	reply, _ := s.replies.Get().(chan msg.AdmitReply)
	m := p.head.admit
	m.Ctx, m.Reply = p.r.Context(), reply
	if len(p.upload.blocks) > 0 {
		m.Blocks = p.upload.blocks
	}
	if box.TrySend(&m) != nil {
		s.replies.Put(reply)
		return p.mailboxRefusal(), true
	}
	patience := time.NewTimer(s.timers.Admit)
	defer patience.Stop()
	select {
	case rep = <-reply:
		s.replies.Put(reply)
		return rep, true
	case <-box.Stopped():
		p.isBodyFree = false // the mailbox may still hold the message and its hashes
		return p.replyAfterStop(reply), true
	case <-ctx.Done():
		p.returnLateTicket(reply)
		return rep, false
	case <-patience.C:
		p.returnLateTicket(reply)
		return msg.AdmitReply{Refusal: msg.Overloaded, Epoch: p.target.epoch}, true
	}
}

// mailboxRefusal tells a full mailbox from a stopped one.
func (p *dataRequest) mailboxRefusal() msg.AdmitReply {
	rep := msg.AdmitReply{Refusal: msg.Overloaded, Epoch: p.target.epoch}
	select {
	case <-p.target.mailbox.Stopped():
		rep.Refusal = msg.Gone
	default:
	}
	return rep
}

// replyAfterStop returns an answer that came just before the actor ended.
func (p *dataRequest) replyAfterStop(reply chan msg.AdmitReply) msg.AdmitReply {
	select {
	case rep := <-reply:
		return rep
	default:
		return msg.AdmitReply{Refusal: msg.Gone, Epoch: p.target.epoch}
	}
}

// returnLateTicket gives back a ticket that is granted after its request has ended. It runs one goroutine per
// such request, which ends with the answer, the actor or a deadline.
func (p *dataRequest) returnLateTicket(reply chan msg.AdmitReply) {
	p.isBodyFree = false
	s, box := p.server, p.target.mailbox
	s.running.Go(func() {
		timeout := time.NewTimer(s.timers.LateTicket)
		defer timeout.Stop()
		select {
		case rep := <-reply:
			s.replies.Put(reply)
			if rep.Refusal == msg.Granted {
				box.Send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.Refused, Cause: "late_ticket"})
			}
		case <-box.Stopped():
		case <-timeout.C:
		}
	})
}
