package noderpc

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// RankLinksConfig is the configuration of RankLinks. Self, Hub, Store, Open and Log are required.
type RankLinksConfig struct {
	Self  string    // id of this node
	Hub   *msg.Hub  // where the ranks of other nodes come to
	Store msg.Store // it lists the other nodes
	// Open makes the connection of a stream. With syscall.ECONNREFUSED in the chain of its error the node's
	// ranks are taken out at once.
	Open   func(ctx context.Context, node state.Node) (net.Conn, error)
	Heard  func(node string) // is told when a node sends something. nil: nobody is told
	Timers StreamTimers
	Log    *slog.Logger
}

// RankLinks brings the ranks of other nodes into this node's Hub, over one stream per node, whatever the
// number of sinks.
type RankLinks struct {
	config   RankLinksConfig
	timers   StreamTimers
	log      *slog.Logger
	interval atomic.Int64 // time.Duration between messages to one node

	skipped   unpackStats
	lostPosts atomic.Uint64 // posts

	stop    context.CancelFunc
	running sync.WaitGroup

	mu    sync.Mutex
	links map[string]*link // by node id
}

// RankLinksStats counts events since NewRankLinks.
type RankLinksStats struct {
	UnknownKinds uint64 // records of a later version
	Malformed    uint64 // streams that ended with a record that cannot be, and began again
	LostPosts    uint64 // messages to ranks that found no room, or whose node was removed
}

// NewRankLinks makes the links, which follow Store at once, until Close.
func NewRankLinks(c RankLinksConfig) *RankLinks {
	if c.Heard == nil {
		c.Heard = func(string) {}
	}
	f := &RankLinks{
		config: c, timers: c.Timers.withDefaults(), log: c.Log.With(slog.String("component", "remote")),
		links: map[string]*link{},
	}
	ctx, stop := context.WithCancel(context.Background())
	f.stop = stop
	changed := c.Store.Changed() // before State, so that no change is missed
	f.updateLinks(ctx, c.Store.State())
	f.running.Go(func() { f.followStore(ctx, changed) })
	return f
}

// Close ends all streams and takes the ranks of other nodes out, without a warning. It is idempotent and
// waits.
func (f *RankLinks) Close() {
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
func (f *RankLinks) Stats() RankLinksStats {
	return RankLinksStats{
		UnknownKinds: f.skipped.kinds.Load(), Malformed: f.skipped.malformed.Load(),
		LostPosts: f.lostPosts.Load(),
	}
}

// followStore keeps one link to every other node that has ranks.
func (f *RankLinks) followStore(ctx context.Context, changed <-chan struct{}) {
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
func (f *RankLinks) updateLinks(ctx context.Context, st *state.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.interval.Store(int64(postInterval(countRole(st, state.RoleIngress))))
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
func (f *RankLinks) unlinkReason(n, old *state.Node) string {
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

// StreamTimers are the times of the ranks' streams between nodes. Zero values take the defaults.
type StreamTimers struct {
	Heartbeat time.Duration // of a stream without records, at most half as much later; 250 ms
	Suspect   time.Duration // of silence: the node's ranks are picked last; 1 s
	Out       time.Duration // of silence: the node's ranks are out; 3 s
}

const (
	backoffMin = 50 * time.Millisecond // first wait between attempts to reach a node, which grows
	backoffMax = time.Second           // longest such wait
)

func (t StreamTimers) withDefaults() StreamTimers {
	return StreamTimers{
		Heartbeat: cmp.Or(t.Heartbeat, 250*time.Millisecond), Suspect: cmp.Or(t.Suspect, time.Second),
		Out: cmp.Or(t.Out, 3*time.Second),
	}
}

// A stream has at most one message per interval, with everything that waited. The first message after a pause
// leaves at once. All streams of a process wait for the same beat, because a wake-up costs more than a
// message. With many peers the intervals grow, so that the messages of a node to all its peers cost a bounded
// share of a core.
const (
	coalesce = 20 * time.Millisecond  // of records, at least: what routing does not notice
	perPeer  = 625 * time.Microsecond // of an interval
	maxPace  = 40 * time.Millisecond
)

// postInterval is the time between messages to a node: room that ends with a request is waited for.
func postInterval(peers int) time.Duration { return min(time.Duration(peers)*perPeer, maxPace) }

// recordInterval is the time between messages to an ingress.
func recordInterval(peers int) time.Duration { return max(postInterval(peers), coalesce) }

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
