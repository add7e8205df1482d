package shim

import (
	"bufio"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// conn is one connection to a shim, as the shim sees it.
type conn struct {
	s    *server
	c    *net.UnixConn
	in   *bufio.Reader
	done chan struct{} // closed with the connection

	watches, reads bool // has asked for it; used by run only

	mu sync.Mutex // of writes
}

func newConn(s *server, c *net.UnixConn) *conn {
	return &conn{s: s, c: c, in: bufio.NewReader(c), done: make(chan struct{})}
}

// run answers requests until the connection ends.
func (c *conn) run() {
	defer func() {
		_ = c.c.Close()
		close(c.done)
		c.s.leave(c)
	}()
	if err := c.greet(); err != nil {
		return
	}
	for {
		line, err := readLine(c.in, requestLimit)
		if errors.Is(err, ErrProtocol) {
			_ = c.send(&reply{Error: refuse(err)})
		}
		if err != nil {
			return
		}
		r, err := parseRequest(line)
		if err != nil {
			_ = c.send(&reply{ID: r.ID, Error: refuse(err)})
			return
		}
		if err := c.handle(&r); err != nil {
			return
		}
	}
}

// greet checks who the other side is, and that it speaks the version of the node that started this shim.
func (c *conn) greet() error {
	_ = c.c.SetDeadline(time.Now().Add(helloWait))
	uid, _, err := peer(c.c)
	if err == nil && uid != os.Geteuid() {
		err = ErrForeign
	}
	if err != nil {
		return err
	}
	if err := c.send(hello{c.s.spec.Version}); err != nil {
		return err
	}
	line, err := readLine(c.in, requestLimit)
	if err != nil {
		return err
	}
	h, err := parseHello(line)
	if err == nil && h.Version != c.s.spec.Version {
		err = &VersionError{Version}
	}
	if err != nil {
		_ = c.send(&reply{Error: refuse(err)})
		return err
	}
	return c.c.SetDeadline(time.Time{})
}

// handle answers a request; an error ends the connection.
func (c *conn) handle(r *request) error {
	answer := reply{ID: r.ID}
	var err error
	switch r.Op {
	case opInfo:
		answer.Info = c.s.info()
	case opWatch:
		if c.watches {
			return ErrProtocol
		}
		if err = c.s.own(c); err == nil {
			c.watches, answer.More = true, true
			defer func() { go c.watch(r.ID) }()
		}
	case opSignal:
		c.s.signal(r.Signal)
	case opExtend:
		err = c.s.extend(c, time.Duration(r.TTL)*time.Millisecond)
	case opLogs:
		if c.reads {
			return ErrProtocol
		}
		c.reads = true
		go c.logs(r)
		return nil
	case opRelease:
		if c.s.child.Held() != "" {
			err = ErrRunning
		} else {
			defer c.s.released()
		}
	}
	if err != nil {
		answer.Error = refuse(err)
	}
	if r.ID == 0 {
		return nil
	}
	return c.send(&answer)
}

// watch tells the engine's exit.
func (c *conn) watch(id uint64) {
	select {
	case <-c.s.child.Exited():
		exit := c.s.child.Exit()
		_ = c.send(&reply{ID: id, Exit: &exit})
	case <-c.done:
	}
}

// logs sends the engine's lines. With Follow it goes on until nothing follows, or the connection ends.
func (c *conn) logs(r *request) {
	for next := r.Since; ; {
		b := c.s.ring.from(next)
		next = b.next
		more := !b.ended && (r.Follow || len(b.lines) > 0)
		if len(b.lines) > 0 || b.missed > 0 || !more {
			if c.send(&reply{ID: r.ID, Lines: b.lines, Missed: b.missed, More: more}) != nil {
				_ = c.c.Close() // the other side sees that something is missing
				return
			}
		}
		if !more {
			return
		}
		if r.Follow {
			c.s.ring.took(next)
		}
		if len(b.lines) > 0 {
			continue
		}
		select {
		case <-b.changed:
		case <-c.done:
			return
		}
	}
}

// send writes a line. A side that does not read makes nobody else wait: each request that answers at length
// has a goroutine and a connection of its own.
func (c *conn) send(message any) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return writeLine(c.c, message)
}
