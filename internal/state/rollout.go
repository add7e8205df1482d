package state

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// MaxHistory is how many revisions of an application the state keeps, the current one included. The last good
// one is kept as well if it is older.
const MaxHistory = 10

// PastSpec is what an application was deployed with at a revision.
type PastSpec struct {
	AppSpec
	Revision uint64 `json:"revision"`
	At       int64  `json:"at,omitempty"`     // unix ms, leader's clock
	From     uint64 `json:"from,omitempty"`   // the revision that this one repeats; 0 = it came from a file
	Good     bool   `json:"good,omitempty"`   // all of its units have proven themselves
	Halted   string `json:"halted,omitempty"` // why its roll-out was halted; "" = it was not
}

// Halt says why the roll-out of a revision ended early.
type Halt struct {
	Revision uint64   `json:"revision"`          // whose unit ended
	BackTo   uint64   `json:"back_to,omitempty"` // the good revision that followed again; 0 = none did
	Refused  string   `json:"refused,omitempty"` // why the good revision could not be deployed again
	Unit     string   `json:"unit"`
	Unready  bool     `json:"unready,omitempty"` // the unit was never ready: its first starts failed
	Cause    string   `json:"cause"`
	LogTail  []string `json:"log_tail,omitempty"`
	At       int64    `json:"at,omitempty"` // unix ms, leader's clock
}

// Describe says what halted the roll-out.
func (h *Halt) Describe() string {
	if h.Unready {
		return h.Unit + " did not start: " + h.Cause
	}
	return h.Unit + " ended: " + h.Cause
}

// MarkGood says that all units of an application's revision have proven themselves.
type MarkGood struct {
	App      string `json:"app"`
	Revision uint64 `json:"revision"`
}

// HaltRollout ends the roll-out of an application's revision. If Halt.BackTo is set, the spec of that
// revision becomes the next revision in the same command, so that no leader change comes between. If that is
// not possible (another application has its model name by now), the roll-out is halted and stays where it is.
type HaltRollout struct {
	App  string `json:"app"`
	Halt Halt   `json:"halt"`
}

// Past returns what an application was deployed with at a revision. The error is a problem.NotFound that
// lists the revisions that are kept.
func (s *State) Past(name string, revision uint64) (*PastSpec, error) {
	if s.Apps[name] == nil {
		return nil, s.unknownAppError(name)
	}
	past := s.History[name]
	for i := range past {
		if past[i].Revision == revision {
			return &past[i], nil
		}
	}
	kept := make([]string, len(past))
	for i := range past {
		kept[i] = strconv.FormatUint(past[i].Revision, 10)
	}
	return nil, problem.New(problem.NotFound, "application %q: %w %d", name, ErrNoRevision, revision).
		WithHint("the cluster keeps the revisions %s", strings.Join(kept, ", "))
}

// LastGood returns the last revision of an application whose units have proven themselves; 0 = none is kept.
func (s *State) LastGood(name string) uint64 {
	for _, p := range slices.Backward(s.History[name]) {
		if p.Good {
			return p.Revision
		}
	}
	return 0
}

// record adds the current revision of an application to its history.
func (s *State) record(a *App, at int64, from uint64) {
	past := append(slices.Clone(s.History[a.Name]), PastSpec{
		AppSpec:  AppSpec{Name: a.Name, Spec: a.Spec, Names: a.Names},
		Revision: a.Revision, At: at, From: from,
	})
	oldest, good := len(past)-MaxHistory, s.LastGood(a.Name)
	past = slices.DeleteFunc(past, func(p PastSpec) bool {
		isOld := oldest > 0
		oldest--
		return isOld && p.Revision != good
	})
	s.setHistory(a.Name, past)
}

// setHistory replaces the history of an application; nil removes it. Clones of the state share the lists and
// their map, so neither is written into.
func (s *State) setHistory(name string, past []PastSpec) {
	next := make(map[string][]PastSpec, len(s.History)+1)
	maps.Copy(next, s.History)
	if next[name] = past; past == nil {
		delete(next, name)
	}
	s.History = next
}

// markPast changes the entry of a revision in the history of an application.
func (s *State) markPast(name string, revision uint64, change func(*PastSpec)) {
	past := slices.Clone(s.History[name])
	for i := range past {
		if past[i].Revision == revision {
			change(&past[i])
		}
	}
	s.setHistory(name, past)
}

// appAtRevision returns an application if the command is about its present revision.
func (s *State) appAtRevision(verb, name string, revision uint64) (*App, error) {
	a := s.Apps[name]
	switch {
	case a == nil:
		return nil, s.unknownAppError(name)
	case a.Deleting:
		return nil, problem.New(problem.Conflict, "%s: application %q: %w", verb, name, ErrDeleting).
			WithHint("wait until it is gone (dpserve status %s)", name)
	case a.Revision != revision:
		return nil, problem.New(problem.Conflict, "%s: %w: application %q is at revision %d, not %d", verb,
			ErrStaleRevision, name, a.Revision, revision).
			WithHint("look at what changed (dpserve history %s)", name)
	}
	return a, nil
}

func (s *State) markGood(c *MarkGood) (Result, error) {
	if _, err := s.appAtRevision("mark good", c.App, c.Revision); err != nil {
		return Result{}, err
	}
	s.markPast(c.App, c.Revision, func(p *PastSpec) { p.Good = true })
	return Result{Revision: s.Revision}, nil
}

func (s *State) haltRollout(c *HaltRollout) (Result, error) {
	a, err := s.appAtRevision("halt the roll-out", c.App, c.Halt.Revision)
	if err != nil {
		return Result{}, err
	}
	halt := c.Halt
	halt.LogTail = Tail(halt.LogTail)
	s.markPast(a.Name, a.Revision, func(p *PastSpec) { p.Halted = halt.Describe() })
	r := Result{Revision: s.Revision}
	if halt.BackTo != 0 {
		if r, err = s.deployAgain(a.Name, halt.BackTo, halt.At); err != nil {
			r, halt.BackTo, halt.Refused = Result{Revision: s.Revision}, 0, err.Error()
		}
	}
	next := *s.Apps[a.Name]
	next.Halt = &halt
	s.Apps[a.Name] = &next
	if halt.BackTo != 0 { // it has proven itself before
		s.markPast(a.Name, next.Revision, func(p *PastSpec) { p.Good = true })
	}
	return r, nil
}

// deployAgain makes the spec of a former revision the next revision.
func (s *State) deployAgain(name string, revision uint64, at int64) (Result, error) {
	past, err := s.Past(name, revision)
	if err != nil {
		return Result{}, err
	}
	return s.putApps(&PutApps{Apps: []AppSpec{past.AppSpec}, At: at, From: revision})
}

// confirm returns an application that was deployed with the spec that it has: a halted roll-out goes on.
func (a *App) confirm() *App {
	next := *a
	next.Halt = nil
	return &next
}

// NewestLaunch returns what the newest units of a pool were started with, by the revisions that their grants
// name; "" if no unit is granted. While a revision rolls out, ranks with another launch are replaced next.
func (s *State) NewestLaunch(app, pool string) string {
	launch, revision := "", uint64(0)
	for _, u := range s.Units {
		isNewer := u.AppRevision > revision || u.AppRevision == revision && u.Launch > launch
		if u.App == app && u.Pool == pool && u.Holds() && isNewer {
			launch, revision = u.Launch, u.AppRevision
		}
	}
	return launch
}
