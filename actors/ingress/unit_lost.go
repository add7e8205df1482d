package ingress

import (
	"context"
	"time"
)

// How long the loss of a lockstep unit may take to be heard of: its ranks fail one by one before the first of their streams says why.
const (
	lossWait       = 250 * time.Millisecond
	deadEngineWait = 2 * time.Second // after the engine's own word: it exits within a second
)

// mergeUnitAttempts asks, when a request has no attempt left, whether it was one lockstep unit that failed it again and again: all of its
// attempts there are one then, and it waits for the unit or goes to another. It waits for a word of the stream.
func (req *request) mergeUnitAttempts(ctx context.Context, rk *rank, why cause) bool {
	there := 0
	for _, t := range req.tried {
		if t.unit == rk.unit && t.epoch == rk.epoch {
			there++
		}
	}
	wait := lossWait
	if why == causeEngineDead {
		wait = deadEngineWait
	}
	if there < 2 || !req.app.router.isLockstep() || !req.awaitUnitLoss(ctx, rk, wait) {
		return false
	}
	req.attempts = max(req.attempts-there, 0) + 1
	return true
}

// awaitUnitLoss waits until a rank is lost; false if it is not within wait.
func (req *request) awaitUnitLoss(ctx context.Context, rk *rank, wait time.Duration) bool {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errOver)
	a := &attempt{router: req.attempt.router, rank: rk, cancel: cancel}
	if !req.app.router.trackAttempt(rk, a) {
		return true
	}
	defer req.app.router.untrackAttempt(rk, a)
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return req.app.router.isLost(rk)
}
