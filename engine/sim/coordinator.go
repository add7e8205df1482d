package sim

import (
	"sync"
	"time"

	em "github.com/dpserve/dpserve/enginemodel"
)

// coordinator drives the group's state machine by wall time, in rank 0.
type coordinator struct {
	group *em.Group
	say   func(em.GroupEffect)
	zero  time.Time
	stop  chan struct{}
	kick  chan struct{}

	mu    sync.Mutex
	inbox []em.GroupInput // at most one wave and one report per rank and step
}

func newCoordinator(group *em.Group, say func(em.GroupEffect)) *coordinator {
	return &coordinator{group: group, say: say, zero: time.Now(), stop: make(chan struct{}),
		kick: make(chan struct{}, 1)}
}

// tell never blocks.
func (c *coordinator) tell(in em.GroupInput) {
	c.mu.Lock()
	c.inbox = append(c.inbox, in)
	c.mu.Unlock()
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

func (c *coordinator) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait := c.turn() - time.Since(c.zero)
		if wait <= 0 {
			select {
			case <-c.stop:
				return
			default:
				continue
			}
		}
		timer.Reset(min(wait, time.Hour))
		select {
		case <-c.kick:
		case <-timer.C:
		case <-c.stop:
			return
		}
	}
}

func (c *coordinator) turn() time.Duration {
	c.mu.Lock()
	in := c.inbox
	c.inbox = nil
	c.mu.Unlock()
	effects, wake := c.group.Step(time.Since(c.zero), in)
	for _, e := range effects {
		c.say(e)
	}
	return wake
}
