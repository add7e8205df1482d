package shim

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dpserve/dpserve/internal/process"
)

// peer is the process at the other end of a unix socket. Of a listener it is the one that listens.
func peer(c *net.UnixConn) (uid, pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, failed); err != nil {
		return 0, 0, fmt.Errorf("who is at the other end: %w", err)
	}
	return int(cred.Uid), int(cred.Pid), nil
}

// socketPath names the socket of a shim's folder, which is open, in a few bytes: a socket's path has at most
// 107, and a data dir may be longer. The function is to be called after the use.
func socketPath(dir *os.File) (string, func(), error) {
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + socketFile, func() {}, nil
}

// adoptOrphans makes this process the parent of processes that the engine leaves behind.
func adoptOrphans() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// reapOrphans reaps them as they end. The front process is left to the one who waits for it.
func reapOrphans(front int, done <-chan struct{}) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	for {
		select {
		case <-ended:
		case <-done:
			return
		}
		for _, s := range process.Children(os.Getpid()) {
			if s.Zombie && s.PID != front {
				_, _ = unix.Wait4(s.PID, nil, unix.WNOHANG, nil)
			}
		}
	}
}

// silence sends what is still printed to nowhere.
func silence() error {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = null.Close() }()
	return unix.Dup3(int(null.Fd()), int(os.Stdout.Fd()), 0)
}
