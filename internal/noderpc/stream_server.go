package noderpc

import (
	"cmp"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/routing"
)

// Times of a connection.
const (
	// streamSilence bounds a write, and how long a reader may send nothing: then its stream ends.
	streamSilence = 10*time.Second + readerBeat
	readerBeat    = 3 * time.Second        // a reader without posts sends an empty message
	endTime       = 500 * time.Millisecond // to tell a reader why its stream ends
)

// StreamServerConfig is the configuration of a StreamServer. Feed, Peer and Log are required.
type StreamServerConfig struct {
	Feed msg.Feed              // the node's own ranks
	Peer func(net.Conn) string // the ingress node at the other end of a connection
	// Count is told when a stream of an ingress begins (1) and ends (-1). nil: nobody is told.
	Count func(ingress string, change int)
	// Unknown counts posts of a kind that this version does not know. nil: they are not counted.
	Unknown func(what string)
	Timers  StreamTimers
	Log     *slog.Logger
}

// StreamServer serves the streams of a node's ranks to the ingresses of other nodes, and passes their posts
// to the ranks.
//
// A stream is a list and then a watch: its goroutine (list) asks one rank after the other for a snapshot,
// while every record of every rank goes into one log that all streams read. A stream that is too slow for the
// log ends; its reader opens another one, which begins with a list.
type StreamServer struct {
	config  StreamServerConfig
	timers  StreamTimers
	log     *slog.Logger
	cancel  func()         // the subscription to the ranks
	running sync.WaitGroup // streams
	counts  streamCounts

	mu       sync.Mutex
	ended    error // why streams end and none begins; nil while they are served
	closed   bool
	ranks    map[unitRank]*liveRank
	lastSlot uint64
	records  recordLog
	packer   packer
	streams  map[string]*subscriber // by ingress
	idle     []*subscriber          // those that have sent everything, and wait
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

var _ msg.Sink = (*StreamServer)(nil)

// NewStreamServer makes a server that follows the node's ranks at once, until Close.
func NewStreamServer(c StreamServerConfig) *StreamServer {
	if c.Count == nil {
		c.Count = func(string, int) {}
	}
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

// Restart ends every stream before the node's process is replaced, and tells its reader. Close follows.
func (s *StreamServer) Restart() { s.endStreams(errRestarts) }

// Close ends every stream and the subscription, and waits. It is idempotent.
func (s *StreamServer) Close() {
	s.endStreams(errShutDown)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
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

// Serve carries a stream on each connection that l accepts, until l is closed.
func (s *StreamServer) Serve(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		s.addStream(conn)
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

// addStream begins a stream. A second one of the same ingress ends the first, whose connection broke without
// notice.
func (s *StreamServer) addStream(conn net.Conn) {
	sub := newSubscriber(s, conn)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch old := s.streams[sub.name]; {
	case s.closed:
		_ = conn.Close()
		return
	case s.ended != nil: // it only says why
		sub.finish(s.ended)
	default:
		if old != nil {
			old.finish(errReplaced)
		}
		s.streams[sub.name] = sub
		sub.at = s.records.end()
	}
	s.running.Go(sub.run)
}

// dropStream removes a stream that has ended.
func (s *StreamServer) dropStream(sub *subscriber) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[sub.name] == sub {
		delete(s.streams, sub.name)
	}
	s.idle = slices.DeleteFunc(s.idle, func(o *subscriber) bool { return o == sub })
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
	if urgent {
		for _, sub := range s.streams {
			signal(sub.hurry)
		}
	}
	for _, sub := range s.idle {
		sub.isIdle = false
		signal(sub.wake)
	}
	s.idle = s.idle[:0]
}

// maxAgo bounds how long ago a first token may have been.
const maxAgo = time.Hour

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
		Charge:           d.GetCharge(), CheckHealth: d.GetCheckHealth(),
		BusyFor: min(max(time.Duration(d.GetBusyNano()), 0), maxBusy),
	}
}

// maxBusy is the longest time for which an ingress can make a rank full.
const maxBusy = time.Minute

// boundedCount is a count from the wire.
func boundedCount(n int64) int { return int(min(max(n, 0), maxCount)) }
