package kvevents

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/zeebo/xxh3"
)

// Times and bounds of a tracker.
const (
	replayCooldown = 30 * time.Second // after a failed replay
	// silence after which the end of the stream is checked: a lost last batch makes no gap
	tailDelay       = 2 * time.Second
	tailInterval    = 30 * time.Second // between such checks of a stream that stays silent
	maxPending      = 4096             // live batches kept while a replay runs
	maxPendingBytes = 32 << 20
	maxRounds       = 8 // replays in a row that did not reach the live stream
	recentSize      = 256
)

// seqReset is the sequence number of an end marker and of "publisher shuts down" (−1).
const seqReset = math.MaxUint64

// message is one batch with its number.
type message struct {
	seq     uint64
	payload []byte
}

// replayMode is why a replay was asked.
type replayMode uint8

const (
	replayNone   replayMode = iota
	replayFull              // everything there is: a baseline
	replayGap               // from the first missing batch
	replayVerify            // after a reconnect, from the last batch on: is it the same engine?
	replayTail              // after silence, from the batch behind the last
)

// ask is a replay to be run.
type ask struct {
	id   uint64 // counts asks: results of older ones are ignored
	from uint64
}

// tracker puts batches into the engine's order and detects when that is no longer possible. It is pure: the
// time is an argument, nothing blocks, and its owner runs the replays that it asks for (want).
//
//	            connect ─ full replay ─┐                         gap ─ replay from what misses ─┐
//	no baseline ───────────────────────┴─ live ──────────────────┬──────────────────────────────┴─ live
//	   ↑  ↑       first batch is a baseline too                  ├ reconnect ─ replay: same content? ─ live
//	   │  └────── another engine, range gone, replay failed ─────┤
//	   └──────── Reset(partial) ─────────────────────────────────┘ 2 s of silence ─ was the tail lost?
type tracker struct {
	replays bool // there is a replay endpoint
	sink    Sink
	decoder batchDecoder
	groups  groupFilter

	connected bool
	have      bool   // next is known
	suspect   bool   // the connection is new: the known blocks may be those of an earlier engine
	next      uint64 // the number of the next batch
	atStart   bool   // a replay of everything was empty, and no batch came since
	high      uint64 // what next was when it was lost; 0 = nothing to compare with
	lastTS    float64
	recent    [recentSize]print // by seq modulo its size

	replay  replayState
	pending []message // live batches that wait for the replay
	bytes   int       // of pending
	lost    bool      // pending overflowed
	healed  uint64    // the unreadable batch that was asked for last
	stats   Stats
}

// replayState is the replay that runs, and when others may.
type replayState struct {
	mode   replayMode
	seen   bool // it brought a batch
	want   *ask // not yet taken by the owner
	asked  uint64
	rounds int

	cooldown time.Time // no replay before
	fullAt   time.Time // try again for a full baseline; zero = no need
	tailAt   time.Time // check the end of the stream
}

// print recognises a batch that was seen before.
type print struct {
	seq uint64
	sum uint64
	set bool
}

func newTracker(replays bool, sink Sink) *tracker {
	return &tracker{replays: replays, sink: sink, healed: seqReset, stats: Stats{Partial: true}}
}

// connect: the event socket has its engine, a new connection.
func (t *tracker) connect(now time.Time) {
	t.connected, t.replay.rounds, t.suspect = true, 0, t.have
	t.atStart = false // that was said by the connection before, perhaps by another engine
	t.stats.Connects++
	switch {
	case !t.replays:
	case !t.have || t.wantsFull():
		t.start(now, replayFull, 0)
	case t.next == 0:
		t.start(now, replayFull, 0) // nothing was seen that could be compared
	default:
		t.start(now, replayVerify, t.next-1)
	}
}

// disconnect: the connection is gone; so may be batches, and the engine.
func (t *tracker) disconnect() {
	t.connected = false
	t.stats.Disconnects++
	t.stop()
	t.dropPending()
	if !t.replays && t.have {
		t.reset(true)
	}
}

