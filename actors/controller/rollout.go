package controller

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rollout"
	"github.com/dpserve/dpserve/internal/state"
)

// rollOut is what the core knows of an application's roll-out.
type rollOut struct {
	good     uint64          // the last good revision; 0 = none yet
	launches map[string]bool // what it starts, as launch hashes; nil if there is none, or it cannot be read
	since    time.Time       // of the deploy, as this core saw it: ends before that do not count
	halt     *state.Halt     // as committed
	failure  *state.Halt     // to be committed
	next     rollout.Decision
	busy     bool      // MarkGood or HaltRollout is under way
	retryAt  time.Time // if the state does not show the result until then, it is proposed again
}

// updateRollOut takes what a new snapshot says of the roll-out.
func (c *Core) updateRollOut(now time.Time, a *application, s *state.App) {
	r := &a.rollOut
	if r.halt != nil && s.Halt == nil {
		r.since = now // deployed again
	}
	if r.halt = s.Halt; s.Halt != nil {
		r.failure = nil
	}
	last := c.state.LastGood(a.name)
	if last == 0 || r.good == last && r.launches != nil {
		return
	}
	r.good, r.launches = last, nil
	past, err := c.state.Past(a.name, last)
	if err != nil {
		return
	}
	good := readApp(&state.App{Name: a.name, Spec: past.Spec})
	if good.broken != "" {
		return
	}
	r.launches = map[string]bool{}
	for _, launch := range good.launch {
		r.launches[launch] = true
	}
}

// isHalted reports whether the roll-out of the current revision was halted.
func (a *application) isHalted() bool {
	return a.rollOut.halt != nil && a.rollOut.halt.Revision == a.revision
}

// isRollingOut reports whether the current revision starts engines that have not proven themselves yet. The
// first revision of an application has nothing to go back to. Attached engines are started by others.
func (a *application) isRollingOut() bool {
	if a.rollOut.launches == nil || a.rollOut.good == a.revision || a.isHalted() || a.deleting ||
		a.pools == nil || a.spec().Engine.Kind == app.KindAttach {
		return false
	}
	for _, launch := range a.launch {
		if !a.rollOut.launches[launch] {
			return true
		}
	}
	return false
}

// decideRollOut decides about the units of an application before they are replaced.
func (c *Core) decideRollOut(now time.Time, a *application) {
	r := &a.rollOut
	if r.good == a.revision || a.isHalted() {
		r.next, r.retryAt = rollout.Decision{}, time.Time{}
		return
	}
	minReady := time.Duration(0)
	rolls := a.isRollingOut()
	if rolls {
		minReady = app.Seconds(a.spec().Rollout.MinReadyS)
	}
	units := make([]rollout.Unit, 0, len(a.units))
	for i := range a.units {
		w := &a.units[i]
		out := rollout.Unit{ID: w.ID, Pool: w.Pool, New: rolls && !a.rollOut.launches[a.launch[w.ID]]}
		if u := c.units[w.ID]; u != nil {
			out.Stale = c.isStale(a, u)
			out.Ready, out.Since = u.m.Phase == state.Ready, u.m.ReadyAt
			out.Proven = u.proven != 0 && u.proven == u.m.Epoch
			isNews := !u.m.Since.Before(r.since)
			out.Ended = isNews && u.m.Phase == state.Backoff && u.m.WasReady
			out.Failed = isNews && u.m.HasFailed()
		}
		units = append(units, out)
	}
	r.next = rollout.Decide(now, minReady, units)
	for _, id := range r.next.Proven {
		c.units[id].proven = c.units[id].m.Epoch
	}
	if rolls && r.next.Failed != "" && r.failure == nil {
		r.failure = c.haltOf(now, a, c.units[r.next.Failed])
	}
	var cmd state.Command
	switch {
	case r.failure != nil:
		cmd.HaltRollout = &state.HaltRollout{App: a.name, Halt: *r.failure}
	case r.next.Good && a.pools != nil:
		cmd.MarkGood = &state.MarkGood{App: a.name, Revision: a.revision}
	default:
		r.retryAt = time.Time{}
		return
	}
	if !r.busy && !now.Before(r.retryAt) {
		r.busy = true
		c.emit(ProposeEffect{App: a.name, Command: cmd})
	}
}

func (c *Core) haltOf(now time.Time, a *application, u *unit) *state.Halt {
	h := &state.Halt{
		Revision: a.revision, Unit: u.id, Unready: u.m.HasFailed(), Cause: u.m.Reason,
		LogTail: u.m.LogTail, At: now.UnixMilli(),
	}
	if a.spec().Rollout.OnFailure == app.OnFailureRollback {
		h.BackTo = a.rollOut.good
	}
	return h
}

