package remote

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/state"
)

// link is the stream of one other node, over its breaks. One goroutine reads it, one writes it, and a timer hears its silence.
//
//	heard ── nothing for Suspect, or the stream broke ──▶ silent ── nothing for Out, or refused ──▶ out
//	  ▲                                                     │                                        │
//	  └───────────────── anything comes ────────────────────┴────────────────────────────────────────┘
type link struct {
	feed   *Feed
	node   state.Node
	log    *slog.Logger
	posts  postQueue
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex // records reach the sinks under it
	ranks  map[appRank]*source
	heard  time.Time // anything of the node
	tried  time.Time // the stream at hand was begun, or heard of
	silent bool
	out    bool
	drop   context.CancelFunc // ends the stream at hand
	timer  *time.Timer
	closed bool

	expected time.Time // the node may be joining until then: its silence is no warning if nothing was heard before
	warned   bool      // the log says that it is silent
}

// errNothingHeard ends a stream on which a node has said nothing for too long.
var errNothingHeard = errors.New("nothing is heard")

// joinTime is how long a node that has just become known may take until it serves its ranks' stream.
const joinTime = 10 * time.Second

func newLink(ctx context.Context, f *Feed, n state.Node) *link {
	ctx, cancel := context.WithCancel(ctx)
	now := time.Now()
	l := &link{
		feed: f, node: n, log: f.log.With(slog.String("peer", n.ID)), cancel: cancel, done: make(chan struct{}),
		ranks: map[appRank]*source{}, heard: now, tried: now, drop: func() {}, expected: now.Add(joinTime),
	}
	l.posts.init(&f.lost)
	l.mu.Lock()
	l.timer = time.AfterFunc(f.timers.Suspect, l.tick)
	l.mu.Unlock()
	go l.run(ctx) // ends with close
	return l
}

// close ends the link, and takes the node's ranks out. It waits. why is "" if this node ends.
func (l *link) close(why string) {
	l.cancel()
	<-l.done
	l.posts.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.timer.Stop()
	l.goOut(why)
}

