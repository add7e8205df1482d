package noderpc

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// Bounds of the messages between ingresses.
const (
	maxGroupBatch = 256                    // in one message on the wire
	maxGroupQueue = 16_384                 // that wait for a link
	redialPause   = 500 * time.Millisecond // after a link to an owner has failed
)

// The call of the Ingress service, which nodes with role ingress serve: the owner of the queue of a lockstep
// group answers the ingresses of other nodes. Without messages, a batch is a sign of life.
const (
	ingressService = "dpserve.v1.Ingress"

	holdStream = stream[[]msg.GroupMessage, []msg.GroupMessage]("/" + ingressService + "/Hold")
)

type groupPipe = pipe[[]msg.GroupMessage, []msg.GroupMessage]

// GroupLinksConfig is the configuration of GroupLinks. All fields but Timers are required.
type GroupLinksConfig struct {
	Conn   func(node string) (*grpc.ClientConn, error) // to a node
	Peer   PeerOf
	Timers StreamTimers
	Log    *slog.Logger
}

// GroupLinks are both ends of the streams between ingresses: those that this node has opened to owners of
// queues, and those that it serves. It implements msg.GroupLinks, and is registered at a gRPC server.
//
// A stream is over when it breaks, or when one end has heard nothing for Suspect. Then its requests are
// nobody's: their ingress gives them to another owner.
type GroupLinks struct {
	cfg     GroupLinksConfig
	timers  StreamTimers
	stop    context.CancelFunc
	ctx     context.Context //nolint:containedctx // of the streams that this node opens
	running sync.WaitGroup

	mu      sync.Mutex
	peer    msg.GroupPeer         // nil before Bind
	owners  map[string]*groupLink // by node: opened by this node
	holders map[string]*groupLink // by node: served
	failed  map[string]time.Time  // when the last link to an owner has ended
}

var _ msg.GroupLinks = (*GroupLinks)(nil)

// groupLink is one stream.
type groupLink struct {
	node   string
	cancel context.CancelCauseFunc
	wake   chan struct{} // one slot

	mu    sync.Mutex
	isUp  bool // a message was received
	queue []msg.GroupMessage

	delivery sync.Mutex // held while a message is delivered
	isOver   bool       // none is any more
}

