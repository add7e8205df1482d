package noderpc

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
)

// subscriber is the stream to one ingress.
type subscriber struct {
	name string
	wake chan struct{} // one slot

	once sync.Once
	done chan struct{}
	err  error // why it ended; set before done is closed

	// StreamServer.mu guards the fields below
	at        place
	isIdle    bool    // it is in StreamServer.idle
	own       []piece // pieces for this stream alone, by place
	ownBytes  int
	wanted    []*liveRank // ranks to be asked for snapshots, one after the other
	askedRank *liveRank
	askedAt   time.Time
	nextAskAt time.Time // no rank is asked before
	lastGap   time.Time
}

// piece is a packed record that is sent after everything before at.
type piece struct {
	at    place
	bytes []byte
}

func (sub *subscriber) finish(err error) {
	sub.once.Do(func() {
		sub.err = err
		close(sub.done)
	})
}

func (sub *subscriber) addWanted(r *liveRank) {
	if !slices.Contains(sub.wanted, r) {
		sub.wanted = append(sub.wanted, r)
	}
}

// requestAll gives a stream the list of the node's ranks, and asks all of them for snapshots. The caller
// holds mu.
func (s *StreamServer) requestAll(sub *subscriber) {
	s.packer.roster(len(s.ranks), func(yield func(slot uint64, id identity)) {
		for _, r := range s.ranks {
			yield(r.slot, r.identity)
		}
	})
	list := slices.Clone(s.packer.buf)
	sub.own = append(sub.own, piece{at: s.records.end(), bytes: list})
	sub.ownBytes += len(list)
	for _, r := range s.ranks {
		sub.addWanted(r)
	}
	signal(sub.wake)
}

// handleGap drops the records that wait for a stream that was too slow, and starts it again: at once, and
// then at most every resyncWait.
func (s *StreamServer) handleGap(sub *subscriber, now time.Time) {
	s.counts.gaps.Add(1)
	s.removeReceiver(sub)
	sub.at, sub.own, sub.ownBytes, sub.wanted, sub.askedRank = s.records.end(), nil, 0, nil, nil
	if now.Sub(sub.lastGap) < resyncWait {
		sub.nextAskAt = sub.lastGap.Add(resyncWait)
	}
	sub.lastGap = now
	s.requestAll(sub)
}

// unpacedBytes is the size of a message after which the next one need not wait for others.
const unpacedBytes = chunkBytes / 2

// sendRecords sends records until the stream ends.
func (s *StreamServer) sendRecords(
	sub *subscriber, stream grpc.BidiStreamingServer[dpservev1.SubscribeRequest, dpservev1.Records],
) error {
	timer := time.NewTimer(s.timers.Heartbeat)
	defer timer.Stop()
	sent := time.Now()
	for {
		packed, ask, pace := s.nextMessage(sub)
		if ask != nil {
			_ = ask.TrySend(msg.Resync{Sink: s.snapshots}) // a rank whose mailbox is full is asked again
		}
		if quiet := time.Since(sent); packed == nil && quiet < s.timers.Heartbeat/2 {
			timer.Reset(heartbeatIn(quiet, s.timers.Heartbeat))
			select {
			case <-sub.done:
				return nil
			case <-sub.wake:
			case <-timer.C:
			}
			continue
		}
		if err := stream.Send(&dpservev1.Records{Packed: packed}); err != nil {
			return err
		}
		sent = time.Now()
		if len(packed) > 0 && len(packed) < unpacedBytes && !waitTimer(sub.done, timer, untilBeat(pace)) {
			return nil
		}
	}
}

// heartbeatIn is the time to the next heartbeat of a stream without a message for quiet. It is on the beat,
// at most one and a half times every after the last message.
func heartbeatIn(quiet, every time.Duration) time.Duration {
	d := untilBeat(every)
	if quiet+d < every/2 {
		d += every
	}
	return d
}

// nextMessage is the next message of a stream, nil if there is none, and the rank to be asked for a snapshot,
// nil if none.
func (s *StreamServer) nextMessage(sub *subscriber) (packed []byte, ask msg.Mailbox, pace time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.records.hasLost(sub.at, maxLag*uint64(max(1, len(s.ranks)))) {
		s.handleGap(sub, now)
	}
	until := s.records.end()
	if len(sub.own) > 0 {
		until = sub.own[0].at
	}
	packed, sub.at = s.records.read(sub.at, until)
	if packed == nil {
		packed = sub.takeOwn()
	}
	if r := s.nextWanted(sub, now); r != nil {
		ask = r.mailbox
	}
	if packed == nil && !sub.isIdle {
		sub.isIdle = true
		s.idle = append(s.idle, sub)
	}
	return packed, ask, sendInterval(len(s.streams))
}

