package rollout_test

import (
	"slices"
	"testing"
	"time"

	"github.com/dpserve/dpserve/internal/rollout"
)

func TestDecide(t *testing.T) {
	start := time.Unix(1000, 0)
	const minReady = 10 * time.Second
	unit := func(id string, change func(*rollout.Unit)) rollout.Unit {
		u := rollout.Unit{ID: id, Ready: true, Since: start}
		change(&u)
		return u
	}
	old := unit("old", func(u *rollout.Unit) { u.Stale = true })
	same := unit("same", func(*rollout.Unit) {})
	fresh := unit("new", func(u *rollout.Unit) { u.New = true })
	proven := unit("proven", func(u *rollout.Unit) { u.New, u.Proven = true, true })
	ended := unit("ended", func(u *rollout.Unit) { u.New, u.Ready, u.Ended = true, false, true })
	endedLate := unit("late", func(u *rollout.Unit) {
		u.New, u.Ready, u.Ended, u.Proven = true, false, true, true
	})
	failed := unit("failed", func(u *rollout.Unit) { u.New, u.Ready, u.Failed = true, false, true })
	sameEnded := unit("same", func(u *rollout.Unit) { u.Ready, u.Ended = false, true })
	starting := unit("starting", func(u *rollout.Unit) { u.New, u.Ready, u.Since = true, false, time.Time{} })
	for _, c := range []struct {
		name     string
		after    time.Duration
		minReady time.Duration
		units    []rollout.Unit
		good     bool
		failed   string
		proven   []string
		waits    bool
	}{
		{"nothing changes", 0, minReady, []rollout.Unit{same}, true, "", nil, false},
		{"an old unit is left", 0, minReady, []rollout.Unit{same, old}, false, "", nil, false},
		{
			"a new unit is on probation", 9 * time.Second, minReady,
			[]rollout.Unit{fresh, old},
			false, "", nil,
			true,
		},
		{"it passes", minReady, minReady, []rollout.Unit{fresh, old}, false, "", []string{"new"}, false},
		{
			"the last one passes", minReady, minReady,
			[]rollout.Unit{fresh, proven},
			true, "",
			[]string{"new"},
			false,
		},
		{"no probation", 0, 0, []rollout.Unit{fresh, old}, false, "", []string{"new"}, false},
		{"a new unit ends on probation", 0, minReady, []rollout.Unit{old, ended}, false, "ended", nil, false},
		{"it ends and there is no probation", 0, 0, []rollout.Unit{old, ended}, false, "", nil, false},
		{"a proven unit ends", 0, minReady, []rollout.Unit{endedLate, old}, false, "", nil, false},
		{
			"a unit that stays as it is ends", 0, minReady,
			[]rollout.Unit{sameEnded, old},
			false, "", nil,
			false,
		},
		{"a new unit cannot start", 0, minReady, []rollout.Unit{failed, old}, false, "failed", nil, false},
		{"the same without probation", 0, 0, []rollout.Unit{failed, old}, false, "failed", nil, false},
		{"a new unit starts", 0, minReady, []rollout.Unit{starting, old}, false, "", nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := rollout.Decide(start.Add(c.after), c.minReady, c.units)
			if d.Good != c.good || d.Failed != c.failed || !slices.Equal(d.Proven, c.proven) ||
				d.Waits("") != c.waits || d.Due.IsZero() == c.waits {
				t.Errorf("decided %+v", d)
			}
		})
	}
}
