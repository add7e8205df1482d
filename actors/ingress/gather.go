package ingress

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// net/http has a buffer of 4 KiB in front of a connection: a larger piece of an answer leaves in three system calls, the rest of the
// buffer, the piece, and the end of its chunk. Each wakes the client. gatheredFrom is the size from which that happens.
const gatheredFrom = 4<<10 - 64

// gatherBuffers are what a connection collects the writes of one piece in.
var gatherBuffers = sync.Pool{New: func() any {
	b := make([]byte, 0, relayBuffer+1<<10) // one read of an engine, its chunk's length and the answer's header
	return &b
}}

// connKey is the key of a request's clientConn in its context.
type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// startGather begins to collect what is written to the client of r, if a piece of n bytes would take several writes; nil: it does not. Over
// HTTP/2 a connection has many writers, and frames of its own.
func startGather(r *http.Request, n int) *clientConn {
	if n < gatheredFrom || r.ProtoMajor != 1 {
		return nil
	}
	c, _ := r.Context().Value(connKey{}).(*clientConn)
	if c == nil {
		return nil // a request of this process
	}
	c.gathered, _ = gatherBuffers.Get().(*[]byte)
	return c
}

// sendGathered writes what was collected in one write, and collects no longer. A nil connection has collected nothing.
func (c *clientConn) sendGathered() error {
	if c == nil {
		return nil
	}
	b := c.gathered
	c.gathered = nil
	var err error
	if len(*b) > 0 {
		_, err = c.Write(*b)
	}
	*b = (*b)[:0]
	gatherBuffers.Put(b)
	return err
}

// collect takes p into what is gathered; false: it does not collect, or has no room for it. What it had is written by then.
func (c *clientConn) collect(p []byte) (ok bool, err error) {
	b := c.gathered
	if b == nil {
		return false, nil
	}
	if len(*b)+len(p) <= cap(*b) {
		*b = append(*b, p...)
		return true, nil
	}
	if len(*b) > 0 {
		_, err = c.framedConn.Write(*b)
		*b = (*b)[:0]
	}
	return false, err
}
