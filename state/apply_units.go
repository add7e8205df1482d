package state

import (
	"cmp"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of what the replicated state keeps.
const (
	// LogTailLines is how many of an engine's last log lines a failed unit keeps.
	LogTailLines = 20
	logLineBytes = 1000 // a longer line is cut: the state is replicated and held in memory by every node
	maxFreed     = 1024 // port blocks remembered as freed; more than a default port range holds
)

// grantGroup starts units, all or none: each gets the next epoch of its name.
func (s *State) grantGroup(c *GrantGroup) (Result, error) {
	if err := s.checkGrant(c); err != nil {
		return Result{}, err
	}
	r := Result{Epochs: make(map[string]uint64, len(c.Units))}
	for i := range c.Units {
		u := s.granted(c, &c.Units[i])
		if old := s.Units[u.ID]; old != nil {
			s.free(old.Blocks)
		}
		s.use(u.Blocks)
		s.Units[u.ID], s.Epochs[u.ID] = u, u.Epoch
		r.Epochs[u.ID] = u.Epoch
	}
	return r, nil
}

// granted is the new record of a unit.
func (s *State) granted(c *GrantGroup, g *UnitGrant) *Unit {
	u := &Unit{
		ID: g.Unit, App: c.App, Group: c.Group, Epoch: s.LastEpoch(g.Unit) + 1, Phase: Starting, Attempt: g.Attempt,
		AppRevision: c.AppRevision, Launch: g.Launch, Ranks: slices.Clone(g.Ranks), Blocks: slices.Clone(g.Blocks),
		Since: c.At, Restarts: max(0, g.Restarts),
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

// sameLaunch says whether two grants start the same thing: then the later one is a restart.
func (u *Unit) sameLaunch(v *Unit) bool {
	return u.AppRevision == v.AppRevision || (u.Launch != "" && u.Launch == v.Launch)
}

// Holds says whether the unit holds its ranks, slots, devices and ports. A failed one holds nothing: it failed after its
// processes were gone.
func (u *Unit) Holds() bool { return u.Phase != Failed }

// unitReady records that every rank serves.
func (s *State) unitReady(c *UnitRef) error {
	u, err := s.current("unit ready", c)
	if err != nil {
		return err
	}
	if u.Phase == Failed {
		return wrongPhase("unit ready", u)
	}
	s.replace(u, func(n *Unit) { n.Phase, n.Reason, n.LogTail, n.Since = Ready, "", nil, c.At })
	return nil
}

// unitFenced records, as a fact, that the unit left routing.
func (s *State) unitFenced(c *UnitRef) error {
	u, err := s.current("unit fenced", c)
	if err != nil {
		return err
	}
	if u.Phase == Failed {
		return wrongPhase("unit fenced", u)
	}
	s.replace(u, func(n *Unit) { n.Phase, n.Reason, n.Since = Fenced, c.Reason, c.At })
	return nil
}

// unitFailed gives up until the next deploy. The record stays, with the reason, and holds nothing any more.
func (s *State) unitFailed(c *UnitRef) error {
	u, err := s.current("unit failed", c)
	if err != nil {
		return err
	}
	s.free(u.Blocks)
	s.replace(u, func(n *Unit) {
		n.Phase, n.Reason, n.LogTail, n.Blocks, n.Since = Failed, c.Reason, Tail(c.LogTail), nil, c.At
	})
	return nil
}

// release forgets a unit whose processes are gone. Its epoch stays.
func (s *State) release(c *UnitRef) error {
	u, err := s.current("release", c)
	if err != nil {
		return err
	}
	s.free(u.Blocks)
	delete(s.Units, u.ID)
	return nil
}

// current is the record of a unit if the report is about its present epoch.
func (s *State) current(verb string, c *UnitRef) (*Unit, error) {
	u, ok := s.Units[c.Unit]
	switch {
	case ok && u.Epoch == c.Epoch:
		return u, nil
	case c.Epoch != s.LastEpoch(c.Unit):
		return nil, staleEpoch(verb, c.Unit, c.Epoch, s.LastEpoch(c.Unit))
	default:
		return nil, problem.New(problem.NotFound, "%s: %w %s: epoch %d is released already", verb, ErrUnknownUnit, c.Unit, c.Epoch)
	}
}

func staleEpoch(verb, unit string, told, have uint64) error {
	return problem.New(problem.Conflict, "%s: %w: %s is at epoch %d, the command is for epoch %d", verb, ErrStaleEpoch, unit, have, told).
		WithHint("read the state again: the unit was started anew meanwhile")
}

func wrongPhase(verb string, u *Unit) error {
	return problem.New(problem.Conflict, "%s: %s is %s: %w", verb, u.ID, u.Phase, ErrWrongPhase).WithHint("deploy the application again")
}

// replace puts a changed copy in the place of a record.
func (s *State) replace(u *Unit, change func(*Unit)) {
	n := *u
	change(&n)
	s.Units[u.ID] = &n
}

// Tail is the last LogTailLines lines, each cut to a bounded length.
func Tail(lines []string) []string {
	lines = lines[max(0, len(lines)-LogTailLines):]
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = strings.ToValidUTF8(l[:min(len(l), logLineBytes)], "")
	}
	return out
}

// free remembers blocks as freed, the latest last, so that placement re-uses them last.
func (s *State) free(blocks []Block) {
	if len(blocks) == 0 {
		return
	}
	freed := append(slices.Clone(s.Freed), blocks...)
	s.Freed = freed[max(0, len(freed)-maxFreed):]
}

// use forgets freed blocks that are in use again.
func (s *State) use(blocks []Block) {
	s.Freed = slices.DeleteFunc(slices.Clone(s.Freed), func(f Block) bool {
		return slices.ContainsFunc(blocks, f.overlaps)
	})
}

func (b Block) overlaps(o Block) bool {
	return b.Node == o.Node && b.Base < o.Base+o.Size && o.Base < b.Base+b.Size
}
