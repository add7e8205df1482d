package state

import (
	"cmp"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of lists in the replicated state.
const (
	// LogTailLines is how many of an engine's last log lines a failed unit keeps.
	LogTailLines = 20
	logLineBytes = 1000 // longer lines are cut: every node replicates the state and holds it in memory
	maxFreed     = 1024 // freed port blocks that are remembered; more than a default port range has
)

// grantGroup starts all units of the command or none. Each unit gets the next epoch of its name.
func (s *State) grantGroup(c *GrantGroup) (Result, error) {
	if err := s.checkGrant(c); err != nil {
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

// newUnit makes the record of a granted unit.
func (s *State) newUnit(c *GrantGroup, g *UnitGrant) *Unit {
	u := &Unit{
		ID: g.Unit, App: c.App, Group: c.Group, Epoch: s.LastEpoch(g.Unit) + 1, Phase: Starting,
		Attempt:     g.Attempt,
		AppRevision: c.AppRevision, Launch: g.Launch, Ranks: slices.Clone(g.Ranks),
		Blocks: slices.Clone(g.Blocks),
		Since:  c.At, Restarts: max(0, g.Restarts),
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

// Holds reports whether the unit holds its ranks, slots, devices and ports. A failed unit holds nothing,
// because it fails only after its processes are gone.
func (u *Unit) Holds() bool { return u.Phase != Failed }

// unitReady records that every rank of the unit serves.
func (s *State) unitReady(c *UnitRef) error {
	u, err := s.unitAtEpoch("unit ready", c)
	if err != nil {
		return err
	}
	if u.Phase == Failed {
		return wrongPhaseError("unit ready", u)
	}
	s.updateUnit(u, func(n *Unit) { n.Phase, n.Reason, n.LogTail, n.Since = Ready, "", nil, c.At })
	return nil
}

// unitFenced records that the unit left routing.
func (s *State) unitFenced(c *UnitRef) error {
	u, err := s.unitAtEpoch("unit fenced", c)
	if err != nil {
		return err
	}
	if u.Phase == Failed {
		return wrongPhaseError("unit fenced", u)
	}
	s.updateUnit(u, func(n *Unit) { n.Phase, n.Reason, n.Since = Fenced, c.Reason, c.At })
	return nil
}

// unitFailed gives up on a unit until the next deploy. The record keeps the reason and holds nothing.
func (s *State) unitFailed(c *UnitRef) error {
	u, err := s.unitAtEpoch("unit failed", c)
	if err != nil {
		return err
	}
	s.recordFreed(u.Blocks)
	s.updateUnit(u, func(n *Unit) {
		n.Phase, n.Reason, n.LogTail, n.Blocks, n.Since = Failed, c.Reason, Tail(c.LogTail), nil, c.At
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

func staleEpochError(verb, unit string, told, have uint64) error {
	return problem.New(problem.Conflict, "%s: %w: %s is at epoch %d, the command is for epoch %d", verb,
		ErrStaleEpoch, unit, have, told).
		WithHint("read the state again: the unit was started anew meanwhile")
}

func wrongPhaseError(verb string, u *Unit) error {
	return problem.New(problem.Conflict, "%s: %s is %s: %w", verb, u.ID, u.Phase, ErrWrongPhase).
		WithHint("deploy the application again")
}

// updateUnit replaces a record by a changed copy.
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
		out[i] = strings.ToValidUTF8(l[:min(len(l), logLineBytes)], "")
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
