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

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// maxRankChangeAttempts bounds how often a change of ranks is repeated on a newer revision of its
// application.
const maxRankChangeAttempts = 16

// AttachedRanks adds and removes ranks of applications of kind attach. An empty application name selects the
// only one of that kind.
type AttachedRanks struct{ Controller *Controller }

// rankEdit is an application with changed ranks, and the reply to the caller.
type rankEdit struct {
	pool  *app.Application
	reply client.RankChange
	grace map[string]time.Duration // per removed unit; default: the application's grace
}

// Add attaches an engine, described like an item of engine.ranks, to the pool of its role. The rank gets the
// lowest free number. For an engine that is attached with a lease, Add renews it. A service, described like
// an item of engine.services, is followed from now on.
func (r AttachedRanks) Add(ctx context.Context, name string, rank []byte) (client.RankChange, error) {
	if app.IsService(rank) {
		return r.addService(ctx, name, rank)
	}
	if reply, ok := r.renew(name, rank); ok {
		return reply, nil
	}
	return r.change(ctx, name, func(st *state.State, found attachedApp) (rankEdit, error) {
		parsed, err := app.ParseRank(rank, found.pools[0].Engine.Family, transferOf(found.pools[0]))
		if err != nil {
			return rankEdit{}, err
		}
		a, err := poolFor(found.named, parsed.Role)
		if err != nil {
			return rankEdit{}, err
		}
		for _, other := range found.pools { // the other pool may have attached it
			if err := other.CheckAttachable(&parsed); err != nil {
				return rankEdit{}, err
			}
		}
		next, n, err := a.WithRank(parsed, isNumberTaken(st, a))
		if err != nil {
			return rankEdit{}, err
		}
		return rankEdit{pool: next, reply: newRankChange(a, &parsed, n)}, nil
	})
}

// transferOf returns the transfer of an application with two pools, "" for others.
func transferOf(a *app.Application) string {
	if a.Disaggregation == nil {
		return ""
	}
	return a.Disaggregation.Transfer
}

// poolFor returns the pool that a rank of a role belongs to.
func poolFor(pools []*app.Application, role string) (*app.Application, error) {
	for _, a := range pools {
		if a.Pool == "" || (a.Pool == app.PoolPrefill) == (role == app.RolePrefill) {
			return a, nil
		}
	}
	return nil, problem.New(problem.Conflict, "add a rank: a rank with role %s does not belong to %s", role,
		pools[0].PoolName()).
		WithHint("name the application: dpserve ranks add %s URL --role prefill | decode", pools[0].Name)
}

// Remove drains and detaches a rank, or a service with all of its ranks. deadline is for their running
// streams; nil = the application's grace.
func (r AttachedRanks) Remove(ctx context.Context, name string, rank app.RankRef,
	deadline *time.Duration,
) (client.RankChange, error) {
	if app.IsServiceURL(rank.URL) {
		return r.removeService(ctx, name, rank.URL, deadline)
	}
	return r.change(ctx, name, func(_ *state.State, found attachedApp) (rankEdit, error) {
		a, err := poolWith(found.named, rank)
		if err != nil {
			return rankEdit{}, err
		}
		next, gone, err := a.WithoutRank(rank)
		if err != nil {
			return rankEdit{}, err
		}
		if gone.Service != "" {
			return rankEdit{}, problem.New(problem.Conflict,
				"remove a rank: %s is an address of %s, and would be attached again", gone.URL, gone.Service).
				WithHint("take its engine out of the service, or: dpserve ranks remove %s %s", name,
					gone.Service)
		}
		c := rankEdit{pool: next, reply: newRankChange(a, &gone, *gone.Number)}
		if deadline != nil {
			c.grace = map[string]time.Duration{rankUnitID(a, gone.Group, *gone.Number): *deadline}
		}
		return c, nil
	})
}

// poolWith returns the pool that has a rank. GROUP/RANK alone may be a rank of both.
func poolWith(pools []*app.Application, rank app.RankRef) (*app.Application, error) {
	if len(pools) == 1 {
		return pools[0], nil
	}
	var have []*app.Application
	var details []string
	for _, a := range pools {
		_, _, err := a.WithoutRank(rank)
		if problem.CodeOf(err) != problem.NotFound {
			have = append(have, a)
		} else if p, ok := errors.AsType[*problem.Error](err); ok {
			details = append(details, p.Details...)
		}
	}
	switch len(have) {
	case 0:
		return nil, problem.New(problem.NotFound, "there is no rank %s in %s", rank, pools[0].Name).
			WithHint("its ranks are listed below").WithDetails(details...)
	case 1:
		return have[0], nil
	default:
		return nil, problem.New(problem.InvalidArgument, "both pools of %s have a rank %s",
			pools[0].Name, rank).
			WithHint("name the pool: dpserve ranks remove %s %s", pools[0].PoolName(), rank)
	}
}

