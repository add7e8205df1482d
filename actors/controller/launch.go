package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/dpserve/dpserve/app"
)

// launchHash is a hash of all that a unit's engines and replicas are started with. A revision that leaves it as it is, such as
// another routing policy or one group more, restarts nothing.
func launchHash(a *app.Application, u *app.Unit) (string, error) {
	l := *a
	l.RoutePrefix, l.Routing, l.Timeouts, l.Retries = "", app.Routing{}, app.Timeouts{}, app.Retries{}
	l.MaxQueuedRequests, l.GracefulShutdownTimeout = 0, 0
	l.NumReplicas, l.NumGroups = 0, 0
	l.Model.Aliases = nil
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
	for _, r := range u.Ranks {
		if a := e.Rank(u.Group, r); a != nil {
			out = append(out, *a)
		}
	}
	return out
}
