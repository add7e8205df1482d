package dpserver

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/dpserve/dpserve/actors/msg"
)

// stream is the one ordered stream of a rank. The replica writes the records of load and state, and the
// recorder writes the records of the KV cache. Each holds mu while one record is delivered, so neither waits
// for the other's work, only for the delivery of one record.
type stream struct {
	seq atomic.Uint64 // number of the last record of this incarnation; written under mu

	mu          sync.Mutex
	identity    msg.Record // App, Unit, Rank, Epoch and Incarnation of every record
	sinks       []*hubSubscription
	columnsID   uint64 // number of the present KV columns: those of another number are not published
	hasColumns  bool   // a KV column has begun since columnsID is valid
	reusedForKV msg.Record
}

// emit numbers a record and delivers it to every sink.
func (s *stream) emit(rec *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.emitLocked(rec)
}

func (s *stream) emitLocked(rec *msg.Record) {
	s.seq.Add(1)
	s.stamp(rec)
	for _, sub := range s.sinks {
		sub.deliver(rec)
	}
}

func (s *stream) stamp(rec *msg.Record) {
	id := &s.identity
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation = id.App, id.Unit, id.Rank, id.Epoch,
		id.Incarnation
	rec.Seq = s.seq.Load()
}

// emitKV emits a record of the KV columns with the number columnsID. It does nothing if they have ended, or
// no incarnation has begun.
func (s *stream) emitKV(columnsID uint64, kind msg.RecordKind, kv msg.KV) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if columnsID == 0 || columnsID != s.columnsID {
		return
	}
	s.hasColumns = true
	s.reusedForKV = msg.Record{Kind: kind, KV: kv}
	s.emitLocked(&s.reusedForKV)
}

// begin begins an incarnation, or the same one again after a panic. Its first record has the number base + 1.
// It sends every sink a snapshot, which has no KV columns, and returns the number of the columns that may
// follow: 0 before the first incarnation.
func (s *stream) begin(incarnation, base uint64, snapshot *msg.Record) (columnsID uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.identity.Incarnation != incarnation {
		s.identity.Incarnation = incarnation
		s.seq.Store(base)
	}
	if incarnation != 0 {
		s.columnsID++
	}
	s.hasColumns = false
	s.stamp(snapshot)
	for _, sub := range s.sinks {
		sub.deliver(snapshot)
	}
	return s.columnsID
}

// sendSnapshot sends one sink a snapshot, and adds the sink at its first. If the stream has KV columns and
// they do not follow, it sends nothing and returns false: the sink could not use a record of theirs that
// comes before them.
func (s *stream) sendSnapshot(sub *hubSubscription, snapshot *msg.Record, columnsFollow bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hasColumns && !columnsFollow {
		return false
	}
	s.addLocked(sub)
	s.stamp(snapshot)
	sub.deliver(snapshot)
	return true
}

// sendColumn sends one sink a part of the columns that follow its snapshot. The part has the number of the
// last record, which may be later than that of the snapshot: records of requests may lie between.
func (s *stream) sendColumn(sub *hubSubscription, columnsID uint64, kind msg.RecordKind, kv msg.KV) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if columnsID == 0 || columnsID != s.columnsID {
		return
	}
	kv.InSnapshot = true
	s.reusedForKV = msg.Record{Kind: kind, KV: kv}
	s.stamp(&s.reusedForKV)
	sub.deliver(&s.reusedForKV)
}

// end emits the last record.
func (s *stream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.columnsID = 0
	s.emitLocked(&msg.Record{Kind: msg.RecGone})
}

// add adds sinks, each at most once: after a panic a sink may come from the Hub and from its own message.
func (s *stream) add(subs ...*hubSubscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sub := range subs {
		s.addLocked(sub)
	}
}

func (s *stream) addLocked(sub *hubSubscription) {
	if !slices.Contains(s.sinks, sub) && !sub.isClosed() {
		s.sinks = append(s.sinks, sub)
	}
}

func (s *stream) remove(sub *hubSubscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sinks = slices.DeleteFunc(s.sinks, func(o *hubSubscription) bool { return o == sub })
}

func (s *stream) subscriptionsOf(sink msg.Sink) (subs []*hubSubscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sub := range s.sinks {
		if sub.sink == sink {
			subs = append(subs, sub)
		}
	}
	return subs
}

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