// change stores a change of an application's ranks. Changes run one after another. If a deploy overtakes a
// change, it is repeated on the new revision.
func (r AttachedRanks) change(ctx context.Context, name string,
	edit func(*state.State, attachedApp) (rankEdit, error),
) (client.RankChange, error) {
	done, err := r.Controller.LockRanks(ctx)
	if err != nil {
		return client.RankChange{}, err
	}
	defer done()
	var stale error
	for range maxRankChangeAttempts {
		st := r.Controller.cfg.Store.State()
		found, err := findAttached(st, name)
		if err != nil {
			return client.RankChange{}, err
		}
		c, err := edit(st, found)
		if err != nil {
			return client.RankChange{}, err
		}
		pools := slices.Clone(found.pools)
		at := slices.IndexFunc(pools, func(p *app.Application) bool { return p.Pool == c.pool.Pool })
		pools[at] = c.pool
		res, err := r.Controller.Reshape(ctx, pools, found.Revision, c.grace)
		if err == nil {
			c.reply.Revision = res.Apps[found.Name]
			return c.reply, nil
		}
		if stale = err; !errors.Is(err, state.ErrStaleRevision) {
			return client.RankChange{}, err
		}
	}
	return client.RankChange{}, problem.New(problem.Conflict,
		"the application changed %d times meanwhile: %w", maxRankChangeAttempts, stale).WithHint("try again")
}

// AttachedURLs lists the URLs of an application's engines in rank order, prefill ranks first, each once.
func AttachedURLs(st *state.State, name string) ([]string, error) {
	found, err := findAttached(st, name)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, a := range found.named {
		for _, r := range attached(a) {
			if !slices.Contains(out, r.URL) {
				out = append(out, r.URL)
			}
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

// attachedApp is a stored application with its pools, of which a name selects all or one.
type attachedApp struct {
	*state.App
	pools, named []*app.Application
}

// findAttached returns the application of a name, which may be the name of one of its pools. An empty name
// selects the only application of kind attach.
func findAttached(st *state.State, name string) (attachedApp, error) {
	if name == "" {
		var err error
		if name, err = onlyAttached(st); err != nil {
			return attachedApp{}, err
		}
	}
	out := attachedApp{App: st.Apps[name]}
	if a, pool := st.Pool(name); pool != nil {
		out.App, out.named = a, []*app.Application{pool}
	}
	if out.App == nil {
		return attachedApp{}, state.UnknownApp(name, slices.Sorted(maps.Keys(st.Apps)))
	}
	var err error
	if out.pools, err = out.Pools(); err != nil {
		return attachedApp{}, fmt.Errorf("read the stored specification of %s: %w", name, err)
	}
	if out.named == nil {
		out.named = out.pools
	}
	return out, nil
}

func onlyAttached(st *state.State) (string, error) {
	var found []string
	for _, name := range slices.Sorted(maps.Keys(st.Apps)) {
		pools, err := st.Apps[name].Pools()
		if err == nil && pools[0].Engine.Kind == app.KindAttach && !st.Apps[name].Deleting {
			found = append(found, name)
		}
	}
	switch len(found) {
	case 0:
		return "", problem.New(problem.NotFound, "there is no application of kind attach").
			WithHint("deploy one with its first engine: `dpserve up --attach http://HOST:PORT`")
	case 1:
		return found[0], nil
	default:
		return "", problem.New(problem.InvalidArgument, "there are %d applications of kind attach",
			len(found)).
			WithHint("name one with app=: %s", strings.Join(found, ", "))
	}
}

// isNumberTaken reports whether a unit still has a rank's number. A draining unit keeps its number until it
// is released.
func isNumberTaken(st *state.State, pool *app.Application) func(rank int) bool {
	return func(rank int) bool { return st.Units[rankUnitID(pool, 0, rank)] != nil }
}

func rankUnitID(pool *app.Application, group, rank int) string {
	return groupName(pool.PoolName(), group) + "/" + strconv.Itoa(rank)
}

func newRankChange(pool *app.Application, r *app.AttachRank, number int) client.RankChange {
	c := client.RankChange{App: pool.Name, Pool: pool.Pool, Group: r.Group, Rank: number, URL: r.URL}
	if r.Addressing != app.AddressURL {
		c.Selector = &r.Selector
	}
	return c
}
