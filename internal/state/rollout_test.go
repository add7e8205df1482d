package state_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"testing"

	"github.com/dpserve/dpserve/internal/state"
)

// A cluster with one application whose revisions are 1 to n; the spec of each is its number.
func withRevisions(t *testing.T, n int) (*state.State, func(state.Command) error) {
	t.Helper()
	s := state.New()
	do := func(c state.Command) error {
		_, err := s.Apply(s.Index+1, &c)
		return err
	}
	for i := 1; i <= n; i++ {
		if err := do(putNumber(i)); err != nil {
			t.Fatal(err)
		}
	}
	return s, do
}

func putNumber(i int) state.Command {
	return state.Command{PutApps: &state.PutApps{At: int64(i), Apps: []state.AppSpec{{
		Name: "pd", Spec: json.RawMessage(strconv.Itoa(i)), Names: []string{"m"},
	}}}}
}

func markGood(revision uint64) state.Command {
	return state.Command{MarkGood: &state.MarkGood{App: "pd", Revision: revision}}
}

func halt(revision, backTo uint64) state.Command {
	return state.Command{HaltRollout: &state.HaltRollout{App: "pd", Halt: state.Halt{
		Revision: revision, BackTo: backTo, Unit: "pd/0/0", Cause: "out of memory", LogTail: []string{"bye"},
	}}}
}

func kept(s *state.State) (out []uint64) {
	for _, p := range s.History["pd"] {
		out = append(out, p.Revision)
	}
	return out
}

func TestTheStateKeepsTheLastRevisionsAndTheGoodOne(t *testing.T) {
	s, do := withRevisions(t, 2)
	if err := do(markGood(2)); err != nil {
		t.Fatal(err)
	}
	clone := s.Clone()
	for i := 3; i <= 15; i++ {
		if err := do(putNumber(i)); err != nil {
			t.Fatal(err)
		}
	}
	want := []uint64{2, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	if got := kept(s); !slices.Equal(got, want) {
		t.Errorf("kept %v, want %v", got, want)
	}
	if got := kept(clone); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("the clone has %v: a later command wrote into it", got)
	}
	if s.Public().History != nil {
		t.Error("followers get the history")
	}
	if _, err := s.Past("pd", 4); !errors.Is(err, state.ErrNoRevision) {
		t.Errorf("revision 4: %v", err)
	}
}

func TestAHaltedRolloutGoesBackInOneCommand(t *testing.T) {
	s, do := withRevisions(t, 1)
	for _, c := range []state.Command{markGood(1), putNumber(2), halt(2, 1)} {
		if err := do(c); err != nil {
			t.Fatal(err)
		}
	}
	a, past := s.Apps["pd"], s.History["pd"]
	if a.Revision != 3 || string(a.Spec) != "1" || s.LastGood("pd") != 3 || a.Halt == nil ||
		a.Halt.Revision != 2 {
		t.Errorf("after the halt: %+v", a)
	}
	if past[1].Good || past[1].Halted != "pd/0/0 ended: out of memory" || past[2].From != 1 {
		t.Errorf("the history does not say that 2 was halted and that 3 repeats 1: %+v", past)
	}
	if err := do(halt(2, 1)); !errors.Is(err, state.ErrStaleRevision) {
		t.Errorf("a second halt of revision 2: %v", err)
	}
	if err := do(putNumber(1)); err != nil || s.Apps["pd"].Halt != nil || s.Apps["pd"].Revision != 3 {
		t.Errorf("deployed the same again: %+v, %v", s.Apps["pd"], err)
	}
}

func TestAHaltWithoutRollbackKeepsTheRevision(t *testing.T) {
	s, do := withRevisions(t, 2)
	if err := do(halt(2, 0)); err != nil {
		t.Fatal(err)
	}
	if a := s.Apps["pd"]; a.Revision != 2 || a.Halt == nil || a.Halt.LogTail[0] != "bye" {
		t.Errorf("after the halt: %+v", a)
	}
	for _, c := range []state.Command{
		{DeleteApp: &state.DeleteApp{Name: "pd"}}, {ForgetApp: &state.ForgetApp{Name: "pd"}},
	} {
		if err := do(c); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.History) != 0 {
		t.Errorf("the history of a removed application stays: %v", s.History)
	}
}

func TestAHaltWithNoWayBackKeepsTheRevision(t *testing.T) {
	s, do := withRevisions(t, 1)
	second, other := putNumber(2), putNumber(7)
	second.PutApps.Apps[0].Names = []string{"m2"}
	other.PutApps.Apps[0].Name = "other" // has the model name of revision 1
	for _, c := range []state.Command{markGood(1), second, other, halt(2, 1)} {
		if err := do(c); err != nil {
			t.Fatal(err)
		}
	}
	a := s.Apps["pd"]
	if a.Revision != 2 || s.LastGood("pd") != 1 || a.Halt == nil || a.Halt.BackTo != 0 ||
		a.Halt.Refused == "" {
		t.Errorf("after the halt: %+v, %+v", a, a.Halt)
	}
}

func TestNewestLaunchIsThatOfTheHighestRevision(t *testing.T) {
	s := state.New()
	if got := s.NewestLaunch("pd", ""); got != "" {
		t.Errorf("without units: %q", got)
	}
	s.Units = map[string]*state.Unit{
		"pd/0/0": {App: "pd", AppRevision: 3, Launch: "new", Phase: state.Ready},
		"pd/0/1": {App: "pd", AppRevision: 2, Launch: "old", Phase: state.Ready},
		"pd/0/2": {App: "pd", AppRevision: 4, Launch: "failed", Phase: state.Failed},
	}
	if got := s.NewestLaunch("pd", ""); got != "new" {
		t.Errorf("newest launch %q", got)
	}
}
