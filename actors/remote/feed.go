package remote

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/state"
)

// StreamClient is the reader's end of a node's stream.
type StreamClient = grpc.BidiStreamingClient[dpservev1.SubscribeRequest, dpservev1.Records]

// FeedConfig is what a Feed needs. Self, Store, Open and Log are required.
type FeedConfig struct {
	Self  string    // id of this node
	Local msg.Feed  // its own ranks; nil: it has none
	Store msg.Store // names the other nodes
	// Open begins a stream, which ends with ctx. An error that is, or says, "connection refused" takes the node's ranks out at once.
	Open   func(ctx context.Context, node state.Node) (StreamClient, error)
	Timers StreamTimers
	Log    *slog.Logger
}

// Feed joins the ranks of all nodes into one msg.Feed: the own ones as Local gives them, and those of other nodes by one stream per
// node, whatever the number of sinks. Records of one node come to a sink in order and one at a time; those of Local and of
// the other nodes may come at once.
type Feed struct {
	config FeedConfig
	timers StreamTimers
	log    *slog.Logger
	pace   atomic.Int64 // time.Duration between messages to one node

	audience atomic.Pointer[audience]
	skipped  unread
	lost     atomic.Uint64 // posts

	stop    context.CancelFunc
	running sync.WaitGroup

	mu    sync.Mutex
	links map[string]*link // by node id
}

// audience is everybody who listens, as of one moment. gen grows with every subscription: who came later than a rank's last
// snapshot hears nothing of that rank before the next one.
type audience struct {
	gen       uint64
	listeners []*listener
}

type listener struct {
	since uint64 // audience.gen of its subscription

	mu     sync.Mutex
	sink   msg.Sink
	closed bool
}

func (l *listener) deliver(rec *msg.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.sink.Deliver(rec)
	}
}

// FeedStats counts what happened since NewFeed.
type FeedStats struct {
	Nodes         int    // that have a stream now, or should
	UnknownKinds  uint64 // records of a later version
	UnknownFields uint64 // records with more than is known
	Malformed     uint64 // records that were dropped: their ranks are asked for snapshots
	Strays        uint64 // records of ranks that were not known yet
	LostPosts     uint64 // messages to ranks that found no room, or whose node is gone
}

var _ msg.Feed = (*Feed)(nil)

// NewFeed makes a feed that follows Store at once, until Close.
func NewFeed(c FeedConfig) (*Feed, error) {
	if c.Self == "" || c.Store == nil || c.Open == nil || c.Log == nil {
		return nil, errors.New("feed: Self, Store, Open and Log must be set")
	}
	f := &Feed{config: c, timers: c.Timers.withDefaults(), log: c.Log.With(slog.String("room", "remote")), links: map[string]*link{}}
	f.audience.Store(&audience{})
	ctx, stop := context.WithCancel(context.Background())
	f.stop = stop
	changed := c.Store.Changed() // before State, so that no change is missed
	f.adopt(ctx, c.Store.State())
	f.running.Go(func() { f.follow(ctx, changed) })
	return f, nil
}

// Close ends all streams; the ranks of other nodes are gone, which is no warning. Idempotent; it waits. Local goes on.
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

// Stats counts.
func (f *Feed) Stats() FeedStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return FeedStats{
		Nodes: len(f.links), UnknownKinds: f.skipped.kinds.Load(), UnknownFields: f.skipped.fields.Load(),
		Malformed: f.skipped.malformed.Load(), Strays: f.skipped.strays.Load(), LostPosts: f.lost.Load(),
	}
}

// Subscribe implements msg.Feed. The nodes are asked for snapshots of all their ranks, which come soon after.
func (f *Feed) Subscribe(sink msg.Sink) (cancel func()) {
	f.mu.Lock()
	old := f.audience.Load()
	l := &listener{since: old.gen + 1, sink: sink}
	f.audience.Store(&audience{gen: l.since, listeners: append(slices.Clone(old.listeners), l)})
	for _, k := range f.links {
		k.posts.resync()
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

func (f *Feed) unsubscribe(l *listener) {
	f.mu.Lock()
	old := f.audience.Load()
	left := slices.DeleteFunc(slices.Clone(old.listeners), func(o *listener) bool { return o == l })
	f.audience.Store(&audience{gen: old.gen, listeners: left})
	f.mu.Unlock()
	l.mu.Lock() // a Deliver in progress ends first
	defer l.mu.Unlock()
	l.closed = true
}

// deliver gives a record of a rank to all who have its snapshot. That a rank is gone or silent is told to all: who subscribed anew may
// know it from before.
func (f *Feed) deliver(src *source, rec *msg.Record) {
	a := f.audience.Load()
	if rec.Kind == msg.RecSnapshot {
		src.gen = a.gen
	}
	all := rec.Kind == msg.RecGone || rec.Kind == msg.RecSilent
	for _, l := range a.listeners {
		if all || src.gen >= l.since {
			l.deliver(rec)
		}
	}
}

// follow keeps one link to every other node that has ranks.
func (f *Feed) follow(ctx context.Context, changed <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			changed = f.config.Store.Changed()
			f.adopt(ctx, f.config.Store.State())
		}
	}
}

// adopt takes over which nodes there are.
func (f *Feed) adopt(ctx context.Context, st *state.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pace.Store(int64(paceOf(countRole(st, state.RoleIngress))))
	for id, l := range f.links {
		if why := f.unwanted(st.Nodes[id], &l.node); why != "" {
			l.close(why)
			delete(f.links, id)
		}
	}
	for id, n := range st.Nodes {
		if f.links[id] == nil && f.unwanted(n, n) == "" {
			f.links[id] = newLink(ctx, f, *n)
		}
	}
}

// unwanted says why there is no link to a node; "" if there is one. old is the node as it was when the link began.
func (f *Feed) unwanted(n, old *state.Node) string {
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

// pacing is how long a message to a node waits for company.
func (f *Feed) pacing() time.Duration { return time.Duration(f.pace.Load()) }
