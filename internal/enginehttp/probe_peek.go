//go:build unix && !(linux && (amd64 || arm64))

package enginehttp

import (
	"errors"
	"syscall"
)

// peek reports that nothing can be read, not even an end of file. It does not block: Go's sockets never do.
func peek(fd uintptr, b *[1]byte) (isQuiet bool) {
	for {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
		if !errors.Is(err, syscall.EINTR) {
			return errors.Is(err, syscall.EAGAIN)
		}
	}
}
