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

// Propose puts a command through consensus and returns what state.Apply made of it: its result, or its typed error as it is.
// The command is durable when Propose returns nil. When ctx ends first, the error is ctx's cause and the command may still be
// applied later: propose only commands that are safe to repeat (they carry expected revisions or epochs).
func (c *Cluster) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	data, err := state.EncodeCommand(&cmd)
	if err != nil {
		return state.Result{}, err
	}
	started := time.Now()
	a := c.submit(ctx, func() applied { return c.commit(ctx, data) })
	c.apply(time.Since(started))
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
	if err := c.raft.Barrier(proposeTimeout).Error(); err != nil {
		return applied{err: proposeError(err)}
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
	if c.closing {
		<-c.slots
		return errClosed()
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
	f := c.raft.Apply(data, enqueueTimeout(ctx))
	if err := f.Error(); err != nil {
		return applied{err: proposeError(err)}
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

// proposeError turns raft's errors into ours.
func proposeError(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader):
		return problem.New(problem.Unavailable, "propose: %w", ErrNotLeader).WithHint("wait for the election and try again")
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
