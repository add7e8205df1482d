package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// lockFile is locked by the process that uses the data dir. The kernel unlocks it when the process ends, in
// any way.
const lockFile = "lock"

// takeDataDir makes the data dir if there is none and locks it for this process. Closing the result unlocks
// it.
func takeDataDir(dir string) (io.Closer, error) {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, problem.New(problem.InvalidArgument, "make data dir: %w", err).
			WithHint("choose a --data-dir that you may write to")
	}
	return lockDir(dir)
}

// lockWait is how long a lock may outlive its process: until its last forked child has executed another
// program.
const lockWait = 500 * time.Millisecond

func lock(f *os.File) error {
	for end := time.Now().Add(lockWait); ; time.Sleep(lockWait / 50) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
	}
}

// lockDir locks the data dir for this process. Closing the result unlocks it.
func lockDir(dir string) (io.Closer, error) {
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, fileMode) //nolint:gosec // the data dir
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "open lock: %w", err).
			WithHint("choose a --data-dir that you may write to")
	}
	err = lock(f)
	if err == nil {
		return f, nil
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = problem.New(problem.Conflict, "data dir %s is in use by another dpserve", dir).
			WithHint("stop the other one, or choose another --data-dir")
	} else {
		err = fmt.Errorf("lock data dir: %w", err)
	}
	return nil, firstError(err, f.Close())
}
