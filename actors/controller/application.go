package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// application is a committed app, decoded once per revision.
type application struct {
	name     string
	revision uint64
	deleting bool
	spec     *app.Application // nil if broken
	broken   string           // why the spec cannot be read
	units    []app.Unit       // wanted
	launch   map[string]string

	running    uint64 // the last revision that was RUNNING
	status     state.AppStatus
	lastCounts *RanksEffect // the last emitted counts; nil = none yet
	busy       bool         // ForgetApp is under way
	retryAt    time.Time
}

func (a *application) isWanted(id string) bool {
	_, ok := a.launch[id]
	return ok && !a.deleting
}

func readApp(s *state.App) *application {
	a := &application{name: s.Name, revision: s.Revision, launch: map[string]string{}}
	spec, err := s.Application()
	if err != nil {
		a.broken = "the stored spec cannot be read: " + err.Error()
		return a
	}
	if err := a.setSpec(spec); err != nil {
		a.broken = "the stored spec cannot be hashed: " + err.Error()
	}
	return a
}

// wantedApp is an application as a deploy wants it.
func wantedApp(spec *app.Application) (*application, error) {
	a := &application{name: spec.Name, launch: map[string]string{}}
	if err := a.setSpec(spec); err != nil {
		return nil, problem.New(problem.InvalidArgument, "deploy %s: %w", spec.Name, err)
	}
	return a, nil
}

func (a *application) setSpec(spec *app.Application) error {
	units := spec.Units()
	for i := range units {
		h, err := launchHash(spec, &units[i])
		if err != nil {
			return err
		}
		a.launch[units[i].ID] = h
	}
	a.spec, a.units = spec, units
	return nil
}

// kvEventsOn stands for engine.kv_events in the launch spec of units whose engines publish KV events.
const kvEventsOn = "on"

// launchSpec is everything that a unit's engines and replicas are started with. Engines publish KV events
// only for a policy that reads them, so such a change of policy changes it.
func launchSpec(a *app.Application, u *app.Unit) *app.Application {
	l := *a
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
		l.Engine.Ranks = attachedRanks(&a.Engine, u)
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
