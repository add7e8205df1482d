package controller

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Resolver looks up the addresses of services. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// services are the services that this leader follows. What it has seen of them is not in the state: a new
// leader begins anew, and gives each rank the whole time before it leaves.
type services struct {
	mu    sync.Mutex
	views map[service]*serviceView
}

// service is a service of an application.
type service struct {
	app string
	app.AttachService
}

func (s service) compare(other service) int {
	return cmp.Or(strings.Compare(s.app, other.app), strings.Compare(s.URL, other.URL))
}

// servicesIn returns the services of all applications, in order.
func servicesIn(st *state.State) []service {
	var out []service
	for name, stored := range st.Apps {
		pools, err := stored.Pools()
		if err != nil || stored.Deleting {
			continue
		}
		for _, a := range pools {
			for _, s := range a.Engine.Services {
				out = append(out, service{name, s})
			}
		}
	}
	return slices.SortedFunc(slices.Values(out), service.compare)
}

// followServices resolves the services over and over, and adds and removes their ranks.
func (c *Controller) followServices(ctx context.Context) {
	for ctx.Err() == nil {
		found := servicesIn(c.cfg.Store.State())
		c.lookAtServices(ctx, found)
		c.awaitNextLook(ctx, found)
	}
}

// awaitNextLook waits until it is time for the next lookups, or there are other services.
func (c *Controller) awaitNextLook(ctx context.Context, seen []service) {
	var next <-chan time.Time
	if len(seen) > 0 {
		next = time.After(serviceLook + rand.N(serviceJitter))
	}
	for {
		changed := c.cfg.Store.Changed() // Changed comes before State, so that no change in between is missed
		if !slices.Equal(seen, servicesIn(c.cfg.Store.State())) {
			return
		}
		select {
		case <-changed:
		case <-next:
			return
		case <-ctx.Done():
			return
		}
	}
}

// lookAtServices resolves services, and changes the ranks of each as its answer says.
func (c *Controller) lookAtServices(ctx context.Context, found []service) {
	c.services.forget(found)
	lookups := make([]lookup, len(found))
	var g errgroup.Group
	g.SetLimit(lookupsAtOnce)
	for i, of := range found {
		g.Go(func() error {
			lookups[i] = c.resolve(ctx, &of.AttachService)
			return nil
		})
	}
	_ = g.Wait()
	for i, of := range found {
		if ctx.Err() == nil {
			c.updateService(ctx, of, &lookups[i])
		}
	}
}

func (c *Controller) resolve(ctx context.Context, s *app.AttachService) lookup {
	ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
	defer cancel()
	addresses, err := c.cfg.Resolver.LookupNetIP(ctx, "ip", s.Host())
	return lookup{c.cfg.Clock(), s.Ranks(addresses), err}
}

// updateService changes the ranks of a service.
func (c *Controller) updateService(ctx context.Context, of service, l *lookup) {
	log := c.cfg.Log.With(slog.String("component", actorName), slog.String("app", of.app),
		slog.String("service", of.URL))
	found, err := findAttached(c.cfg.Store.State(), of.app)
	if err != nil {
		return // it was deleted meanwhile
	}
	add, remove, note, isNew := c.services.next(of, l, c.ranksOf(found, of.URL))
	if isNew {
		c.ring.wake()
		if note != "" {
			log.Warn("a service has a fault", slog.String("fault", note),
				slog.Int("addresses", len(l.ranks)))
		} else {
			log.Info("a service has no fault any more", slog.Int("addresses", len(l.ranks)))
		}
	}
	if len(add)+len(remove) == 0 {
		return
	}
	err = AttachedRanks{c}.changeService(ctx, of, add, remove)
	switch {
	case errors.Is(err, errNoChange):
	case err != nil:
		log.Warn("the ranks of a service do not change", slog.Any("err", err))
	default:
		log.Info("the ranks of a service change", slog.Int("added", len(add)),
			slog.Int("removed", len(remove)))
	}
}

// ranksOf returns the URLs of a service's ranks, and whether each is ready.
func (c *Controller) ranksOf(found attachedApp, url string) map[string]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]bool{}
	for _, a := range found.pools {
		for place, r := range attached(a) {
			if r.Service == url {
				u := c.core.units[rankUnitID(a, place.group, place.rank)]
				out[r.URL] = u != nil && u.m.Phase == state.Ready
			}
		}
	}
	return out
}

// errNoChange says that there is nothing to change: every new address is attached in another way.
var errNoChange = errors.New("no rank changes")

