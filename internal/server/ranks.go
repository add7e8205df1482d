package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// maxRankChangeAttempts bounds how often a change of ranks is repeated on a newer revision of its
// application.
const maxRankChangeAttempts = 16

var _ api.Ranks = (*backend)(nil)

// rankEdit is an application with changed ranks, and the reply to the caller.
type rankEdit struct {
	app   *app.Application
	reply api.RankChange
	grace map[string]time.Duration // per removed unit; default: the application's grace
}

// AddRank implements api.Ranks.
func (b *backend) AddRank(ctx context.Context, name string, rank []byte) (api.RankChange, error) {
	return b.changeRanks(ctx, name, func(a *app.Application, st *state.State) (rankEdit, error) {
		r, err := app.ParseRank(rank, a.Engine.Family)
		if err != nil {
			return rankEdit{}, err
		}
		next, n, err := a.WithRank(r, isNumberTaken(st, a.Name))
		if err != nil {
			return rankEdit{}, err
		}
		return rankEdit{app: next, reply: newRankChange(a.Name, &r, n)}, nil
	})
}

// RemoveRank implements api.Ranks.
func (b *backend) RemoveRank(ctx context.Context, name string, r api.RankRemoval) (api.RankChange, error) {
	return b.changeRanks(ctx, name, func(a *app.Application, _ *state.State) (rankEdit, error) {
		next, gone, err := a.WithoutRank(r.Rank)
		if err != nil {
			return rankEdit{}, err
		}
		c := rankEdit{app: next, reply: newRankChange(a.Name, &gone, *gone.Number)}
		if r.Deadline != nil {
			c.grace = map[string]time.Duration{rankUnitID(a.Name, gone.Group, *gone.Number): *r.Deadline}
		}
		return c, nil
	})
}

// Workers implements api.Ranks.
func (b *backend) Workers(_ context.Context, name string) ([]string, error) {
	a, _, err := findAttachedApp(b.n.store.State(), name)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, g := range slices.Sorted(maps.Keys(attachedGroups(a))) {
		for _, n := range a.RankNumbers(g) {
			if r := a.Engine.Rank(g, n); r != nil && !slices.Contains(out, r.URL) {
				out = append(out, r.URL)
			}
		}
	}
	return out, nil
}

func attachedGroups(a *app.Application) map[int]bool {
	out := map[int]bool{}
	for i := range a.Engine.Ranks {
		out[a.Engine.Ranks[i].Group] = true
	}
	return out
}

// changeRanks stores a change of an application's ranks. Changes run one after another. If a deploy overtakes
// a change, it is repeated on the new revision.
func (b *backend) changeRanks(ctx context.Context, name string,
	edit func(*app.Application, *state.State) (rankEdit, error),
) (api.RankChange, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return api.RankChange{}, err
	}
	done, err := l.control.Turn(ctx)
	if err != nil {
		return api.RankChange{}, err
	}
	defer done()
	var stale error
	for range maxRankChangeAttempts {
		st := b.n.store.State()
		a, revision, err := findAttachedApp(st, name)
		if err != nil {
			return api.RankChange{}, err
		}
		c, err := edit(a, st)
		if err != nil {
			return api.RankChange{}, err
		}
		r, err := l.control.Reshape(ctx, c.app, revision, c.grace)
		if err == nil {
			c.reply.Revision = r.Apps[a.Name]
			return c.reply, nil
		}
		if stale = err; !errors.Is(err, state.ErrStaleRevision) {
			return api.RankChange{}, err
		}
	}
	return api.RankChange{}, problem.New(problem.Conflict, "the application changed %d times meanwhile: %w",
		maxRankChangeAttempts, stale).WithHint("try again")
}

// findAttachedApp returns a stored application with its revision. An empty name selects the only application
// of kind attach.
func findAttachedApp(st *state.State, name string) (*app.Application, uint64, error) {
	if name != "" {
		s := st.Apps[name]
		if s == nil {
			return nil, 0, unknownApp(name, slices.Sorted(maps.Keys(st.Apps)))
		}
		a, err := s.Application()
		return a, s.Revision, err
	}
	var found []*app.Application
	var names []string
	for _, n := range slices.Sorted(maps.Keys(st.Apps)) {
		a, err := st.Apps[n].Application()
		if err == nil && a.Engine.Kind == app.KindAttach && !st.Apps[n].Deleting {
			found, names = append(found, a), append(names, n)
		}
	}
	switch len(found) {
	case 0:
		return nil, 0, problem.New(problem.NotFound, "there is no application of kind attach").
			WithHint("deploy one with its first engine: `dpserve up --attach http://HOST:PORT`")
	case 1:
		return found[0], st.Apps[names[0]].Revision, nil
	default:
		return nil, 0, problem.New(problem.InvalidArgument, "there are %d applications of kind attach",
			len(found)).
			WithHint("name one with app=: %s", strings.Join(names, ", "))
	}
}

// isNumberTaken reports whether a unit still has a rank's number. A draining unit keeps its number until it
// is released.
func isNumberTaken(st *state.State, name string) func(rank int) bool {
	return func(rank int) bool { return st.Units[rankUnitID(name, 0, rank)] != nil }
}

// rankUnitID names the unit of an independent rank.
func rankUnitID(name string, group, rank int) string {
	return name + "/" + strconv.Itoa(group) + "/" + strconv.Itoa(rank)
}

func newRankChange(name string, r *app.AttachRank, number int) api.RankChange {
	c := api.RankChange{App: name, Group: r.Group, Rank: number, URL: r.URL}
	if r.Addressing != app.AddressURL {
		c.Selector = &r.Selector
	}
	return c
}

// removedRanks lists the attached ranks that a deploy ends because the file does not list their engines, for
// example those added at run time.
func removedRanks(old, a *app.Application) []string {
	if old.Engine.Kind != app.KindAttach {
		return nil
	}
	listed := map[string]bool{}
	for i := range a.Engine.Ranks {
		listed[a.Engine.Ranks[i].Address()] = true
	}
	var out []string
	for _, g := range slices.Sorted(maps.Keys(attachedGroups(old))) {
		for _, n := range old.RankNumbers(g) {
			if r := old.Engine.Rank(g, n); r != nil && !listed[r.Address()] {
				out = append(out, fmt.Sprintf("%d/%d %s", g, n, r.Address()))
			}
		}
	}
	return out
}
