package controller

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	leaseLook = time.Second     // how often the leases are looked at while there are any
	lateLook  = 5 * time.Second // a look that is later: this process stood still, and heard of no renewal
)

// rankLeases are the times until which engines stay attached that register themselves (ttl_s). They are not
// in the state: a new leader gives each lease its whole time again.
type rankLeases struct {
	mu     sync.Mutex
	until  map[leasedRank]time.Time
	looked time.Time
}

// leasedRank names a rank by its application and its engine.
type leasedRank struct{ app, address string }

// renew gives a lease its whole time again.
func (l *rankLeases) renew(r leasedRank, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until[r] = until
}

// expired is a rank whose lease is over.
type expired struct {
	leasedRank
	ref app.RankRef
	ttl time.Duration
}

// look returns the ranks whose leases are over at now. has reports whether there are leases at all.
func (l *rankLeases) look(st *state.State, now time.Time) (over []expired, has bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	stoodStill := now.Sub(l.looked) > lateLook
	l.looked = now
	kept := map[leasedRank]time.Time{}
	for name, stored := range st.Apps {
		pools, err := stored.Pools()
		if err != nil || stored.Deleting {
			continue
		}
		for _, a := range pools {
			for place, r := range attached(a) {
				if r.TTLS <= 0 {
					continue
				}
				key, ttl := leasedRank{name, r.Address()}, time.Duration(r.TTLS*float64(time.Second))
				until, known := l.until[key]
				if !known || stoodStill {
					until = now.Add(ttl)
				}
				if !now.Before(until) {
					over = append(over, expired{key, app.RankRef{Group: place.group, Rank: place.rank}, ttl})
				}
				kept[key] = until
			}
		}
	}
	l.until = kept
	return over, len(kept) > 0
}

// followLeases removes the ranks whose engines have not registered again in time.
func (c *Controller) followLeases(ctx context.Context) {
	for {
		changed := c.cfg.Store.Changed() // Changed comes before State, so that no change in between is missed
		over, has := c.leases.look(c.cfg.Store.State(), c.cfg.Clock())
		for _, r := range over {
			c.endLease(ctx, r)
		}
		var next <-chan time.Time
		if has {
			next = time.After(leaseLook)
		}
		select {
		case <-changed:
		case <-next:
		case <-ctx.Done():
			return
		}
	}
}

// endLease removes a rank. If that is refused, as for the last rank of an application, the rank has another
// lease.
func (c *Controller) endLease(ctx context.Context, r expired) {
	log := c.cfg.Log.With(slog.String("component", "controller"), slog.String("app", r.app),
		slog.String("url", r.address), slog.Duration("ttl", r.ttl))
	pool, err := c.poolOfLease(r)
	if err == nil {
		_, err = AttachedRanks{c}.Remove(ctx, pool, r.ref, nil)
	}
	if err != nil {
		log.Warn("an engine has not registered again, and stays attached", slog.Any("err", err))
		c.leases.renew(r.leasedRank, c.cfg.Clock().Add(r.ttl))
		return
	}
	log.Info("an engine has not registered again: its rank leaves")
}

// poolOfLease names the pool that has the rank.
func (c *Controller) poolOfLease(r expired) (string, error) {
	found, err := findAttached(c.cfg.Store.State(), r.app)
	if err != nil {
		return "", err
	}
	for _, a := range found.pools {
		for _, rank := range attached(a) {
			if rank.Address() == r.address {
				return a.PoolName(), nil
			}
		}
	}
	return r.app, nil
}

// renew renews the lease of an engine that is attached with one. ok is false if rank describes no such
// engine.
func (r AttachedRanks) renew(name string, rank []byte) (reply client.RankChange, ok bool) {
	c := r.Controller
	found, err := findAttached(c.cfg.Store.State(), name)
	if err != nil {
		return reply, false
	}
	parsed, err := app.ParseRank(rank, found.pools[0].Engine.Family, transferOf(found.pools[0]))
	if err != nil || parsed.TTLS <= 0 {
		return reply, false
	}
	for _, a := range found.pools {
		for place, old := range attached(a) {
			if old.TTLS > 0 && old.Address() == parsed.Address() {
				ttl := time.Duration(parsed.TTLS * float64(time.Second))
				c.leases.renew(leasedRank{found.Name, old.Address()}, c.cfg.Clock().Add(ttl))
				reply = newRankChange(a, old, place.rank)
				reply.Revision = found.Revision
				return reply, true
			}
		}
	}
	return reply, false
}
