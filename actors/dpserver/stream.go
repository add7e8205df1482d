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
	identity    msg.Record          // App, Unit, Rank, Epoch and Incarnation of every record
	sinks       []*msg.Subscription // that have its snapshot
	setsID      uint64              // of the present KV block sets: others are not published
	hasSets     bool                // a KV block set has begun since setsID is valid
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
		sub.Deliver(rec)
	}
}

func (s *stream) stamp(rec *msg.Record) {
	id := &s.identity
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation = id.App, id.Unit, id.Rank, id.Epoch,
		id.Incarnation
	rec.Seq = s.seq.Load()
}

// emitKV emits a record of the KV block sets with the number setsID. It does nothing if they have ended, or
// no incarnation has begun.
func (s *stream) emitKV(setsID uint64, kind msg.RecordKind, kv msg.KV) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if setsID == 0 || setsID != s.setsID {
		return
	}
	s.hasSets = true
	s.reusedForKV = msg.Record{Kind: kind, KV: kv}
	s.emitLocked(&s.reusedForKV)
}

// begin begins an incarnation, or the same one again after a panic. Its first record has the number base + 1.
// It sends every sink a snapshot, which has no KV block sets, and returns the number of the block sets that
// may follow: 0 before the first incarnation.
func (s *stream) begin(incarnation, base uint64, snapshot *msg.Record) (setsID uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.identity.Incarnation != incarnation {
		s.identity.Incarnation = incarnation
		s.seq.Store(base)
	}
	if incarnation != 0 {
		s.setsID++
	}
	s.hasSets = false
	s.stamp(snapshot)
	for _, sub := range s.sinks {
		sub.Deliver(snapshot)
	}
	return s.setsID
}

// sendSnapshot sends a sink a snapshot; a Subscription gets every later record too. If the stream has KV
// block sets and they do not follow, it sends nothing and returns false: the sink could not use a record of
// theirs that comes before them.
func (s *stream) sendSnapshot(sink msg.Sink, snapshot *msg.Record, setsFollow bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hasSets && !setsFollow {
		return false
	}
	if sub, ok := sink.(*msg.Subscription); ok {
		s.addLocked(sub)
	}
	s.stamp(snapshot)
	sink.Deliver(snapshot)
	return true
}

// sendSet sends one sink a part of the block sets that follow its snapshot. The part has the number of the
// last record, which may be later than that of the snapshot: records of requests may lie between.
func (s *stream) sendSet(sink msg.Sink, setsID uint64, kind msg.RecordKind, kv msg.KV) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if setsID == 0 || setsID != s.setsID {
		return
	}
	s.reusedForKV = msg.Record{Kind: kind, KV: kv}
	s.stamp(&s.reusedForKV)
	sink.Deliver(&s.reusedForKV)
}

// end emits the last record.
func (s *stream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setsID = 0
	s.emitLocked(&msg.Record{Kind: msg.RecGone})
}

// add adds sinks, each at most once: after a panic a sink may come from the Hub and from its own message.
func (s *stream) add(subs ...*msg.Subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sub := range subs {
		s.addLocked(sub)
	}
}

func (s *stream) addLocked(sub *msg.Subscription) {
	if !slices.Contains(s.sinks, sub) && !sub.IsClosed() {
		s.sinks = append(s.sinks, sub)
	}
}

func (s *stream) remove(sub *msg.Subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sinks = slices.DeleteFunc(s.sinks, func(o *msg.Subscription) bool { return o == sub })
}
