package noderpc

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// link is the stream of one other node, over all its connections. One goroutine reads it, one writes it, and
// a timer checks its silence.
//
//	heard ── silent for Suspect, or the stream broke ──▶ silent ── silent for Out, or refused ──▶ out
//	  ▲                                                    │                                       │
//	  └────────────────── any message ─────────────────────┴───────────────────────────────────────┘
type link struct {
	links  *RankLinks
	node   state.Node
	log    *slog.Logger
	posts  postQueue
	cancel context.CancelFunc
	done   chan struct{}

	mu           sync.Mutex // records reach the sinks under it
	ranks        map[appRank]*remoteRank
	lastHeard    time.Time // last message of the node
	lastTry      time.Time // the current stream was begun, or had a message
	isSilent     bool
	isOut        bool
	cancelStream context.CancelCauseFunc // ends the current stream
	timer        *time.Timer
	closed       bool

	// Until then the node's silence is expected, because it joins or restarts. A message ends that.
	quietUntil time.Time
	hasWarned  bool // the log says that it is silent
	restarts   bool // it said so, and has begun no stream since

	in        *unpacker // of the current stream
	isListing bool      // the current stream has listed a rank
}

var _ msg.Source = (*link)(nil)

// Reasons why this side ends a stream.
var (
	errSilent = errors.New("nothing is heard")
	errRelist = errors.New("a reader wants the ranks listed again")
)

// readBytes is the memory for one read: more than TLS hands over at once.
const readBytes = 32 << 10

// quietTime is how long a node that joins or restarts may take until it serves its ranks' stream.
const quietTime = 10 * time.Second

func newLink(ctx context.Context, f *RankLinks, n state.Node) *link {
	ctx, cancel := context.WithCancel(ctx)
	now := time.Now()
	l := &link{
		links: f, node: n, log: f.log.With(slog.String("peer", n.ID)), cancel: cancel,
		done:  make(chan struct{}),
		ranks: map[appRank]*remoteRank{}, lastHeard: now, lastTry: now, cancelStream: func(error) {},
		quietUntil: now.Add(quietTime),
	}
	l.posts.init(&f.lostPosts)
	f.config.Hub.AddNode(l)
	l.mu.Lock()
	l.timer = time.AfterFunc(f.timers.Suspect, l.checkSilence)
	l.mu.Unlock()
	go l.run(ctx) // ends with close
	return l
}

// close ends the link, and takes the node's ranks out. It waits. why is "" if this node ends.
func (l *link) close(why string) {
	l.cancel()
	<-l.done
	l.posts.close()
	defer l.links.config.Hub.Remove(l) // after its ranks are out
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.timer.Stop()
	l.takeOut(why)
}

// List implements msg.Source: the stream begins again, and with it a list for all subscriptions. If the
// stream has listed nothing yet, its list is for the new one too.
func (l *link) List(*msg.Subscription) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isListing {
		l.cancelStream(errRelist)
	}
}

// Forget implements msg.Source: a subscription that has ended takes nothing any more.
func (l *link) Forget(*msg.Subscription) {}

