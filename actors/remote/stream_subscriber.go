package remote

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
)

// subscriber is the stream to one ingress.
type subscriber struct {
	name string
	wake chan struct{} // one slot

	once sync.Once
	done chan struct{}
	err  error // why it ended, once done is closed

	// below: StreamServer.mu
	at        place
	idle      bool    // it is in StreamServer.idle
	held      []piece // for this stream alone, by place
	heldBytes int
	wants     []*liveRank // to be asked for snapshots, one after the other
	asked     *liveRank
	askedAt   time.Time
	askFrom   time.Time // not before
	lastGap   time.Time
}

// piece is a packed record that comes when everything in front of at is sent.
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

func (sub *subscriber) poke() {
	select {
	case sub.wake <- struct{}{}:
	default: // it has not seen the last one yet
	}
}

func (sub *subscriber) want(r *liveRank) {
	if !slices.Contains(sub.wants, r) {
		sub.wants = append(sub.wants, r)
	}
}

// refresh gives a stream the list of the node's ranks, and asks them all for snapshots. Call with mu held.
func (s *StreamServer) refresh(sub *subscriber) {
	s.packer.roster(len(s.ranks), func(yield func(slot uint64, id identity)) {
		for _, r := range s.ranks {
			yield(r.slot, r.identity)
		}
	})
	list := slices.Clone(s.packer.buf)
	sub.held = append(sub.held, piece{at: s.records.end(), bytes: list})
	sub.heldBytes += len(list)
	for _, r := range s.ranks {
		sub.want(r)
	}
	sub.poke()
}

// gap drops what waits for a stream that was too slow, and begins it anew: at once, and then at most every Resync.
func (s *StreamServer) gap(sub *subscriber, now time.Time) {
	s.counts.gaps.Add(1)
	s.untake(sub)
	sub.at, sub.held, sub.heldBytes, sub.wants, sub.asked = s.records.end(), nil, 0, nil, nil
	if now.Sub(sub.lastGap) < s.timers.Resync {
		sub.askFrom = sub.lastGap.Add(s.timers.Resync)
	}
	sub.lastGap = now
	s.refresh(sub)
}

// unpaced is a message so long that the next one need not wait for company.
const unpaced = chunkBytes / 2

// write sends records until the stream ends.
func (s *StreamServer) write(sub *subscriber, stream grpc.BidiStreamingServer[dpservev1.SubscribeRequest, dpservev1.Records]) error {
	timer := time.NewTimer(s.timers.Heartbeat)
	defer timer.Stop()
	sent := time.Now()
	for {
		packed, ask, pace := s.next(sub)
		if ask != nil {
			s.counts.resyncs.Add(1)
			_ = ask.TrySend(msg.Resync{Sink: s.asker}) // a rank that has no room for it is asked again
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
		if len(packed) > 0 && len(packed) < unpaced && !rest(sub.done, timer, untilBeat(pace)) {
			return nil
		}
	}
}

// heartbeatIn is the time to the next heartbeat of a stream that has said nothing for quiet: on the beat, and at most every and a half
// behind the last message.
func heartbeatIn(quiet, every time.Duration) time.Duration {
	d := untilBeat(every)
	if quiet+d < every/2 {
		d += every
	}
	return d
}

// next is what a stream sends next, nil if there is nothing, and the rank that it asks for a snapshot, nil if none.
func (s *StreamServer) next(sub *subscriber) (packed []byte, ask msg.Mailbox, pace time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.records.lost(sub.at, maxWaiting*uint64(max(1, len(s.ranks)))) {
		s.gap(sub, now)
	}
	until := s.records.end()
	if len(sub.held) > 0 {
		until = sub.held[0].at
	}
	packed, sub.at = s.records.read(sub.at, until)
	if packed == nil {
		packed = sub.takeHeld()
	}
	if r := s.nextAsk(sub, now); r != nil {
		ask = r.mailbox
	}
	if packed == nil && !sub.idle {
		sub.idle = true
		s.idle = append(s.idle, sub)
	}
	return packed, ask, paceOf(len(s.streams))
}

// takeHeld joins the first pieces of one place to one message.
func (sub *subscriber) takeHeld() []byte {
	n, size := 0, 0
	for n < len(sub.held) && sub.held[n].at == sub.held[0].at && (n == 0 || size+len(sub.held[n].bytes) <= chunkBytes) {
		size += len(sub.held[n].bytes)
		n++
	}
	if n == 0 {
		return nil
	}
	packed := sub.held[0].bytes
	if n > 1 {
		packed = make([]byte, 0, size)
		for _, p := range sub.held[:n] {
			packed = append(packed, p.bytes...)
		}
	}
	sub.heldBytes -= size
	if sub.held = slices.Delete(sub.held, 0, n); len(sub.held) == 0 {
		sub.held = nil
	}
	return packed
}

// nextAsk picks the rank that is asked for a snapshot next: one at a time, and when the answer before is sent. One that does not
// answer comes last.
func (s *StreamServer) nextAsk(sub *subscriber, now time.Time) *liveRank {
	if r := sub.asked; r != nil && (r.gone || now.Sub(sub.askedAt) >= s.timers.Resync) {
		sub.asked = nil
		sub.want(r)
	}
	sub.wants = slices.DeleteFunc(sub.wants, func(r *liveRank) bool { return r.gone })
	if sub.asked != nil || len(sub.held) > 0 || len(sub.wants) == 0 || now.Before(sub.askFrom) {
		return nil
	}
	sub.asked, sub.askedAt = sub.wants[0], now
	sub.wants = slices.Delete(sub.wants, 0, 1)
	return sub.asked
}
