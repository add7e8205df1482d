package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine"
)

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
