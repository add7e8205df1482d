package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// ErrNoMajority is in the error of a proposal that found nobody who leads.
var ErrNoMajority = errors.New("no majority of control nodes answers")

// copyOf is what Cluster and Watcher have in common for who wants to reach the leader.
type copyOf interface {
	State() *state.State
	LeaderNode() (uid string, known bool)
	Leadership() <-chan struct{}
	refusal() error // why nothing can be proposed here, however long one waits
	closing() <-chan struct{}
	leaderHint() string
	find(uid string) state.Node
}

// forwarder is Config.Forward.
type forwarder func(ctx context.Context, leader state.Node, c state.Command) (state.Result, error)

// awaitLeader waits until it is known who leads, at most proposeTimeout.
func awaitLeader(ctx context.Context, s copyOf) (state.Node, error) {
	waiting, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	for {
		turn := s.Leadership()
		if uid, ok := s.LeaderNode(); ok {
			return s.find(uid), nil
		}
		if err := s.refusal(); err != nil {
			return state.Node{}, err
		}
		select {
		case <-turn:
		case <-s.closing():
		case <-waiting.Done():
			return state.Node{}, nobodyLeads(ctx, s)
		}
	}
}

// nobodyLeads is the end of a wait for a leader. Who gave up on purpose hears that; who ran out of time, why.
func nobodyLeads(ctx context.Context, s copyOf) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("propose: %w", cause)
	}
	return problem.New(problem.Unavailable, "propose: %w", ErrNoMajority).WithHint("%s", s.leaderHint())
}

// send puts a command to the leader once.
func (f forwarder) send(ctx context.Context, leader state.Node, cmd state.Command) (state.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	res, err := f(ctx, leader, cmd)
	var known *problem.Error
	if err == nil || errors.As(err, &known) || ctx.Err() != nil {
		return res, err
	}
	return res, problem.New(problem.Unavailable, "propose at the leader, node %s: %w", leader.ID, err).
		WithHint("look at the state, then try again")
}

// find is a node of the state by its UID; one that the state does not have yet has no more than its UID.
func find(st *state.State, uid string) state.Node {
	for _, n := range st.Nodes {
		if n.UID == uid {
			return *n
		}
	}
	return state.Node{UID: uid}
}

// startThem is the hint for who finds no leader.
func startThem(st *state.State, voters []string) string {
	var names []string
	for _, uid := range voters {
		if n := find(st, uid); n.ID != "" {
			names = append(names, n.ID)
		}
	}
	if len(names) == 0 {
		return "look whether the control nodes run and reach each other"
	}
	slices.Sort(names)
	return "start the control nodes that are down and look whether they reach each other; these vote: " + strings.Join(names, ", ")
}

// proposeThere sends a command to the leader and waits until this node has applied it too.
func (c *Cluster) proposeThere(ctx context.Context, cmd state.Command) (state.Result, error) {
	leader, err := awaitLeader(ctx, c)
	if err != nil {
		return state.Result{}, err
	}
	if leader.UID == c.ident.UID {
		return c.ProposeHere(ctx, cmd)
	}
	res, err := forwarder(c.cfg.Forward).send(ctx, leader, cmd)
	if err == nil {
		c.readOwn(ctx, res)
	}
	return res, err
}

// readOwn gives this node's copy the time to show a command that the leader has acknowledged. A copy that lags is no reason to
// say that the command failed.
func (c *Cluster) readOwn(ctx context.Context, res state.Result) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	_ = c.fsm.await(ctx, res.Index)
}

func (c *Cluster) closing() <-chan struct{} { return c.done }

func (c *Cluster) refusal() error { return firstError(c.ended(), c.Fault()) }

func (c *Cluster) find(uid string) state.Node {
	n := find(c.State(), uid)
	if all := c.addresses(uid); len(all) > 0 {
		n.Address = all[0]
	}
	return n
}

func (c *Cluster) leaderHint() string {
	if c.net == nil {
		return "the disk of the data dir may be full or very slow; look for raft errors in the log"
	}
	var voters []string
	for _, m := range c.Members() {
		if m.Voter {
			voters = append(voters, m.UID)
		}
	}
	return startThem(c.State(), voters)
}
