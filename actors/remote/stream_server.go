package remote

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/routing"
)

// Bounds of a subscription.
const (
	maxWaiting  = 1024     // records per rank of the node; the log bounds their bytes
	maxHeld     = 16 << 20 // bytes of snapshots that were asked for
	maxNodeName = 256      // bytes
)

// StreamServerConfig is what a StreamServer needs. Feed and Log are required.
type StreamServerConfig struct {
	Feed msg.Feed // the node's own ranks
	Peer func(ctx context.Context) (node string, ok bool)
	// Unknown counts posts of a kind that this version does not know. Nil: nobody counts.
	Unknown func(what string)
	Timers  StreamTimers
	Log     *slog.Logger
}

// StreamServer serves the streams of a node's ranks to the ingresses of other nodes, and takes what they post to the ranks.
// It implements dpservev1.ReplicaServer. Peer says who is behind a stream's connection, and is held against the name that the stream
// gives; nil: it is not.
//
// It hears the ranks twice. The tap writes all it hears into one log that every stream reads. The asker exists to be given the
// snapshots that single streams want: what it hears goes to those alone.
type StreamServer struct {
	dpservev1.UnimplementedReplicaServer
	config StreamServerConfig
	timers StreamTimers
	log    *slog.Logger
	asker  *asker

	untap, unask func()
	running      sync.WaitGroup // readers and writers
	counts       streamCounts

	mu       sync.Mutex
	closed   bool
	ranks    map[unitRank]*liveRank
	lastSlot uint64
	records  recordLog
	packer   packer
	streams  map[string]*subscriber // by ingress
	idle     []*subscriber          // those that have sent all there is
}

// unitRank names a rank as a post does.
type unitRank struct {
	unit string
	rank routing.RankID
}

// liveRank is an incarnation of a rank of this node.
type liveRank struct {
	identity
	slot    uint64
	mailbox msg.Mailbox
	gone    bool
	givenAt uint64        // number of the last snapshot given to takers: its columns have the same
	takers  []*subscriber // who got it
}

type streamCounts struct {
	posts, strangePosts, gaps, resyncs atomic.Uint64
}

// StreamServerStats counts what happened since New.
type StreamServerStats struct {
	Streams      int    // ingresses now
	Posts        uint64 // taken
	StrangePosts uint64 // dropped: of a kind that is not known, or for no incarnation that is here
	Gaps         uint64 // a stream was too slow, and lost all that waited
	Resyncs      uint64 // snapshots asked for
}

var _ dpservev1.ReplicaServer = (*StreamServer)(nil)

// NewStreamServer makes a server that follows the node's ranks at once, until Close.
func NewStreamServer(c StreamServerConfig) (*StreamServer, error) {
	if c.Feed == nil || c.Log == nil {
		return nil, errors.New("stream server: Feed and Log must be set")
	}
	if c.Unknown == nil {
		c.Unknown = func(string) {}
	}
	s := &StreamServer{
		config: c, timers: c.Timers.withDefaults(), log: c.Log.With(slog.String("room", "remote")),
		ranks: map[unitRank]*liveRank{}, streams: map[string]*subscriber{},
	}
	s.asker = &asker{s}
	s.untap = c.Feed.Subscribe(&tap{s})
	s.unask = c.Feed.Subscribe(s.asker)
	return s, nil
}

// Close ends every stream and leaves the feed. Idempotent. It waits for all that New and the streams started.
func (s *StreamServer) Close() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	for _, sub := range s.streams {
		sub.finish(status.Error(codes.Unavailable, "the node is shutting down"))
	}
	s.mu.Unlock()
	if first {
		s.untap()
		s.unask()
	}
	s.running.Wait()
}

// Stats counts.
func (s *StreamServer) Stats() StreamServerStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return StreamServerStats{
		Streams: len(s.streams), Posts: s.counts.posts.Load(), StrangePosts: s.counts.strangePosts.Load(), Gaps: s.counts.gaps.Load(),
		Resyncs: s.counts.resyncs.Load(),
	}
}

// Subscribe implements dpservev1.ReplicaServer: one stream to one ingress. When it ends, nothing is done about the tickets of that
// ingress: those whose requests still run end with them, and the others lapse as their admission's context ends.
func (s *StreamServer) Subscribe(stream grpc.BidiStreamingServer[dpservev1.SubscribeRequest, dpservev1.Records]) error {
	hello, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := s.known(stream.Context(), hello.GetIngress()); err != nil {
		return err
	}
	sub, err := s.enter(hello.GetIngress())
	if err != nil {
		return err
	}
	defer s.leave(sub)
	s.running.Go(func() { sub.finish(s.read(sub, stream, hello)) })
	s.running.Go(func() { sub.finish(s.write(sub, stream)) })
	select { // reader and writer end with the stream, which ends with this call
	case <-stream.Context().Done():
		return status.FromContextError(stream.Context().Err()).Err()
	case <-sub.done:
		return sub.err
	}
}

// known holds the name that a stream gives against its connection's.
func (s *StreamServer) known(ctx context.Context, name string) error {
	if name == "" || len(name) > maxNodeName {
		return status.Error(codes.InvalidArgument, "the first message of a replica stream must name its ingress node")
	}
	if s.config.Peer == nil {
		return nil
	}
	if node, ok := s.config.Peer(ctx); !ok || node != name {
		return status.Errorf(codes.PermissionDenied, "a stream of node %q came over the connection of node %q", name, node)
	}
	return nil
}

