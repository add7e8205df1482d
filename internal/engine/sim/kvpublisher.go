package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
)

// Bounds of a publisher beside those of its settings.
const (
	kvRingBytes = 64 << 20 // payloads in the replay ring: the oldest leave first
	// payloads that wait for one slow subscriber; beyond it batches are dropped, as at a high-water mark
	kvQueueBytes = 64 << 20
	kvPeers      = 64                     // connections to a bound socket
	kvRedial     = 100 * time.Millisecond // between attempts to reach the subscriber
	kvDialLimit  = 2 * time.Second
)

// kvPublisher is the event side of one rank: sequence numbers, the replay ring, the sockets. Safe for
// concurrent use.
type kvPublisher struct {
	cfg     *Config
	set     KVEvents
	sockets sockets
	encoder *kvEncoder
	faults  *faults

	quit   chan struct{} // closed with the sockets
	once   sync.Once
	cancel context.CancelFunc
	pub    *zmtp.Server // nil where it dials
	router *zmtp.Server // nil without a replay endpoint
	wg     sync.WaitGroup

	mu    sync.Mutex
	next  uint64 // sequence number
	ring  []kvBatch
	bytes int
	subs  map[*kvSubscriber]struct{}
	dice  uint64   // state of the faults' random numbers
	held  *kvBatch // kv-reorder: published after the next one
	dials *zmtp.Conn
}

type kvBatch struct {
	seq     uint64
	payload []byte
}

func newKVPublisher(cfg *Config, rank int, faults *faults) (*kvPublisher, error) {
	s, err := cfg.KVEvents.at(rank)
	if err != nil {
		return nil, err
	}
	return &kvPublisher{
		quit: make(chan struct{}), cfg: cfg, set: cfg.KVEvents, sockets: s,
		encoder: newKVEncoder(&cfg.KVEvents, cfg.Model.BlockSize, rank), faults: faults,
		next: cfg.KVEvents.FirstSeq, subs: map[*kvSubscriber]struct{}{},
		dice: cfg.Seed + uint64(rank),
	}, nil
}

