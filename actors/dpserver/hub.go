package dpserver

import (
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
)

// Hub joins the streams of all ranks of a node into one Feed. Records of one rank reach a sink in order; a sink hears one
// record at a time, whichever rank it comes from, on the goroutine of that rank's actor. So Deliver must be short, and must
// neither subscribe nor cancel.
type Hub struct {
	mu      sync.Mutex
	subs    map[*subscription]struct{}
	servers map[*Server]struct{}
}

var _ msg.Feed = (*Hub)(nil)

// NewHub makes a node's feed.
func NewHub() *Hub {
	return &Hub{subs: map[*subscription]struct{}{}, servers: map[*Server]struct{}{}}
}

// subscription is one sink.
type subscription struct {
	mu     sync.Mutex
	sink   msg.Sink
	closed bool
}

func (s *subscription) deliver(r *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.sink.Deliver(r)
	}
}

func (s *subscription) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// Subscribe implements msg.Feed. The snapshots come from the ranks' own actors, soon after.
func (h *Hub) Subscribe(sink msg.Sink) (cancel func()) {
	sub := &subscription{sink: sink}
	h.mu.Lock()
	h.subs[sub] = struct{}{}
	for s := range h.servers {
		s.box.Send(subscribe{sub})
	}
	h.mu.Unlock()
	return func() { h.unsubscribe(sub) }
}

func (h *Hub) unsubscribe(sub *subscription) {
	h.mu.Lock()
	delete(h.subs, sub)
	for s := range h.servers {
		s.box.Send(unsubscribe{sub})
	}
	h.mu.Unlock()
	sub.close() // outside mu: a Deliver in progress must not hold up the registration of a rank
}

// register adds a rank and gives the sinks it must serve from now on. Under one lock with Subscribe: a sink is either in the
// answer or has sent its message to the rank, never neither.
func (h *Hub) register(s *Server) []*subscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.servers[s] = struct{}{}
	out := make([]*subscription, 0, len(h.subs))
	for sub := range h.subs {
		out = append(out, sub)
	}
	return out
}

func (h *Hub) remove(s *Server) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.servers, s)
}