// enter begins a subscription. A second one of the same ingress ends the first: that is a connection which broke unseen.
func (s *StreamServer) enter(name string) (*subscriber, error) {
	sub := &subscriber{name: name, wake: make(chan struct{}, 1), done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, status.Error(codes.Unavailable, "the node is shutting down")
	}
	if old := s.streams[name]; old != nil {
		s.remove(old)
		old.finish(status.Error(codes.Aborted, "the ingress has opened another stream"))
	}
	s.streams[name] = sub
	sub.at = s.records.end()
	s.running.Add(1) // until leave: Close waits for the readers and writers that are about to start
	s.log.Info("an ingress reads this node's ranks", slog.String("ingress", name))
	return sub, nil
}

func (s *StreamServer) leave(sub *subscriber) {
	s.mu.Lock()
	s.remove(sub)
	s.mu.Unlock()
	sub.finish(nil)
	s.running.Done()
	s.log.Info("an ingress no longer reads this node's ranks", slog.String("ingress", sub.name))
}

// remove takes a subscription out of everything. Call with mu held.
func (s *StreamServer) remove(sub *subscriber) {
	if s.streams[sub.name] == sub {
		delete(s.streams, sub.name)
	}
	s.idle = slices.DeleteFunc(s.idle, func(o *subscriber) bool { return o == sub })
	s.untake(sub)
}

func (s *StreamServer) untake(sub *subscriber) {
	for _, r := range s.ranks {
		r.takers = slices.DeleteFunc(r.takers, func(o *subscriber) bool { return o == sub })
	}
}

// tap hears everything, for all streams.
type tap struct{ s *StreamServer }

// Deliver implements msg.Sink.
func (t *tap) Deliver(rec *msg.Record) {
	s := t.s
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.track(rec)
	if r == nil {
		return // of an incarnation that is over
	}
	if len(s.streams) > 0 {
		s.packer.pack(r.slot, rec)
		start := 0
		for _, end := range s.packer.ends {
			s.records.append(s.packer.buf[start:end])
			start = end
		}
		s.wakeIdle()
	}
	if rec.Kind == msg.RecGone {
		r.gone = true
		delete(s.ranks, unitRank{r.unit, r.rank})
	}
}

// track is the rank of a record; a snapshot may begin one.
func (s *StreamServer) track(rec *msg.Record) *liveRank {
	key := unitRank{rec.Unit, rec.Rank}
	r := s.ranks[key]
	if r != nil && r.epoch == rec.Epoch && r.incarnation == rec.Incarnation {
		if rec.Kind == msg.RecSnapshot {
			r.mailbox = rec.Snapshot.Mailbox
		}
		return r
	}
	if rec.Kind != msg.RecSnapshot || r != nil && r.epoch > rec.Epoch {
		return nil
	}
	if r != nil {
		r.gone = true
	}
	s.lastSlot++
	r = &liveRank{identity: identityOf(rec), slot: s.lastSlot, mailbox: rec.Snapshot.Mailbox}
	s.ranks[key] = r
	return r
}

func (s *StreamServer) wakeIdle() {
	for _, sub := range s.idle {
		sub.idle = false
		sub.poke()
	}
	s.idle = s.idle[:0]
}

// asker hears everything too, and passes on the snapshots that somebody wants.
type asker struct{ s *StreamServer }

// Deliver implements msg.Sink.
func (a *asker) Deliver(rec *msg.Record) {
	switch rec.Kind {
	case msg.RecSnapshot, msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		a.s.answer(rec)
	default: // in the log
	}
}

// answer gives a snapshot, and the columns behind it, to the streams that have asked for it.
func (s *StreamServer) answer(rec *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[unitRank{rec.Unit, rec.Rank}]
	if r == nil || r.epoch != rec.Epoch || r.incarnation != rec.Incarnation {
		return // the tap hears of it next, and all streams with it
	}
	if rec.Kind == msg.RecSnapshot {
		s.choose(r, rec.Seq)
	}
	if len(r.takers) == 0 || rec.Seq != r.givenAt {
		return
	}
	s.packer.pack(r.slot, rec)
	shared := slices.Clone(s.packer.buf)
	at, start := s.records.end(), 0
	for _, end := range s.packer.ends {
		for _, sub := range r.takers {
			sub.held = append(sub.held, piece{at: at, bytes: shared[start:end]})
		}
		start = end
	}
	r.takers = slices.DeleteFunc(r.takers, func(sub *subscriber) bool { return !s.hold(sub, r, len(shared)) })
}

// choose makes the streams that wait for a rank the takers of its snapshot.
func (s *StreamServer) choose(r *liveRank, seq uint64) {
	r.givenAt, r.takers = seq, r.takers[:0]
	for _, sub := range s.streams {
		if sub.asked == r {
			sub.asked = nil
			r.takers = append(r.takers, sub)
		}
	}
}

// hold counts what a stream was given; false if that is too much: the rank is asked again when the rest is sent.
func (s *StreamServer) hold(sub *subscriber, r *liveRank, n int) bool {
	sub.heldBytes += n
	sub.poke()
	if sub.heldBytes > maxHeld {
		sub.want(r)
		return false
	}
	return true
}
