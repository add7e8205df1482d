package ingress

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
)

// readBody reads the whole body before anything else: otherwise net/http does not notice that the client
// leaves, and no second attempt is possible. It refuses a body that announces a length above the limit
// without reading it.
func (req *request) readBody() *failure {
	in, r := req.in, req.r
	// One byte more, because net/http watches the connection only after a read has reached the end of the
	// body.
	most := in.limits.MaxBody + 1
	if r.ContentLength >= most {
		return in.tooLarge()
	}
	if r.ContentLength >= 0 {
		most = r.ContentLength + 1
	}
	if err := req.fillBody(int(most)); err != nil {
		return req.bodyFailure(err)
	}
	if r.GetBody != nil { // an in-process request would hold its body as long as it lives
		r.Body, r.GetBody = http.NoBody, nil
	}
	return nil
}

// bodyFailure is the answer to a request whose body could not be read to its end.
func (req *request) bodyFailure(err error) *failure {
	in, r := req.in, req.r
	switch {
	case errors.Is(err, errTooLarge):
		return in.tooLarge()
	case errors.Is(err, errNoBodyMemory):
		return noBodyMemory()
	case errors.Is(err, errTooSlow), errors.Is(err, os.ErrDeadlineExceeded):
		return newFailure(openai.CodeSlowRequest, fmt.Sprintf(
			"the body came too slowly: send at least %d bytes per second, and up to %d MiB within %s",
			bodyRate, wholeBody>>20, in.timers.wholeBody()))
	case r.Context().Err() != nil && !errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{status: statusClientGone, clientGone: true, cause: causeClientGone.String()}
	default:
		return newFailure(openai.CodeInvalidRequest,
			"the body ended before its announced length, or its chunks are malformed")
	}
}

func (in *Ingress) tooLarge() *failure {
	text := fmt.Sprintf("the body is larger than %d bytes", in.limits.MaxBody)
	if in.limits.MaxBody < LargestMaxBody {
		text += fmt.Sprintf("; the node's --max-body allows up to %d MiB", LargestMaxBody>>20)
	}
	return newFailure(openai.CodeBodyTooLarge, text)
}

func noBodyMemory() *failure {
	f := newFailure(openai.CodeOverloaded,
		"this node holds as many bytes of request bodies as it may; try again later").withRetryAfter(1)
	f.cause = "body_memory"
	return f
}

var (
	errTooLarge     = errors.New("body above the limit")
	errNoBodyMemory = errors.New("no memory for bodies is left")
	errTooSlow      = errors.New("body too slow")
)

// fillBody reads the body to its end. The buffer grows as bytes arrive, so a client that only announces a
// length costs no memory. most is the largest number of bytes that may arrive, plus one.
func (req *request) fillBody(most int) error {
	m, window := &req.in.bodies, req.in.timers.BodyStall
	if req.body = m.take(bodySizes[0]); req.body == nil {
		return errNoBodyMemory
	}
	now := time.Now()
	pace := bodyPace{window: window, whole: req.in.timers.wholeBody(), began: now, since: now}
	for armed := (time.Time{}); ; {
		if now.Sub(armed) >= window/deadlineSteps {
			if err := setReadDeadline(req.rc, pace.deadline(now, len(req.body.b))); err != nil {
				return err
			}
			armed = now
		}
		if len(req.body.b) == cap(req.body.b) {
			larger := m.grow(req.body, most)
			if larger == nil {
				return errNoBodyMemory
			}
			req.body = larger
		}
		b := req.body.b
		n, err := req.r.Body.Read(b[len(b):cap(b)])
		req.body.b = b[:len(b)+n]
		now = time.Now()
		switch {
		case int64(len(req.body.b)) > req.in.limits.MaxBody:
			return errTooLarge
		case errors.Is(err, io.EOF):
			// net/http's own reader takes over at the end of the body, and must not run into our deadline.
			return setReadDeadline(req.rc, time.Time{})
		case err != nil:
			return err
		case pace.isTooSlow(now, len(req.body.b)):
			return errTooSlow
		}
	}
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

func setReadDeadline(w *http.ResponseController, at time.Time) error {
	if err := w.SetReadDeadline(at); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
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
	if setReadDeadline(http.NewResponseController(w), time.Now()) != nil {
		return // the connection is already gone
	}
}