// open binds the sockets and begins to dial.
func (p *kvPublisher) open(ctx context.Context) (err error) {
	if !p.sockets.dials {
		if p.pub, err = p.bind(ctx, &p.sockets.endpoint, p.sockets.publish, zmtp.Pub, p.serve); err != nil {
			return err
		}
	}
	if p.sockets.replay != "" {
		p.router, err = p.bind(ctx, &p.sockets.replay, p.sockets.answer, zmtp.Router, p.replays)
		if err != nil {
			return err
		}
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	if p.sockets.dials {
		p.wg.Go(func() { p.dialLoop(life) })
	}
	return nil
}

// bind listens; a wildcard is the host of the API. told learns the port where any was wanted.
func (p *kvPublisher) bind(ctx context.Context, told *string, addr string, role zmtp.Role,
	handle func(*zmtp.Conn),
) (*zmtp.Server, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if host == "*" {
		addr = net.JoinHostPort(p.cfg.Host, port)
	}
	l, err := p.cfg.listen(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("bind kv events socket %s: %w", addr, err)
	}
	if port == "0" {
		_, port, _ = net.SplitHostPort(l.Addr().String())
		*told = schemeTCP + net.JoinHostPort(host, port)
	}
	s := zmtp.NewServer(l, role, zmtp.DefaultLimits(), kvPeers, nil, handle)
	s.Start()
	return s, nil
}

// close ends the sockets and waits. It is idempotent.
func (p *kvPublisher) close() {
	p.once.Do(func() { close(p.quit) })
	if p.cancel != nil {
		p.cancel()
	}
	for _, s := range []*zmtp.Server{p.pub, p.router} {
		if s != nil {
			_ = s.Close()
		}
	}
	p.wg.Wait()
}

// dialLoop keeps a connection to a subscriber that binds.
func (p *kvPublisher) dialLoop(ctx context.Context) {
	for {
		dial, cancel := context.WithTimeout(ctx, kvDialLimit)
		c, err := zmtp.Dial(dial, p.cfg.dial, p.sockets.publish, zmtp.Pub, zmtp.DefaultLimits())
		cancel()
		if err == nil {
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			p.mu.Lock()
			p.dials = c
			p.mu.Unlock()
			p.serve(c)
			stop()
			_ = c.Close()
		}
		if pause.For(ctx, kvRedial) != nil {
			return
		}
	}
}

// step publishes the changes of one step.
func (p *kvPublisher) step(events []em.BlockEvent) {
	ts := float64(time.Now().UnixMicro()) / 1e6
	p.mu.Lock()
	defer p.mu.Unlock()
	payload := p.encoder.batch(ts, events)
	if p.strikes(ModeKVUnknown) {
		payload = withUnknown(payload)
	}
	b := kvBatch{seq: p.next, payload: payload}
	p.next++
	p.remember(b)
	p.send(b)
}

// remember enters a batch into the ring.
func (p *kvPublisher) remember(b kvBatch) {
	p.ring = append(p.ring, b)
	p.bytes += len(b.payload)
	for len(p.ring) > p.set.BufferSteps || p.bytes > kvRingBytes && len(p.ring) > 1 {
		p.bytes -= len(p.ring[0].payload)
		p.ring[0] = kvBatch{}
		p.ring = p.ring[1:]
	}
}

// send passes a batch to the subscribers, as the injected failures want it.
func (p *kvPublisher) send(b kvBatch) {
	switch {
	case p.strikes(ModeKVDrop):
		return
	case p.strikes(ModeKVGarbage):
		b.payload = damaged(b.payload)
	case p.held == nil && p.strikes(ModeKVReorder):
		p.held = &b
		return
	}
	p.fan(b)
	if p.strikes(ModeKVDuplicate) {
		p.fan(b)
	}
	if p.held != nil {
		p.fan(*p.held)
		p.held = nil
	}
}

func (p *kvPublisher) fan(b kvBatch) {
	for s := range p.subs {
		s.offer(p.set.Topic, b)
	}
}

// strikes draws whether a failure mode hits the next batch.
func (p *kvPublisher) strikes(m Mode) bool {
	return p.faults.chance(m, func() float64 {
		p.dice = p.dice*6364136223846793005 + 1442695040888963407
		return float64(p.dice>>11) / (1 << 53)
	})
}

// restart is the event side of an engine that began anew in the same place.
func (p *kvPublisher) restart() {
	p.mu.Lock()
	p.next, p.ring, p.bytes, p.held = p.set.FirstSeq, nil, 0, nil
	clear(p.encoder.digests)
	dials := p.dials
	p.mu.Unlock()
	if dials != nil {
		_ = dials.Close()
	}
	for _, s := range []*zmtp.Server{p.pub, p.router} {
		if s != nil {
			s.DropAll()
		}
	}
}

// published is the number of the next batch.
func (p *kvPublisher) published() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.next
}

// serve handles one subscriber's connection: it reads subscriptions, and another goroutine writes batches.
func (p *kvPublisher) serve(c *zmtp.Conn) {
	s := newKVSubscriber(p.set.HWM)
	p.mu.Lock()
	p.subs[s] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() { s.write(c, p.set.Topic) })
	for {
		frames, err := c.Recv()
		if err != nil {
			break
		}
		if len(frames) == 1 && len(frames[0]) > 0 {
			s.subscribe(frames[0][0] == 1, string(frames[0][1:]))
		}
	}
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	s.stop()
	_ = c.Close()
	writer.Wait()
}

// kvSubscriber is one subscriber's queue. Safe for concurrent use.
type kvSubscriber struct {
	hwm  int
	kick chan struct{}
	done chan struct{}

	mu     sync.Mutex
	topics map[string]struct{}
	queue  []kvBatch
	bytes  int
}

