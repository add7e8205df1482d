//go:build linux && !race

// Package rawconn makes TCP connections whose reads and writes bypass Go's scheduler: they use raw system
// calls.
//
// An ordinary read or write of a net.Conn leaves and re-enters the scheduler around the call, because the
// call might block. The sockets are non-blocking, so it never does; but on a machine whose processors are
// nearly idle, as a relay of paced token streams leaves them, each of these steps may wake the runtime's
// monitor thread and other processors, which costs more than the call. docs/performance.md has the numbers.
// This package makes the raw system call instead, from the callbacks of syscall.RawConn, which still parks
// the goroutine in the runtime's poller when there is nothing to read or no room to write. Deadlines, Close
// and errors work as they do without it.
//
// A raw call holds its processor until it is done, and garbage collection waits for it: so one call writes at
// most maxPiece bytes. The race detector does not see what a raw call does to memory, so under it, and on
// systems other than Linux, connections stay as they are.
package rawconn

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// maxPiece bounds one raw call: a copy of so many bytes takes some 20 µs, for which the processor cannot be
// taken away.
const maxPiece = 128 << 10

// Conn returns a connection over c that uses raw system calls. If c is no *net.TCPConn, or closed, it returns
// c.
func Conn(c net.Conn) net.Conn {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return c
	}
	q := &conn{tcp: tcp, raw: raw}
	q.in.try, q.out.try = q.in.read, q.out.write
	return q
}

// conn is a net.Conn over raw system calls. The TCPConn is no embedded field: its ReadFrom and WriteTo would
// go around them.
type conn struct {
	tcp *net.TCPConn
	raw syscall.RawConn
	in  side
	out side
}

// side is one direction. Its callback is bound once per connection, so that a call allocates nothing; mu
// keeps two callers of the same direction apart, as the connection below does.
type side struct {
	mu    sync.Mutex
	try   func(fd uintptr) bool
	p     []byte // left to fill or to send
	n     int    // bytes moved
	errno syscall.Errno
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, errno, err := c.in.run(c.raw.Read, p)
	switch {
	case err != nil:
		return 0, renamed(err, "read")
	case errno != 0:
		return 0, c.failed("read", errno)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// Write implements net.Conn. With an error it says how many bytes went before it.
func (c *conn) Write(p []byte) (int, error) {
	n, errno, err := c.out.run(c.raw.Write, p)
	switch {
	case err != nil:
		return n, renamed(err, "write")
	case errno != 0:
		return n, c.failed("write", errno)
	}
	return n, nil
}

// run moves bytes in one direction. err is of the connection (deadline, closed), errno of the system call.
func (s *side) run(raw func(func(fd uintptr) bool) error, p []byte) (n int, errno syscall.Errno, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.p, s.n, s.errno = p, 0, 0
	err = raw(s.try)
	s.p = nil
	return s.n, s.errno, err
}

// read reads once; false means that the poller is to wait for bytes.
func (s *side) read(fd uintptr) (done bool) {
	for {
		n, errno := call(syscall.SYS_READ, fd, s.p[:min(len(s.p), maxPiece)])
		switch errno {
		case 0:
			s.n = n
			return true
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			s.errno = errno
			return true
		}
	}
}

// write writes all that is left; false means that the poller is to wait for room.
func (s *side) write(fd uintptr) (done bool) {
	for len(s.p) > 0 {
		n, errno := call(syscall.SYS_WRITE, fd, s.p[:min(len(s.p), maxPiece)])
		switch errno {
		case 0:
			s.n, s.p = s.n+n, s.p[n:]
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			s.errno = errno
			return true
		}
	}
	return true
}

// call makes the raw system call. p is not empty.
func call(trap, fd uintptr, p []byte) (int, syscall.Errno) {
	//nolint:gosec // the address is taken within the call, as package unsafe asks (rule 4)
	n, _, errno := syscall.RawSyscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	return int(n), errno
}

// failed is a system call's error in the form that package net gives it.
func (c *conn) failed(op string, errno syscall.Errno) error {
	return &net.OpError{
		Op: op, Net: "tcp", Source: c.tcp.LocalAddr(), Addr: c.tcp.RemoteAddr(),
		Err: os.NewSyscallError(op, errno),
	}
}

// renamed sets the operation of an error of the raw connection to the one that its caller used.
func renamed(err error, op string) error {
	var e *net.OpError
	if errors.As(err, &e) {
		e.Op = op // made for this call alone
	}
	return err
}

// Close implements net.Conn: it ends calls that wait.
func (c *conn) Close() error { return c.tcp.Close() }

// SetLinger is that of net.TCPConn.
func (c *conn) SetLinger(sec int) error { return c.tcp.SetLinger(sec) }

// CloseWrite shuts the writing side down: the peer reads an end of file.
func (c *conn) CloseWrite() error { return c.tcp.CloseWrite() }

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error { return c.tcp.SetDeadline(t) }

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error { return c.tcp.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *conn) SetWriteDeadline(t time.Time) error { return c.tcp.SetWriteDeadline(t) }

// SyscallConn implements syscall.Conn.
func (c *conn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }
