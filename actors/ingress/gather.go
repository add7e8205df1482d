package ingress

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// gatheredFrom is the size from which the writes of a piece are gathered. net/http has a buffer of 4 KiB in
// front of a connection: it writes a larger piece in three system calls (the rest of the buffer, the piece,
// and the end of its chunk), each of which wakes the client.
const gatheredFrom = 4<<10 - 64

// gatherBuffers are the buffers in which connections collect the writes of one piece.
var gatherBuffers = sync.Pool{New: func() any {
	// one read of an engine, its chunk's length and the answer's header
	b := make([]byte, 0, relayBuffer+1<<10)
	return &b
}}

// connKey is the context key of a request's clientConn.
type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// startGather begins to collect the writes to the client of r, if a piece of n bytes would take several
// writes; otherwise it returns nil. It does nothing on HTTP/2, where a connection has many writers and its
// own frames.
func startGather(r *http.Request, n int) *clientConn {
	if n < gatheredFrom || r.ProtoMajor != 1 {
		return nil
	}
	c, _ := r.Context().Value(connKey{}).(*clientConn)
	if c == nil {
		return nil // an in-process request
	}
	c.gathered, _ = gatherBuffers.Get().(*[]byte)
	return c
}

// sendGathered writes the collected bytes in one write and stops collecting. c may be nil.
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

// collect adds p to the collected bytes. It returns false if the connection does not collect or has no room;
// it has then written what it had collected.
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
