package state

import (
	"bytes"
	"cmp"
	"encoding/json"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// New returns the empty state of a cluster that has no name yet.
func New() *State {
	return &State{
		Apps: map[string]*App{}, Units: map[string]*Unit{}, Epochs: map[string]uint64{},
		Revisions: map[string]uint64{}, Nodes: map[string]*Node{}, Tokens: map[string]*Token{},
		Served: map[string]string{},
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
	r, err := s.carryOut(c)
	if err == nil && !r.Unchanged {
		s.Level = max(s.Level, c.Level())
	}
	return r, err
}

func (s *State) carryOut(c *Command) (Result, error) {
	switch {
	case c.Init != nil:
		return Result{}, s.init(c.Init)
	case c.PutApps != nil:
		return s.putApps(c.PutApps)
	case c.DeleteApp != nil:
		return s.deleteApp(c.DeleteApp)
	case c.ForgetApp != nil:
		return Result{}, s.forgetApp(c.ForgetApp)
	case c.MarkGood != nil:
		return s.markGood(c.MarkGood)
	case c.HaltRollout != nil:
		return s.haltRollout(c.HaltRollout)
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
	case c.RevokeToken != nil:
		return s.revokeToken(c.RevokeToken)
	case c.RotateGossipKey != nil:
		return s.rotateGossipKey(c.RotateGossipKey)
	default:
		return Result{}, problem.New(problem.InvalidArgument, "%w: it cannot be applied", ErrUnknownCommand)
	}
}

// Clone returns a snapshot for readers. It is cheap: clones share apps, units, nodes and tokens, because
// Apply replaces these records and never writes into them.
func (s *State) Clone() *State {
	c := *s
	c.Apps, c.Units, c.Epochs, c.Revisions = maps.Clone(s.Apps), maps.Clone(s.Units), maps.Clone(s.Epochs),
		maps.Clone(s.Revisions)
	c.Nodes, c.Tokens, c.Served = maps.Clone(s.Nodes), maps.Clone(s.Tokens), maps.Clone(s.Served)
	return &c
}

// Public returns a snapshot for nodes that take no part in consensus. It leaves out what only control nodes
// may know (Secrets, Tokens), or need (History). It keeps Secret, because ingresses hash with it.
func (s *State) Public() *State {
	c := s.Clone()
	c.Secrets, c.Tokens, c.History = Secrets{}, map[string]*Token{}, nil
	return c
}

// Pools yields the pools of all applications that can be read.
func (s *State) Pools() iter.Seq2[*App, *app.Application] {
	return func(yield func(*App, *app.Application) bool) {
		for _, a := range s.Apps {
			pools, _ := a.Pools()
			for _, p := range pools {
				if !yield(a, p) {
					return
				}
			}
		}
	}
}

// Pool returns the pool with a name (app.Application.PoolName), and its application; nil if there is none
// that can be read.
func (s *State) Pool(name string) (*App, *app.Application) {
	for a, p := range s.Pools() {
		if p.PoolName() == name {
			return a, p
		}
	}
	return nil, nil
}

// Encode returns the whole state in the form of a snapshot.
//
//nolint:gosec // the secret belongs into the snapshot, which lies in the data dir
func (s *State) Encode() ([]byte, error) { return json.Marshal(s) }

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

// putApps changes a copy of the app table and stores the copy when no part of the command was refused.
func (s *State) putApps(c *PutApps) (Result, error) {
	next := maps.Clone(s.Apps)
	changed := false
	for i := range c.Apps {
		put, err := s.putApp(next, &c.Apps[i], c.Expect)
		if err != nil {
			return Result{}, err
		}
		changed = changed || put
	}
	changed = c.Prune && markUnlisted(next, c.Apps) || changed
	if err := checkNames(next); err != nil {
		return Result{}, err
	}
	before := s.Apps
	s.Apps = next
	for i := range c.Apps {
		a, old := next[c.Apps[i].Name], before[c.Apps[i].Name]
		if old == nil || old.Revision != a.Revision {
			s.record(a, c.At, c.From)
		}
	}
	return s.putResult(c.Apps, changed), nil
}

func (s *State) putResult(apps []AppSpec, changed bool) Result {
	if changed {
		s.Revision++
	}
	r := Result{Revision: s.Revision, Apps: make(map[string]uint64, len(apps))}
	for i := range apps {
		r.Apps[apps[i].Name] = s.Apps[apps[i].Name].Revision
	}
	return r
}

// putApp puts one application into next and reports whether that changed the application.
func (s *State) putApp(next map[string]*App, spec *AppSpec, expect map[string]uint64) (bool, error) {
	old := s.Apps[spec.Name]
	if err := checkExpect(spec.Name, old, expect); err != nil {
		return false, err
	}
	if next[spec.Name] != old {
		return false, problem.New(problem.InvalidArgument, "put apps: %w: application %q is listed twice",
			ErrBadCommand, spec.Name)
	}
	canonical, err := compact(spec.Spec)
	if err != nil {
		return false, problem.New(problem.InvalidArgument, "put apps: %w: spec of application %q is not JSON",
			ErrBadCommand, spec.Name)
	}
	if old != nil && old.Deleting {
		return false, problem.New(problem.Conflict, "put apps: application %q: %w", spec.Name, ErrDeleting).
			WithHint("wait until it is gone (dpserve status %s), then deploy it again", spec.Name)
	}
	if old != nil && bytes.Equal(old.Spec, canonical) {
		if old.Halt != nil {
			next[spec.Name] = old.confirm()
		}
		return false, nil
	}
	a := &App{
		Name: spec.Name, Revision: s.lastRevision(spec.Name) + 1, ChangedAt: s.Revision + 1,
		Spec: canonical, Names: slices.Clone(spec.Names),
	}
	if old != nil {
		a.Revision = old.Revision + 1
	}
	a.decode()
	next[spec.Name] = a
	return true, nil
}

func checkExpect(name string, old *App, expect map[string]uint64) error {
	want, ok := expect[name]
	if !ok {
		return nil
	}
	var have uint64
	if old != nil {
		have = old.Revision
	}
	if have == want {
		return nil
	}
	return problem.New(problem.Conflict,
		"put apps: %w: application %q is at revision %d, the change was made for revision %d",
		ErrStaleRevision, name, have, want).
		WithHint("look at what changed (dpserve status %s), then deploy again", name)
}

// compact returns the canonical form of a spec: the JSON of raft and of the proposer may differ in white
// space.
func compact(spec json.RawMessage) (json.RawMessage, error) {
	var b bytes.Buffer
	if err := json.Compact(&b, spec); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// markUnlisted marks the applications that are not listed as deleting.
func markUnlisted(apps map[string]*App, listed []AppSpec) bool {
	keep := make(map[string]bool, len(listed))
	for i := range listed {
		keep[listed[i].Name] = true
	}
	changed := false
	for name, a := range apps {
		if !keep[name] && !a.Deleting {
			apps[name] = markDeleting(a)
			changed = true
		}
	}
	return changed
}

func markDeleting(a *App) *App {
	d := *a
	d.Deleting = true
	return &d
}

// checkNames refuses a model name that two applications share. Applications that are being deleted do not
// count.
func checkNames(apps map[string]*App) error {
	names := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(apps)) {
		a := apps[name]
		if a.Deleting {
			continue
		}
		for _, n := range a.Names {
			if other, taken := names[n]; taken && other != name {
				return problem.New(problem.Conflict,
					"put apps: %w: applications %q and %q both serve the model %q", ErrNameTaken,
					other, name, n).
					WithHint("give one of them another model.id, alias or adapter id")
			}
			names[n] = name
		}
	}
	return nil
}

// deleteApp marks an application as deleting. A second command changes nothing.
func (s *State) deleteApp(c *DeleteApp) (Result, error) {
	a, ok := s.Apps[c.Name]
	if !ok {
		return Result{}, s.unknownAppError(c.Name)
	}
	if !a.Deleting {
		s.Apps[c.Name] = markDeleting(a)
		s.Revision++
	}
	return Result{Revision: s.Revision, Apps: map[string]uint64{c.Name: a.Revision}}, nil
}

// forgetApp removes an application whose units are all released. Its epochs and its revision stay recorded.
func (s *State) forgetApp(c *ForgetApp) error {
	a, ok := s.Apps[c.Name]
	if !ok {
		return s.unknownAppError(c.Name)
	}
	if !a.Deleting {
		return problem.New(problem.Conflict, "forget app: application %q: %w", c.Name, ErrNotDeleting).
			WithHint("delete it first")
	}
	for _, id := range slices.Sorted(maps.Keys(s.Units)) {
		if s.Units[id].App == c.Name {
			return problem.New(problem.Conflict, "forget app: %w: %s is not released", ErrUnitsLeft, id).
				WithHint("wait until its processes are gone")
		}
	}
	delete(s.Apps, c.Name)
	s.setHistory(c.Name, nil)
	maps.DeleteFunc(s.Served, func(unit, _ string) bool { return appOfUnit(unit) == c.Name })
	s.Revisions[c.Name] = a.Revision
	s.dropOldNames()
	return nil
}

// maxGoneNames bounds the names of removed applications, and of removed units, that the state keeps.
const maxGoneNames = 1024

// dropOldNames drops names of removed applications and units above maxGoneNames, the lowest numbers first. A
// name without an entry counts as having the floor's number. The floor is at least as high as every dropped
// number, so no name comes back with a number that it had before.
func (s *State) dropOldNames() {
	s.EpochFloor = max(s.EpochFloor, dropLowest(s.Epochs,
		func(unit string) bool { return s.Units[unit] == nil && s.Apps[appOfUnit(unit)] == nil }))
	s.RevisionFloor = max(s.RevisionFloor, dropLowest(s.Revisions,
		func(name string) bool { return s.Apps[name] == nil }))
}

// appOfUnit returns the application of a unit's name, whose own name has no dot and no slash.
func appOfUnit(unit string) string {
	pool, _, _ := strings.Cut(unit, "/")
	name, _, _ := strings.Cut(pool, ".")
	return name
}

// dropLowest drops all but maxGoneNames of the entries that may go and returns the highest number that it
// dropped.
func dropLowest(of map[string]uint64, mayGo func(name string) bool) (highest uint64) {
	var names []string
	for name := range of {
		if mayGo(name) {
			names = append(names, name)
		}
	}
	if len(names) <= maxGoneNames {
		return 0
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(of[a], of[b]), cmp.Compare(a, b))
	})
	for _, name := range names[:len(names)-maxGoneNames] {
		highest = max(highest, of[name])
		delete(of, name)
	}
	return highest
}

