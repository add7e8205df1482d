package sim

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// maxUnknownCallers bounds the connections to a groupListener that have not sent their hello.
const maxUnknownCallers = 64

// groupListener is rank 0's listener while it waits for the group. Unknown and silent callers do not delay
// the others.
type groupListener struct {
	//nolint:containedctx // it ends with close: the goroutines that listen to callers live as long
	ctx    context.Context
	cancel context.CancelFunc
	ln     net.Listener
	cfg    *Config
	guests chan groupCaller
	work   sync.WaitGroup
	failed chan error // one slot: the listener's end
}

// groupCaller is a caller that has proved to belong to this group.
type groupCaller struct {
	conn  net.Conn
	hello frame
}

func newDoor(ctx context.Context, ln net.Listener, cfg *Config) *groupListener {
	d := &groupListener{ln: ln, cfg: cfg, guests: make(chan groupCaller), failed: make(chan error, 1)}
	d.ctx, d.cancel = context.WithCancel(ctx)
	d.work.Go(d.accept)
	return d
}

// next gives the next rank that came, or why none will.
func (d *groupListener) next() (groupCaller, error) {
	select {
	case g := <-d.guests:
		return g, nil
	case err := <-d.failed:
		return groupCaller{}, err
	case <-d.ctx.Done():
		return groupCaller{}, context.Cause(d.ctx)
	}
}

// close closes the listener and all callers that were not accepted.
func (d *groupListener) close() {
	d.cancel()
	_ = d.ln.Close() // nothing is lost with it
	d.work.Wait()
}

func (d *groupListener) accept() {
	seats := make(chan struct{}, maxUnknownCallers)
	for {
		select {
		case seats <- struct{}{}:
		case <-d.ctx.Done():
			return
		}
		conn, err := d.ln.Accept()
		if err != nil {
			d.failed <- err
			return
		}
		d.work.Go(func() {
			d.receive(conn)
			<-seats
		})
	}
}

// receive listens to one caller.
func (d *groupListener) receive(conn net.Conn) {
	stop := context.AfterFunc(d.ctx, func() { _ = conn.Close() })
	hello, ok := readHello(conn, d.cfg.GroupKey)
	// stopped before it is handed on: the end of the meeting must not close what was welcomed
	if !stop() || !ok {
		_ = conn.Close()
		return
	}
	select {
	case d.guests <- groupCaller{conn, hello}:
	case <-d.ctx.Done():
		_ = conn.Close()
	}
}

// proof shows that a hello comes from a rank of the group: only those of the same start know the key.
func proof(hello frame, key string) []byte {
	b := hello.encode()
	h := hmac.New(sha256.New, []byte(key))
	h.Write(b[:])
	return h.Sum(nil)
}

func writeHello(c net.Conn, hello frame, key string) error {
	if err := writeFrame(c, hello); err != nil {
		return err
	}
	_, err := c.Write(proof(hello, key)) // under the deadline of the frame
	return err
}

// readHello reads the caller's hello; false if the caller does not belong to the group.
func readHello(c net.Conn, key string) (frame, bool) {
	deadline := c.SetReadDeadline(time.Now().Add(frameTimeout))
	hello, err := readFrame(c)
	said := make([]byte, sha256.Size)
	_, errProof := io.ReadFull(c, said)
	err = errors.Join(deadline, err, errProof, c.SetReadDeadline(time.Time{}))
	return hello, err == nil && hello.kind == frameHello && hmac.Equal(said, proof(hello, key))
}