func newKVSubscriber(hwm int) *kvSubscriber {
	return &kvSubscriber{
		hwm: hwm, kick: make(chan struct{}, 1), done: make(chan struct{}),
		topics: map[string]struct{}{},
	}
}

// maxKVTopics bounds what one subscriber can ask for.
const maxKVTopics = 64

func (s *kvSubscriber) subscribe(on bool, prefix string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !on {
		delete(s.topics, prefix)
	} else if len(s.topics) < maxKVTopics {
		s.topics[prefix] = struct{}{}
	}
}

// offer queues a batch, or drops it silently if the subscriber did not ask for it or its queue is full, as a
// PUB socket does.
func (s *kvSubscriber) offer(topic string, b kvBatch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.wants(topic) || s.hwm > 0 && len(s.queue) >= s.hwm || s.bytes+len(b.payload) > kvQueueBytes {
		return
	}
	s.queue = append(s.queue, b)
	s.bytes += len(b.payload)
	kick(s.kick)
}

func (s *kvSubscriber) wants(topic string) bool {
	for prefix := range s.topics {
		if strings.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}

func (s *kvSubscriber) stop() { close(s.done) }

func (s *kvSubscriber) write(c *zmtp.Conn, topic string) {
	for {
		select {
		case <-s.kick:
		case <-s.done:
			return
		}
		for {
			s.mu.Lock()
			if len(s.queue) == 0 {
				s.queue = nil
				s.mu.Unlock()
				break
			}
			b := s.queue[0]
			s.queue[0] = kvBatch{}
			s.queue = s.queue[1:]
			s.bytes -= len(b.payload)
			s.mu.Unlock()
			if c.Send([]byte(topic), seqFrame(b.seq), b.payload) != nil {
				_ = c.Close() // the reader notices
				return
			}
		}
	}
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// Failures of the replay socket.
const (
	kvShortRing = 2 // batches that a short ring still holds
	// in front of each answer of a slow one: longer than any consumer should wait
	kvSlowPause = 3 * time.Second
	kvChunk     = 64 // batches that are copied out of the ring at a time
)

// replays handles one connection to the ROUTER: it answers each request of exactly two frames (three with the
// identity that the socket adds) from the ring and ignores others.
func (p *kvPublisher) replays(c *zmtp.Conn) {
	for {
		frames, err := c.Recv()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[1]) != 8 {
			p.cfg.Logger.Error("kv events: invalid replay request", "frames", len(frames))
			continue
		}
		if p.faults.is(ModeKVNoReplay) {
			continue
		}
		if p.answer(c, binary.BigEndian.Uint64(frames[1])) != nil {
			return
		}
	}
}

// answer sends what the ring has from the number from on, then the end marker.
func (p *kvPublisher) answer(c *zmtp.Conn, from uint64) error {
	for {
		batches := p.since(from)
		if len(batches) == 0 {
			break
		}
		for _, b := range batches {
			if err := p.reply(c, p.set.Topic, b.seq, b.payload); err != nil {
				return err
			}
		}
		from = batches[len(batches)-1].seq + 1
	}
	return p.reply(c, "", math.MaxUint64, nil)
}

// since copies the next batches of the ring.
func (p *kvPublisher) since(from uint64) []kvBatch {
	p.mu.Lock()
	defer p.mu.Unlock()
	ring := p.ring
	if p.faults.is(ModeKVShortReplay) {
		ring = ring[max(0, len(ring)-kvShortRing):]
	}
	if len(ring) == 0 || from > ring[len(ring)-1].seq {
		return nil
	}
	if from > ring[0].seq {
		ring = ring[from-ring[0].seq:]
	}
	return append([]kvBatch{}, ring[:min(len(ring), kvChunk)]...)
}

func (p *kvPublisher) reply(c *zmtp.Conn, topic string, seq uint64, payload []byte) error {
	if p.faults.is(ModeKVSlowReplay) {
		select {
		case <-time.After(kvSlowPause):
		case <-p.quit:
		}
	}
	return c.Send(nil, []byte(topic), seqFrame(seq), payload)
}
