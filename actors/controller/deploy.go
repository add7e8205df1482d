package controller

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Reshape replaces a revision of an application by one with other attached ranks: new ranks start, missing
// ones drain (for the time in grace, else the application's) and are released. Unlike Deploy it does not
// retry waiting or failed units and touches no other unit. Errors: problem.Conflict if the application has
// another revision by now, problem.Unplaceable. The caller holds the Turn.
func (c *Controller) Reshape(ctx context.Context, a *app.Application, revision uint64,
	grace map[string]time.Duration,
) (state.Result, error) {
	s, avoided := c.planningState()
	if err := checkPlaceable(s, avoided, []*app.Application{a}, false); err != nil {
		return state.Result{}, err
	}
	spec, err := encodeSpec(a)
	if err != nil {
		return state.Result{}, err
	}
	c.setGrace(grace, true)
	put := &state.PutApps{Apps: []state.AppSpec{spec}, Expect: map[string]uint64{a.Name: revision}}
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: put})
	if err != nil {
		if isTypedRefusal(err) { // else it may be committed
			c.setGrace(grace, false)
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

// setGrace notes how long ending units may drain, or drops it. It is not replicated: after a restart there
// are no streams left to wait for.
func (c *Controller) setGrace(grace map[string]time.Duration, isSet bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, d := range grace {
		if u := c.core.units[id]; u != nil {
			if u.drain = nil; isSet {
				u.drain = &d
			}
		}
	}
}

// redeployRequest tells the core of a deploy; done is closed when the core has handled it.
type redeployRequest struct {
	AppsRedeployed
	done chan struct{}
}

// Deploy creates or replaces applications and, with prune, deletes the others. It first computes a placement
// of all new units and refuses a deploy that does not fit; with partial, groups without room wait for it
// instead. expect gives the revision that the caller saw per app (0 = none). Failed units of apps that do not
// change are tried again. Errors: problem.Unplaceable, problem.Conflict.
func (c *Controller) Deploy(ctx context.Context, apps []*app.Application, expect map[string]uint64, prune,
	partial bool,
) (state.Result, error) {
	if !partial {
		s, avoided := c.planningState()
		if err := checkPlaceable(s, avoided, apps, prune); err != nil {
			return state.Result{}, err
		}
	}
	put := &state.PutApps{Expect: expect, Prune: prune, End: formerNames(c.cfg.Store.State(), apps)}
	names := make([]string, 0, len(apps))
	for _, a := range apps {
		spec, err := encodeSpec(a)
		if err != nil {
			return state.Result{}, err
		}
		put.Apps = append(put.Apps, spec)
		names = append(names, a.Name)
	}
	before := c.unitEpochs()
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: put})
	if err != nil {
		return r, err
	}
	return r, c.awaitCore(ctx, names, before)
}

// planningState is the current state for a trial placement, and the nodes that applications avoid.
func (c *Controller) planningState() (*state.State, avoidances) {
	s := c.cfg.Store.State()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.withStoppingAsDraining(s), c.core.avoided.clone()
}

// encodeSpec is an application as the state stores it. No request is for a prefill pool: it serves no model
// and has no route.
func encodeSpec(a *app.Application) (state.AppSpec, error) {
	spec, err := json.Marshal(a)
	if err != nil {
		return state.AppSpec{}, problem.New(problem.Internal, "deploy %s: %w", a.Name, err)
	}
	out := state.AppSpec{Name: a.Name, Spec: spec}
	if a.Pool != app.PoolPrefill {
		out.Names, out.Route = a.Model.ServedNames(), a.RoutePrefix
	}
	return out, nil
}

// Delete ends an application with all of its pools: its units drain and stop, then it is forgotten. A second
// call changes nothing.
func (c *Controller) Delete(ctx context.Context, name string) (state.Result, error) {
	cmd, err := deletion(c.cfg.Store.State(), name)
	if err != nil {
		return state.Result{}, err
	}
	return c.commit(ctx, cmd)
}

// commit proposes a command and waits until Status shows its effect.
func (c *Controller) commit(ctx context.Context, cmd state.Command) (state.Result, error) {
	r, err := c.cfg.Proposer.Propose(ctx, cmd)
	if err != nil {
		return r, err
	}
	return r, c.awaitCore(ctx, nil, nil)
}

func (c *Controller) unitEpochs() map[string]uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[string]uint64, len(c.core.units))
	for id, u := range c.core.units {
		out[id] = u.m.Epoch
	}
	return out
}

// awaitCore waits until Status shows what was committed, so that a status request after a deploy does not get
// a false 404. The change is already committed, so a timeout is no error.
func (c *Controller) awaitCore(ctx context.Context, apps []string, before map[string]uint64) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timers.Call)
	defer cancel()
	select {
	case <-c.ready: // nothing to wait for before
	case <-c.box.Stopped():
	case <-ctx.Done():
	}
	m := &redeployRequest{AppsRedeployed{apps, before, c.cfg.Store.State()}, make(chan struct{})}
	if err := c.box.TrySend(m); errors.Is(err, inbox.ErrStopped) {
		return errStopped()
	} else if err != nil {
		return problem.New(problem.Overloaded, "tell the controller: %w", err).
			WithHint("deploy again in a second")
	}
	select {
	case <-m.done:
	case <-c.box.Stopped():
	case <-ctx.Done():
	}
	return nil
}

// Drain begins to move a node's units to other nodes. Running streams are cut at by; zero = after each
// application's graceful_shutdown_timeout_s. Errors: state.ErrUnknownNode.
func (c *Controller) Drain(ctx context.Context, node string, by time.Time) error {
	d := &state.DrainNode{Node: node}
	if !by.IsZero() {
		d.By = by.UnixMilli()
	}
	_, err := c.commit(ctx, state.Command{DrainNode: d})
	return err
}

// Undrain allows new ranks on a node again. Units that are already moving still move.
func (c *Controller) Undrain(ctx context.Context, node string) error {
	_, err := c.commit(ctx, state.Command{DrainNode: &state.DrainNode{Node: node, Undo: true}})
	return err
}

// Remove removes a node permanently. Errors: state.ErrUnitsLeft while a living node has ranks,
// state.ErrLastControl, state.ErrUnknownNode.
func (c *Controller) Remove(ctx context.Context, node string) error {
	remove := &state.RemoveNode{Node: node, Now: c.cfg.Clock().UnixMilli()}
	_, err := c.commit(ctx, state.Command{RemoveNode: remove})
	return err
}

// Plan computes what Deploy would do now: what is created, replaced and deleted, where every rank would be,
// and why something would not fit, which is no error here. An error means that the deploy would be refused
// for another reason.
func (c *Controller) Plan(apps []*app.Application, prune bool) (client.Plan, error) {
	s, avoided := c.planningState()
	return planOf(s, avoided, apps, prune)
}
