//go:build !linux

package rankleg

import "syscall"

// connectNow does nothing on this system.
func connectNow(_, _ string, _ syscall.RawConn) error { return nil }
