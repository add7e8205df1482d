package remote

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// admit asks the rank's DPServer for a ticket, for as long as the request's stream is open; ok is false if that has ended.
func (p *passage) admit(ctx context.Context) (rep msg.AdmitReply, ok bool) {
	s, box := p.server, p.target.mailbox
	reply, _ := s.replies.Get().(chan msg.AdmitReply)
	m := p.head.admit
	m.Ctx, m.Reply = p.r.Context(), reply
	if len(p.in.blocks) > 0 {
		m.Blocks = p.in.blocks
	}
	if box.TrySend(&m) != nil {
		s.replies.Put(reply)
		return p.unsent(), true
	}
	patience := time.NewTimer(s.timers.Admit)
	defer patience.Stop()
	select {
	case rep = <-reply:
		s.replies.Put(reply)
		return rep, true
	case <-box.Stopped():
		p.settled = false // the message may still hold the hashes
		return p.afterStop(reply), true
	case <-ctx.Done():
		p.late(reply)
		return rep, false
	case <-patience.C:
		p.late(reply)
		return msg.AdmitReply{Refusal: msg.Overloaded, Epoch: p.target.epoch}, true
	}
}

// unsent tells a full mailbox from a stopped one.
func (p *passage) unsent() msg.AdmitReply {
	rep := msg.AdmitReply{Refusal: msg.Overloaded, Epoch: p.target.epoch}
	select {
	case <-p.target.mailbox.Stopped():
		rep.Refusal = msg.Gone
	default:
	}
	return rep
}

// afterStop takes an answer that came just before the actor ended.
func (p *passage) afterStop(reply chan msg.AdmitReply) msg.AdmitReply {
	select {
	case rep := <-reply:
		return rep
	default:
		return msg.AdmitReply{Refusal: msg.Gone, Epoch: p.target.epoch}
	}
}

// late takes a ticket that comes after its request has left, and gives it back. One goroutine per such request, ended by the
// answer, the actor's end or a deadline.
func (p *passage) late(reply chan msg.AdmitReply) {
	p.settled = false
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