// reset drops the blocks; the next live batch is the new baseline.
func (t *tracker) reset(partial bool) {
	if t.have {
		t.high = t.next
	}
	t.have, t.suspect, t.atStart = false, false, false
	t.recent = [recentSize]print{}
	t.groups.forget()
	t.stats.Partial = partial
	t.stats.Resets++
	t.sink.Reset(partial)
}

// restart: the engine is a new incarnation.
func (t *tracker) restart(now time.Time) {
	t.stats.Restarts++
	t.reset(true)
	t.high, t.healed = 0, seqReset
	if t.replays {
		t.start(now, replayFull, 0)
	}
}

// setBaseline makes seq the next number; the batches before it are unknown. The first batch of an engine has
// number 0, or 1 (llm-d-inference-sim): where nothing was published before, either is the whole beginning.
func (t *tracker) setBaseline(seq uint64) {
	isBeginning := seq == 0 || seq == 1 && t.atStart
	t.reset(!isBeginning)
	if seq < t.high {
		t.stats.Restarts++
	}
	t.have, t.next, t.high = true, seq, 0
}

// live takes one batch from the event socket.
func (t *tracker) live(now time.Time, m message) {
	t.stats.LastEvent = now
	t.replay.tailAt = now.Add(tailDelay)
	t.atStart = t.atStart && m.seq != 0 // this engine counts from 0, so 1 is not its first
	if t.replay.mode != replayNone {
		t.wait(m)
		return
	}
	if t.order(now, m) {
		t.replay.rounds = 0
		return
	}
	t.wait(m)
}

// wait keeps a batch until the replay has ended.
func (t *tracker) wait(m message) {
	if len(t.pending) >= maxPending || t.bytes+len(m.payload) > maxPendingBytes {
		t.dropPending()
		t.lost = true
		t.stats.Overflows++
		return
	}
	t.pending = append(t.pending, m)
	t.bytes += len(m.payload)
}

func (t *tracker) dropPending() {
	clear(t.pending)
	t.pending, t.bytes, t.lost = t.pending[:0], 0, false
}

// order applies m if its turn has come; false = a replay has to come first.
func (t *tracker) order(now time.Time, m message) bool {
	switch {
	case m.seq == seqReset:
		t.restart(now)
		return true
	case !t.have:
		t.setBaseline(m.seq)
	case m.seq < t.next:
		return t.handlePassed(now, m)
	case m.seq > t.next:
		if m.seq != 1 || !t.atStart { // else the replay shows whether there was a batch 0
			t.stats.Gaps++
		}
		if t.replays {
			if t.start(now, replayGap, t.next); t.replay.mode != replayNone {
				return false
			}
		}
		t.setBaseline(m.seq)
	}
	if t.apply(m) {
		return true
	}
	// the wire may have damaged what the ring has whole
	if t.replays && t.healed != m.seq && t.replay.rounds < maxRounds && !now.Before(t.replay.cooldown) {
		t.healed = m.seq
		t.start(now, replayGap, t.next)
		return false
	}
	t.skipUnreadable(m)
	if t.replay.fullAt.IsZero() {
		t.replay.fullAt = now.Add(replayCooldown)
	}
	return true
}

// handlePassed handles a batch whose number has passed: a duplicate, a straggler from before a gap, or a sign
// of a new incarnation.
func (t *tracker) handlePassed(now time.Time, m message) bool {
	known, same := t.isRecent(m)
	if known && same {
		t.stats.Duplicates++
		return true
	}
	b, err := t.decoder.Decode(m.payload)
	switch {
	case err != nil: // damaged, and not needed
		t.stats.BadBatches++
		return true
	case !known && b.TS < t.lastTS:
		t.stats.Stragglers++
		return true
	}
	t.restart(now)
	if t.replay.mode != replayNone {
		return false
	}
	return t.order(now, m)
}

