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

// bodyBuffer is a request's body in memory that is used again.
type bodyBuffer struct{ b []byte }

// release gives the buffer back to the pool, unless it is too large to keep or somebody may still read it: an engine
// connection that was given up may be in the middle of writing it.
func (in *Ingress) release(b *bodyBuffer, settled bool) {
	if settled && cap(b.b) <= maxPooledBody {
		in.buffers.Put(b)
	}
}

// firstBody is the buffer for a body whose length is not announced.
const firstBody = 4 << 10

// readBody reads the whole body before anything else: without that the client's leaving is not noticed, and no second
// attempt is possible (TRAPS 2). A body above the limit is refused unread if it announces its length.
func (in *Ingress) readBody(w *http.ResponseController, r *http.Request, buf *bodyBuffer) *failure {
	if r.ContentLength > in.limits.MaxBody {
		return in.tooLarge()
	}
	size := int(r.ContentLength) + 1 // one more, to reach the end: TRAPS 2
	if r.ContentLength < 0 {
		size = firstBody
	}
	if cap(buf.b) < size {
		buf.b = make([]byte, 0, size)
	}
	buf.b = buf.b[:0]
	err := in.fill(w, r, buf)
	var stalled *stallError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errTooLarge):
		return in.tooLarge()
	case errors.As(err, &stalled), errors.Is(err, os.ErrDeadlineExceeded):
		return fail(openai.CodeSlowRequest, fmt.Sprintf("the body came too slowly: send at least %d bytes per second", bodyRate))
	case r.Context().Err() != nil && !errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{status: statusClientGone, gone: true, cause: causeClientGone.String()}
	default:
		return fail(openai.CodeInvalidRequest, "the body ended before its announced length, or its chunks are malformed")
	}
}

func (in *Ingress) tooLarge() *failure {
	return fail(openai.CodeBodyTooLarge, fmt.Sprintf("the body is larger than %d bytes", in.limits.MaxBody))
}

var errTooLarge = errors.New("body above the limit")

// stallError is a body that brings less than bodyRate over a window.
type stallError struct{}

func (*stallError) Error() string { return "body too slow" }

// fill reads to the end of the body, window by window. One deadline per window is enough: a body that stands still brings
// too few bytes as well.
func (in *Ingress) fill(w *http.ResponseController, r *http.Request, buf *bodyBuffer) error {
	for {
		due := time.Now().Add(in.timers.BodyStall)
		if err := setReadDeadline(w, due); err != nil {
			return err
		}
		from := len(buf.b)
		err := in.window(r.Body, buf, due)
		if err == nil { // the window is over, the body is not
			err = enough(len(buf.b)-from, in.timers.BodyStall)
		}
		if errors.Is(err, io.EOF) {
			// The connection's own reader takes over at the end of the body: it must not run into our deadline.
			return setReadDeadline(w, time.Time{})
		}
		if err != nil {
			return err
		}
	}
}

func setReadDeadline(w *http.ResponseController, at time.Time) error {
	if err := w.SetReadDeadline(at); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// abandonBody is for an answer to a request whose body was not read to its end. On HTTP/1 net/http would read on to keep the
// connection, without a deadline: a stalled client would hold it for ever. So the connection ends, and reading does at once. On
// HTTP/2 the stream is reset alone, and the requests of others on the connection go on.
func abandonBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.ProtoMajor > 1 {
		return
	}
	w.Header().Set("Connection", "close")
	if setReadDeadline(http.NewResponseController(w), time.Now()) != nil {
		return // the connection is gone, which is as good
	}
}

func enough(n int, window time.Duration) error {
	if float64(n) < bodyRate*window.Seconds() {
		return &stallError{}
	}
	return nil
}

// window reads until due, or to the end of the body: then the error is io.EOF.
func (in *Ingress) window(body io.Reader, buf *bodyBuffer, due time.Time) error {
	for {
		if len(buf.b) == cap(buf.b) {
			buf.b = append(buf.b, 0)[:len(buf.b)]
		}
		n, err := body.Read(buf.b[len(buf.b):cap(buf.b)])
		buf.b = buf.b[:len(buf.b)+n]
		switch {
		case int64(len(buf.b)) > in.limits.MaxBody:
			return errTooLarge
		case err != nil:
			return err
		case n > 0 && !time.Now().Before(due):
			return nil
		}
	}
}
