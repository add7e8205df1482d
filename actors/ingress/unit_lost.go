package ingress

import (
	"context"
	"time"
)

// How long the loss of a lockstep unit may take to be heard of: its ranks fail one by one before the first of their streams says why.
const (
	lossTold     = 250 * time.Millisecond
	deadLossTold = 2 * time.Second // after the engine's own word: it exits within a second
)

// unitLost asks, when a request has no attempt left, whether it was one lockstep unit that failed it again and again: all of its
// attempts there are one then, and it waits for the unit or goes to another. It waits for a word of the stream.
func (c *call) unitLost(ctx context.Context, rk *rank, why cause) bool {
	there := 0
	for _, t := range c.tried {
		if t.unit == rk.unit && t.epoch == rk.epoch {
			there++
		}
	}
	wait := lossTold
	if why == causeEngineDead {
		wait = deadLossTold
	}
	if there < 2 || !c.entry.lane.lockstep() || !c.lossOf(ctx, rk, wait) {
		return false
	}
	c.attempts = max(c.attempts-there, 0) + 1
	return true
}

// lossOf waits until a rank is lost; false if it is not within wait.
func (c *call) lossOf(ctx context.Context, rk *rank, wait time.Duration) bool {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errOver)
	a := &attempt{router: c.attempt.router, rank: rk, cancel: cancel}
	if !c.entry.lane.begin(rk, a) {
		return true
	}
	defer c.entry.lane.over(rk, a)
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return c.entry.lane.isLost(rk)
}
