package enginehttp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// ackedBytes is how many bytes the peer's system has acknowledged on a connection; false if that is not
// known.
func ackedBytes(c net.Conn) (n uint64, ok bool) {
	s, isSocket := c.(syscall.Conn)
	if !isSocket {
		return 0, false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, false
	}
	err = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if ok = err == nil && info.Bytes_acked > 0; ok {
			n = info.Bytes_acked - 1 // the first one is that of the handshake
		}
	})
	return n, ok && err == nil
}
