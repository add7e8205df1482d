package diskfile

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// ErrHangs is in every error of Await about a disk that does not answer.
var ErrHangs = errors.New("its disk does not answer")

// Await makes calls of the disk that holds dir, and waits for them at most limit. Nothing can end a call of
// the kernel: after limit the error, a *problem.Error with ErrHangs, names dir, and calls goes on alone. What
// it uses must not be used again before it has returned.
func Await(dir string, limit time.Duration, calls func() error) error {
	returned := make(chan error, 1)
	go func() { returned <- calls() }()
	over := time.NewTimer(limit)
	defer over.Stop()
	select {
	case err := <-returned:
		return err
	case <-over.C:
	}
	return problem.New(problem.Unavailable, "data dir %s: %w", dir,
		fmt.Errorf("%w: a call has not returned for %s", ErrHangs, limit)).
		WithHint("look at that disk before you start dpserve there again")
}

// hung holds a channel for each folder whose writes hang in a test; it is closed when they end.
var hung sync.Map

// Hang makes every Replace of a file in dir hang until end is called. It is for tests: no write of a real
// disk can be made to hang.
func Hang(dir string) (end func()) {
	over := make(chan struct{})
	hung.Store(dir, over)
	return sync.OnceFunc(func() {
		hung.Delete(dir)
		close(over)
	})
}

// awaitHang waits for the end of Hang.
func awaitHang(dir string) {
	if over, is := hung.Load(dir); is {
		<-over.(chan struct{})
	}
}