// LastEpoch returns a number at least as high as every epoch that the unit had. The next grant has a higher
// one.
func (s *State) LastEpoch(unit string) uint64 {
	if e, ok := s.Epochs[unit]; ok {
		return e
	}
	return s.EpochFloor
}

// lastRevision returns a number at least as high as every revision that the application had.
func (s *State) lastRevision(name string) uint64 {
	if last, ok := s.Revisions[name]; ok {
		return last
	}
	return s.RevisionFloor
}

func (s *State) unknownAppError(name string) error {
	return UnknownApp(name, slices.Sorted(maps.Keys(s.Apps)))
}

// Bounds of lists in the replicated state.
const (
	// LogTailLines is how many of an engine's log lines a failed unit keeps.
	LogTailLines = 20
	logLineBytes = 1000 // longer lines are cut: every node replicates the state and holds it in memory
	maxFreed     = 1024 // freed port blocks that are remembered; more than a default port range has
)

// grantGroup starts all units of the command or none. Each unit gets the next epoch of its name.
func (s *State) grantGroup(c *GrantGroup) (Result, error) {
	if err := checkGrant(s, c); err != nil {
		return Result{}, err
	}
	r := Result{Epochs: make(map[string]uint64, len(c.Units))}
	for i := range c.Units {
		u := s.newUnit(c, &c.Units[i])
		if old := s.Units[u.ID]; old != nil {
			s.recordFreed(old.Blocks)
		}
		s.clearFreed(u.Blocks)
		s.Units[u.ID], s.Epochs[u.ID] = u, u.Epoch
		r.Epochs[u.ID] = u.Epoch
	}
	return r, nil
}