// run holds the stream: at once again after one that held, else after a growing rest.
func (l *link) run(ctx context.Context) {
	defer close(l.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	t := l.feed.timers
	for wait := time.Duration(0); ctx.Err() == nil; {
		began := time.Now()
		heard, err := l.session(ctx)
		if ctx.Err() != nil {
			return
		}
		l.broke(err)
		if heard && time.Since(began) >= t.BackoffMax {
			wait = 0
			continue
		}
		wait = min(max(2*wait, t.BackoffMin), t.BackoffMax)
		if !rest(ctx.Done(), timer, wait) {
			return
		}
	}
}

// session is one stream from its beginning to its end. heard: the node said something.
func (l *link) session(ctx context.Context) (heard bool, err error) {
	ctx, end := context.WithCancelCause(ctx)
	cancel := func() { end(nil) }
	defer cancel()
	l.mu.Lock()
	l.tried, l.drop = time.Now(), func() { end(errNothingHeard) }
	l.mu.Unlock()
	defer func() {
		if errors.Is(context.Cause(ctx), errNothingHeard) {
			err = errNothingHeard // gRPC tells only that this end has cancelled
		}
	}()
	stream, err := l.feed.config.Open(ctx, l.node)
	if err != nil {
		return false, err
	}
	var sender sync.WaitGroup
	sender.Go(func() {
		defer cancel()
		l.send(ctx, stream)
	})
	defer sender.Wait()
	defer cancel()
	in := newUnpacker(&l.feed.skipped)
	for {
		m, err := stream.Recv()
		if err != nil {
			return heard, err
		}
		heard = true
		if err := l.take(in, m.GetPacked()); err != nil {
			return heard, err
		}
	}
}

// take hands a message's records to the sinks.
func (l *link) take(in *unpacker, packed []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard = time.Now()
	l.tried, l.expected = l.heard, l.heard
	l.setSilent(false, "")
	l.out = false
	return in.unpack(packed, l)
}

// record implements taker. Called by unpack, with mu held.
func (l *link) record(src *source, rec *msg.Record) {
	key := src.key()
	old := l.ranks[key]
	switch rec.Kind {
	case msg.RecSnapshot:
		if old != src {
			l.begin(key, old, src)
		}
		rec.Snapshot.Mailbox = src.box
	case msg.RecGone:
		if old != nil && old.identity == src.identity {
			delete(l.ranks, key)
			old.box.stop()
		}
	default:
	}
	l.feed.deliver(src, rec)
}

// begin enters a rank, or a rank's next incarnation. One that was known before a break of the stream keeps its mailbox.
func (l *link) begin(key appRank, old, src *source) {
	if old != nil && old.identity == src.identity {
		src.box, src.gen = old.box, old.gen
	} else {
		src.box = &remoteBox{id: src.identity, posts: &l.posts, stopped: make(chan struct{})}
		if old != nil {
			old.box.stop()
		}
	}
	l.ranks[key] = src
}

// roster implements taker: what the node does not have any more is gone. Called by unpack, with mu held.
func (l *link) roster(list []identity) {
	for _, src := range l.ranks {
		if !slices.Contains(list, src.identity) {
			l.gone(src)
		}
	}
}

func (l *link) gone(src *source) {
	delete(l.ranks, src.key())
	src.box.stop()
	l.tell(src, &msg.Record{Kind: msg.RecGone})
}

// tell gives the sinks a finding of this end.
func (l *link) tell(src *source, rec *msg.Record) {
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation = src.app, src.unit, src.rank, src.epoch, src.incarnation
	l.feed.deliver(src, rec)
}

func (l *link) setSilent(silent bool, why string) {
	if silent {
		l.warn(why)
	}
	if silent == l.silent {
		return
	}
	l.silent = silent
	if !silent && l.warned {
		l.warned = false
		l.log.Info("a node's stream is heard again", slog.Int("ranks", len(l.ranks)))
	}
	for _, src := range l.ranks {
		l.tell(src, &msg.Record{Kind: msg.RecSilent, Silent: silent})
	}
}

// warn logs once that the node is silent; not while it may be joining.
func (l *link) warn(why string) {
	if l.warned || time.Now().Before(l.expected) {
		return
	}
	l.warned = true
	l.log.Warn("a node's stream is silent, its ranks are used last", slog.String("cause", why), slog.Int("ranks", len(l.ranks)))
}

// goOut takes the node's ranks out. Nobody hears of it in the log if why is "".
func (l *link) goOut(why string) {
	if why != "" && !l.out && len(l.ranks) > 0 {
		l.log.Warn("a node's ranks are out", slog.String("cause", why), slog.Int("ranks", len(l.ranks)))
	}
	l.out = true
	for _, src := range l.ranks {
		l.gone(src)
	}
}

// broke judges the end of a stream: the node's ranks are suspect at once, and out if nobody listens there.
func (l *link) broke(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setSilent(true, err.Error())
	if refused(err) {
		l.goOut(err.Error())
	}
}

// refused says that a node's kernel answered, and nobody listens there. gRPC gives the reason as text only.
func refused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "connection refused")
}

// tick looks how long nothing was heard.
func (l *link) tick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	t := l.feed.timers
	now := time.Now()
	if now.Sub(l.heard) >= t.Suspect {
		l.setSilent(true, errNothingHeard.Error())
	}
	if now.Sub(l.heard) >= t.Out {
		l.goOut(errNothingHeard.Error())
	}
	if now.Sub(l.tried) >= t.Out {
		l.tried = now
		l.drop() // a stream, or the try to open one, that gives nothing
	}
	next := t.Out
	for _, due := range [...]time.Time{l.heard.Add(t.Suspect), l.heard.Add(t.Out), l.tried.Add(t.Out)} {
		if left := due.Sub(now); left > 0 {
			next = min(next, left)
		}
	}
	l.timer.Reset(next)
}

// send writes what is posted to the node's ranks, until the stream ends.
func (l *link) send(ctx context.Context, stream StreamClient) {
	l.posts.greet()
	hello := &dpservev1.SubscribeRequest{Ingress: l.feed.config.Self, Resync: true}
	if stream.Send(hello) != nil {
		return // the reader gets the reason
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		batch, resync := l.posts.take()
		if len(batch) == 0 && !resync {
			select {
			case <-ctx.Done():
				return
			case <-l.posts.wake:
			}
			continue
		}
		if stream.Send(&dpservev1.SubscribeRequest{Posts: wirePosts(batch, time.Now()), Resync: resync}) != nil {
			l.posts.putBack(batch)
			return
		}
		if !rest(ctx.Done(), timer, untilBeat(l.feed.pacing())) {
			return
		}
	}
}
