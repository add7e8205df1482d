package enginehttp

import (
	"sync"
	"time"
)

// pool keeps connections between requests. It takes the one that was used last first, so that the others
// reach their idle time.
type pool struct {
	idle time.Duration // how long a connection may wait
	most int

	mu     sync.Mutex
	free   []*conn // the longest waiting first
	timer  *time.Timer
	armed  bool
	closed bool
}

// get returns a connection that its peer does not seem to have closed; nil if there is none.
func (p *pool) get() *conn {
	for {
		c := p.pop()
		if c == nil || time.Since(c.since) < p.idle && c.probe.quiet() {
			return c
		}
		c.close()
	}
}

func (p *pool) pop() *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.free) - 1
	if n < 0 {
		return nil
	}
	c := p.free[n]
	p.free[n], p.free = nil, p.free[:n]
	return c
}

// put keeps c; false if it must be closed.
func (p *pool) put(c *conn) bool {
	c.since, c.waited = time.Now(), true
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.free) >= p.most {
		return false
	}
	p.free = append(p.free, c)
	if !p.armed {
		p.arm(p.idle)
	}
	return true
}

func (p *pool) arm(after time.Duration) {
	p.armed = true
	if p.timer == nil {
		p.timer = time.AfterFunc(after, p.expire)
		return
	}
	p.timer.Reset(after)
}

// expire closes the connections that have waited too long and sets the timer for the next one.
func (p *pool) expire() {
	for _, c := range p.expired(time.Now()) {
		c.close()
	}
}

func (p *pool) expired(now time.Time) []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for n < len(p.free) && now.Sub(p.free[n].since) >= p.idle {
		n++
	}
	old := append([]*conn(nil), p.free[:n]...)
	left := copy(p.free, p.free[n:])
	clear(p.free[left:])
	p.free = p.free[:left]
	p.armed = false
	if left > 0 && !p.closed {
		p.arm(p.free[0].since.Add(p.idle).Sub(now))
	}
	return old
}

func (p *pool) empty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free) == 0
}

// drop closes the waiting connections.
func (p *pool) drop() { closeAll(p.takeAll(false)) }

// close closes the waiting connections and refuses others.
func (p *pool) close() { closeAll(p.takeAll(true)) }

func (p *pool) takeAll(forEver bool) []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.free
	p.free = nil
	p.closed = p.closed || forEver
	if p.timer != nil && forEver {
		p.timer.Stop()
		p.armed = false
	}
	return all
}

func closeAll(all []*conn) {
	for _, c := range all {
		c.close()
	}
}
