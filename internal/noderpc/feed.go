package noderpc

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// StreamClient is the reader's end of a node's stream.
type StreamClient = grpc.BidiStreamingClient[dpservev1.SubscribeRequest, dpservev1.Records]

// FeedConfig is the configuration of a Feed. Self, Store, Open and Log are required.
type FeedConfig struct {
	Self  string    // id of this node
	Local msg.Feed  // its own ranks; nil: it has none
	Store msg.Store // it lists the other nodes
	// Open begins a stream, which ends with ctx. If the error is, or contains, "connection refused", the
	// node's ranks are taken out at once.
	Open   func(ctx context.Context, node state.Node) (StreamClient, error)
	Timers StreamTimers
	Log    *slog.Logger
}

// Feed joins the ranks of all nodes into one msg.Feed: its own ones as Local delivers them, and those of
// other nodes over one stream per node, whatever the number of sinks. Records of one node reach a sink in
// order and one at a time; records of Local and of other nodes may come at the same time.
type Feed struct {
	config   FeedConfig
	timers   StreamTimers
	log      *slog.Logger
	interval atomic.Int64 // time.Duration between messages to one node

	subscribers atomic.Pointer[feedSubscribers]
	skipped     unpackStats
	lostPosts   atomic.Uint64 // posts

	stop    context.CancelFunc
	running sync.WaitGroup

	mu    sync.Mutex
	links map[string]*link // by node id
}

// feedSubscribers are all subscribers at one moment. gen grows with every subscription: a subscriber that
// came after a rank's last snapshot gets no record of that rank before the next one.
type feedSubscribers struct {
	gen  uint64
	list []*feedSubscriber
}

type feedSubscriber struct {
	since uint64 // feedSubscribers.gen of its subscription

	mu     sync.Mutex
	sink   msg.Sink
	closed bool
}

func (l *feedSubscriber) deliver(rec *msg.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.sink.Deliver(rec)
	}
}

// FeedStats counts events since NewFeed.
type FeedStats struct {
	UnknownKinds uint64 // records of a later version
	Malformed    uint64 // records that were dropped; the readers ask for snapshots
	LostPosts    uint64 // messages to ranks that found no room, or whose node was removed
}

var _ msg.Feed = (*Feed)(nil)

// NewFeed makes a feed that follows Store at once, until Close.
func NewFeed(c FeedConfig) *Feed {
	f := &Feed{
		config: c, timers: c.Timers.withDefaults(), log: c.Log.With(slog.String("component", "remote")),
		links: map[string]*link{},
	}
	f.subscribers.Store(&feedSubscribers{})
	ctx, stop := context.WithCancel(context.Background())
	f.stop = stop
	changed := c.Store.Changed() // before State, so that no change is missed
	f.updateLinks(ctx, c.Store.State())
	f.running.Go(func() { f.followStore(ctx, changed) })
	return f
}

// Close ends all streams and takes the ranks of other nodes out, without a warning. It is idempotent and
// waits. Local goes on.
func (f *Feed) Close() {
	f.stop()
	f.running.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, l := range f.links {
		l.close("")
		delete(f.links, id)
	}
}

// Stats returns the counters.
func (f *Feed) Stats() FeedStats {
	return FeedStats{
		UnknownKinds: f.skipped.kinds.Load(), Malformed: f.skipped.malformed.Load(),
		LostPosts: f.lostPosts.Load(),
	}
}

// Subscribe implements msg.Feed. Every node is asked for snapshots of all its ranks, which come soon after.
func (f *Feed) Subscribe(sink msg.Sink) (cancel func()) {
	f.mu.Lock()
	old := f.subscribers.Load()
	l := &feedSubscriber{since: old.gen + 1, sink: sink}
	f.subscribers.Store(&feedSubscribers{gen: l.since, list: append(slices.Clone(old.list), l)})
	for _, k := range f.links {
		k.posts.requestResync()
	}
	f.mu.Unlock()
	local := func() {}
	if f.config.Local != nil {
		local = f.config.Local.Subscribe(sink)
	}
	return func() {
		local()
		f.unsubscribe(l)
	}
}

func (f *Feed) unsubscribe(l *feedSubscriber) {
	f.mu.Lock()
	old := f.subscribers.Load()
	left := slices.DeleteFunc(slices.Clone(old.list), func(o *feedSubscriber) bool { return o == l })
	f.subscribers.Store(&feedSubscribers{gen: old.gen, list: left})
	f.mu.Unlock()
	l.mu.Lock() // wait for a Deliver in progress
	defer l.mu.Unlock()
	l.closed = true
}