// isRecent reports whether the number of m was seen recently, and whether its content was the same.
func (t *tracker) isRecent(m message) (known, same bool) {
	p := &t.recent[m.seq%recentSize]
	known = p.set && p.seq == m.seq
	return known, known && p.sum == xxh3.Hash(m.payload)
}

// apply decodes and delivers the next batch; false = it cannot be decoded, and next is unchanged.
func (t *tracker) apply(m message) bool {
	b, err := t.decoder.Decode(m.payload)
	if err != nil {
		t.stats.BadBatches++
		return false
	}
	t.step(m)
	t.lastTS = b.TS
	t.stats.Batches++
	t.stats.Unknown += uint64(b.Unknown)
	t.stats.Malformed += uint64(b.Malformed)
	t.stats.UnknownMembers += uint64(b.UnknownMembers)
	t.decoder.Deliver(t.sink, &t.groups)
	c := &t.decoder.delivered
	t.stats.Stored, t.stats.Removed, t.stats.Cleared = c.Stored, c.Removed, c.Cleared
	t.stats.Blocks, t.stats.Skipped = c.Blocks, t.groups.Skipped
	if t.decoder.cleared() {
		t.stats.Partial = false // nothing is left that could be unknown
		t.replay.fullAt = time.Time{}
	}
	return true
}

// step records that m was handled and advances next.
func (t *tracker) step(m message) {
	t.recent[m.seq%recentSize] = print{seq: m.seq, sum: xxh3.Hash(m.payload), set: true}
	t.next, t.atStart = m.seq+1, false
}

// skipUnreadable skips a batch that cannot be decoded: the known blocks stay, and the state becomes partial.
func (t *tracker) skipUnreadable(m message) {
	t.step(m)
	t.stats.Partial = true
}

// drain applies the live batches that waited for the replay.
func (t *tracker) drain(now time.Time) {
	for len(t.pending) > 0 && t.replay.mode == replayNone {
		m := t.pending[0]
		if !t.order(now, m) {
			return
		}
		t.pending[0] = message{}
		t.pending = t.pending[1:]
		t.bytes -= len(m.payload)
	}
	if t.replay.mode != replayNone {
		return
	}
	t.pending = nil
	if t.lost && t.have && t.replays {
		t.lost = false
		t.start(now, replayTail, t.next) // perhaps this replay brought them all
		return
	}
	t.replay.rounds = 0
}

// overflow: live batches were dropped in front of the tracker.
func (t *tracker) overflow(now time.Time) {
	t.stats.Overflows++
	switch {
	case t.replay.mode != replayNone:
		t.lost = true
	case t.have && t.replays:
		t.start(now, replayTail, t.next)
	case t.have:
		t.reset(true)
	}
}

// tick starts the checks and replays that are due.
func (t *tracker) tick(now time.Time) {
	if at := t.dueAt(); at.IsZero() || now.Before(at) {
		return
	}
	if t.wantsFull() && !now.Before(t.replay.fullAt) {
		t.start(now, replayFull, 0)
		return
	}
	t.start(now, replayTail, t.next)
}

// dueAt is when tick has something to start, if nothing comes before; zero: never.
func (t *tracker) dueAt() (at time.Time) {
	if !t.connected || !t.replays || t.replay.mode != replayNone {
		return at
	}
	if t.wantsFull() {
		at = t.replay.fullAt
	}
	if tail := t.replay.tailAt; t.have && !tail.IsZero() && (at.IsZero() || tail.Before(at)) {
		at = tail
	}
	if !at.IsZero() && at.Before(t.replay.cooldown) {
		return t.replay.cooldown
	}
	return at
}

// wantsFull records that a replay was not possible and that a later full replay could complete the state.
func (t *tracker) wantsFull() bool { return !t.replay.fullAt.IsZero() && (t.stats.Partial || !t.have) }

