package noderpc

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
)

// Bounds of the posts that wait for one node.
const (
	maxPosts  = 8192
	postBatch = 512 // of one message
)

// errNotPosted refuses a message that does not travel over the stream, such as an Admit.
var errNotPosted = errors.New("a message of this kind is not posted to ranks of other nodes")

// remoteMailbox is the mailbox of a rank on another node. It implements msg.Mailbox: Done, FirstToken,
// Progress, Pardon and Demand are sent over the node's stream, and all other messages are refused.
// Posts after the rank is out are still sent if the node comes back, because its requests may have gone on.
type remoteMailbox struct {
	id      identity
	posts   *postQueue
	stopped chan struct{}
	once    sync.Once
}

var _ msg.Mailbox = (*remoteMailbox)(nil)

func (b *remoteMailbox) stop() { b.once.Do(func() { close(b.stopped) }) }

// Stopped implements msg.Mailbox: for this node, the rank has ended, or its node is out.
func (b *remoteMailbox) Stopped() <-chan struct{} { return b.stopped }

// Send implements msg.Mailbox. If the queue is full the message is lost, and counted.
func (b *remoteMailbox) Send(m any) { _ = b.TrySend(m) }

// TrySend implements msg.Mailbox.
func (b *remoteMailbox) TrySend(m any) error {
	p := post{wire: toPost(m)}
	if p.wire == nil {
		return errNotPosted
	}
	p.wire.Unit, p.wire.Rank, p.wire.Epoch, p.wire.Incarnation = b.id.unit, uint32(b.id.rank), b.id.epoch,
		b.id.incarnation
	switch m := m.(type) {
	case *msg.FirstToken:
		p.at = m.At
	case *msg.Progress:
		p.progress = true
	}
	return b.posts.push(p)
}

// post is a message that waits to be sent.
type post struct {
	wire     *dpservev1.Post
	at       time.Time // of a first token
	progress bool
}

// packPosts makes one message, with its length in front. The age of a first token is set here, because it is
// known only when the message leaves.
func packPosts(batch []post, now time.Time) []byte {
	var m dpservev1.Posts
	for _, p := range batch {
		if f, ok := p.wire.GetMessage().(*dpservev1.Post_FirstToken); ok && !p.at.IsZero() {
			f.FirstToken.AgoNano = int64(max(now.Sub(p.at), 0))
		}
		m.Posts = append(m.Posts, p.wire)
	}
	var out bytes.Buffer
	_, _ = protodelim.MarshalTo(&out, &m) // fails only for a text that is not UTF-8: causes are words of ours
	return out.Bytes()
}

// postQueue is the posts that wait for one node, in order. It never blocks. Over its bound it drops Progress
// first, because the next one repeats it.
type postQueue struct {
	wake chan struct{} // one slot
	lost *atomic.Uint64

	mu     sync.Mutex
	list   []post
	closed bool
}

func (q *postQueue) init(lost *atomic.Uint64) { q.wake, q.lost = make(chan struct{}, 1), lost }

func (q *postQueue) push(p post) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || !q.makeRoom(p.progress) {
		q.lost.Add(1)
		return msg.ErrOverloaded
	}
	q.list = append(q.list, p)
	signal(q.wake)
	return nil
}

// makeRoom makes room for one more post, if it can.
func (q *postQueue) makeRoom(progress bool) bool {
	if len(q.list) < maxPosts {
		return true
	}
	if progress {
		return false
	}
	before := len(q.list)
	q.list = slices.DeleteFunc(q.list, func(p post) bool { return p.progress })
	q.lost.Add(uint64(before - len(q.list)))
	return len(q.list) < maxPosts
}

// takeBatch returns the next posts to send.
func (q *postQueue) takeBatch() []post {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.list), postBatch)
	batch := slices.Clone(q.list[:n])
	q.list = slices.Delete(q.list, 0, n)
	return batch
}

// putBack returns posts that could not be sent.
func (q *postQueue) putBack(batch []post) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = slices.Insert(q.list, 0, batch...)
}

func (q *postQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.lost.Add(uint64(len(q.list)))
	q.list = nil
}

// toPost is a mailbox's message on the wire; nil if it is not sent over the stream.
func toPost(m any) *dpservev1.Post {
	switch m := m.(type) {
	case *msg.Done:
		return &dpservev1.Post{Message: &dpservev1.Post_Done{Done: &dpservev1.Done{
			Ticket: m.TicketID, Outcome: uint32(m.Outcome), Cause: m.Cause,
			PromptTokens: int64(m.PromptTokens), CachedTokens: int64(m.CachedTokens),
			HasCached: m.HasCached, CompletionTokens: int64(m.CompletionTokens),
			FirstTokenNano: int64(m.FirstToken), Charge: m.Charge, BusyNano: int64(m.BusyFor),
			CheckHealth: m.CheckHealth,
		}}}
	case *msg.FirstToken:
		return &dpservev1.Post{Message: &dpservev1.Post_FirstToken{
			FirstToken: &dpservev1.FirstToken{Ticket: m.TicketID},
		}}
	case *msg.Progress:
		return &dpservev1.Post{Message: &dpservev1.Post_Progress{
			Progress: &dpservev1.Progress{Ticket: m.TicketID, Out: int64(m.Out)},
		}}
	case *msg.Pardon:
		return &dpservev1.Post{Message: &dpservev1.Post_Pardon{Pardon: &dpservev1.Pardon{}}}
	case *msg.Demand:
		return &dpservev1.Post{Message: &dpservev1.Post_Demand{Demand: &dpservev1.Demand{Waits: m.Waits}}}
	case msg.Demand:
		return toPost(&m)
	default:
		return nil
	}
}
