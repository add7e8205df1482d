package remote

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
)

// Bounds of what waits to be posted to one node.
const (
	maxPosts  = 8192
	postBatch = 512 // of one message
)

// errNotPosted is what a rank of another node says to a message that does not travel by its stream, as an Admit.
var errNotPosted = errors.New("a message of this kind is not posted to ranks of other nodes")

// remoteBox is the mailbox of a rank on another node. It implements msg.Mailbox: Done, FirstToken, Progress, Probe, Demand and Resync go
// there by the node's stream, everything else is refused. What is posted after the rank is out still goes, if the node comes back: its
// requests may have gone on.
type remoteBox struct {
	id      identity
	posts   *postQueue
	stopped chan struct{}
	once    sync.Once
}

var _ msg.Mailbox = (*remoteBox)(nil)

func (b *remoteBox) stop() { b.once.Do(func() { close(b.stopped) }) }

// Stopped implements msg.Mailbox: the rank is gone, or its node is out, as far as this node knows.
func (b *remoteBox) Stopped() <-chan struct{} { return b.stopped }

// Send implements msg.Mailbox. Without room the message is lost, and counted.
func (b *remoteBox) Send(m any) { _ = b.TrySend(m) }

// TrySend implements msg.Mailbox.
func (b *remoteBox) TrySend(m any) error {
	p := post{wire: toPost(m)}
	if p.wire == nil {
		return errNotPosted
	}
	p.wire.Unit, p.wire.Rank, p.wire.Epoch, p.wire.Incarnation = b.id.unit, uint32(b.id.rank), b.id.epoch, b.id.incarnation
	switch m := m.(type) {
	case *msg.FirstToken:
		p.at = m.At
	case msg.FirstToken:
		p.at = m.At
	case *msg.Progress, msg.Progress, *msg.Probe, msg.Probe:
		p.progress = true
	}
	return b.posts.push(p)
}

// post is a message on its way.
type post struct {
	wire     *dpservev1.Post
	at       time.Time // of a first token
	progress bool      // or a Probe
}

// wirePosts makes the posts of one message: how long ago a first token was is known only when it leaves.
func wirePosts(batch []post, now time.Time) []*dpservev1.Post {
	out := make([]*dpservev1.Post, 0, len(batch))
	for _, p := range batch {
		if f, ok := p.wire.GetMessage().(*dpservev1.Post_FirstToken); ok && !p.at.IsZero() {
			f.FirstToken.AgoNano = int64(max(now.Sub(p.at), 0))
		}
		out = append(out, p.wire)
	}
	return out
}

// postQueue is what waits to be posted to one node, in order. It never blocks. Over its bound reports of progress and probes go first:
// the next one says it all again.
type postQueue struct {
	wake chan struct{} // one slot
	lost *atomic.Uint64

	mu     sync.Mutex
	list   []post
	again  bool // a snapshot of every rank is wanted
	closed bool
}

func (q *postQueue) init(lost *atomic.Uint64) { q.wake, q.lost = make(chan struct{}, 1), lost }

func (q *postQueue) push(p post) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || !q.room(p.progress) {
		q.lost.Add(1)
		return msg.ErrOverloaded
	}
	q.list = append(q.list, p)
	q.poke()
	return nil
}

// room makes room for one more, if it can.
func (q *postQueue) room(progress bool) bool {
	if len(q.list) < maxPosts {
		return true
	}
	if progress {
		return false
	}
	before := len(q.list)
	q.list = slices.DeleteFunc(q.list, func(p post) bool { return p.progress })
	q.lost.Add(uint64(before - len(q.list))) //nolint:gosec // it only gets shorter
	return len(q.list) < maxPosts
}

// resync asks for snapshots of all the node's ranks.
func (q *postQueue) resync() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.again = true
	q.poke()
}

// greet says that a stream begins, which asks for all snapshots anyway.
func (q *postQueue) greet() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.again = false
}

// take gives what leaves next.
func (q *postQueue) take() (batch []post, resync bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.list), postBatch)
	batch = slices.Clone(q.list[:n])
	q.list = slices.Delete(q.list, 0, n)
	resync, q.again = q.again, false
	return batch, resync
}

// putBack returns what could not be sent; a new stream asks for snapshots itself.
func (q *postQueue) putBack(batch []post) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = slices.Insert(q.list, 0, batch...)
}

// close drops what waits.
func (q *postQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.lost.Add(uint64(len(q.list)))
	q.list = nil
}

func (q *postQueue) poke() {
	select {
	case q.wake <- struct{}{}:
	default: // it was not heard yet
	}
}
