package ingress

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// passedHead is how many bytes of a large body are read before a rank is picked.
const passedHead = 4 << 20

// restBody is what follows the beginning of a large body. One attempt after another may be given it; the
// first that reads is the last, because the client sends it only once. A nil restBody is that of a body which
// is whole. Safe for concurrent use.
type restBody struct {
	in    *Ingress
	w     http.ResponseWriter
	r     *http.Request
	conn  *http.ResponseController
	size  int64
	begun atomic.Bool // a byte was asked for: the body cannot be sent again
	over  atomic.Bool // nothing is read any more
	whole atomic.Bool // its end was read

	mu      sync.Mutex  // held while the client is waited for
	reader  *restReader // of the attempt that may read
	members openai.Rest
	pace    bodyPace
	got     int // bytes of the whole body
	failure *failure
}

// restReader reads a restBody for one attempt.
type restReader struct {
	*restBody
	timer *phaseTimer
	limit time.Duration // for the first token
}

func newRestBody(in *Ingress, w http.ResponseWriter, r *http.Request, head []byte) *restBody {
	b := &restBody{
		in: in, w: w, r: r, conn: http.NewResponseController(w), got: len(head),
		size: r.ContentLength - int64(len(head)),
		pace: bodyPace{window: in.timers.BodyStall, whole: in.timers.wholeBody()},
	}
	b.members.Begin(head)
	return b
}

// Size implements rankleg.Rest.
func (b *restBody) Size() int64 { return b.size }

// IsBegun implements rankleg.Rest.
func (b *restBody) IsBegun() bool { return b != nil && b.begun.Load() }

// isWhole reports whether the client has sent all of its body.
func (b *restBody) isWhole() bool { return b == nil || b.whole.Load() }

// give lets an attempt read until take, and until its ctx ends.
func (b *restBody) give(ctx context.Context, q *rankleg.Request, timer *phaseTimer, limit time.Duration) (
	take func(),
) {
	if b == nil {
		return func() {}
	}
	r := &restReader{b, timer, limit}
	q.Rest = r
	b.setReader(r)
	stop := context.AfterFunc(ctx, b.End)
	return func() {
		if stop(); b.IsBegun() {
			b.end()
		}
		b.setReader(nil) // the engine's connection may still want to read
		if b.IsBegun() {
			b.end()
		}
	}
}

func (b *restBody) setReader(r *restReader) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reader = r
}

// Read implements rankleg.Rest. The bounds are those of every upload. The time for the first token begins
// anew with each byte, and stands still while the client is waited for.
func (r *restReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reader != r {
		return 0, errRestOver
	}
	now := time.Now()
	if !r.begun.Swap(true) {
		r.pace.began, r.pace.since, r.pace.had = now, now, r.got
	}
	r.timer.pause()
	n, err := r.readClient(p, now)
	now = time.Now()
	isEnd := errors.Is(err, io.EOF)
	switch r.got += n; {
	case r.over.Load():
		return 0, errRestOver
	case isEnd:
		r.whole.Store(true)
		err = setReadDeadline(r.conn, time.Time{})
	case err == nil && r.pace.isTooSlow(now, r.got):
		err = errTooSlow
	}
	if err != nil {
		r.failure = bodyFailure(r.in, r.r, err)
		return 0, err
	}
	if err := r.members.Watch(p[:n]); err != nil {
		r.failure = badBody(err)
		return 0, err
	}
	r.timer.arm(now, now.Add(r.limit), errFirstToken)
	if isEnd {
		return n, io.EOF
	}
	return n, nil
}

func (b *restBody) readClient(p []byte, now time.Time) (int, error) {
	if err := setReadDeadline(b.conn, b.pace.deadline(now, b.got)); err != nil {
		return 0, err
	}
	if b.over.Load() { // end may have set its deadline before
		return 0, errRestOver
	}
	return b.r.Body.Read(p)
}

var errRestOver = errors.New("the request is over")

// end ends all reads, also one that waits for the client. If the body was not read to its end, the client's
// connection ends after the answer.
func (b *restBody) end() {
	if b != nil && !b.whole.Load() {
		abandonBody(b.w, b.r)
		b.End()
	}
}

// End implements rankleg.Rest. Unlike end, any goroutine may call it: it leaves the client's answer alone.
func (b *restBody) End() {
	if !b.IsBegun() {
		return
	}
	if b.over.Store(true); !b.whole.Load() {
		_ = setReadDeadline(b.conn, time.Now()) // fails if the connection is already gone
	}
}

// fault is the answer to a client whose body could not be passed on; nil: it could.
func (b *restBody) fault() *failure {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failure
}
