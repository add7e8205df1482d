package state

import (
	"maps"

	"github.com/dpserve/dpserve/internal/problem"
)

// New returns the empty state of a cluster that has no name yet.
func New() *State {
	return &State{
		Apps: map[string]*App{}, Units: map[string]*Unit{}, Epochs: map[string]uint64{},
		Revisions: map[string]uint64{},
		Nodes:     map[string]*Node{}, Tokens: map[string]*Token{},
	}
}

// Apply carries out one committed command, whole or not at all. It is deterministic: the same commands in the
// same order give the same state on every node. The error is a typed refusal: a *problem.Error that wraps one
// of the Err… values of this package. A refused command changes nothing but Index. Apply never writes into an
// App, Unit, Node or Token: it stores a new one, so that clones stay unchanged.
func (s *State) Apply(index uint64, c *Command) (Result, error) {
	s.Index = index
	if err := c.check(); err != nil {
		return Result{}, err
	}
	switch {
	case c.Init != nil:
		return Result{}, s.init(c.Init)
	case c.PutApps != nil:
		return s.putApps(c.PutApps)
	case c.DeleteApp != nil:
		return s.deleteApp(c.DeleteApp)
	case c.ForgetApp != nil:
		return Result{}, s.forgetApp(c.ForgetApp)
	case c.GrantGroup != nil:
		return s.grantGroup(c.GrantGroup)
	case c.UnitReady != nil:
		return Result{}, s.unitReady(c.UnitReady)
	case c.UnitFenced != nil:
		return Result{}, s.unitFenced(c.UnitFenced)
	case c.UnitFailed != nil:
		return Result{}, s.unitFailed(c.UnitFailed)
	case c.Release != nil:
		return Result{}, s.release(c.Release)
	default:
		return s.applyNodes(c)
	}
}

// applyNodes carries out a command about nodes, join tokens or the gossip key.
func (s *State) applyNodes(c *Command) (Result, error) {
	switch {
	case c.PutNode != nil:
		return s.putNode(c.PutNode)
	case c.NodeLost != nil:
		return s.nodeLost(c.NodeLost)
	case c.NodeBack != nil:
		return s.nodeBack(c.NodeBack)
	case c.DrainNode != nil:
		return s.drainNode(c.DrainNode)
	case c.RemoveNode != nil:
		return s.removeNode(c.RemoveNode)
	case c.PutToken != nil:
		return s.putToken(c.PutToken)
	case c.UseToken != nil:
		return s.useToken(c.UseToken)
	case c.TurnKey != nil:
		return s.turnKey(c.TurnKey)
	default:
		return s.applyNext(c)
	}
}

// Clone returns a snapshot for readers. It is cheap: clones share apps, units, nodes and tokens, because
// Apply replaces these records and never writes into them.
func (s *State) Clone() *State {
	c := *s
	c.Apps, c.Units, c.Epochs, c.Revisions = maps.Clone(s.Apps), maps.Clone(s.Units), maps.Clone(s.Epochs),
		maps.Clone(s.Revisions)
	c.Nodes, c.Tokens = maps.Clone(s.Nodes), maps.Clone(s.Tokens)
	return &c
}

// Public returns a snapshot for nodes that take no part in consensus. It leaves out what only control nodes
// may know (Secrets, Tokens). It keeps Secret, because ingresses hash with it.
func (s *State) Public() *State {
	c := s.Clone()
	c.Secrets, c.Tokens = Secrets{}, map[string]*Token{}
	return c
}

func (s *State) init(c *Init) error {
	switch {
	case c.Cluster == "":
		return problem.New(problem.InvalidArgument, "init: %w: the cluster id is empty", ErrBadCommand)
	case c.LeaseTTL < 0:
		return problem.New(problem.InvalidArgument, "init: %w: a lease lasts %d ms", ErrBadCommand,
			c.LeaseTTL)
	case (len(c.Authority) == 0) != (len(c.AuthorityKey) == 0):
		return problem.New(problem.InvalidArgument, "init: %w: an authority comes with its key",
			ErrBadCommand)
	case s.Cluster != "" && s.Cluster != c.Cluster:
		return problem.New(problem.Conflict, "init: %w: this is %s, not %s", ErrWrongCluster, s.Cluster,
			c.Cluster).
			WithHint("use another --data-dir for another cluster")
	}
	s.Cluster = c.Cluster
	if len(s.Secret) == 0 {
		s.Secret = c.Secret
	}
	if s.LeaseTTL == 0 {
		s.LeaseTTL = c.LeaseTTL
	}
	s.Secrets = s.Secrets.fillMissing(c.Secrets)
	return nil
}

// fillMissing sets the secrets that are not set yet. A secret that is set stays, because certificates and
// memberships were made with it.
func (s Secrets) fillMissing(by Secrets) Secrets {
	if len(s.Authority) == 0 {
		s.Authority, s.AuthorityKey = by.Authority, by.AuthorityKey
	}
	if len(s.GossipKey) == 0 {
		s.GossipKey = by.GossipKey
	}
	return s
}
