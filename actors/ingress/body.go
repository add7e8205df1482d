package ingress

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// readBody reads the whole body before anything else: otherwise net/http does not notice that the client
// leaves, and no second attempt is possible. It refuses a body that announces a length above the limit
// without reading it. Of a large body it reads the beginning, if the rest can be passed on as it comes.
func (q *question) readBody(in *Ingress, w http.ResponseWriter, conn *http.ResponseController,
	s *routeScope,
) *failure {
	r := q.r
	// One byte more, because net/http watches the connection only after a read has reached the end of the
	// body.
	most := in.bodies.most + 1
	if r.ContentLength > in.limits.MaxBody {
		return in.limits.tooLarge(in.limits.MaxBody)
	}
	pace := bodyPace{window: in.timers.BodyStall, whole: in.timers.wholeBody()}
	if r.ContentLength > passedHead {
		if err := q.fillBody(in, conn, &pace, passedHead); err != nil {
			return bodyFailure(in, r, err)
		}
		if q.canPassOn(s) {
			q.rest = newRestBody(in, w, r, q.body.b)
			return nil
		}
		if r.ContentLength >= most {
			return in.limits.tooLarge(in.bodies.most)
		}
	}
	if r.ContentLength >= 0 {
		most = r.ContentLength + 1
	}
	if err := q.fillBody(in, conn, &pace, int(most)); err != nil {
		return bodyFailure(in, r, err)
	}
	if r.GetBody != nil { // an in-process request would hold its body as long as it lives
		r.Body, r.GetBody = http.NoBody, nil
	}
	return nil
}

// canPassOn reports whether the body, of which the beginning is here, may go to an engine as it comes. A
// policy that reads prompts reads those of up to sharedBody bytes. An application with two pools sends each
// body twice.
func (q *question) canPassOn(s *routeScope) bool {
	if q.route != openai.Chat || !q.scan.ScanHead(q.body.b, s.only != nil) {
		return false
	}
	to := s.only
	if q.scan.HasModel {
		to = s.models[string(q.scan.Model)]
	}
	if to == nil || to.pair != nil {
		return false
	}
	policy := to.router.inputs()
	return !policy.chains() && !policy.needs.Text || q.r.ContentLength > sharedBody
}

// refuseEncoded refuses a compressed body. dpserve sends bodies on as they come, and no engine unpacks them.
func refuseEncoded(w http.ResponseWriter, r *http.Request) *failure {
	for _, encoding := range r.Header["Content-Encoding"] {
		if encoding != "" && !strings.EqualFold(encoding, "identity") {
			w.Header()["Accept-Encoding"] = []string{"identity"}
			return &failure{
				status: http.StatusUnsupportedMediaType, code: openai.CodeInvalidRequest,
				message: "content-encoding " + clipped([]byte(encoding)) +
					" is not taken; send the body as it is",
			}
		}
	}
	return nil
}

// bodyFailure is the answer to a request whose body could not be read to its end.
func bodyFailure(in *Ingress, r *http.Request, err error) *failure {
	switch {
	case errors.Is(err, errTooLarge):
		return in.limits.tooLarge(in.bodies.most)
	case errors.Is(err, errNoBodyMemory):
		return noBodyMemory()
	case errors.Is(err, errTooSlow), errors.Is(err, os.ErrDeadlineExceeded):
		return newFailure(openai.CodeSlowRequest, fmt.Sprintf(
			"the body came too slowly: send at least %d bytes per second, and up to %d MiB within %s",
			bodyRate, wholeBody>>20, in.timers.wholeBody()))
	case r.Context().Err() != nil && !errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{status: statusClientGone, clientGone: true, cause: dispatch.ClientGone.String()}
	default:
		return newFailure(openai.CodeInvalidRequest,
			"the body ended before its announced length, or its chunks are malformed")
	}
}

// tooLarge is the answer to a body of more than most bytes.
func (l Limits) tooLarge(most int64) *failure {
	text := fmt.Sprintf("the body is larger than %d bytes", most)
	switch {
	case most < l.MaxBody:
		text += ", half of the memory that this node has for bodies: a quarter of its memory limit, and at " +
			"most 32 times --max-body and 2 GiB"
	case most < LargestMaxBody:
		text += fmt.Sprintf("; the node's --max-body allows up to %d MiB", LargestMaxBody>>20)
	}
	return newFailure(openai.CodeBodyTooLarge, text)
}

func noBodyMemory() *failure {
	f := newFailure(openai.CodeOverloaded, "this node holds as many bytes of request bodies as it may "+
		"(a larger --max-body allows more); try again later").withRetryAfter(1)
	f.cause = "body_memory"
	return f
}

var (
	errTooLarge     = errors.New("body above the limit")
	errNoBodyMemory = errors.New("no memory for bodies is left")
	errTooSlow      = errors.New("body too slow")
)

