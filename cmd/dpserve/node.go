package main

import (
	"context"
	"errors"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/wiring"
)

// stopAtOnce bounds how long a node that was told to stop at once may take: engines get no grace then.
const stopAtOnce = 10 * time.Second

// node is a running node as up and start see it. Serve blocks until its context ends, then drains; Kill cuts the drain.
type node interface {
	Listen() error
	Serve(ctx context.Context) error
	Kill()
	Close() error
	HTTPAddr() string
	AdminAddr() string
	MetricsAddr() string
	FirstToken() (address, token string)
	Left() bool
	Totals() (requests, tokens uint64, inflight int)
}

// serving is a node with its Serve running.
type serving struct {
	node
	cancel context.CancelFunc
	done   chan struct{} // closed when Serve has returned
	err    error         // of Serve; read after done
}

// serve makes a node, binds it and runs it. The caller owns it: stop and close. The end of ctx does not stop it: a drain
// outlives the command that was interrupted.
func (e *env) serve(ctx context.Context, c wiring.Config) (*serving, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.Stop = e.sig.first
	n, err := e.newNode(c)
	if err != nil {
		return nil, err
	}
	if err := n.Listen(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &serving{node: n, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.err = n.Serve(ctx)
	}()
	return s, nil
}

// failed is Serve's own error once it has returned without being asked to.
func (s *serving) failed() error {
	if s.err == nil || errors.Is(s.err, context.Canceled) {
		return problem.New(problem.Internal, "the node stopped by itself").WithHint("its log above says why")
	}
	return s.err
}

// stop drains the node and waits; a second signal stops it at once. It says so on the screen and gives the command's error.
func (s *serving) stop(sig *interrupts, scr *screen) error {
	_, _, inflight := s.Totals()
	scr.say("stopping: %s in flight; Ctrl-C again stops at once", count(inflight, "request"))
	s.cancel()
	select {
	case <-s.done:
		return s.drained()
	case <-sig.second:
	}
	scr.say("stopping at once")
	s.Kill()
	select {
	case <-s.done:
	case <-time.After(stopAtOnce):
		scr.say("warning: the node does not end; its engines die with this process")
	}
	return &silentError{code: exitInterrupted}
}

func (s *serving) drained() error {
	if s.err != nil && !errors.Is(s.err, context.Canceled) {
		return s.err
	}
	return nil
}
