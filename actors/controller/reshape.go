package controller

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Reshape replaces a revision of an application by one with other attached ranks: new ranks start, missing
// ones drain (for the time in grace, else the application's) and are released. Unlike Deploy it does not
// retry waiting or failed units and touches no other unit. Errors: problem.Conflict if the application has
// another revision by now, problem.Unplaceable. The caller holds the Turn.
func (c *Controller) Reshape(ctx context.Context, a *app.Application, revision uint64,
	grace map[string]time.Duration) (state.Result, error) {
	if err := checkPlaceable(c.planningState(), []*app.Application{a}, false); err != nil {
		return state.Result{}, err
	}
	spec, err := encodeSpec(a)
	if err != nil {
		return state.Result{}, err
	}
	c.setGrace(grace)
	put := &state.PutApps{Apps: []state.AppSpec{spec}, Expect: map[string]uint64{a.Name: revision}}
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: put})
	if err != nil {
		if isTypedRefusal(err) { // else it may be committed
			c.clearGrace(grace)
		}
		return r, err
	}
	return r, c.awaitCore(ctx, nil, nil)
}

// Turn waits until no other change of ranks is under way; done ends the turn. A caller that reads and changes
// the application within its turn cannot be overtaken by another change of ranks.
func (c *Controller) Turn(ctx context.Context) (done func(), err error) {
	select {
	case c.rankTurn <- struct{}{}:
		return func() { <-c.rankTurn }, nil
	case <-ctx.Done():
		return nil, problem.New(problem.Timeout, "change the ranks: other changes are under way: %w",
			ctx.Err()).WithHint("try again")
	}
}

// setGrace notes how long ending units may drain. It is not replicated: after a restart there are no streams
// left to wait for.
func (c *Controller) setGrace(grace map[string]time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, d := range grace {
		if u := c.core.units[id]; u != nil {
			u.drain = &d
		}
	}
}

func (c *Controller) clearGrace(grace map[string]time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range grace {
		if u := c.core.units[id]; u != nil {
			u.drain = nil
		}
	}
}
