package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Sentinels for errors.Is; users see them inside a *problem.Error with code Unavailable.
var (
	ErrNotLeader      = errors.New("this node is not the leader")
	ErrClosed         = errors.New("cluster is closed")
	ErrOutcomeUnknown = errors.New("leadership was lost before the answer: the command may or may not have been applied")
)

func errClosed() error {
	return problem.New(problem.Unavailable, "propose: %w", ErrClosed).WithHint("dpserve is stopping; start it again")
}

// Propose puts a command through consensus and returns what state.Apply made of it: its result, or its typed error as it is. A
// node that does not lead sends it to the leader, once. The command is durable when Propose returns nil, and this node has
// applied it. When ctx ends first, the error is ctx's cause and the command may still be applied later: propose only commands
// that are safe to repeat (they carry expected revisions or epochs).
func (c *Cluster) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	cmd, err := c.State().Readable(cmd)
	if err != nil {
		return state.Result{}, err
	}
	res, err := c.ProposeHere(ctx, cmd)
	if c.cfg.Forward == nil || !errors.Is(err, ErrNotLeader) {
		return res, err
	}
	return c.proposeThere(ctx, cmd)
}

// ProposeHere is Propose for a node that takes itself for the leader: it is never sent on. ErrNotLeader: nothing was done. What a control
// node could not read is not proposed (state.ErrControlTooOld): its run would end.
func (c *Cluster) ProposeHere(ctx context.Context, cmd state.Command) (state.Result, error) {
	cmd, err := c.State().Readable(cmd)
	if err != nil {
		return state.Result{}, err
	}
	data, err := state.EncodeCommand(&cmd)
	if err != nil {
		return state.Result{}, err
	}
	started := time.Now()
	a := c.submit(ctx, func() applied { return c.commit(ctx, data) })
	c.cfg.ApplySeconds(time.Since(started))
	return a.result, a.err
}

// submit runs a call of raft, which no context can end, in a goroutine of its own, and waits for its answer, ctx or Close.
// The goroutine ends when raft answers; Close waits for it.
func (c *Cluster) submit(ctx context.Context, call func() applied) applied {
	if err := c.enter(ctx); err != nil {
		return applied{err: err}
	}
	answer := make(chan applied, 1)
	go func() {
		defer c.leave()
		answer <- call()
	}()
	select {
	case a := <-answer:
		return a
	case <-ctx.Done():
		return applied{err: fmt.Errorf("propose: %w", context.Cause(ctx))}
	case <-c.done:
		return applied{err: c.ended()}
	}
}

// barrier waits until everything committed so far is applied.
func (c *Cluster) barrier() applied {
	if err := c.run.Load().raft.Barrier(proposeTimeout).Error(); err != nil {
		return applied{err: c.proposeError(err)}
	}
	return applied{}
}

// enter takes a slot; leave gives it back.
func (c *Cluster) enter(ctx context.Context) error {
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("propose: %w", context.Cause(ctx))
	case <-c.done:
		return c.ended()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if why := c.why; why != nil || c.stopping {
		<-c.slots
		return firstError(why, errClosed())
	}
	c.proposals.Add(1)
	return nil
}

func (c *Cluster) leave() {
	<-c.slots
	c.proposals.Done()
}

// commit hands the command to raft, which batches what waits, and waits for it to be applied.
func (c *Cluster) commit(ctx context.Context, data []byte) applied {
	f := c.run.Load().raft.Apply(data, enqueueTimeout(ctx))
	if err := f.Error(); err != nil {
		return applied{err: c.proposeError(err)}
	}
	a, ok := f.Response().(applied)
	if !ok {
		return applied{err: problem.New(problem.Internal, "propose: raft answered %T", f.Response())}
	}
	return a
}

// enqueueTimeout is how long raft may take to accept the command: the rest of ctx, at most proposeTimeout.
func enqueueTimeout(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return proposeTimeout
	}
	return max(time.Millisecond, min(time.Until(deadline), proposeTimeout))
}

// faultOf is the disk's part in an error of raft; nil: none.
func (c *Cluster) faultOf(err error) error {
	switch {
	case errors.Is(err, ErrDisk):
		return c.diskProblem(err)
	case errors.Is(err, raft.ErrRaftShutdown):
		return c.Fault()
	}
	return nil
}

// proposeError turns raft's errors into ours. Where nothing was done it is ErrNotLeader; where the disk is at fault, that.
func (c *Cluster) proposeError(err error) error {
	if fault := c.faultOf(err); fault != nil {
		return fault
	}
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return errNotLeader()
	case errors.Is(err, raft.ErrRaftShutdown):
		return errClosed()
	case errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrAbortedByRestore):
		return problem.New(problem.Unavailable, "propose: %w", ErrOutcomeUnknown).WithHint("look at the state, then try again")
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return problem.New(problem.Timeout, "propose: the log did not take the command: %w", err).
			WithHint("the disk of the data dir is full or very slow")
	default:
		return problem.New(problem.Internal, "propose: %w", err).WithHint("look for raft errors in the log; the disk may be full")
	}
}

func errNotLeader() error {
	return problem.New(problem.Unavailable, "propose: %w", ErrNotLeader).WithHint("wait for the election and try again")
}
