package ingress

import (
	"context"
	"time"
)

// Limits for the wait for a stream to report the loss of a lockstep unit: its ranks fail one by one before
// the first of their streams reports the reason.
const (
	lossWait       = 250 * time.Millisecond
	deadEngineWait = 2 * time.Second // the engine reported its dead core: it exits within a second
)

// mergeUnitAttempts checks, when a request has no attempt left, whether one lockstep unit failed it several
// times. It waits for the unit's stream to report the loss. All attempts on a lost unit then count as one,
// and the request may be tried again.
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

// awaitUnitLoss waits until a rank is lost; it returns false if that does not happen within wait.
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
