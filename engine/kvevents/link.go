package kvevents

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/engine/kvevents/zmtp"
)

// Times of the event socket.
const (
	dialTimeout = 2 * time.Second
	firstPause  = 50 * time.Millisecond // between attempts to reach a publisher, doubling
	lastPause   = time.Second
	maxPeers    = 4 // connections to a bound socket: the publisher, its successor, and handshakes
)

// dialLoop keeps a connection to a publisher that binds.
func (s *Subscriber) dialLoop(ctx context.Context) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		dial, cancel := context.WithTimeout(ctx, dialTimeout)
		c, err := zmtp.Dial(dial, s.cfg.Dial, s.addr.connect, zmtp.Sub, zmtp.DefaultLimits())
		cancel()
		if err == nil {
			pause = firstPause
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			s.read(c)
			stop()
			_ = c.Close()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// read is the life of one connection: everything goes into the queue.
func (s *Subscriber) read(c *zmtp.Conn) {
	if err := c.SetWriteDeadline(time.Now().Add(dialTimeout)); err != nil {
		return
	}
	if err := c.Subscribe(s.cfg.Topic); err != nil {
		return
	}
	id := s.become(c)
	s.queue.push(item{kind: itemConnect, conn: id})
	defer s.queue.push(item{kind: itemDisconnect, conn: id})
	for {
		frames, err := c.Recv()
		if err != nil {
			return
		}
		m, ok := liveMessage(frames)
		it := item{kind: itemMessage, conn: id, msg: m}
		if !ok {
			it = item{kind: itemBadFrames, conn: id}
		}
		s.queue.push(it)
	}
}

// become makes c the connection that counts. The newest wins: it is the engine's successor, or its next
// attempt; the one before may be half open for minutes.
func (s *Subscriber) become(c *zmtp.Conn) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil && s.current != c {
		_ = s.current.Close()
	}
	s.current = c
	s.conns++
	return s.conns
}

// liveMessage reads [topic, seq, payload].
func liveMessage(frames [][]byte) (message, bool) {
	if len(frames) != 3 {
		return message{}, false
	}
	seq, ok := seqOf(frames[1])
	return message{seq: seq, payload: frames[2]}, ok
}