// takeOwn joins the first pieces of one place to one message.
func (sub *subscriber) takeOwn() []byte {
	n, size := 0, 0
	for n < len(sub.own) && sub.own[n].at == sub.own[0].at &&
		(n == 0 || size+len(sub.own[n].bytes) <= chunkBytes) {
		size += len(sub.own[n].bytes)
		n++
	}
	if n == 0 {
		return nil
	}
	packed := sub.own[0].bytes
	if n > 1 {
		packed = make([]byte, 0, size)
		for _, p := range sub.own[:n] {
			packed = append(packed, p.bytes...)
		}
	}
	sub.ownBytes -= size
	if sub.own = slices.Delete(sub.own, 0, n); len(sub.own) == 0 {
		sub.own = nil
	}
	return packed
}

// nextWanted picks the rank that is asked for a snapshot next: one at a time, after the answer before was
// sent. A rank that does not answer comes last.
func (s *StreamServer) nextWanted(sub *subscriber, now time.Time) *liveRank {
	if r := sub.askedRank; r != nil && (r.hasEnded || now.Sub(sub.askedAt) >= resyncWait) {
		sub.askedRank = nil
		sub.addWanted(r)
	}
	sub.wanted = slices.DeleteFunc(sub.wanted, func(r *liveRank) bool { return r.hasEnded })
	if sub.askedRank != nil || len(sub.own) > 0 || len(sub.wanted) == 0 || now.Before(sub.nextAskAt) {
		return nil
	}
	sub.askedRank, sub.askedAt = sub.wanted[0], now
	sub.wanted = slices.Delete(sub.wanted, 0, 1)
	return sub.askedRank
}

// Sizes of a log.
const (
	chunkBytes = 64 << 10
	maxChunks  = 16 // 1 MiB
)

// recordLog is the packed records of all ranks of a node, in one order, as long as a stream may need them:
// written once, and read by every stream at its own pace. A chunk's bytes never change, so they are sent
// without a copy. A reader that is too slow loses its place; it never blocks the writer. Not safe for
// concurrent use.
type recordLog struct {
	chunks []*logChunk
	first  uint64 // number of chunks[0]
	count  uint64 // all records since the start
}

type logChunk struct {
	buf   []byte
	start uint64 // records before it
}

// place is a reader's position in the log.
type place struct {
	chunk uint64
	pos   int
	count uint64 // records before it
}

func (p place) before(q place) bool {
	return p.chunk < q.chunk || p.chunk == q.chunk && p.pos < q.pos
}

func (l *recordLog) append(part []byte) {
	n := len(l.chunks)
	if n == 0 || len(l.chunks[n-1].buf)+len(part) > cap(l.chunks[n-1].buf) {
		if n == maxChunks {
			l.chunks = append(l.chunks[:0], l.chunks[1:]...)
			l.first++
		}
		l.chunks = append(l.chunks,
			&logChunk{buf: make([]byte, 0, max(chunkBytes, len(part))), start: l.count})
	}
	c := l.chunks[len(l.chunks)-1]
	c.buf = append(c.buf, part...)
	l.count++
}

// end is the position after the last record.
func (l *recordLog) end() place {
	n := len(l.chunks)
	if n == 0 {
		return place{chunk: l.first, count: l.count}
	}
	return place{chunk: l.first + uint64(n) - 1, pos: len(l.chunks[n-1].buf), count: l.count}
}

// hasLost says whether a reader at p missed records, or is more than limit of them behind.
func (l *recordLog) hasLost(p place, limit uint64) bool {
	return p.chunk < l.first || l.count-p.count > limit
}

// read returns records from p up to until, and where they end; nil if there are none. hasLost(p) must be
// false.
func (l *recordLog) read(p, until place) (records []byte, next place) {
	for p.before(until) {
		c := l.chunks[p.chunk-l.first]
		if p.chunk == until.chunk {
			return c.buf[p.pos:until.pos:until.pos], until
		}
		records = c.buf[p.pos:len(c.buf):len(c.buf)]
		p = place{chunk: p.chunk + 1, count: l.chunks[p.chunk+1-l.first].start}
		if len(records) > 0 {
			return records, p
		}
	}
	return nil, p
}
