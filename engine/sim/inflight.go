package sim

import "sync"

// inflight counts requests and says when there are none.
type inflight struct {
	mu   sync.Mutex
	n    int
	zero chan struct{} // closed while n is 0
}

func newInflight() *inflight {
	f := &inflight{zero: make(chan struct{})}
	close(f.zero)
	return f
}

func (f *inflight) enter() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == 0 {
		f.zero = make(chan struct{})
	}
	f.n++
}

func (f *inflight) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n--
	if f.n == 0 {
		close(f.zero)
	}
}

func (f *inflight) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

// idle is closed as soon as nothing is in flight.
func (f *inflight) idle() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.zero
}
