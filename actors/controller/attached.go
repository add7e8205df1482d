package controller

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// maxRankChangeAttempts bounds how often a change of ranks is repeated on a newer revision of its
// application.
const maxRankChangeAttempts = 16

// RankChange is a committed change of one attached rank.
type RankChange struct {
	App      string
	Group    int
	Rank     int
	URL      string
	Selector *int   // if several ranks are behind the URL
	Revision uint64 // of the application
}

// AttachedRanks adds and removes ranks of applications of kind attach. An empty application name selects the
// only one of that kind.
type AttachedRanks struct{ Controller *Controller }

// rankEdit is an application with changed ranks, and the reply to the caller.
type rankEdit struct {
	app   *app.Application
	reply RankChange
	grace map[string]time.Duration // per removed unit; default: the application's grace
}

// Add attaches an engine, described like an item of engine.ranks. The rank gets the lowest free number.
func (r AttachedRanks) Add(ctx context.Context, name string, rank []byte) (RankChange, error) {
	return r.change(ctx, name, func(a *app.Application, st *state.State) (rankEdit, error) {
		parsed, err := app.ParseRank(rank, a.Engine.Family)
		if err != nil {
			return rankEdit{}, err
		}
		next, n, err := a.WithRank(parsed, isNumberTaken(st, a.Name))
		if err != nil {
			return rankEdit{}, err
		}
		return rankEdit{app: next, reply: newRankChange(a.Name, &parsed, n)}, nil
	})
}

// Remove drains and detaches a rank. deadline is for its running streams; nil = the application's grace.
func (r AttachedRanks) Remove(ctx context.Context, name string, rank app.RankRef,
	deadline *time.Duration,
) (RankChange, error) {
	return r.change(ctx, name, func(a *app.Application, _ *state.State) (rankEdit, error) {
		next, gone, err := a.WithoutRank(rank)
		if err != nil {
			return rankEdit{}, err
		}
		c := rankEdit{app: next, reply: newRankChange(a.Name, &gone, *gone.Number)}
		if deadline != nil {
			c.grace = map[string]time.Duration{rankUnitID(a.Name, gone.Group, *gone.Number): *deadline}
		}
		return c, nil
	})
}

// change stores a change of an application's ranks. Changes run one after another. If a deploy overtakes a
// change, it is repeated on the new revision.
func (r AttachedRanks) change(ctx context.Context, name string,
	edit func(*app.Application, *state.State) (rankEdit, error),
) (RankChange, error) {
	done, err := r.Controller.Turn(ctx)
	if err != nil {
		return RankChange{}, err
	}
	defer done()
	var stale error
	for range maxRankChangeAttempts {
		st := r.Controller.cfg.Store.State()
		a, revision, err := findAttachedApp(st, name)
		if err != nil {
			return RankChange{}, err
		}
		c, err := edit(a, st)
		if err != nil {
			return RankChange{}, err
		}
		res, err := r.Controller.Reshape(ctx, c.app, revision, c.grace)
		if err == nil {
			c.reply.Revision = res.Apps[a.Name]
			return c.reply, nil
		}
		if stale = err; !errors.Is(err, state.ErrStaleRevision) {
			return RankChange{}, err
		}
	}
	return RankChange{}, problem.New(problem.Conflict, "the application changed %d times meanwhile: %w",
		maxRankChangeAttempts, stale).WithHint("try again")
}

// AttachedURLs lists the URLs of an application's engines in rank order, each once.
func AttachedURLs(st *state.State, name string) ([]string, error) {
	a, _, err := findAttachedApp(st, name)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, r := range attached(a) {
		if !slices.Contains(out, r.URL) {
			out = append(out, r.URL)
		}
	}
	return out, nil
}

// rankPlace is the number of a rank.
type rankPlace struct{ group, rank int }

// attached yields the ranks of an application of kind attach, by group and number.
func attached(a *app.Application) iter.Seq2[rankPlace, *app.AttachRank] {
	groups := map[int]bool{}
	for i := range a.Engine.Ranks {
		groups[a.Engine.Ranks[i].Group] = true
	}
	return func(yield func(rankPlace, *app.AttachRank) bool) {
		for _, g := range slices.Sorted(maps.Keys(groups)) {
			for _, n := range a.RankNumbers(g) {
				if r := a.Engine.Rank(g, n); r != nil && !yield(rankPlace{g, n}, r) {
					return
				}
			}
		}
	}
}

// findAttachedApp returns a stored application with its revision. An empty name selects the only application
// of kind attach.
func findAttachedApp(st *state.State, name string) (*app.Application, uint64, error) {
	if name != "" {
		s := st.Apps[name]
		if s == nil {
			return nil, 0, state.UnknownApp(name, slices.Sorted(maps.Keys(st.Apps)))
		}
		a, err := s.Application()
		if err != nil {
			err = fmt.Errorf("read the stored specification of %s: %w", name, err)
		}
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

func newRankChange(name string, r *app.AttachRank, number int) RankChange {
	c := RankChange{App: name, Group: r.Group, Rank: number, URL: r.URL}
	if r.Addressing != app.AddressURL {
		c.Selector = &r.Selector
	}
	return c
}
