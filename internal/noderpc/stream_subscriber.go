package noderpc

import (
	"bufio"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
)

// listAhead is how many bytes of a list may wait; then no further rank is asked.
const listAhead = 1 << 20

// subscriber is the stream to one ingress. It is the sink of its own list.
type subscriber struct {
	server *StreamServer
	name   string
	conn   net.Conn
	wake   chan struct{} // one slot, as the two below: there is something to send
	hurry  chan struct{} // it is not to wait for the beat
	room   chan struct{} // the waiting part of the list was sent

	end  sync.Mutex    // of finish and extend
	done chan struct{} // closed when the stream ends
	err  error         // why; set before done is closed

	// StreamServer.mu guards the fields below
	at        place
	isIdle    bool    // it is in StreamServer.idle
	own       []piece // of the list, by place
	listBytes int     // in own
}

// piece is a packed record that is sent after everything before at.
type piece struct {
	at    place
	bytes []byte
}

func newSubscriber(s *StreamServer, conn net.Conn) *subscriber {
	return &subscriber{
		server: s, name: s.config.Peer(conn), conn: conn, wake: make(chan struct{}, 1),
		hurry: make(chan struct{}, 1), room: make(chan struct{}, 1), done: make(chan struct{}),
	}
}

// finish ends the stream; the first reason stays. The connection has endTime left, for the reason.
func (sub *subscriber) finish(why error) {
	sub.end.Lock()
	defer sub.end.Unlock()
	if sub.hasEnded() {
		return
	}
	sub.err = why
	_ = sub.conn.SetDeadline(time.Now().Add(endTime))
	close(sub.done)
}

func (sub *subscriber) hasEnded() bool {
	select {
	case <-sub.done:
		return true
	default:
		return false
	}
}

// extend moves the deadline of the next read or write, unless the stream has ended.
func (sub *subscriber) extend(setDeadline func(time.Time) error) {
	sub.end.Lock()
	defer sub.end.Unlock()
	if !sub.hasEnded() {
		_ = setDeadline(time.Now().Add(streamSilence))
	}
}

// run is the stream from its beginning to its end: it writes the records, beside one goroutine that reads
// posts and one for the list. When it ends, the tickets of the ingress stay: those whose requests still run
// end with them, and the others lapse when the context of their admission ends.
func (sub *subscriber) run() {
	s := sub.server
	log := s.log.With(slog.String("ingress", sub.name))
	log.Info("an ingress reads this node's ranks")
	s.config.Count(sub.name, 1)
	var beside sync.WaitGroup
	beside.Go(func() { sub.finish(sub.readPosts()) })
	beside.Go(sub.list)
	if err := sub.sendRecords(); err != nil {
		sub.finish(err)
		_ = sub.conn.Close()
	} else {
		_, _ = sub.conn.Write(packEnd(sub.err))
	}
	s.dropStream(sub)
	beside.Wait() // the reader closes the connection, which takes at most endTime
	_ = sub.conn.Close()
	s.config.Count(sub.name, -1)
	log.Info("an ingress no longer reads this node's ranks")
}

// readPosts handles the messages of the ingress until the stream ends.
func (sub *subscriber) readPosts() error {
	in := bufio.NewReader(sub.conn)
	for {
		sub.extend(sub.conn.SetReadDeadline)
		var m dpservev1.Posts
		if err := protodelim.UnmarshalFrom(in, &m); err != nil { // its bound is 4 MiB
			return err
		}
		for _, p := range m.GetPosts() {
			sub.server.deliverPost(sub, p)
		}
	}
}

// list asks the ranks for their snapshots, one after the other, and ends the list. It asks no further rank
// while much of the list waits to be sent. A rank that begins meanwhile is in the log.
func (sub *subscriber) list() {
	for _, r := range sub.server.liveRanks() {
		for sub.isFull() {
			select {
			case <-sub.room:
			case <-sub.done:
				return
			}
		}
		sent := make(chan struct{})
		r.mailbox.Send(msg.List{Sink: sub, Done: sent})
		select {
		case <-sent:
		case <-r.mailbox.Stopped(): // its RecGone is in the log
		case <-sub.done:
			return
		}
	}
	s := sub.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.packer.listed()
	sub.addOwn(s.packer.buf)
}

func (s *StreamServer) liveRanks() []liveRank {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]liveRank, 0, len(s.ranks))
	for _, r := range s.ranks {
		out = append(out, *r)
	}
	return out
}

func (sub *subscriber) isFull() bool {
	sub.server.mu.Lock()
	defer sub.server.mu.Unlock()
	return sub.listBytes > listAhead
}

// Deliver implements msg.Sink: a rank's snapshot, or a part of its block sets.
func (sub *subscriber) Deliver(rec *msg.Record) {
	s := sub.server
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[unitRank{rec.Unit, rec.Rank}]
	if r == nil || r.epoch != rec.Epoch || r.incarnation != rec.Incarnation {
		return // the log has the snapshot of another incarnation
	}
	s.packer.pack(r.slot, rec)
	sub.addOwn(s.packer.buf)
}

func (sub *subscriber) addOwn(packed []byte) {
	sub.own = append(sub.own, piece{at: sub.server.records.end(), bytes: slices.Clone(packed)})
	sub.listBytes += len(packed)
	signal(sub.wake)
}

// unpacedBytes is the size of a message after which the next one need not wait for others.
const unpacedBytes = chunkBytes / 2

