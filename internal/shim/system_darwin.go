package shim

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The tests of shims need /proc, so this file is compiled and not tested. Where it lacks what Linux has:
//   - there is no subreaper, so a process that leaves the engine's session is not found any more;
//   - there is no parent-death signal: after SIGKILL of its shim an engine ends when it reads its standard
//     input, or when the node finds the shim's folder.

// peer is the process at the other end of a unix socket. Of a listener it is the one that listens.
func peer(c *net.UnixConn) (uid, pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Xucred
	var errUID, errPID error
	err = raw.Control(func(fd uintptr) {
		cred, errUID = unix.GetsockoptXucred(int(fd), unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
		pid, errPID = unix.GetsockoptInt(int(fd), unix.SOL_LOCAL, unix.LOCAL_PEERPID)
	})
	if err = errors.Join(err, errUID, errPID); err != nil {
		return 0, 0, fmt.Errorf("who is at the other end: %w", err)
	}
	return int(cred.Uid), pid, nil
}

// socketPath names the socket of a shim's folder by a link: a socket's path has at most 103 bytes. The
// function removes the link.
func socketPath(dir *os.File) (string, func(), error) {
	link, err := os.MkdirTemp("/tmp", "dpserve")
	if err != nil {
		return "", nil, err
	}
	at := filepath.Join(link, "d")
	return filepath.Join(at, socketFile), func() { _ = os.RemoveAll(link) }, os.Symlink(dir.Name(), at)
}

// adoptOrphans is not possible on this system: what leaves the engine's session is not found.
func adoptOrphans() error { return nil }

func reapOrphans(_ int, done <-chan struct{}) { <-done }

// silence sends what is still printed to nowhere.
func silence() error {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = null.Close() }()
	return unix.Dup2(int(null.Fd()), int(os.Stdout.Fd()))
}