func (s *State) newUnit(c *GrantGroup, g *UnitGrant) *Unit {
	u := &Unit{
		ID: g.Unit, App: c.App, Pool: c.Pool, Group: c.Group, Phase: Starting,
		Epoch: max(s.LastEpoch(g.Unit), s.EpochLeast) + 1, Attempt: g.Attempt, AppRevision: c.AppRevision,
		Launch: g.Launch, Ranks: slices.Clone(g.Ranks), Blocks: slices.Clone(g.Blocks), Since: c.At,
		Restarts: max(0, g.Restarts), LastEnd: g.LastEnd,
	}
	slices.SortFunc(u.Ranks, func(a, b RankGrant) int { return cmp.Compare(a.Rank, b.Rank) })
	if old := s.Units[g.Unit]; old != nil {
		u.Restarts = 0
		if old.sameLaunch(u) {
			u.Restarts = old.Restarts + 1
		}
	}
	return u
}

// sameLaunch reports whether two grants start the same engines. The later one then counts as a restart.
func (u *Unit) sameLaunch(v *Unit) bool {
	return u.AppRevision == v.AppRevision || (u.Launch != "" && u.Launch == v.Launch)
}

func (s *State) unitReady(c *UnitRef) error {
	return s.changePhase("unit ready", c,
		func(n *Unit) { n.Phase, n.Reason, n.LogTail, n.Since = Ready, "", nil, c.At })
}

