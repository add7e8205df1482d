package noderpc

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/routing"
)

// Bounds of a stream.
const (
	listAhead   = 1 << 20 // bytes of a list that wait; then no further rank is asked
	maxNodeName = 256     // bytes
)

// StreamServerConfig is the configuration of a StreamServer. Feed and Log are required.
type StreamServerConfig struct {
	Feed msg.Feed // the node's own ranks
	Peer PeerOf   // it must be the node that the stream names; nil: it is not checked
	// Unknown counts posts of a kind that this version does not know. nil: they are not counted.
	Unknown func(what string)
	Timers  StreamTimers
	Log     *slog.Logger
}

// StreamServer serves the streams of a node's ranks to the ingresses of other nodes, and passes their posts
// to the ranks. It implements dpservev1.ReplicaServer.
//
// A stream is a list and then a watch: its goroutine (list) asks one rank after the other for a snapshot,
// while every record of every rank goes into one log that all streams read. A stream that is too slow for the
// log ends; its reader opens another one, which begins with a list.
type StreamServer struct {
	dpservev1.UnimplementedReplicaServer
	config  StreamServerConfig
	timers  StreamTimers
	log     *slog.Logger
	cancel  func()         // the subscription to the ranks
	running sync.WaitGroup // readers, writers and lists
	counts  streamCounts

	mu       sync.Mutex
	ended    error // why streams end and none begins; nil while they are served
	ranks    map[unitRank]*liveRank
	lastSlot uint64
	records  recordLog
	packer   packer
	streams  map[string]*subscriber // by ingress
}

// unitRank names a rank of a node. A unit's name contains the application's.
type unitRank struct {
	unit string
	rank routing.RankID
}

// liveRank is an incarnation of a rank of this node.
type liveRank struct {
	identity
	slot    uint64
	mailbox msg.Mailbox
}

type streamCounts struct {
	posts, strangePosts, gaps atomic.Uint64
}

// StreamServerStats counts events since New.
type StreamServerStats struct {
	Streams      int    // open now
	Posts        uint64 // delivered to a rank
	StrangePosts uint64 // dropped: of an unknown kind, or for an incarnation that is not here
	Gaps         uint64 // streams that ended because they were too slow
}

var (
	_ dpservev1.ReplicaServer = (*StreamServer)(nil)
	_ msg.Sink                = (*StreamServer)(nil)
)

// NewStreamServer makes a server that follows the node's ranks at once, until Close.
func NewStreamServer(c StreamServerConfig) *StreamServer {
	if c.Unknown == nil {
		c.Unknown = func(string) {}
	}
	s := &StreamServer{
		config: c, timers: c.Timers.withDefaults(), log: c.Log.With(slog.String("component", "remote")),
		ranks: map[unitRank]*liveRank{}, streams: map[string]*subscriber{},
	}
	s.cancel = c.Feed.Subscribe(s)
	return s
}

// Reasons of the end of all streams, for the nodes that read them.
var (
	errShutDown = status.Error(codes.Unavailable, "the node is shutting down")
	// errRestarts makes the silence that follows an expected one (link.onStreamEnd).
	errRestarts = status.Error(codes.Unavailable, "dpserve restarts on this node")
	// errBehind has the reader list the ranks again; it is no sign that the node is in trouble.
	errBehind = status.Error(codes.OutOfRange, "the stream is too slow for this node's ranks")
)

// Restart ends every stream before the node's process is replaced, and tells its reader. Close follows.
func (s *StreamServer) Restart() { s.endStreams(errRestarts) }

// Close ends every stream and the subscription. It is idempotent. It waits for all goroutines that New and
// the streams started.
func (s *StreamServer) Close() {
	s.endStreams(errShutDown)
	s.cancel()
	s.running.Wait()
}

// endStreams ends every stream and refuses others. The first reason stays.
func (s *StreamServer) endStreams(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = cmp.Or(s.ended, why)
	for _, sub := range s.streams {
		sub.finish(s.ended)
	}
}

// Stats returns the counters.
func (s *StreamServer) Stats() StreamServerStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return StreamServerStats{
		Streams: len(s.streams), Posts: s.counts.posts.Load(), StrangePosts: s.counts.strangePosts.Load(),
		Gaps: s.counts.gaps.Load(),
	}
}

