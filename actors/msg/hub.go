package msg

import (
	"maps"
	"sync"
)

// Hub joins the streams of all ranks that a node knows into one Feed: those of its own ranks, and those of
// other nodes. Records of one rank reach a sink in order. Records of several ranks may come at the same time,
// each on the goroutine of its source. Deliver must neither subscribe nor cancel.
type Hub struct {
	mu      sync.Mutex
	subs    map[*Subscription]struct{}
	sources map[Source]bool // true: a rank of this node
}

// Source is one rank of this node, or all ranks of another node.
type Source interface {
	// List sends a subscription a snapshot of each rank, and from then on every record. A subscription that
	// the source has already gets its ranks anew.
	List(sub *Subscription)
	// Forget ends what List began. The subscription is closed.
	Forget(sub *Subscription)
}

// Subscription is one sink of a Hub.
type Subscription struct {
	mu       sync.RWMutex // shared during Deliver
	sink     Sink
	nearOnly bool
	closed   bool
}

var (
	_ Feed = (*Hub)(nil)
	_ Sink = (*Subscription)(nil)
)

// NewHub makes a feed without ranks.
func NewHub() *Hub {
	return &Hub{subs: map[*Subscription]struct{}{}, sources: map[Source]bool{}}
}

// Deliver implements Sink. It does nothing after the subscription's end.
func (s *Subscription) Deliver(r *Record) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.closed {
		s.sink.Deliver(r)
	}
}

// IsClosed reports whether the subscription has ended.
func (s *Subscription) IsClosed() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.closed
}

// Subscribe implements Feed.
func (h *Hub) Subscribe(sink Sink) (cancel func()) { return h.subscribe(&Subscription{sink: sink}) }

// List implements Feed.
func (h *Hub) List(sink Sink) {
	h.mu.Lock()
	subs := maps.Clone(h.subs)
	h.mu.Unlock()
	for sub := range subs {
		if sub.sink == sink {
			h.list(sub)
		}
	}
}

// Near is the feed of this node's own ranks.
func (h *Hub) Near() Feed { return nearFeed{h} }

type nearFeed struct{ *Hub }

// Subscribe implements Feed.
func (f nearFeed) Subscribe(sink Sink) (cancel func()) {
	return f.subscribe(&Subscription{sink: sink, nearOnly: true})
}

func (h *Hub) subscribe(sub *Subscription) (cancel func()) {
	h.mu.Lock()
	h.subs[sub] = struct{}{}
	h.mu.Unlock()
	h.list(sub)
	return func() { h.unsubscribe(sub) }
}

// list has every source list to a subscription. A source that comes later knows the subscription from Hub.
func (h *Hub) list(sub *Subscription) {
	for source, isNear := range h.present() {
		if isNear || !sub.nearOnly {
			source.List(sub)
		}
	}
}

func (h *Hub) unsubscribe(sub *Subscription) {
	h.mu.Lock()
	delete(h.subs, sub)
	h.mu.Unlock()
	sub.mu.Lock() // waits for a Deliver in progress
	sub.closed = true
	sub.mu.Unlock()
	for source := range h.present() {
		source.Forget(sub)
	}
}

// present are the sources. They are called without mu, because they call the Hub under locks of their own.
func (h *Hub) present() map[Source]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.sources)
}

// AddRank adds a rank of this node and returns the present subscriptions. One that begins meanwhile is in the
// result, or the rank is asked to list to it.
func (h *Hub) AddRank(rank Source) []*Subscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sources[rank] = true
	return h.subscriptions(true)
}

// AddNode adds the ranks of another node.
func (h *Hub) AddNode(node Source) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sources[node] = false
}

// Remove removes a source.
func (h *Hub) Remove(source Source) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.sources, source)
}

// Far returns the present subscriptions to ranks of other nodes.
func (h *Hub) Far() []*Subscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.subscriptions(false)
}

func (h *Hub) subscriptions(near bool) []*Subscription {
	subs := make([]*Subscription, 0, len(h.subs))
	for sub := range h.subs {
		if near || !sub.nearOnly {
			subs = append(subs, sub)
		}
	}
	return subs
}
