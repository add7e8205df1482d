// Package kvevents follows the KV-cache events of engine ranks: it subscribes to an engine's ZeroMQ
// publisher, puts batches into their order, fetches missing ones from the engine's replay socket, notices new
// incarnations, and hands events to a Sink. The events that it passes on are exact, or the state is marked as
// partial.
//
// The tracker is pure and decides the order: without a baseline it asks for a full replay; a gap is replayed
// from the first missing batch while live batches wait; a number that has passed is a duplicate (same
// content), a straggler of a gap that was given up, or a new incarnation of the engine. What cannot be
// completed becomes Reset(partial), which ends with an AllBlocksCleared or a replay from the first batch. A
// BlockStored that contradicts itself is dropped alone (less is known than there is); a BlockRemoved that
// cannot be read spoils its batch (more would be believed than there is).
//
// The ZMTP wire is go-zeromq's, its sockets are not used: they have no bounds, and a peer's malformed
// handshake ends them. Frames, batches, queues, replays and connections have bounds, constants beside their
// use.
package kvevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
)

// minTick is the shortest time from one batch of events to a check of cooldowns and of a silent stream.
const minTick = 250 * time.Millisecond

// errStarted is given by a second Start.
var errStarted = errors.New("kv event subscriber was started before")

// Config is one subscription: one rank, one incarnation or, for attached engines, any number of them.
type Config struct {
	Endpoints Endpoints
	Hosts     Hosts
	Topic     string // prefix of the topics; "" = all
	Sink      Sink   // required
	// optional: called when the state in Stats changed, after the calls of the Sink; it must not block
	Changed func()
	Replays *Replays // shared by the subscriptions of a node; nil = unbounded

	Logger *slog.Logger // nil = silent
	// Dial and Listen replace the network (tests on memory transports); nil = net.
	Dial   func(ctx context.Context, addr string) (net.Conn, error)
	Listen func(ctx context.Context, addr string) (net.Listener, error)
}

// Subscriber follows one rank. Safe for concurrent use.
type Subscriber struct {
	cfg   Config
	addr  addresses
	log   *slog.Logger
	queue *queue

	cancel context.CancelFunc
	server *zmtp.Server // where the engine dials
	wg     sync.WaitGroup

	mu      sync.Mutex
	current *zmtp.Conn
	conns   uint64
	stats   Stats
	refused uint64
	started bool
	closed  bool
}

// New checks the configuration. Errors: problem.InvalidArgument for endpoints that may not be used.
func New(cfg Config) (*Subscriber, error) {
	addr, err := cfg.Endpoints.resolve(cfg.Hosts)
	if err != nil {
		return nil, err
	}
	s := &Subscriber{cfg: cfg, addr: addr, log: cfg.Logger, queue: newQueue(), stats: Stats{Partial: true}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s, nil
}

// Start binds, where the engine dials, and begins to follow. ctx bounds the start only; Close ends the
// subscription.
func (s *Subscriber) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started || s.closed {
		return errStarted
	}
	if s.addr.bind != "" {
		l, err := s.listen(ctx)
		if err != nil {
			return fmt.Errorf("listen for kv events on %s: %w", s.addr.bind, err)
		}
		s.server = zmtp.NewServer(l, zmtp.Sub, zmtp.DefaultLimits(), maxPeers, s.admit, s.read)
		s.server.Start()
	}
	s.started = true
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	if s.addr.connect != "" {
		s.wg.Go(func() { s.dialLoop(life) })
	}
	s.wg.Go(func() { s.follow(life) })
	return nil
}

func (s *Subscriber) listen(ctx context.Context) (net.Listener, error) {
	if s.cfg.Listen != nil {
		return s.cfg.Listen(ctx, s.addr.bind)
	}
	var lc net.ListenConfig
	return lc.Listen(ctx, "tcp", s.addr.bind)
}

// admit refuses publishers from elsewhere.
func (s *Subscriber) admit(a net.Addr) bool {
	if s.cfg.Hosts.accepts(a) {
		return true
	}
	s.mu.Lock()
	s.refused++
	s.mu.Unlock()
	s.log.Warn("a peer that is no declared engine tried to publish kv events", "peer", a.String())
	return false
}

// Addr is where it listens for the engine; nil if it dials.
func (s *Subscriber) Addr() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server == nil {
		return nil
	}
	return s.server.Addr()
}

// Stats is a snapshot.
func (s *Subscriber) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.stats
	out.Refused = s.refused
	return out
}

// Close ends the subscription and waits; the Sink is not called any more. It is idempotent.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	s.closed = true
	cancel, server := s.cancel, s.server
	s.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	var err error
	if server != nil {
		err = server.Close()
	}
	s.wg.Wait()
	return err
}

