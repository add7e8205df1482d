//go:build !linux

package engineleg

import "syscall"

// connectNow does nothing on this system.
func connectNow(_, _ string, _ syscall.RawConn) error { return nil }