// changeService adds and removes ranks of a service, in one revision.
func (r AttachedRanks) changeService(ctx context.Context, of service, add []app.AttachRank, remove []string,
) error {
	_, err := r.change(ctx, of.app, func(st *state.State, found attachedApp) (rankEdit, error) {
		at := slices.IndexFunc(found.pools, func(a *app.Application) bool { return a.Service(of.URL) != nil })
		if at < 0 {
			return rankEdit{}, errNoChange
		}
		pool := found.pools[at]
		next := pool
		for _, url := range remove {
			if b, _, err := next.WithoutRank(app.RankRef{URL: url}); err == nil {
				next = b
			}
		}
		for _, rank := range add {
			if slices.ContainsFunc(found.pools, func(a *app.Application) bool {
				return a.CheckAttachable(&rank) != nil
			}) {
				continue
			}
			b, _, err := next.WithRank(rank, isNumberTaken(st, pool))
			if err != nil {
				break // it has as many ranks as there may be
			}
			next = b
		}
		if next == pool {
			return rankEdit{}, errNoChange
		}
		return rankEdit{pool: next}, nil
	})
	return err
}

// addService adds a service to the pool of its role.
func (r AttachedRanks) addService(ctx context.Context, name string, text []byte) (client.RankChange, error) {
	return r.change(ctx, name, func(_ *state.State, found attachedApp) (rankEdit, error) {
		s, err := app.ParseService(text, transferOf(found.pools[0]))
		if err != nil {
			return rankEdit{}, err
		}
		a, err := poolFor(found.named, s.Role)
		if err != nil {
			return rankEdit{}, err
		}
		for _, other := range found.pools {
			if other.Service(s.URL) != nil {
				a = other // which refuses it
			}
		}
		next, err := a.WithService(s)
		return rankEdit{pool: next, reply: newServiceChange(a, s.URL)}, err
	})
}

// removeService drains and detaches the ranks of a service, and follows it no longer.
func (r AttachedRanks) removeService(ctx context.Context, name, url string, deadline *time.Duration,
) (client.RankChange, error) {
	return r.change(ctx, name, func(_ *state.State, found attachedApp) (rankEdit, error) {
		at := slices.IndexFunc(found.named, func(a *app.Application) bool { return a.Service(url) != nil })
		if at < 0 {
			return rankEdit{}, problem.New(problem.NotFound, "there is no service %s in %s", url, found.Name).
				WithHint("dpserve get %s prints its file", found.Name)
		}
		a := found.named[at]
		c := rankEdit{reply: newServiceChange(a, url), grace: map[string]time.Duration{}}
		for place, rank := range attached(a) {
			if rank.Service == url && deadline != nil {
				c.grace[rankUnitID(a, place.group, place.rank)] = *deadline
			}
		}
		var err error
		c.pool, err = a.WithoutService(url)
		return c, err
	})
}

func newServiceChange(pool *app.Application, url string) client.RankChange {
	return client.RankChange{App: pool.Name, Pool: pool.Pool, URL: url, Service: true}
}

// next is serviceView.next of a service, with its note, and whether that has changed.
func (s *services) next(of service, l *lookup, attached map[string]bool,
) (add []app.AttachRank, remove []string, note string, isNew bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.views[of]
	if v == nil {
		v = &serviceView{}
		s.views[of] = v
	}
	was := v.note
	add, remove = v.next(l, attached)
	return add, remove, v.note, v.note != was
}

// forget drops what is known of services that are not there any more.
func (s *services) forget(found []service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.views, func(of service, _ *serviceView) bool { return !slices.Contains(found, of) })
}

// addNotes adds what people should know of services to the messages of their applications.
func (s *services) addNotes(apps []client.AppStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range slices.SortedFunc(maps.Keys(s.views), service.compare) {
		i := slices.IndexFunc(apps, func(a client.AppStatus) bool { return a.Name == of.app })
		if note := s.views[of].note; i >= 0 && note != "" {
			apps[i].Message = strings.TrimPrefix(apps[i].Message+"\n"+of.URL+": "+note, "\n")
		}
	}
}

// withServiceRanks returns pools, which come from a file, with the ranks of their services.
func withServiceRanks(st *state.State, pools []*app.Application) []*app.Application {
	out := slices.Clone(pools)
	for i, a := range pools {
		stored := st.Apps[a.Name]
		if stored == nil || len(a.Engine.Services) == 0 {
			continue
		}
		was, err := stored.Pools()
		if err != nil {
			continue
		}
		for _, old := range was {
			if old.Pool == a.Pool && old.Engine.Kind == app.KindAttach {
				out[i] = a.WithServiceRanksOf(old)
			}
		}
	}
	return out
}