// Subscribe implements dpservev1.ReplicaServer: one stream to one ingress. When it ends, the tickets of that
// ingress stay: those whose requests still run end with them, and the others lapse when the context of their
// admission ends.
func (s *StreamServer) Subscribe(
	stream grpc.BidiStreamingServer[dpservev1.SubscribeRequest, dpservev1.Records],
) error {
	hello, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := s.checkName(stream.Context(), hello.GetIngress()); err != nil {
		return err
	}
	sub, err := s.addStream(hello.GetIngress())
	if err != nil {
		return err
	}
	defer s.dropStream(sub)
	s.running.Go(func() { sub.finish(s.readPosts(sub, stream, hello)) })
	s.running.Go(func() { sub.finish(s.sendRecords(sub, stream)) })
	s.running.Go(sub.list)
	select { // reader and writer end with the stream, which ends with this call
	case <-stream.Context().Done():
		return status.FromContextError(stream.Context().Err()).Err()
	case <-sub.done:
		return sub.err
	}
}

// checkName compares the name that a stream gives with that of its connection.
func (s *StreamServer) checkName(ctx context.Context, name string) error {
	if name == "" || len(name) > maxNodeName {
		return status.Error(codes.InvalidArgument,
			"the first message of a replica stream must name its ingress node")
	}
	if s.config.Peer == nil {
		return nil
	}
	if peer, ok := s.config.Peer(ctx); !ok || peer.Node != name {
		return status.Errorf(codes.PermissionDenied,
			"a stream of node %q came over the connection of node %q", name, peer.Node)
	}
	return nil
}

// addStream begins a subscription. A second one of the same ingress ends the first, whose connection broke
// without notice.
func (s *StreamServer) addStream(name string) (*subscriber, error) {
	sub := &subscriber{
		server: s, name: name, wake: make(chan struct{}, 1), hurry: make(chan struct{}, 1),
		room: make(chan struct{}, 1), done: make(chan struct{}),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return nil, s.ended
	}
	if old := s.streams[name]; old != nil {
		s.removeStream(old)
		old.finish(status.Error(codes.Aborted, "the ingress has opened another stream"))
	}
	s.streams[name] = sub
	sub.at = s.records.end()
	s.running.Add(1) // until dropStream: Close waits for the readers and writers that are about to start
	s.log.Info("an ingress reads this node's ranks", slog.String("ingress", name))
	return sub, nil
}

func (s *StreamServer) dropStream(sub *subscriber) {
	s.mu.Lock()
	s.removeStream(sub)
	s.mu.Unlock()
	sub.finish(nil)
	s.running.Done()
	s.log.Info("an ingress no longer reads this node's ranks", slog.String("ingress", sub.name))
}

// removeStream removes a subscription. The caller holds mu.
func (s *StreamServer) removeStream(sub *subscriber) {
	if s.streams[sub.name] == sub {
		delete(s.streams, sub.name)
	}
}

// Deliver implements msg.Sink: it writes a record into the log, for all streams.
func (s *StreamServer) Deliver(rec *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rankOf(rec)
	if r == nil {
		return // of an incarnation that has ended
	}
	if len(s.streams) > 0 {
		s.packer.pack(r.slot, rec)
		s.records.append(s.packer.buf, s.oldestPlace)
		s.wakeStreams(rec)
	}
	if rec.Kind == msg.RecGone {
		delete(s.ranks, unitRank{r.unit, r.rank})
	}
}

// oldestPlace is where the stream that is furthest behind stands.
func (s *StreamServer) oldestPlace() place {
	oldest := s.records.end()
	for _, sub := range s.streams {
		if sub.at.before(oldest) {
			oldest = sub.at
		}
	}
	return oldest
}

// rankOf is the rank of a record; a snapshot may begin one.
func (s *StreamServer) rankOf(rec *msg.Record) *liveRank {
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
	s.lastSlot++
	r = &liveRank{identity: identityOf(rec), slot: s.lastSlot, mailbox: rec.Snapshot.Mailbox}
	s.ranks[key] = r
	return r
}

