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

// ErrNoMajority is in the error of a proposal that found no leader.
var ErrNoMajority = errors.New("no majority of control nodes answers")

// leaderSource is what Cluster and Watcher share: what awaitLeader needs to find the leader.
type leaderSource interface {
	State() *state.State
	LeaderNode() (uid string, known bool)
	Leadership() <-chan struct{}
	refusal() error // why proposals fail here, however long the caller waits
	closing() <-chan struct{}
	leaderHint() string
	findNode(uid string) state.Node
}

// forwarder has the type of Config.Forward.
type forwarder func(ctx context.Context, leader state.Node, c state.Command) (state.Result, error)

// awaitLeader waits until this node knows the leader, at most proposeTimeout.
func awaitLeader(ctx context.Context, s leaderSource) (state.Node, error) {
	waiting, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	for {
		turn := s.Leadership()
		if uid, ok := s.LeaderNode(); ok {
			return s.findNode(uid), nil
		}
		if err := s.refusal(); err != nil {
			return state.Node{}, err
		}
		select {
		case <-turn:
		case <-s.closing():
		case <-waiting.Done():
			return state.Node{}, noLeaderError(ctx, s)
		}
	}
}

// noLeaderError is the result of a wait for a leader. It is the context's cause if the caller gave up on
// purpose, and says what to check if the time ran out.
func noLeaderError(ctx context.Context, s leaderSource) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("propose: %w", cause)
	}
	return problem.New(problem.Unavailable, "propose: %w", ErrNoMajority).WithHint("%s", s.leaderHint())
}

// send sends a command to the leader once.
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

// nodeByUID returns a node of the state. For an unknown node the result has only its UID.
func nodeByUID(st *state.State, uid string) state.Node {
	for _, n := range st.Nodes {
		if n.UID == uid {
			return *n
		}
	}
	return state.Node{UID: uid}
}

// controlNodesHint is the hint for a caller that finds no leader.
func controlNodesHint(st *state.State, voters []string) string {
	var names []string
	for _, uid := range voters {
		if n := nodeByUID(st, uid); n.ID != "" {
			names = append(names, n.ID)
		}
	}
	if len(names) == 0 {
		return "look whether the control nodes run and reach each other"
	}
	slices.Sort(names)
	return "start the control nodes that are down and look whether they reach each other; these vote: " +
		"" + strings.Join(names, ", ")
}

// proposeAtLeader sends a command to the leader and waits until this node has applied it too.
func (c *Cluster) proposeAtLeader(ctx context.Context, cmd state.Command) (state.Result, error) {
	leader, err := awaitLeader(ctx, c)
	if err != nil {
		return state.Result{}, err
	}
	if leader.UID == c.ident.UID {
		return c.ProposeHere(ctx, cmd)
	}
	res, err := forwarder(c.cfg.Forward).send(ctx, leader, cmd)
	if err == nil {
		c.awaitApplied(ctx, res)
	}
	return res, err
}

// awaitApplied waits until this node's copy shows a command that the leader has acknowledged. A copy that
// lags does not make the command a failure.
func (c *Cluster) awaitApplied(ctx context.Context, res state.Result) {
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	_ = c.fsm.await(ctx, res.Index)
}

func (c *Cluster) closing() <-chan struct{} { return c.done }

func (c *Cluster) refusal() error { return firstError(c.endError(), c.Fault()) }

func (c *Cluster) findNode(uid string) state.Node {
	n := nodeByUID(c.State(), uid)
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
	return controlNodesHint(c.State(), voters)
}
