//go:build unix && !(linux && (amd64 || arm64))

package enginehttp

import (
	"errors"
	"syscall"
)

// peek does not block: Go's sockets never do.
func (p *probe) peek(fd uintptr) (done bool) {
	for {
		_, _, err := syscall.Recvfrom(int(fd), p.byte[:], syscall.MSG_PEEK)
		if !errors.Is(err, syscall.EINTR) {
			p.alive = errors.Is(err, syscall.EAGAIN)
			return true
		}
	}
}
