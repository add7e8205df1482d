package kvevents

import "time"

// Stats are counters of one subscription since its start, and its state.
type Stats struct {
	Connected bool // the event socket has its engine
	Synced    bool // there is a baseline: blocks are known and events are followed in order
	// the engine may hold blocks that are not known (ring too short, replay failed, unreadable batch)
	Partial   bool
	Replaying bool
	LastSeq   uint64    // of the newest batch applied; only while Synced
	LastEvent time.Time // when the newest batch came (live); zero = none yet
	Content
	Faults
}

// Content counts what came, live and replayed.
type Content struct {
	Batches    uint64 // applied
	Stored     uint64 // events
	Removed    uint64
	Cleared    uint64
	Blocks     uint64 // block hashes in Stored events
	Unknown    uint64 // events of unknown types
	Malformed  uint64 // Stored events that contradict themselves
	BadBatches uint64 // payloads that are no batch
	BadFrames  uint64 // messages that are not three frames with a sequence number
	Skipped    uint64 // events of groups that cannot be indexed
}

// Faults counts what happened to the order of the batches and to the connection.
type Faults struct {
	Duplicates     uint64 // batches seen before
	Stragglers     uint64 // batches of before a gap that was given up
	Gaps           uint64 // batches were missing
	Overflows      uint64 // the own queue was full: a gap too
	Replays        uint64 // asked
	ReplayFailures uint64
	Resets         uint64 // times the blocks were dropped
	Restarts       uint64 // new incarnations recognised
	Connects       uint64
	Disconnects    uint64
	Refused        uint64 // peers that may not publish here
}

// status holds the fields whose change triggers Config.Changed; the others only count.
type status struct {
	connected, synced, partial bool
	restarts                   uint64
}

func (s *Stats) status() status { return status{s.Connected, s.Synced, s.Partial, s.Restarts} }

// Silence detects that requests complete while no events come: the engine's publisher is broken or not
// enabled, and the index would stay empty. It is pure: the caller passes the time. The zero value begins with
// its first Check.
type Silence struct {
	batches, completed uint64
	since              time.Time     // the first completion without a batch behind it
	quiet              time.Duration // from there to the newest
	began              bool
}

// Check returns for how long requests have completed without a batch: from the first such completion to the
// newest one that a Check saw. Time in which nothing completes does not count, because an idle engine is
// silent. batches and completed are counters. The caller compares the result with its limit (30 s;
// test/acceptance.md, KV10).
func (s *Silence) Check(now time.Time, batches, completed uint64) time.Duration {
	switch {
	case !s.began || batches != s.batches || completed < s.completed:
		*s = Silence{batches: batches, completed: completed, began: true}
	case completed > s.completed:
		if s.since.IsZero() {
			s.since = now
		}
		s.completed, s.quiet = completed, now.Sub(s.since)
	}
	return s.quiet
}
