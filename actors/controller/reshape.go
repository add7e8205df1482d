package controller

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Reshape puts an application with other attached ranks in the place of its revision: new ranks start, missing ones drain (the
// units in grace for so long, else as the application says) and are released. Unlike Deploy it is no second chance for units
// that wait or have failed: nothing but what comes and goes is touched. Errors: problem.Conflict if the application is at
// another revision by now, problem.Unplaceable. The caller has the Turn.
func (c *Controller) Reshape(ctx context.Context, a *app.Application, revision uint64, grace map[string]time.Duration) (state.Result, error) {
	if err := dryRun(c.placeable(), []*app.Application{a}, false); err != nil {
		return state.Result{}, err
	}
	spec, err := specOf(a)
	if err != nil {
		return state.Result{}, err
	}
	c.order(grace)
	put := &state.PutApps{Apps: []state.AppSpec{spec}, Expect: map[string]uint64{a.Name: revision}}
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: put})
	if err != nil {
		if typedRefusal(err) { // else it may be committed
			c.forgetOrder(grace)
		}
		return r, err
	}
	return r, c.catchUp(ctx, nil, nil)
}

// Turn waits until no other change of ranks is under way; done ends the turn. Who reads the application that it changes within its
// turn is not overtaken by the next one, again and again.
func (c *Controller) Turn(ctx context.Context) (done func(), err error) {
	select {
	case c.reshaping <- struct{}{}:
		return func() { <-c.reshaping }, nil
	case <-ctx.Done():
		return nil, problem.New(problem.Timeout, "change the ranks: other changes are under way: %w", ctx.Err()).WithHint("try again")
	}
}

// order notes how long units that are about to end may drain. It is not replicated: after a restart there are no streams left
// to wait for.
func (c *Controller) order(grace map[string]time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, d := range grace {
		if u := c.core.units[id]; u != nil {
			u.drain = &d
		}
	}
}

func (c *Controller) forgetOrder(grace map[string]time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range grace {
		if u := c.core.units[id]; u != nil {
			u.drain = nil
		}
	}
}
