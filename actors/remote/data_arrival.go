package remote

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"
)

// requestBody is the memory of a request's body: chain hashes, then the engine's body. It is re-used.
type requestBody struct {
	b      []byte
	blocks []uint64
}

var (
	errBodyTooLarge = errors.New("the body is too large")
	errBodyCut      = errors.New("the body did not come whole")
)

// read reads the whole body before the request is passed on: while a body is unread, net/http does not cancel
// the request's context when the client leaves. The request is cancelled after patience and one second for
// each MiB of its announced length.
func (a *requestBody) read(r *http.Request, patience time.Duration, cancel context.CancelCauseFunc) error {
	a.b = a.b[:0]
	n := r.ContentLength
	switch {
	case n == 0:
		return nil
	case n > maxDataBody:
		return errBodyTooLarge
	case n < 0:
		n = firstBodyBuffer
	}
	late := time.AfterFunc(patience+time.Duration(n>>20)*time.Second, func() {
		cancel(errBodyCut)
		_ = r.Body.Close() // it ends a Read that waits
	})
	defer late.Stop()
	if cap(a.b) <= int(n) {
		a.b = make([]byte, 0, n+1)
	}
	return a.fill(r.Body)
}

func (a *requestBody) fill(body io.Reader) error {
	for {
		if len(a.b) == cap(a.b) {
			a.b = append(a.b, 0)[:len(a.b)]
		}
		n, err := body.Read(a.b[len(a.b):cap(a.b)])
		a.b = a.b[:len(a.b)+n]
		switch {
		case len(a.b) > maxDataBody:
			return errBodyTooLarge
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return errBodyCut
		}
	}
}
