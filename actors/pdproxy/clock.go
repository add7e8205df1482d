package pdproxy

import (
	"sync"
	"time"
)

// Clock gives the instants of all flights of a Proxy. It goes on while the process is stopped or the machine
// sleeps, and notices that the process stood still. Safe for concurrent use.
type Clock struct {
	now func() time.Duration

	mu    sync.Mutex
	watch Watch
}

// NewClock makes a clock that starts now. It is Go's clock, which tests may fake, and the time that the
// machine has slept.
func NewClock() *Clock {
	start, slept := time.Now(), asleep()
	return &Clock{now: func() time.Duration { return time.Since(start) + asleep() - slept }}
}

// Now is the present instant.
func (c *Clock) Now() Instant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.watch.At(c.now())
}