func (s *State) unitFenced(c *UnitRef) error {
	return s.changePhase("unit fenced", c,
		func(n *Unit) { n.Phase, n.Reason, n.Since = Fenced, c.Reason, c.At })
}

// changePhase changes the record of a unit that is ready, or was ready until now, and notes what it was ready
// with. It refuses one that has failed.
func (s *State) changePhase(verb string, c *UnitRef, change func(*Unit)) error {
	u, err := s.unitAtEpoch(verb, c)
	if err != nil {
		return err
	}
	if u.Phase == Failed {
		return problem.New(problem.Conflict, "%s: %s is %s: %w", verb, u.ID, u.Phase, ErrWrongPhase).
			WithHint("deploy the application again")
	}
	s.updateUnit(u, change)
	s.Served[u.ID] = u.Launch
	return nil
}

// unitFailed ends the first attempts of a unit. The record keeps the reason and holds nothing.
func (s *State) unitFailed(c *UnitRef) error {
	u, err := s.unitAtEpoch("unit failed", c)
	if err != nil {
		return err
	}
	s.recordFreed(u.Blocks)
	s.updateUnit(u, func(n *Unit) {
		n.Phase, n.Reason, n.LogTail, n.Blocks, n.Since = Failed, c.Reason, Tail(c.LogTail), nil, c.At
		n.LastEnd = c.LastEnd
	})
	return nil
}

// release forgets a unit whose processes are gone. Its epoch stays recorded.
func (s *State) release(c *UnitRef) error {
	u, err := s.unitAtEpoch("release", c)
	if err != nil {
		return err
	}
	s.recordFreed(u.Blocks)
	delete(s.Units, u.ID)
	return nil
}

// unitAtEpoch returns the record of a unit if the command is about its present epoch.
func (s *State) unitAtEpoch(verb string, c *UnitRef) (*Unit, error) {
	u, ok := s.Units[c.Unit]
	switch {
	case ok && u.Epoch == c.Epoch:
		return u, nil
	case c.Epoch != s.LastEpoch(c.Unit):
		return nil, staleEpochError(verb, c.Unit, c.Epoch, s.LastEpoch(c.Unit))
	default:
		return nil, problem.New(problem.NotFound, "%s: %w %s: epoch %d is released already", verb,
			ErrUnknownUnit, c.Unit, c.Epoch)
	}
}

func (s *State) updateUnit(u *Unit, change func(*Unit)) {
	n := *u
	change(&n)
	s.Units[u.ID] = &n
}

// Tail returns the last LogTailLines lines, each cut to logLineBytes.
func Tail(lines []string) []string {
	lines = lines[max(0, len(lines)-LogTailLines):]
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = cutLine(l, logLineBytes)
	}
	return out
}

// recordFreed adds blocks to the end of the freed ones, because placement re-uses the latest last.
func (s *State) recordFreed(blocks []Block) {
	if len(blocks) == 0 {
		return
	}
	freed := append(slices.Clone(s.Freed), blocks...)
	s.Freed = freed[max(0, len(freed)-maxFreed):]
}

// clearFreed removes blocks from the freed ones: they are in use again.
func (s *State) clearFreed(blocks []Block) {
	s.Freed = slices.DeleteFunc(slices.Clone(s.Freed), func(f Block) bool {
		return slices.ContainsFunc(blocks, f.overlaps)
	})
}

func (b Block) overlaps(o Block) bool {
	return b.Node == o.Node && b.Base < o.Base+o.Size && o.Base < b.Base+b.Size
}
