package dpserver

import (
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
)

// Hub joins the streams of all ranks of a node into one Feed. Records of one rank reach a sink in order. A
// sink gets one record at a time, on the goroutine of the actor that the record comes from. So Deliver must
// be short, and must neither subscribe nor cancel.
type Hub struct {
	mu      sync.Mutex
	subs    map[*hubSubscription]struct{}
	servers map[*Server]struct{}
}

var _ msg.Feed = (*Hub)(nil)

// NewHub makes a node's feed.
func NewHub() *Hub {
	return &Hub{subs: map[*hubSubscription]struct{}{}, servers: map[*Server]struct{}{}}
}

// hubSubscription is one sink of the Hub.
type hubSubscription struct {
	mu     sync.Mutex
	sink   msg.Sink
	closed bool
}

func (s *hubSubscription) deliver(r *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.sink.Deliver(r)
	}
}

func (s *hubSubscription) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *hubSubscription) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// Subscribe implements msg.Feed. The actor of every rank sends its snapshot soon after.
func (h *Hub) Subscribe(sink msg.Sink) (cancel func()) {
	sub := &hubSubscription{sink: sink}
	h.mu.Lock()
	h.subs[sub] = struct{}{}
	for s := range h.servers {
		s.box.Send(subscribeRequest{sub})
	}
	h.mu.Unlock()
	return func() { h.unsubscribe(sub) }
}

func (h *Hub) unsubscribe(sub *hubSubscription) {
	h.mu.Lock()
	delete(h.subs, sub)
	h.mu.Unlock()
	sub.close() // outside mu: a Deliver in progress must not block the registration of a rank
	h.mu.Lock() // only now: no rank adds a closed subscription again
	for s := range h.servers {
		s.box.Send(unsubscribeRequest{sub})
	}
	h.mu.Unlock()
}

// register adds a rank and returns the present sinks. It holds the same lock as Subscribe: a sink is in the
// result or has sent its message to the rank, never neither.
func (h *Hub) register(s *Server) []*hubSubscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.servers[s] = struct{}{}
	out := make([]*hubSubscription, 0, len(h.subs))
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