// run holds the stream. It reconnects at once after a stream that lasted, otherwise after a growing backoff.
func (l *link) run(ctx context.Context) {
	defer close(l.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for wait := time.Duration(0); ctx.Err() == nil; {
		began := time.Now()
		heard, err := l.runStream(ctx)
		if ctx.Err() != nil {
			return
		}
		l.onStreamEnd(heard, err)
		if heard && (time.Since(began) >= backoffMax || errors.Is(err, errRelist)) {
			wait = 0
			continue
		}
		wait = min(max(2*wait, backoffMin), backoffMax)
		if !waitTimer(ctx.Done(), timer, wait) {
			return
		}
	}
}

// runStream is one stream from its beginning to its end. heard says whether the node sent a message.
func (l *link) runStream(ctx context.Context) (heard bool, err error) {
	ctx, end := context.WithCancelCause(ctx)
	cancel := func() { end(nil) }
	defer cancel()
	l.mu.Lock()
	l.lastTry, l.cancelStream = time.Now(), end
	l.in, l.isListing = newUnpacker(&l.links.skipped), false
	l.mu.Unlock()
	defer func() {
		if why := context.Cause(ctx); errors.Is(why, errSilent) || errors.Is(why, errRelist) {
			err = why // the connection says only that this side has closed it
		}
	}()
	conn, err := l.links.config.Open(ctx, l.node)
	if err != nil {
		return false, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	var sender sync.WaitGroup
	sender.Go(func() {
		defer cancel()
		l.sendPosts(ctx, conn)
	})
	defer func() {
		stop()
		cancel()
		_ = conn.Close()
		sender.Wait()
	}()
	for buf := make([]byte, readBytes); ; {
		n, err := conn.Read(buf)
		switch packed := buf[:n]; {
		case n == 0:
		case !heard && isEnd(packed): // the node serves no stream now
			return false, endReason(uint64(packed[3]))
		default:
			err = cmp.Or(l.onMessage(packed, !heard), err)
			heard = true
		}
		if err != nil {
			return heard, err
		}
	}
}

// onMessage delivers a message's records to the sinks. first: it is the first one of its stream.
func (l *link) onMessage(packed []byte, first bool) error {
	l.links.config.Heard(l.node.ID)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastHeard = time.Now()
	l.lastTry, l.quietUntil = l.lastHeard, l.lastHeard
	l.setSilent(false, "")
	if first && l.restarts {
		l.restarts = false
		l.log.Info("a node has restarted")
	}
	l.isOut = false
	return l.in.unpack(packed, l)
}

// record implements recordHandler. unpack calls it with mu held.
func (l *link) record(src *remoteRank, rec *msg.Record) {
	key := src.key()
	old := l.ranks[key]
	switch rec.Kind {
	case msg.RecSnapshot:
		if old != src {
			l.addRank(key, old, src)
		}
		rec.Snapshot.Mailbox = src.mailbox
		src.sinks, l.isListing = l.links.config.Hub.Far(), true
	case msg.RecGone:
		if old != nil && old.identity == src.identity {
			delete(l.ranks, key)
			old.mailbox.stop()
		}
		src.sinks = l.links.config.Hub.Far() // a sink may know the rank from before
	case msg.RecState:
		if rec.Draining && rec.Cause == msg.CauseRestarting {
			l.expectRestart()
		}
	default:
	}
	for _, sub := range src.sinks {
		sub.Deliver(rec)
	}
}

// addRank adds a rank, or its next incarnation. A rank that was known before the stream broke keeps its
// mailbox.
func (l *link) addRank(key appRank, old, src *remoteRank) {
	if old != nil && old.identity == src.identity {
		src.mailbox = old.mailbox
	} else {
		src.mailbox = &remoteMailbox{id: src.identity, posts: &l.posts, stopped: make(chan struct{})}
		if old != nil {
			old.mailbox.stop()
		}
	}
	l.ranks[key] = src
}

// listed implements recordHandler: ranks that were not listed have ended. unpack calls it with mu held.
func (l *link) listed() {
	for _, src := range l.ranks {
		if l.in.slots[src.slot] != src {
			l.removeRank(src)
		}
	}
}

func (l *link) removeRank(src *remoteRank) {
	delete(l.ranks, src.key())
	src.mailbox.stop()
	l.deliverOwn(src, &msg.Record{Kind: msg.RecGone})
}

// deliverOwn delivers a record that this side makes, to all sinks: one may know the rank from before.
func (l *link) deliverOwn(src *remoteRank, rec *msg.Record) {
	src.setIn(rec)
	for _, sub := range l.links.config.Hub.Far() {
		sub.Deliver(rec)
	}
}

func (l *link) setSilent(silent bool, why string) {
	if silent {
		l.warnSilent(why)
	}
	if silent == l.isSilent {
		return
	}
	l.isSilent = silent
	if !silent && l.hasWarned {
		l.hasWarned = false
		l.log.Info("a node's stream is heard again", slog.Int("ranks", len(l.ranks)))
	}
	for _, src := range l.ranks {
		l.deliverOwn(src, &msg.Record{Kind: msg.RecSilent, RankState: msg.RankState{Silent: silent}})
	}
}

// isQuiet reports whether the node's silence is expected.
func (l *link) isQuiet() bool { return time.Now().Before(l.quietUntil) }

// warnSilent logs once that the node is silent; not while that is expected.
func (l *link) warnSilent(why string) {
	if l.hasWarned || l.isQuiet() {
		return
	}
	l.hasWarned = true
	l.log.Warn("a node's stream is silent, its ranks are used last", slog.String("cause", why),
		slog.Int("ranks", len(l.ranks)))
}

// takeOut takes the node's ranks out. It logs nothing if why is "".
func (l *link) takeOut(why string) {
	if why != "" && !l.isOut && len(l.ranks) > 0 {
		logOut := l.log.Warn
		if l.isQuiet() {
			logOut = l.log.Info
		}
		logOut("a node's ranks are out", slog.String("cause", why), slog.Int("ranks", len(l.ranks)))
	}
	l.isOut = true
	for _, src := range l.ranks {
		l.removeRank(src)
	}
}

// onStreamEnd handles the end of a stream: the node's ranks are suspect at once, and out if the connection
// was refused. If only the list is to begin again, the ranks stay as they are until they are listed.
func (l *link) onStreamEnd(heard bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if heard && isRelist(err) {
		l.log.Info("a node's ranks are listed again", slog.String("cause", err.Error()))
		return
	}
	if errors.Is(err, errRestarts) {
		l.expectRestart()
	}
	if heard && l.restarts {
		l.quietUntil = time.Now().Add(quietTime)
	}
	l.setSilent(true, err.Error())
	if errors.Is(err, syscall.ECONNREFUSED) {
		l.takeOut(err.Error())
	}
}

// expectRestart notes that the node has said that its process is replaced: by the state of a rank or, as it
// may have none that serves, at the end of the stream.
func (l *link) expectRestart() {
	if !l.restarts {
		l.restarts = true
		l.log.Info("a node restarts, its engines go on")
	}
}

// isRelist reports whether a stream has ended for a new list, and the node is heard.
func isRelist(err error) bool {
	return errors.Is(err, errRelist) || errors.Is(err, errMalformed) || errors.Is(err, errGap) ||
		errors.Is(err, errBehind)
}

// checkSilence checks how long the node has been silent.
func (l *link) checkSilence() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	t := l.links.timers
	now := time.Now()
	if now.Sub(l.lastHeard) >= t.Suspect {
		l.setSilent(true, errSilent.Error())
	}
	if now.Sub(l.lastHeard) >= t.Out {
		l.takeOut(errSilent.Error())
	}
	if now.Sub(l.lastTry) >= t.Out {
		l.lastTry = now
		l.cancelStream(errSilent) // a stream, or an attempt to open one, without a message
	}
	next := t.Out
	for _, due := range [...]time.Time{
		l.lastHeard.Add(t.Suspect), l.lastHeard.Add(t.Out),
		l.lastTry.Add(t.Out),
	} {
		if left := due.Sub(now); left > 0 {
			next = min(next, left)
		}
	}
	l.timer.Reset(next)
}

// sendPosts sends the posts to the node's ranks, until the stream ends.
func (l *link) sendPosts(ctx context.Context, conn net.Conn) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for quiet := false; ; {
		batch := l.posts.takeBatch()
		if len(batch) == 0 && !quiet {
			timer.Reset(readerBeat)
			select {
			case <-ctx.Done():
				return
			case <-l.posts.wake:
			case <-timer.C:
				quiet = true
			}
			continue
		}
		quiet = false
		_ = conn.SetWriteDeadline(time.Now().Add(streamSilence))
		if _, err := conn.Write(packPosts(batch, time.Now())); err != nil {
			l.posts.putBack(batch)
			return
		}
		if !waitTimer(ctx.Done(), timer, untilBeat(time.Duration(l.links.interval.Load()))) {
			return
		}
	}
}
