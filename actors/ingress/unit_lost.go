package ingress

import (
	"context"
	"time"
)

// lossTold is how long the loss of a lockstep unit may take to be heard of: its ranks fail one by one before the first of their streams
// says why.
const lossTold = 250 * time.Millisecond

// unitLost asks, when a request has no attempt left, whether it was one lockstep unit that failed it again and again: all of its
// attempts there are one then, and it waits for the unit or goes to another. It waits for a word of the stream.
func (c *call) unitLost(ctx context.Context, rk *rank) bool {
	there := 0
	for _, t := range c.tried {
		if t.unit == rk.unit && t.epoch == rk.epoch {
			there++
		}
	}
	if there < 2 || !c.entry.lane.lockstep() || !c.lossOf(ctx, rk) {
		return false
	}
	c.attempts = max(c.attempts-there, 0) + 1
	return true
}

// lossOf waits until a rank is lost; false if it is not within lossTold.
func (c *call) lossOf(ctx context.Context, rk *rank) bool {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errOver)
	a := &attempt{router: c.attempt.router, rank: rk, cancel: cancel}
	if !c.entry.lane.begin(rk, a) {
		return true
	}
	defer c.entry.lane.over(rk, a)
	timer := time.NewTimer(lossTold)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return c.entry.lane.isLost(rk)
}
