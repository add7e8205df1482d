package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine"
)

// publishes stands for engine.kv_events in the hash of units whose engines publish KV events.
const publishes = "on"

// launchHash is a hash of all that a unit's engines and replicas are started with. A revision that leaves it as it is, such as
// another routing policy or one group more, restarts nothing; but engines publish KV events only for a policy that reads them.
func launchHash(a *app.Application, u *app.Unit) (string, error) {
	l := *a
	l.RoutePrefix, l.Routing, l.Timeouts, l.Retries = "", app.Routing{}, app.Timeouts{}, app.Retries{}
	l.MaxQueuedRequests, l.GracefulShutdownTimeout = 0, 0
	l.NumReplicas, l.NumGroups = 0, 0
	l.Model.Aliases = nil
	l.Engine.KVEvents = app.KVEventsAuto // what the file says matters only by what comes of it
	if engine.WantsEvents(a) {
		l.Engine.KVEvents = publishes
	}
	if l.DataParallel.Coupling == app.Independent {
		l.DataParallel.DPSize = 0 // a rank of its own does not know the others
	}
	if l.Engine.Kind == app.KindAttach {
		l.Engine.Ranks = attached(&a.Engine, u)
	}
	b, err := json.Marshal(&l)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8]), nil
}

// attached are the engines of the unit's own ranks.
func attached(e *app.Engine, u *app.Unit) []app.AttachRank {
	var out []app.AttachRank
	for _, n := range u.Ranks {
		if a := e.Rank(u.Group, n); a != nil {
			r := *a
			r.Number = nil // the unit's name says it; whether it is written depends on the other ranks
			out = append(out, r)
		}
	}
	return out
}
