//go:build linux && (amd64 || arm64)

package enginehttp

import (
	"syscall"
	"unsafe"
)

// peek reports that nothing can be read, not even an end of file. It makes the system call without telling
// the scheduler: it never blocks (see package rawconn).
func peek(fd uintptr, b *[1]byte) (isQuiet bool) {
	for {
		//nolint:gosec // the address is taken within the call, as package unsafe asks (rule 4)
		_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1,
			syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
		if errno != syscall.EINTR {
			return errno == syscall.EAGAIN
		}
	}
}
