package controller

import (
	"context"
	"errors"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
)

// renewRequest is a node's report on its way to the core.
type renewRequest struct {
	report *msg.NodeReport
	reply  chan RenewEffect // one slot
}

// Renew implements msg.Leader: it takes a node's report and prolongs the node's lease. The caller must not
// change the report afterwards. It waits until a new leader is ready, and for nothing else. Errors:
// problem.PermissionDenied for a node that is not, or no longer, a member; problem.Unavailable,
// problem.Overloaded, problem.Conflict and ctx's mean "try again".
func (c *Controller) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	select {
	case <-c.ready:
	case <-c.box.Stopped():
	case <-ctx.Done():
		return msg.Lease{}, context.Cause(ctx)
	}
	m := &renewRequest{r, make(chan RenewEffect, 1)}
	if err := c.box.TrySend(m); errors.Is(err, inbox.ErrStopped) {
		return msg.Lease{}, errStopped()
	} else if err != nil {
		return msg.Lease{}, problem.New(problem.Overloaded, "renew the lease of node %s: %w", r.Node.ID,
			err).WithHint("try again in a moment")
	}
	select {
	case e := <-m.reply:
		e.Lease.Leader = c.cfg.Self
		return e.Lease, e.Err
	case <-c.box.Stopped():
		return msg.Lease{}, errStopped()
	case <-ctx.Done():
		return msg.Lease{}, context.Cause(ctx)
	}
}

func errStopped() error {
	return problem.New(problem.Unavailable, "tell the controller: %w", ErrStopped).
		WithHint("this node does not lead any more; ask the new leader")
}

// refreshState loads the latest state first, so that a node that joined a moment ago is recognised. The
// caller holds mu.
func (c *Controller) refreshState() []Effect {
	s := c.cfg.Store.State()
	if c.core.state == nil || s.Index <= c.core.state.Index {
		return nil
	}
	return c.core.Step(c.cfg.Clock(), StateSeen{s})
}