// follow runs the tracker and calls the Sink, on the subscription's one goroutine.
func (s *Subscriber) follow(ctx context.Context) {
	f := &follower{
		s: s, t: newTracker(s.addr.replay != "", s.cfg.Sink),
		answers: make(chan answer, replayBacklog),
	}
	defer f.end()
	tick := time.NewTimer(minTick)
	defer tick.Stop()
	var tickAt time.Time // when the timer ends; zero: it does not run
	var spare []item
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.queue.kick:
			items := s.queue.take(spare)
			for i := range items {
				f.item(ctx, &items[i])
			}
			clear(items)
			spare = items
		case a := <-f.answers:
			f.answer(a)
		case now := <-tick.C:
			tickAt = time.Time{}
			f.t.tick(now)
		}
		f.launch(ctx)
		f.publish()
		if at := f.t.dueAt(); !at.IsZero() && (tickAt.IsZero() || at.Before(tickAt)) {
			tickAt = at
			tick.Reset(max(time.Until(at), minTick))
		}
	}
}

// follower is the tracker in its goroutine.
type follower struct {
	s       *Subscriber
	t       *tracker
	conn    uint64 // the connection whose messages count
	answers chan answer
	cancel  context.CancelFunc // of the replay that runs
	done    chan struct{}
}

func (f *follower) item(ctx context.Context, it *item) {
	now := time.Now()
	if it.kind == itemConnect {
		if f.t.connected {
			f.t.disconnect()
		}
		f.conn = it.conn
		f.t.connect(now)
		f.launch(ctx)
		return
	}
	if it.conn != f.conn {
		return // of a connection that was replaced
	}
	switch it.kind {
	case itemMessage:
		f.t.live(now, it.msg)
	case itemDisconnect:
		f.t.disconnect()
	case itemOverflow:
		f.t.overflow(now)
	case itemBadFrames:
		f.t.stats.BadFrames++
	case itemConnect:
	}
}

func (f *follower) answer(a answer) {
	switch {
	case !f.t.running(a.id):
	case a.end:
		f.t.replayEnd(time.Now(), a.err)
	default:
		f.t.replayed(time.Now(), a.msg)
	}
}

// launch runs the replay that the tracker wants and cancels the previous one, whose results are no longer
// needed.
func (f *follower) launch(ctx context.Context) {
	a := f.t.take()
	if a == nil {
		return
	}
	f.end()
	ctx, f.cancel = context.WithCancel(ctx)
	f.done = make(chan struct{})
	done := f.done
	go func() {
		defer close(done)
		f.s.replay(ctx, *a, f.answers)
	}()
}

// end stops the replay that runs and waits for it.
func (f *follower) end() {
	if f.cancel == nil {
		return
	}
	f.cancel()
	<-f.done
	f.cancel = nil
}

func (f *follower) publish() {
	stats := f.t.snapshot()
	f.s.mu.Lock()
	changed := f.s.stats.status() != stats.status()
	f.s.stats = stats
	f.s.mu.Unlock()
	if changed && f.s.cfg.Changed != nil {
		f.s.cfg.Changed()
	}
}

// Bounds of the queue between the socket and the tracker. The reader takes messages as fast as the socket
// delivers them, because the engine's publisher drops batches without notice when a subscriber is slow. A
// message that does not fit here becomes a gap in the sequence, which the tracker repairs by a replay.
const (
	maxQueued      = 8192
	maxQueuedBytes = 64 << 20
)

// itemKind is the kind of an item of the queue.
type itemKind uint8

const (
	itemMessage itemKind = iota
	itemConnect
	itemDisconnect
	itemOverflow
	itemBadFrames
)

type item struct {
	kind itemKind
	conn uint64 // which connection it is of
	msg  message
}

// queue is bounded in messages and bytes. Safe for concurrent use.
type queue struct {
	kick chan struct{}

	mu    sync.Mutex
	items []item
	bytes int
}

func newQueue() *queue { return &queue{kick: make(chan struct{}, 1)} }

// push never blocks: beyond the bound a message becomes one overflow item.
func (q *queue) push(it item) {
	q.mu.Lock()
	full := len(q.items) >= maxQueued || q.bytes+len(it.msg.payload) > maxQueuedBytes
	switch {
	case !full || it.kind == itemConnect || it.kind == itemDisconnect:
		q.items = append(q.items, it)
		q.bytes += len(it.msg.payload)
	case q.items[len(q.items)-1].kind != itemOverflow:
		q.items = append(q.items, item{kind: itemOverflow, conn: it.conn})
	}
	q.mu.Unlock()
	select {
	case q.kick <- struct{}{}:
	default:
	}
}

// take returns all items; spare becomes the buffer of the next ones.
func (q *queue) take(spare []item) []item {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := q.items
	q.items, q.bytes = spare[:0], 0
	return out
}

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

// read reads one connection until it ends and puts every message into the queue.
func (s *Subscriber) read(c *zmtp.Conn) {
	if err := c.SetWriteDeadline(time.Now().Add(dialTimeout)); err != nil {
		return
	}
	if err := c.Subscribe(s.cfg.Topic); err != nil {
		return
	}
	id := s.setCurrent(c)
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

// setCurrent makes c the current connection. The newest one wins: it belongs to the engine's successor or to
// its next attempt, and the previous one may stay half open for minutes.
func (s *Subscriber) setCurrent(c *zmtp.Conn) uint64 {
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
	// members of Stored events that are not known; they may set blocks apart that are taken for equal
	UnknownMembers uint64
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