// haltLine says that a roll-out was halted, as a line of the application's message.
func (a *application) haltLine() []string {
	h := a.rollOut.halt
	if h == nil {
		return nil
	}
	line := "the roll-out of revision " + strconv.FormatUint(h.Revision, 10) + " was halted, because " +
		h.Describe()
	switch {
	case h.BackTo != 0:
		line += "; revision " + strconv.FormatUint(h.BackTo, 10) + " was deployed again"
	case h.Refused != "":
		line += "; the revision before cannot be deployed again: " + h.Refused
	}
	return []string{line}
}

// haltStatus is the halted roll-out as status shows it.
func (a *application) haltStatus() *client.Halt {
	h := a.rollOut.halt
	if h == nil {
		return nil
	}
	return &client.Halt{
		Revision: h.Revision, BackTo: h.BackTo, Unit: h.Unit, Unready: h.Unready, Cause: h.Cause,
		LogTail: h.LogTail, At: time.UnixMilli(h.At),
	}
}

// Rollback deploys what an application had at a revision; 0 = the last good one before the current one. It
// is a deploy: what does not fit is refused, and it takes over from a roll-out that is under way.
func (c *Controller) Rollback(ctx context.Context, name string, to uint64,
) (state.Result, []client.Change, error) {
	past, pools, err := pastPools(c.cfg.Store.State(), name, to)
	if err != nil {
		return state.Result{}, nil, err
	}
	if pools[0].Engine.Kind == app.KindAttach {
		return state.Result{}, nil, problem.New(problem.Conflict,
			"the engines of %s are attached: a former revision may list engines that are gone", name).
			WithHint("look at it with `dpserve get %s --revision %d`, and deploy what is right", name,
				past.Revision)
	}
	return c.Deploy(ctx, Deployment{Apps: pools, From: past.Revision})
}

// PastFile returns an application at a revision (0 = the current one) in the form of a file.
func PastFile(s *state.State, name string, revision uint64) (text []byte, at uint64, err error) {
	if a := s.Apps[name]; a != nil && revision == 0 {
		revision = a.Revision
	}
	past, err := s.Past(name, revision)
	if err != nil {
		return nil, 0, err
	}
	pools, err := readPast(past)
	if err != nil {
		return nil, 0, err
	}
	file := app.File{Applications: pools}
	return file.Print(), past.Revision, nil
}

// pastPools returns the revision that a rollback goes to.
func pastPools(s *state.State, name string, to uint64) (*state.PastSpec, []*app.Application, error) {
	if a := s.Apps[name]; a != nil {
		if to == a.Revision {
			return nil, nil, problem.New(problem.Conflict, "%s is at revision %d", name, to).
				WithHint("choose another one of `dpserve history %s`", name)
		}
		if to == 0 {
			to = goodBefore(s, a)
		}
		if to == 0 {
			return nil, nil, problem.New(problem.Conflict,
				"%s is at revision %d, and no other one before it is known as good", name, a.Revision).
				WithHint("choose one of `dpserve history %s` with --to", name)
		}
	}
	past, err := s.Past(name, to)
	if err != nil {
		return nil, nil, err
	}
	pools, err := readPast(past)
	return past, pools, err
}

// goodBefore returns the last good revision before the current one that has another spec; 0 = none.
func goodBefore(s *state.State, a *state.App) uint64 {
	for _, p := range slices.Backward(s.History[a.Name]) {
		if p.Good && p.Revision < a.Revision && !bytes.Equal(p.Spec, a.Spec) {
			return p.Revision
		}
	}
	return 0
}

func readPast(p *state.PastSpec) ([]*app.Application, error) {
	pools, err := (&state.App{Spec: p.Spec}).Pools()
	if err != nil {
		return nil, problem.New(problem.Internal, "revision %d of %s cannot be read: %w", p.Revision, p.Name,
			err).WithHint("another version of dpserve wrote it; deploy a file")
	}
	return pools, nil
}

// History lists the revisions of an application that the state keeps, the newest first.
func History(s *state.State, name string) ([]client.Revision, error) {
	a := s.Apps[name]
	if a == nil {
		_, err := s.Past(name, 0) // names those that exist
		return nil, err
	}
	past := s.History[name]
	out := make([]client.Revision, 0, len(past))
	for _, p := range slices.Backward(past) {
		out = append(out, client.Revision{
			Revision: p.Revision, At: time.UnixMilli(p.At), From: p.From, Halted: p.Halted, IsGood: p.Good,
			IsCurrent: p.Revision == a.Revision,
		})
	}
	return out, nil
}
