//go:build unix

package enginehttp

import (
	"net"
	"syscall"
)

// probe checks a waiting connection without consuming bytes.
type probe struct {
	raw   syscall.RawConn
	look  func(fd uintptr) bool // bound once: a look allocates nothing
	byte  [1]byte
	alive bool
}

// newProbe gives nil for a connection that is no socket.
func newProbe(c net.Conn) *probe {
	s, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil
	}
	p := &probe{raw: raw}
	p.look = func(fd uintptr) (done bool) {
		p.alive = peek(fd, &p.byte)
		return true
	}
	return p
}

// quiet reports that the peer has neither closed nor sent anything. A connection that cannot be checked
// counts as quiet.
func (p *probe) quiet() bool {
	if p == nil {
		return true
	}
	p.alive = false
	return p.raw.Read(p.look) == nil && p.alive
}
