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

// Sentinels for errors.Is. Users see them inside a *problem.Error with code Unavailable.
var (
	ErrNotLeader      = errors.New("this node is not the leader")
	ErrClosed         = errors.New("cluster is closed")
	ErrOutcomeUnknown = errors.New("leadership was lost before the answer: the command may or may not have " +
		"been applied")
)

func errClosed() error {
	return problem.New(problem.Unavailable, "propose: %w", ErrClosed).
		WithHint("dpserve is stopping; start it again")
}

// Propose puts a command through consensus and returns the result or the unchanged typed error of
// state.Apply. A node that does not lead sends the command to the leader once. If Propose returns nil, the
// command is durable and this node has applied it. If ctx ends first, the error is ctx's cause and the
// command may still be applied later: propose only commands that are safe to repeat, with an expected
// revision or epoch.
func (c *Cluster) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	cmd, err := c.State().Readable(cmd)
	if err != nil {
		return state.Result{}, err
	}
	res, err := c.ProposeHere(ctx, cmd)
	if c.cfg.Forward == nil || !errors.Is(err, ErrNotLeader) {
		return res, err
	}
	return c.proposeAtLeader(ctx, cmd)
}

// ProposeHere is Propose on the node that takes itself for the leader: it never forwards. ErrNotLeader:
// nothing was done. It refuses a command that some control node could not read (state.ErrControlTooOld),
// because that node would leave consensus.
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
	a := c.submit(ctx, func() applyResult { return c.applyCommand(ctx, data) })
	c.cfg.ApplySeconds(time.Since(started))
	return a.result, a.err
}

// submit makes a call of raft, which no context can end, in a goroutine. It waits for the answer, ctx or
// Close. The goroutine ends when raft answers; Close waits for it.
func (c *Cluster) submit(ctx context.Context, call func() applyResult) applyResult {
	if err := c.takeSlot(ctx); err != nil {
		return applyResult{err: err}
	}
	answer := make(chan applyResult, 1)
	go func() {
		defer c.freeSlot()
		answer <- call()
	}()
	select {
	case a := <-answer:
		return a
	case <-ctx.Done():
		return applyResult{err: fmt.Errorf("propose: %w", context.Cause(ctx))}
	case <-c.done:
		return applyResult{err: c.endError()}
	}
}

// runBarrier waits until everything committed so far is applied.
func (c *Cluster) runBarrier() applyResult {
	if err := c.run.Load().raft.Barrier(proposeTimeout).Error(); err != nil {
		return applyResult{err: c.proposeError(err)}
	}
	return applyResult{}
}

// takeSlot takes a slot; freeSlot frees it.
func (c *Cluster) takeSlot(ctx context.Context) error {
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("propose: %w", context.Cause(ctx))
	case <-c.done:
		return c.endError()
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

func (c *Cluster) freeSlot() {
	<-c.slots
	c.proposals.Done()
}

// applyCommand gives the command to raft, which batches waiting commands, and waits until it is applied.
func (c *Cluster) applyCommand(ctx context.Context, data []byte) applyResult {
	f := c.run.Load().raft.Apply(data, enqueueTimeout(ctx))
	if err := f.Error(); err != nil {
		return applyResult{err: c.proposeError(err)}
	}
	a, ok := f.Response().(applyResult)
	if !ok {
		return applyResult{err: problem.New(problem.Internal, "propose: raft answered %T", f.Response())}
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

// diskFault returns the fault of the disk behind an error of raft; nil if there is none.
func (c *Cluster) diskFault(err error) error {
	switch {
	case errors.Is(err, ErrDisk):
		return c.diskProblem(err)
	case errors.Is(err, raft.ErrRaftShutdown):
		return c.Fault()
	}
	return nil
}

// proposeError turns raft's errors into ours: the disk's fault, ErrNotLeader if nothing was done, or another.
func (c *Cluster) proposeError(err error) error {
	if fault := c.diskFault(err); fault != nil {
		return fault
	}
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return errNotLeader()
	case errors.Is(err, raft.ErrRaftShutdown):
		return errClosed()
	case errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrAbortedByRestore):
		return problem.New(problem.Unavailable, "propose: %w", ErrOutcomeUnknown).
			WithHint("look at the state, then try again")
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return problem.New(problem.Timeout, "propose: the log did not take the command: %w", err).
			WithHint("the disk of the data dir is full or very slow")
	default:
		return problem.New(problem.Internal, "propose: %w", err).
			WithHint("look for raft errors in the log; the disk may be full")
	}
}

func errNotLeader() error {
	return problem.New(problem.Unavailable, "propose: %w", ErrNotLeader).
		WithHint("wait for the election and try again")
}
