package engine

import (
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/routing"
)

// WantsEvents says whether the engines of a should publish KV events: its policy reads the KV index, its file does not forbid
// them, and its kind can.
func WantsEvents(a *app.Application) bool {
	if a.Engine.KVEvents == app.KVEventsOff || a.Engine.Family == app.FamilyOpenAI {
		return false
	}
	p, err := routing.New(a.Routing.Policy, a.Routing.Preset, a.Routing.Params)
	if err != nil {
		return false // refused when it was deployed
	}
	needs := routing.NeedsOf(p)
	return needs.Hits && !needs.Approximate
}