// deliver delivers a rank's record to all sinks that have its snapshot. RecGone and RecSilent go to all
// sinks: a sink that has subscribed again may know the rank from before.
func (f *Feed) deliver(src *remoteRank, rec *msg.Record) {
	a := f.subscribers.Load()
	if rec.Kind == msg.RecSnapshot {
		src.gen = a.gen
	}
	all := rec.Kind == msg.RecGone || rec.Kind == msg.RecSilent
	for _, l := range a.list {
		if all || src.gen >= l.since {
			l.deliver(rec)
		}
	}
}

// followStore keeps one link to every other node that has ranks.
func (f *Feed) followStore(ctx context.Context, changed <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			changed = f.config.Store.Changed()
			f.updateLinks(ctx, f.config.Store.State())
		}
	}
}

// updateLinks opens and closes links for the nodes of a state.
func (f *Feed) updateLinks(ctx context.Context, st *state.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.interval.Store(int64(sendInterval(countRole(st, state.RoleIngress))))
	for id, l := range f.links {
		if why := f.unlinkReason(st.Nodes[id], &l.node); why != "" {
			l.close(why)
			delete(f.links, id)
		}
	}
	for id, n := range st.Nodes {
		if f.links[id] == nil && f.unlinkReason(n, n) == "" {
			f.links[id] = newLink(ctx, f, *n)
		}
	}
}

// unlinkReason says why there is no link to a node; "" if there is one. old is the node's record when the
// link began.
func (f *Feed) unlinkReason(n, old *state.Node) string {
	switch {
	case n == nil:
		return "it was removed"
	case n.ID == f.config.Self:
		return "it is this node"
	case n.Lost:
		return "it is lost"
	case !slices.Contains(n.Roles, state.RoleWorker):
		return "it has no ranks"
	case n.Address == "":
		return "it has no node port"
	case n.UID != old.UID || n.Address != old.Address:
		return "it came under another address"
	}
	return ""
}

func countRole(st *state.State, role state.Role) (n int) {
	for _, node := range st.Nodes {
		if slices.Contains(node.Roles, role) {
			n++
		}
	}
	return n
}

// postInterval is how long a message to a node waits for others.
func (f *Feed) postInterval() time.Duration { return time.Duration(f.interval.Load()) }

// StreamTimers are the times of the ranks' streams between nodes. Zero values take the defaults.
type StreamTimers struct {
	Heartbeat time.Duration // of a stream without records, at most half as much later; 250 ms
	Suspect   time.Duration // of silence: the node's ranks are picked last; 1 s
	Out       time.Duration // of silence: the node's ranks are out; 3 s
}

const (
	backoffMin = 50 * time.Millisecond // first wait between attempts to reach a node, which grows
	backoffMax = time.Second           // longest such wait
	resyncWait = time.Second           // how long a rank may take to answer a request for a snapshot
)

func (t StreamTimers) withDefaults() StreamTimers {
	return StreamTimers{
		Heartbeat: cmp.Or(t.Heartbeat, 250*time.Millisecond), Suspect: cmp.Or(t.Suspect, time.Second),
		Out: cmp.Or(t.Out, 3*time.Second),
	}
}

// Messages of a node to all its peers together cost a bounded share of a core: each peer gets at most one
// message every perPeer × peers, with all records that waited. The first message after a pause leaves at
// once. All streams of a process wait for the same beat, because a wake-up costs more than a message.
const (
	perPeer = 500 * time.Microsecond
	maxPace = 40 * time.Millisecond
)

func sendInterval(peers int) time.Duration { return min(time.Duration(peers)*perPeer, maxPace) }

// untilBeat is the time to the next beat of a clock that all streams share.
func untilBeat(every time.Duration) time.Duration {
	if every <= 0 {
		return 0
	}
	return every - time.Duration(time.Now().UnixNano())%every
}

// signal wakes the reader of a channel with one slot.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // the last signal was not received yet
	}
}

// waitTimer waits; false if done was closed meanwhile.
func waitTimer(done <-chan struct{}, timer *time.Timer, d time.Duration) bool {
	timer.Reset(d)
	select {
	case <-done:
		return false
	case <-timer.C:
		return true
	}
}
