package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// application is a committed app, decoded once per revision.
type application struct {
	name     string
	revision uint64
	deleting bool
	pools    []*app.Application // nil if broken
	broken   string             // why the spec cannot be read
	units    []app.Unit         // wanted, of all pools
	launch   map[string]string

	rollOut rollOut
	running uint64 // the last revision that was RUNNING
	status  state.AppStatus
	busy    bool // ForgetApp is under way
	retryAt time.Time
}

// poolAt returns the index of a pool, -1 if the application does not have it.
func (a *application) poolAt(name string) int {
	return slices.IndexFunc(a.pools, func(p *app.Application) bool { return p.Pool == name })
}

// pool returns the pool with a name, nil if the application does not have it.
func (a *application) pool(name string) *app.Application {
	if i := a.poolAt(name); i >= 0 {
		return a.pools[i]
	}
	return nil
}

// spec returns what is the same in all pools, and of the rest the part of the pool that answers requests; nil
// if the application is broken.
func (a *application) spec() *app.Application {
	if a.pools == nil {
		return nil
	}
	return a.pools[len(a.pools)-1]
}

// countWanted counts the ranks of all pools.
func (a *application) countWanted() int {
	n := 0
	for _, p := range a.pools {
		n += p.NumReplicas
	}
	return n
}

func (a *application) isWanted(id string) bool {
	_, ok := a.launch[id]
	return ok && !a.deleting
}

func readApp(s *state.App) *application {
	a := &application{name: s.Name, revision: s.Revision}
	pools, err := s.Pools()
	if err != nil {
		a.broken = "the stored spec cannot be read: " + err.Error()
		return a
	}
	if err := a.setPools(pools); err != nil {
		a.broken = "the stored spec cannot be hashed: " + err.Error()
	}
	return a
}

func (a *application) setPools(pools []*app.Application) error {
	a.launch = map[string]string{}
	var all []app.Unit
	for _, p := range pools {
		units := p.Units()
		for i := range units {
			h, err := launchHash(p, &units[i])
			if err != nil {
				return err
			}
			a.launch[units[i].ID] = h
		}
		all = append(all, units...)
	}
	a.pools, a.units = pools, all
	return nil
}

// kvEventsOn stands for engine.kv_events in the launch spec of units whose engines publish KV events.
const kvEventsOn = "on"

// launchSpec is everything that a unit's engines and replicas are started with. Engines publish KV events
// only for a policy that reads them, so such a change of policy changes it.
func launchSpec(a *app.Application, u *app.Unit) *app.Application {
	l := *a
	l.Rollout = app.Rollout{}
	l.RoutePrefix, l.Routing, l.Timeouts, l.Retries = "", app.Routing{}, app.Timeouts{}, app.Retries{}
	l.MaxQueuedRequests, l.MaxQueuedTokens, l.GracefulShutdownTimeout = 0, 0, 0
	l.NumReplicas, l.NumGroups = 0, 0
	if a.Disaggregation != nil { // the ingresses decide about each request
		l.Disaggregation = &app.Disaggregation{Transfer: a.Disaggregation.Transfer}
	}
	l.Model.Aliases = nil
	l.Engine.KVEvents = app.KVEventsAuto // only its effect matters
	if engine.WantsEvents(a) {
		l.Engine.KVEvents = kvEventsOn
	}
	if l.DataParallel.Coupling == app.Independent {
		l.DataParallel.DPSize = 0 // an independent rank does not know the others
	}
	if l.Engine.Kind == app.KindAttach {
		l.Engine.Ranks, l.Engine.Services = attachedRanks(&a.Engine, u), nil
	}
	return &l
}

// launchHash is a hash of the unit's launch spec. A revision with the same hash, for example with another
// routing policy or one more group, restarts nothing.
func launchHash(a *app.Application, u *app.Unit) (string, error) {
	b, err := json.Marshal(launchSpec(a, u))
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8]), nil
}

// startsAs reports whether a unit that was started with a launch hash would be started the same way now. The
// core restarts units for which it is false, and a plan says so.
func (a *application) startsAs(id, launch string) bool { return a.launch[id] == launch }

// attachedRanks returns the engines of the unit's own ranks.
func attachedRanks(e *app.Engine, u *app.Unit) []app.AttachRank {
	var out []app.AttachRank
	for _, n := range u.Ranks {
		if a := e.Rank(u.Group, n); a != nil {
			r := *a
			r.Number = nil // the unit's name has it; whether it is written depends on other ranks
			out = append(out, r)
		}
	}
	return out
}
