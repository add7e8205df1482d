//go:build unix && !linux

package shim

import (
	"errors"
	"net"
	"os"
)

// Supported says whether this system has what shims need.
const Supported = false

var errUnsupported = errors.New("engines outlive dpserve on Linux only")

func peer(*net.UnixConn) (uid, pid int, err error) { return 0, 0, errUnsupported }

func socketPath(dir *os.File) string { return dir.Name() + "/" + socketFile }

func adoptOrphans() error { return errUnsupported }

func reapOrphans(_ int, done <-chan struct{}) { <-done }

func silence() error { return nil }