// NewGroupLinks makes GroupLinks without a stream.
func NewGroupLinks(c GroupLinksConfig) *GroupLinks {
	l := &GroupLinks{
		cfg: c, timers: c.Timers.withDefaults(), owners: map[string]*groupLink{},
		holders: map[string]*groupLink{}, failed: map[string]time.Time{},
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	return l
}

// Register adds the service to a gRPC server.
func (l *GroupLinks) Register(to grpc.ServiceRegistrar) {
	register(to, ingressService, nil, holdStream.serve(nil, l.hold))
}

// Close ends the streams that this node has opened, and waits. Those that it serves end with their server.
func (l *GroupLinks) Close() {
	l.stop()
	l.running.Wait()
}

// Bind implements msg.GroupLinks.
func (l *GroupLinks) Bind(peer msg.GroupPeer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peer = peer
}

// Reach implements msg.GroupLinks.
func (l *GroupLinks) Reach(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := l.owners[node]; k != nil {
		return k.hears()
	}
	if l.peer == nil || l.ctx.Err() != nil || time.Since(l.failed[node]) < redialPause {
		return false
	}
	ctx, cancel := context.WithCancelCause(l.ctx)
	k := newGroupLink(node, cancel)
	l.owners[node] = k
	l.running.Go(func() { l.follow(ctx, k) })
	return false
}

// follow holds a stream to an owner until it ends.
func (l *GroupLinks) follow(ctx context.Context, k *groupLink) {
	var stream *groupPipe
	conn, err := l.cfg.Conn(k.node)
	if err == nil {
		stream, err = holdStream.open(ctx, conn)
	}
	if err == nil {
		var ends sync.WaitGroup
		err = l.carry(ctx, k, stream, &ends, l.peer.OwnerChanged)
		ends.Wait() // the stream has ended with ctx
	} else {
		k.cancel(err)
	}
	l.mu.Lock()
	delete(l.owners, k.node)
	l.failed[k.node] = time.Now()
	l.mu.Unlock()
	if k.hears() {
		l.cfg.Log.Info("the owner of a lockstep group's queue is not reached", slog.String("peer", k.node),
			slog.Any("err", err))
		l.peer.OwnerChanged(k.node)
	}
}

// hold serves a stream that the ingress of another node has opened.
func (l *GroupLinks) hold(stream *groupPipe) error {
	peer, ok := l.cfg.Peer(stream.Context())
	if !ok || !peer.HasRole(string(state.RoleIngress)) {
		return problem.New(problem.PermissionDenied, "node %s has no role ingress", peer.Node)
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	k := newGroupLink(peer.Node, cancel)
	l.mu.Lock()
	old, bound := l.holders[k.node], l.peer // an old one is not heard, or its node has begun anew
	if bound != nil {
		l.holders[k.node] = k
	}
	l.mu.Unlock()
	if bound == nil {
		return problem.New(problem.Unavailable, "the ingress of this node has not started")
	}
	if old != nil {
		old.end()
		bound.HolderLost(k.node)
	}
	var ends sync.WaitGroup // they end when hold has returned
	_ = l.carry(ctx, k, stream, &ends, func(string) {})
	l.mu.Lock()
	isLast := l.holders[k.node] == k
	if isLast {
		delete(l.holders, k.node)
	}
	l.mu.Unlock()
	if isLast {
		bound.HolderLost(k.node)
	}
	return nil
}

func newGroupLink(node string, cancel context.CancelCauseFunc) *groupLink {
	return &groupLink{node: node, cancel: cancel, wake: make(chan struct{}, 1)}
}

func (k *groupLink) hears() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.isUp
}

// carry sends and receives until the stream breaks, is silent, or ctx ends. ends has the goroutines, which
// end with the stream. onUp is called at the first message.
func (l *GroupLinks) carry(
	ctx context.Context, k *groupLink, stream *groupPipe, ends *sync.WaitGroup, onUp func(node string),
) error {
	silence := time.AfterFunc(l.timers.Suspect, func() { k.cancel(errSilent) })
	defer silence.Stop()
	ends.Go(func() {
		for {
			batch, err := stream.Recv()
			if err != nil {
				k.cancel(err)
				return
			}
			silence.Reset(l.timers.Suspect)
			if k.markUp() {
				onUp(k.node)
			}
			for i := range *batch {
				if m := &(*batch)[i]; m.Validate() == nil {
					k.deliver(l.peer, m)
				}
			}
		}
	})
	ends.Go(func() {
		beat := time.NewTimer(0)
		defer beat.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-k.wake:
			case <-beat.C:
			}
			batch := k.take()
			if err := stream.Send(&batch); err != nil {
				k.cancel(err)
				return
			}
			beat.Reset(l.timers.Heartbeat)
		}
	})
	<-ctx.Done()
	k.end()
	return context.Cause(ctx)
}

// end ends the stream. No message is delivered afterwards.
func (k *groupLink) end() {
	k.cancel(errSilent)
	k.delivery.Lock()
	defer k.delivery.Unlock()
	k.isOver = true
}

// deliver passes a message on, unless the stream has ended.
func (k *groupLink) deliver(peer msg.GroupPeer, m *msg.GroupMessage) {
	k.delivery.Lock()
	defer k.delivery.Unlock()
	if !k.isOver {
		peer.ReceiveGroup(k.node, m)
	}
}

// markUp reports whether the message at hand is the first one.
func (k *groupLink) markUp() (isFirst bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	isFirst, k.isUp = !k.isUp, true
	return isFirst
}

// take is the next batch.
func (k *groupLink) take() []msg.GroupMessage {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := min(len(k.queue), maxGroupBatch)
	batch := k.queue[:n:n]
	if k.queue = k.queue[n:]; len(k.queue) > 0 {
		k.poke()
	}
	return batch
}

func (k *groupLink) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Send implements msg.GroupLinks. Messages of an owner go over the stream that their receiver has opened.
func (l *GroupLinks) Send(node string, m *msg.GroupMessage) bool {
	l.mu.Lock()
	links := l.owners
	if m.Kind == msg.GroupRelease || m.Kind == msg.GroupReturn {
		links = l.holders
	}
	k := links[node]
	l.mu.Unlock()
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.isUp || len(k.queue) >= maxGroupQueue {
		return false
	}
	one := *m
	one.Hits = longestHits(m.Hits)
	k.queue = append(k.queue, one)
	k.poke()
	return true
}

// longestHits copies the hits of a request, as many as a message may have.
func longestHits(hits []routing.Hit) []routing.Hit {
	hits = slices.Clone(hits)
	if len(hits) > msg.MaxGroupHits {
		slices.SortFunc(hits, func(a, b routing.Hit) int { return cmp.Compare(b.Tokens, a.Tokens) })
		hits = hits[:msg.MaxGroupHits]
		slices.SortFunc(hits, func(a, b routing.Hit) int { return cmp.Compare(a.Rank, b.Rank) })
	}
	return hits
}