// fillBody reads the body to its end, or until it has most bytes. The buffer grows as bytes arrive, so a
// client that only announces a length costs no memory.
func (q *question) fillBody(in *Ingress, conn *http.ResponseController, pace *bodyPace, most int) error {
	m, window := &in.bodies, in.timers.BodyStall
	if q.body == nil {
		q.body = m.take(bodySizes[0])
	}
	if q.body == nil {
		return errNoBodyMemory
	}
	now := time.Now()
	if pace.began.IsZero() {
		pace.began, pace.since = now, now
	}
	for armed := (time.Time{}); len(q.body.b) < most; {
		if now.Sub(armed) >= window/deadlineSteps {
			if err := setReadDeadline(conn, pace.deadline(now, len(q.body.b))); err != nil {
				return err
			}
			armed = now
		}
		if len(q.body.b) == cap(q.body.b) {
			larger := m.grow(q.body, most)
			if larger == nil {
				return errNoBodyMemory
			}
			q.body = larger
		}
		b := q.body.b
		n, err := q.r.Body.Read(b[len(b):cap(b)])
		q.body.b = b[:len(b)+n]
		now = time.Now()
		switch {
		case int64(len(q.body.b)) > m.most:
			return errTooLarge
		case errors.Is(err, io.EOF):
			// net/http's own reader takes over at the end of the body, and must not run into our deadline.
			return setReadDeadline(conn, time.Time{})
		case err != nil:
			return err
		case pace.isTooSlow(now, len(q.body.b)):
			return errTooSlow
		}
	}
	return nil
}

func setReadDeadline(w *http.ResponseController, at time.Time) error {
	if err := w.SetReadDeadline(at); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// dropBody is releaseBody for a body that no leg may still read.
func (req *request) dropBody() {
	in := req.in
	in.bodies.give(req.body, req.bodySettled)
	in.bodies.give(req.stripped, req.bodySettled)
	req.body, req.stripped, req.engineBody = nil, nil, nil
	req.scan.Forget()
	req.query.Text, req.query.Blocks, req.query.Hits = nil, nil, nil
	if req.promptMem != nil {
		*req.promptMem = req.prompt.giveMemory()
		in.promptPool.Put(req.promptMem)
		req.promptMem = nil
	}
}

// Bounds of a body that is read only to keep its connection.
const (
	skippedBody = 16 << 10 // bytes; the connection of a larger one is closed
	skipTime    = time.Second
)

// skipBody prepares an answer that is given without the body. It reads a small body to its end, so that the
// client keeps its connection: thousands of clients that each open a new one after a refusal would leave no
// room for health checks. The connection of any other body is closed.
func skipBody(w http.ResponseWriter, r *http.Request) {
	isSmall := r.ContentLength > 0 && r.ContentLength <= skippedBody && r.Header["Expect"] == nil
	if !isSmall || r.ProtoMajor > 1 {
		abandonBody(w, r)
		return
	}
	conn := http.NewResponseController(w)
	err := setReadDeadline(conn, time.Now().Add(skipTime))
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
	}
	if err != nil || setReadDeadline(conn, time.Time{}) != nil {
		abandonBody(w, r)
	}
}

// abandonBody prepares an answer to a request whose body was not read to its end. On HTTP/1, net/http would
// read the rest to keep the connection, without a deadline, and a stalled client would hold it for ever. So
// abandonBody closes the connection after the answer and ends reading at once. On HTTP/2 only the stream is
// reset, and the other requests of the connection go on.
func abandonBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.ProtoMajor > 1 {
		return
	}
	w.Header().Set("Connection", "close")
	_ = setReadDeadline(http.NewResponseController(w), time.Now()) // fails if the connection is already gone
}

// bodyBuffer is memory for a request's body.
type bodyBuffer struct{ b []byte }

// bodySizes are the sizes in bytes of pooled buffers. Each is four times the size before it, so a buffer is
// at most four times as large as the body in it, or of the smallest size.
var bodySizes = [...]int{16 << 10, 64 << 10, 256 << 10, 1 << 20}

// bodyMemory allocates the memory of request bodies within a budget for the whole node. It refuses a body for
// which the budget has nothing left, so clients cannot exhaust the node's memory. Safe for concurrent use.
type bodyMemory struct {
	budget int64
	most   int64                     // bytes of one body
	taken  atomic.Int64              // bytes of all buffers in use
	pools  [len(bodySizes)]sync.Pool // *bodyBuffer of each size
}

// take returns an empty buffer with room for size bytes, or nil if the budget has less left.
func (m *bodyMemory) take(size int) *bodyBuffer {
	class := sizeClass(size)
	if class < len(bodySizes) {
		size = bodySizes[class]
	}
	if n := int64(size); m.taken.Add(n) > m.budget {
		m.taken.Add(-n)
		return nil
	}
	if class < len(bodySizes) {
		if b, _ := m.pools[class].Get().(*bodyBuffer); b != nil {
			return b
		}
	}
	return &bodyBuffer{b: make([]byte, 0, size)}
}