// wakeStreams wakes the streams that have nothing to send. A change of a rank's state waits for nobody: it
// goes at once, with everything before it. Room that is for one ingress hurries that ingress's stream alone.
func (s *StreamServer) wakeStreams(rec *msg.Record) {
	urgent := rec.Kind == msg.RecState || rec.Kind == msg.RecSnapshot || rec.Kind == msg.RecGone
	if rec.OfferedTo != "" {
		urgent = false
		if sub := s.streams[rec.OfferedTo]; sub != nil {
			signal(sub.hurry)
		}
	}
	for _, sub := range s.streams {
		if urgent {
			signal(sub.hurry)
		} else if sub.isIdle {
			sub.isIdle = false
			signal(sub.wake)
		}
	}
}

// maxAgo bounds how long ago a first token may have been.
const maxAgo = time.Hour

// readPosts handles the messages of an ingress, beginning with the first, until the stream ends.
func (s *StreamServer) readPosts(
	sub *subscriber, stream grpc.BidiStreamingServer[dpservev1.SubscribeRequest, dpservev1.Records],
	hello *dpservev1.SubscribeRequest,
) error {
	for m := hello; ; {
		for _, p := range m.GetPosts() {
			s.deliverPost(sub, p)
		}
		var err error
		if m, err = stream.Recv(); err != nil {
			return err
		}
	}
}

// deliverPost delivers a post to its rank. Posts for unknown ranks are counted and dropped.
func (s *StreamServer) deliverPost(sub *subscriber, p *dpservev1.Post) {
	s.mu.Lock()
	r := s.ranks[unitRank{p.GetUnit(), routing.RankID(p.GetRank())}]
	if r == nil {
		s.mu.Unlock()
		s.counts.strangePosts.Add(1)
		return
	}
	box, here := r.mailbox, r.epoch == p.GetEpoch() && r.incarnation == p.GetIncarnation()
	s.mu.Unlock()
	m := fromPost(p, time.Now())
	if m == nil {
		s.config.Unknown("post")
	}
	if m == nil || !here {
		s.counts.strangePosts.Add(1)
		return
	}
	if d, ok := m.(*msg.Demand); ok {
		d.Ingress = sub.name
	}
	s.counts.posts.Add(1)
	box.Send(m)
}

// fromPost is the actor's message of a post; nil if its kind is not known.
func fromPost(p *dpservev1.Post, now time.Time) any {
	switch m := p.GetMessage().(type) {
	case *dpservev1.Post_Done:
		return doneOf(m.Done)
	case *dpservev1.Post_FirstToken:
		ago := min(max(time.Duration(m.FirstToken.GetAgoNano()), 0), maxAgo)
		return &msg.FirstToken{TicketID: m.FirstToken.GetTicket(), At: now.Add(-ago)}
	case *dpservev1.Post_Progress:
		return &msg.Progress{TicketID: m.Progress.GetTicket(), Out: boundedCount(m.Progress.GetOut())}
	case *dpservev1.Post_Pardon:
		return &msg.Pardon{}
	case *dpservev1.Post_Demand:
		return &msg.Demand{Waits: m.Demand.GetWaits()}
	default:
		return nil
	}
}

func doneOf(d *dpservev1.Done) any {
	if d.GetOutcome() > uint32(msg.Refused) {
		return nil
	}
	cause := d.GetCause()
	return &msg.Done{
		TicketID: d.GetTicket(), Outcome: msg.Outcome(d.GetOutcome()),
		Cause:        cause[:min(len(cause), maxString)],
		PromptTokens: boundedCount(d.GetPromptTokens()), CachedTokens: boundedCount(d.GetCachedTokens()),
		HasCached:        d.GetHasCached(),
		CompletionTokens: boundedCount(d.GetCompletionTokens()),
		FirstToken:       max(time.Duration(d.GetFirstTokenNano()), 0),
		Charge:           d.GetCharge(), Probe: d.GetProbe(),
		BusyFor: min(max(time.Duration(d.GetBusyNano()), 0), maxBusy),
	}
}

// maxBusy is the longest time for which an ingress can make a rank full.
const maxBusy = time.Minute

// boundedCount is a count from the wire.
func boundedCount(n int64) int { return int(min(max(n, 0), maxCount)) }