// snapshot is the state for readers.
func (t *tracker) snapshot() Stats {
	s := t.stats
	s.Connected, s.Synced, s.Replaying = t.connected, t.have, t.replay.mode != replayNone
	if t.have {
		s.LastSeq = t.next - 1
	}
	return s
}

// seqOf reads the 8 bytes of a sequence number.
func seqOf(frame []byte) (uint64, bool) {
	if len(frame) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(frame), true
}

// start asks for a replay, or acts as if it had failed where none is allowed now.
func (t *tracker) start(now time.Time, mode replayMode, from uint64) {
	if t.replay.rounds++; t.replay.rounds > maxRounds {
		t.replay.cooldown = now.Add(replayCooldown)
	}
	if now.Before(t.replay.cooldown) {
		t.fail(now, mode)
		return
	}
	t.replay.asked++
	t.replay.mode, t.replay.seen, t.replay.want = mode, false, &ask{id: t.replay.asked, from: from}
	t.stats.Replays++
}

// stop forgets the replay that runs.
func (t *tracker) stop() { t.replay.mode, t.replay.want = replayNone, nil }

// take is the ask that the owner has to run now; it replaces one that runs.
func (t *tracker) take() *ask {
	a := t.replay.want
	t.replay.want = nil
	return a
}

// running reports whether the results of ask id are wanted.
func (t *tracker) running(id uint64) bool { return t.replay.mode != replayNone && id == t.replay.asked }

// fail handles a replay that was not possible.
func (t *tracker) fail(now time.Time, mode replayMode) {
	t.stop()
	if mode == replayTail {
		t.replay.tailAt = now.Add(tailInterval)
		return
	}
	t.replay.fullAt = t.replay.cooldown
	if t.suspect || t.have && mode != replayFull {
		t.reset(true)
	}
}

// replayed takes one batch of the replay that runs.
func (t *tracker) replayed(now time.Time, m message) {
	first := !t.replay.seen
	t.replay.seen = true
	switch {
	case first && t.replay.mode == replayFull, !t.have, m.seq > t.next:
		t.setBaseline(m.seq) // what lay between is gone
	case t.suspect && m.seq == t.next:
		t.setBaseline(m.seq) // the last batch we saw is gone: nothing says that it is the same engine
	case m.seq < t.next:
		known, same := t.isRecent(m)
		if known && !same {
			t.restart(now)
			return
		}
		t.suspect = t.suspect && !known
		t.stats.Duplicates++
		return
	}
	if !t.apply(m) {
		t.skipUnreadable(m)
	}
}

// replayEnd handles the end of the replay: its end marker, or err.
func (t *tracker) replayEnd(now time.Time, err error) {
	mode := t.replay.mode
	t.stop()
	if err != nil {
		t.failed(now, mode)
	} else {
		t.ended(now, mode)
	}
	t.drain(now)
}

// failed handles a broken replay. The batches that it brought before are applied.
func (t *tracker) failed(now time.Time, mode replayMode) {
	t.stats.ReplayFailures++
	if mode == replayTail { // nothing is known to be missing
		t.replay.tailAt = now.Add(tailInterval)
		return
	}
	t.replay.cooldown = now.Add(replayCooldown)
	t.replay.fullAt = t.replay.cooldown
	if t.suspect {
		t.reset(true)
	} // gap: the next live batch shows what is missing
}

func (t *tracker) ended(now time.Time, mode replayMode) {
	t.replay.tailAt = now.Add(tailDelay)
	if mode == replayTail {
		t.replay.tailAt = now.Add(tailInterval)
	}
	if mode == replayFull {
		t.replay.fullAt = time.Time{}
	}
	if t.replay.seen {
		return
	}
	switch mode {
	case replayFull:
		if t.suspect || !t.have { // nothing was published yet
			t.setBaseline(0)
			t.atStart = true
		}
	case replayVerify: // the last batch we saw is unknown there
		t.restart(now)
	case replayGap: // a gap that stays: the next live batch is the baseline
		t.reset(true)
	case replayNone, replayTail:
	}
}
