package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
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

// isWanted reports whether the app wants the unit.
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

// kvEventsOn stands for engine.kv_events in the hash of units whose engines publish KV events.
const kvEventsOn = "on"

// launchHash is a hash of everything that a unit's engines and replicas are started with. A revision with the
// same hash, for example with another routing policy or one more group, restarts nothing. Engines publish KV
// events only for a policy that reads them, so such a change of policy changes the hash.
func launchHash(a *app.Application, u *app.Unit) (string, error) {
	l := *a
	l.RoutePrefix, l.Routing, l.Timeouts, l.Retries = "", app.Routing{}, app.Timeouts{}, app.Retries{}
	l.MaxQueuedRequests, l.GracefulShutdownTimeout = 0, 0
	l.NumReplicas, l.NumGroups = 0, 0
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
	b, err := json.Marshal(&l)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8]), nil
}

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
