package remote

import (
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/routing"
)

// maxAgo bounds how long ago a first token may have been.
const maxAgo = time.Hour

// readPosts handles the messages of an ingress, beginning with the first, until the stream ends.
func (s *StreamServer) readPosts(sub *subscriber, stream grpc.BidiStreamingServer[dpservev1.SubscribeRequest,
	dpservev1.Records], hello *dpservev1.SubscribeRequest) error {
	for m := hello; ; {
		if m.GetResync() {
			s.mu.Lock()
			s.requestAll(sub)
			s.mu.Unlock()
		}
		for _, p := range m.GetPosts() {
			s.deliverPost(sub, p)
		}
		var err error
		if m, err = stream.Recv(); err != nil {
			return err
		}
	}
}

// deliverPost delivers a post to its rank. Posts for unknown ranks are counted and dropped.
func (s *StreamServer) deliverPost(sub *subscriber, p *dpservev1.Post) {
	s.mu.Lock()
	r := s.ranks[unitRank{p.GetUnit(), routing.RankID(p.GetRank())}]
	if r == nil {
		s.mu.Unlock()
		s.counts.strangePosts.Add(1)
		return
	}
	if _, ok := p.GetMessage().(*dpservev1.Post_Resync); ok {
		sub.addWanted(r)
		sub.signal()
		s.mu.Unlock()
		s.counts.posts.Add(1)
		return
	}
	box, here := r.mailbox, r.epoch == p.GetEpoch() && r.incarnation == p.GetIncarnation()
	s.mu.Unlock()
	m := fromPost(p, time.Now())
	if m == nil {
		s.config.Unknown("post")
	}
	if m == nil || !here {
		s.counts.strangePosts.Add(1)
		return
	}
	if d, ok := m.(*msg.Demand); ok {
		d.Ingress = sub.name
	}
	s.counts.posts.Add(1)
	box.Send(m)
}

// fromPost is the actor's message of a post; nil if its kind is not known.
func fromPost(p *dpservev1.Post, now time.Time) any {
	switch m := p.GetMessage().(type) {
	case *dpservev1.Post_Done:
		return doneOf(m.Done)
	case *dpservev1.Post_FirstToken:
		ago := min(max(time.Duration(m.FirstToken.GetAgoNano()), 0), maxAgo)
		return &msg.FirstToken{TicketID: m.FirstToken.GetTicket(), At: now.Add(-ago)}
	case *dpservev1.Post_Progress:
		return &msg.Progress{TicketID: m.Progress.GetTicket(), Out: boundedCount(m.Progress.GetOut())}
	case *dpservev1.Post_Probe:
		return &msg.Probe{TicketID: m.Probe.GetTicket()}
	case *dpservev1.Post_Demand:
		return &msg.Demand{Waits: m.Demand.GetWaits()}
	default:
		return nil
	}
}

func doneOf(d *dpservev1.Done) any {
	if d.GetOutcome() > uint32(msg.Refused) {
		return nil
	}
	cause := d.GetCause()
	return &msg.Done{
		TicketID: d.GetTicket(), Outcome: msg.Outcome(d.GetOutcome()), //nolint:gosec // checked
		Cause:        cause[:min(len(cause), maxString)],
		PromptTokens: boundedCount(d.GetPromptTokens()), CachedTokens: boundedCount(d.GetCachedTokens()),
		HasCached:        d.GetHasCached(),
		CompletionTokens: boundedCount(d.GetCompletionTokens()),
		FirstToken:       max(time.Duration(d.GetFirstTokenNano()), 0),
		Trip:             d.GetTrip(), Busy: d.GetBusy(), Probe: d.GetProbe(),
	}
}

// boundedCount is a count from the wire.
func boundedCount(n int64) int { return int(min(max(n, 0), maxCount)) }

// toPost is a mailbox's message on the wire; nil if it is not sent over the stream.
func toPost(m any) *dpservev1.Post {
	switch m := m.(type) {
	case *msg.Done:
		return &dpservev1.Post{Message: &dpservev1.Post_Done{Done: &dpservev1.Done{
			Ticket: m.TicketID, Outcome: uint32(m.Outcome), Cause: m.Cause,
			PromptTokens: int64(m.PromptTokens), CachedTokens: int64(m.CachedTokens),
			HasCached: m.HasCached, CompletionTokens: int64(m.CompletionTokens),
			FirstTokenNano: int64(m.FirstToken),
			Trip:           m.Trip, Busy: m.Busy, Probe: m.Probe,
		}}}
	case msg.Done:
		return toPost(&m)
	case *msg.FirstToken:
		return &dpservev1.Post{Message: &dpservev1.Post_FirstToken{
			FirstToken: &dpservev1.FirstToken{Ticket: m.TicketID},
		}}
	case msg.FirstToken:
		return toPost(&m)
	case *msg.Progress:
		return &dpservev1.Post{Message: &dpservev1.Post_Progress{
			Progress: &dpservev1.Progress{Ticket: m.TicketID, Out: int64(m.Out)},
		}}
	case msg.Progress:
		return toPost(&m)
	case *msg.Probe:
		return &dpservev1.Post{Message: &dpservev1.Post_Probe{Probe: &dpservev1.Probe{Ticket: m.TicketID}}}
	case msg.Probe:
		return toPost(&m)
	case *msg.Demand:
		return &dpservev1.Post{Message: &dpservev1.Post_Demand{Demand: &dpservev1.Demand{Waits: m.Waits}}}
	case msg.Demand:
		return toPost(&m)
	case *msg.Resync, msg.Resync:
		return &dpservev1.Post{Message: &dpservev1.Post_Resync{Resync: &dpservev1.Resync{}}}
	default:
		return nil
	}
}
