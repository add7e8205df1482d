package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
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
// another revision by now, problem.Unplaceable. The caller has called LockRanks.
func (c *Controller) Reshape(ctx context.Context, pools []*app.Application, revision uint64,
	grace map[string]time.Duration,
) (state.Result, error) {
	d, err := c.dryRun(pools, false)
	if err == nil {
		err = d.noRoom
	}
	if err != nil {
		return state.Result{}, err
	}
	d.put.Expect, d.put.At = map[string]uint64{pools[0].Name: revision}, c.cfg.Clock().UnixMilli()
	c.setGrace(grace, true)
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: d.put})
	if err != nil {
		if isTypedRefusal(err) { // else it may be committed
			c.setGrace(grace, false)
		}
		return r, err
	}
	return r, c.awaitCore(ctx, nil, nil)
}

// LockRanks waits until no other change of ranks is under way; done ends the lock. A caller that reads and
// changes the application under the lock cannot be overtaken by another change of ranks.
func (c *Controller) LockRanks(ctx context.Context) (done func(), err error) {
	select {
	case c.ranksLock <- struct{}{}:
		return func() { <-c.ranksLock }, nil
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

// Deployment is what a deploy asks for.
type Deployment struct {
	Apps    []*app.Application // with all of their pools
	Seen    *uint64            // the revision at which the caller has seen the cluster; nil = any
	Prune   bool               // delete the applications that are not listed
	Partial bool               // groups without room wait for it
	From    uint64             // the revision that it repeats; 0 = it comes from a file
}

// Deploy creates or replaces applications and, with Prune, deletes the others. It first computes a placement
// of all new units and refuses a deploy that does not fit, unless it is Partial. Failed units of apps that do
// not change are tried again. It returns what the deploy changes. Errors: problem.Unplaceable,
// problem.Conflict, also if a listed application has changed since it was seen.
func (c *Controller) Deploy(ctx context.Context, what Deployment) (state.Result, []client.Change, error) {
	st := c.cfg.Store.State()
	expect, err := expectedRevisions(st, what.Apps, what.Seen)
	if err != nil {
		return state.Result{}, nil, err
	}
	d, err := c.dryRun(withServiceRanks(st, what.Apps), what.Prune)
	if err == nil && !what.Partial {
		err = d.noRoom
	}
	if err != nil {
		return state.Result{}, nil, err
	}
	d.put.Expect, d.put.At, d.put.From = expect, c.cfg.Clock().UnixMilli(), what.From
	before := c.unitEpochs()
	r, err := c.cfg.Proposer.Propose(ctx, state.Command{PutApps: d.put})
	if err != nil {
		return r, nil, err
	}
	return r, d.changes(), c.awaitCore(ctx, slices.Collect(maps.Keys(d.deployed)), before)
}

// Plan computes what Deploy would do now: what is created, replaced and deleted, where every rank would be,
// and why something would not fit, which is no error here. An error means that the deploy would be refused
// for another reason.
func (c *Controller) Plan(apps []*app.Application, prune bool) (client.Plan, error) {
	d, err := c.dryRun(withServiceRanks(c.cfg.Store.State(), apps), prune)
	if err != nil {
		return client.Plan{}, err
	}
	return d.plan(), nil
}

// dryRun computes a deploy on the current state.
func (c *Controller) dryRun(apps []*app.Application, prune bool) (*dryRun, error) {
	s := c.cfg.Store.State()
	c.mu.Lock()
	s, avoided := c.core.withStoppingAsDraining(s), c.core.avoided.clone()
	c.mu.Unlock()
	return newDryRun(s, avoided, apps, prune)
}

// expectedRevisions returns the revision of every listed app that a caller at cluster revision seen has seen.
// An app that changed after that revision is a conflict.
func expectedRevisions(st *state.State, apps []*app.Application, seen *uint64) (map[string]uint64, error) {
	if seen == nil {
		return nil, nil //nolint:nilnil // no expectation
	}
	if *seen > st.Revision {
		return nil, problem.New(problem.Conflict, "revision %d does not exist yet, the cluster is at %d",
			*seen, st.Revision).WithHint("plan against this cluster again")
	}
	out := map[string]uint64{}
	for _, a := range apps {
		now := st.Apps[a.Name]
		if now == nil {
			out[a.Name] = 0
			continue
		}
		if now.ChangedAt > *seen {
			return nil, problem.New(problem.Conflict,
				"app %s has changed at revision %d, after the %d you saw", a.Name, now.ChangedAt, *seen).
				WithHint("look at `dpserve status %s`, then deploy again", a.Name)
		}
		out[a.Name] = now.Revision
	}
	return out, nil
}

// Delete ends an application with all of its pools: its units drain and stop, then it is forgotten. A second
// call changes nothing.
func (c *Controller) Delete(ctx context.Context, name string) (state.Result, error) {
	if a, pool := c.cfg.Store.State().Pool(name); pool != nil && pool.Pool != "" {
		return state.Result{}, problem.New(problem.Conflict, "%s is a pool of %s, and ends with it", name,
			a.Name).WithHint("end both pools with `dpserve delete %s`", a.Name)
	}
	return c.commit(ctx, state.Command{DeleteApp: &state.DeleteApp{Name: name}})
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