// sendRecords sends records until the stream ends. What changes within the same interval leaves in one
// message. After an error the connection cannot be used any more.
func (sub *subscriber) sendRecords() error {
	every := sub.server.timers.Heartbeat
	timer := time.NewTimer(every)
	defer timer.Stop()
	sent := time.Now()
	for !sub.hasEnded() {
		packed, interval := sub.server.nextMessage(sub)
		if packed == nil {
			if quiet := time.Since(sent); quiet < every/2 {
				timer.Reset(heartbeatIn(quiet, every))
				sub.wait(timer)
				continue
			}
			packed, interval = heartbeat, 0 // the next record leaves at once
		}
		if err := sub.write(packed); err != nil {
			return err
		}
		sent = time.Now()
		if interval > 0 && len(packed) < unpacedBytes {
			sub.waitForBeat(timer, interval)
		}
	}
	return nil
}

// write sends whole records. Each part has a deadline of its own.
func (sub *subscriber) write(packed []byte) error {
	for part := range slices.Chunk(packed, chunkBytes) {
		sub.extend(sub.conn.SetWriteDeadline)
		if _, err := sub.conn.Write(part); err != nil {
			return err
		}
	}
	return nil
}

// wait waits until there is something to send, the stream has ended, or for timer.
func (sub *subscriber) wait(timer *time.Timer) {
	select {
	case <-sub.done:
	case <-sub.wake:
	case <-sub.hurry:
	case <-timer.C:
	}
}

// waitForBeat waits for the next beat, an urgent record or the end of the stream.
func (sub *subscriber) waitForBeat(timer *time.Timer, interval time.Duration) {
	timer.Reset(untilBeat(interval))
	select {
	case <-sub.done:
	case <-sub.hurry:
	case <-timer.C:
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

// nextMessage is the next message of a stream, nil if there is none, and the interval of the messages. It
// ends a stream that is behind the log.
func (s *StreamServer) nextMessage(sub *subscriber) (packed []byte, interval time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records.hasLost(sub.at) {
		s.counts.gaps.Add(1)
		sub.finish(errBehind)
		return nil, 0
	}
	until := s.records.end()
	if len(sub.own) > 0 {
		until = sub.own[0].at
	}
	if packed, sub.at = s.records.read(sub.at, until); packed == nil {
		packed = sub.takeOwn()
	}
	if packed == nil && !sub.isIdle {
		sub.isIdle = true
		s.idle = append(s.idle, sub)
	}
	return packed, recordInterval(len(s.streams))
}

// takeOwn joins the first pieces of one place to one message.
func (sub *subscriber) takeOwn() (packed []byte) {
	n := 0
	for n < len(sub.own) && sub.own[n].at == sub.own[0].at &&
		(n == 0 || len(packed)+len(sub.own[n].bytes) <= chunkBytes) {
		packed = append(packed, sub.own[n].bytes...)
		n++
	}
	sub.listBytes -= len(packed)
	if sub.own = slices.Delete(sub.own, 0, n); len(sub.own) == 0 {
		sub.own = nil
	}
	signal(sub.room)
	return packed
}

// Sizes of a log.
const (
	chunkBytes = 64 << 10
	maxChunks  = 256 // 16 MiB, while a stream is so far behind
)

// recordLog is the packed records of all ranks of a node, in one order, as long as a stream may need them:
// written once, and read by every stream at its own pace. A chunk's bytes never change, so they are sent
// without a copy. A reader that is too slow loses its place; it never blocks the writer. Not safe for
// concurrent use.
type recordLog struct {
	chunks [][]byte
	first  uint64 // number of chunks[0]
}

// place is a reader's position in the log.
type place struct {
	chunk uint64
	pos   int
}

func (p place) before(q place) bool {
	return p.chunk < q.chunk || p.chunk == q.chunk && p.pos < q.pos
}

// append adds a record. A new chunk drops those before oldest, which no reader needs.
func (l *recordLog) append(part []byte, oldest func() place) {
	n := len(l.chunks)
	if n == 0 || len(l.chunks[n-1])+len(part) > cap(l.chunks[n-1]) {
		unneeded := max(oldest().chunk, l.first) - l.first
		l.drop(max(int(unneeded), n+1-maxChunks))
		l.chunks = append(l.chunks, make([]byte, 0, max(chunkBytes, len(part))))
		n = len(l.chunks)
	}
	l.chunks[n-1] = append(l.chunks[n-1], part...)
}

func (l *recordLog) drop(n int) {
	l.chunks = slices.Delete(l.chunks, 0, n)
	l.first += uint64(n)
}

// end is the position after the last record.
func (l *recordLog) end() place {
	n := len(l.chunks)
	if n == 0 {
		return place{chunk: l.first}
	}
	return place{chunk: l.first + uint64(n) - 1, pos: len(l.chunks[n-1])}
}

// hasLost says whether a reader at p missed records.
func (l *recordLog) hasLost(p place) bool { return p.chunk < l.first }

// read returns records from p up to until, and where they end; nil if there are none. hasLost(p) must be
// false.
func (l *recordLog) read(p, until place) (records []byte, next place) {
	for p.before(until) {
		c := l.chunks[p.chunk-l.first]
		if p.chunk == until.chunk {
			return c[p.pos:until.pos:until.pos], until
		}
		records = c[p.pos:len(c):len(c)]
		p = place{chunk: p.chunk + 1}
		if len(records) > 0 {
			return records, p
		}
	}
	return nil, p
}