// grow returns a buffer of at least twice the size with the content of b, which is full, and returns b to the
// pool. The new buffer is not larger than most bytes, rounded up to a size of bodySizes. Above 64 KiB it has
// most bytes if that is 1 MiB or less, because further copies cost more than the memory. It returns nil if
// the budget has less left; b then remains the caller's.
func (m *bodyMemory) grow(b *bodyBuffer, most int) *bodyBuffer {
	size := 2 * cap(b.b)
	if cap(b.b) >= bodySizes[1] && most <= bodySizes[len(bodySizes)-1] {
		size = most
	}
	larger := m.take(min(size, most))
	if larger == nil {
		return nil
	}
	larger.b = append(larger.b, b.b...)
	m.give(b, true)
	return larger
}

// give returns a buffer to the pool; nil is allowed. The buffer is not used again if it is larger than every
// size of bodySizes, or if reusable is false because an abandoned engine connection may still read it.
func (m *bodyMemory) give(b *bodyBuffer, reusable bool) {
	if b == nil {
		return
	}
	m.taken.Add(-int64(cap(b.b)))
	if class := sizeClass(cap(b.b)); reusable && class < len(bodySizes) {
		b.b = b.b[:0]
		m.pools[class].Put(b)
	}
}

// sizeClass is the index in bodySizes of the smallest size that holds n bytes; len(bodySizes) if none does.
func sizeClass(n int) int {
	for i, size := range bodySizes {
		if n <= size {
			return i
		}
	}
	return len(bodySizes)
}

// deadlineSteps is how often the read deadline is moved within a window; the deadline is exact to
// 1/deadlineSteps of it.
const deadlineSteps = 30

// bodyPace enforces the least rates of an upload: bodyRate over each window, and wholeBody bytes within whole
// since the upload began. So a body of up to wholeBody bytes must be complete after whole, and the least rate
// grows with the memory that a body takes.
type bodyPace struct {
	window time.Duration
	whole  time.Duration
	began  time.Time // start of the body
	since  time.Time // start of the current window
	had    int       // bytes that had arrived by then
}

// isTooSlow reports whether n bytes by now are too few.
func (p *bodyPace) isTooSlow(now time.Time, n int) bool {
	if passed := now.Sub(p.since); passed >= p.window {
		if float64(n-p.had) < bodyRate*passed.Seconds() {
			return true
		}
		p.since, p.had = now, n
	}
	passed := now.Sub(p.began)
	return passed >= p.whole && float64(n) < wholeBody*passed.Seconds()/p.whole.Seconds()
}

// deadline is when the next byte must arrive after the n bytes that have arrived by now.
func (p *bodyPace) deadline(now time.Time, n int) time.Time {
	due, last := now.Add(p.window), p.began.Add(p.whole)
	if n < wholeBody && last.Before(due) {
		return last
	}
	return due
}

// errSlowReader is the cause when a client takes its answer too slowly, although no single write has exceeded
// its deadline.
var errSlowReader = fmt.Errorf("the client reads fewer than %d bytes per second: %w", bodyRate,
	os.ErrDeadlineExceeded)

// readerPace enforces bodyRate for a client that reads its answer, as bodyPace does for uploads: if the
// ingress has waited for the client for more than half of a window, the client must have taken bodyRate over
// the time of the wait. Each write has a deadline of its own, so without this rule a client that takes a few
// bytes a minute would keep its place on a rank for hours. A slow engine does not count as waiting. The zero
// value is the beginning of an answer.
type readerPace struct {
	since  time.Time     // start of the current window; zero: none has begun
	began  time.Time     // start of the current write; zero: none
	waited time.Duration // time in writes in this window
	bytes  int           // written in this window
}

// beginWrite records a write of n bytes; false: the client was too slow in the window that has ended.
func (p *readerPace) beginWrite(now time.Time, n int, window time.Duration) bool {
	isTooSlow := false
	if passed := now.Sub(p.since); p.since.IsZero() || passed >= window {
		isTooSlow = 2*p.waited > passed && float64(p.bytes) < bodyRate*p.waited.Seconds()
		*p = readerPace{since: now}
	}
	p.began = now
	p.bytes += n
	return !isTooSlow
}

// endWrite records that the current write, if any, is over.
func (p *readerPace) endWrite(now time.Time) {
	if !p.began.IsZero() {
		p.waited += now.Sub(p.began)
		p.began = time.Time{}
	}
}

// stripBody makes the body for an engine that serves the request alone, without the fields that only dpserve
// may set.
func (req *request) stripBody() *failure {
	req.engineBody = req.body.b
	s := req.split
	if s == nil && len(req.scan.Strip.Spans) == 0 || s != nil && !s.body.HasReserved() {
		return nil
	}
	if req.stripped = req.in.bodies.take(len(req.body.b)); req.stripped == nil {
		return noBodyMemory()
	}
	if s != nil {
		req.stripped.b = s.body.AppendPlain(req.stripped.b)
	} else {
		req.stripped.b = req.scan.Spliced(req.stripped.b, req.body.b)
	}
	req.engineBody = req.stripped.b
	return nil
}

func badBody(err error) *failure {
	f := newFailure(openai.CodeInvalidRequest, err.Error())
	if e, ok := errors.AsType[*openai.BodyError](err); ok {
		f.code, f.param, f.status = e.Code, e.Param, openai.Status(e.Code)
	}
	return f
}
