package ingress

import (
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

// adapterRanks are the ranks that have each LoRA adapter, ascending. Immutable.
type adapterRanks map[string][]routing.RankID

// setAdapters stores which adapters a rank's engine has. The caller holds mu.
func (ar *appRouter) setAdapters(r *rank, names []string) {
	if slices.Equal(r.adapters, names) {
		return
	}
	r.adapters = slices.Clone(names) // those of a record are valid during Deliver only
	ar.listAdapters()
}

// listAdapters publishes which ranks have which adapter. The caller holds mu.
func (ar *appRouter) listAdapters() {
	has := adapterRanks{}
	for id, r := range ar.ranks {
		for _, name := range r.adapters {
			has[name] = append(has[name], id)
		}
	}
	for _, ids := range has {
		slices.Sort(ids)
	}
	ar.adapters.Store(&has)
	ar.queue.room() // what waits may find another rank
}

// hasAdapters is which ranks have which adapter; nil before any rank has one.
func (ar *appRouter) hasAdapters() adapterRanks {
	if has := ar.adapters.Load(); has != nil {
		return *has
	}
	return nil
}

// adapterOf is the LoRA adapter that a model name selects; "" for none. A client may write the adapter's
// name, or BASE:ADAPTER with any name of the application's model. What the file names needs no rank.
func (ar *appRouter) adapterOf(model []byte) string {
	spec := ar.revision.Load()
	if spec == nil || len(model) == 0 {
		return ""
	}
	if name := spec.adapters[string(model)]; name != "" {
		return name
	}
	has, m := ar.hasAdapters(), &spec.app.Model
	if len(has) == 0 || string(model) == m.ID || slices.Contains(m.Aliases, string(model)) {
		return ""
	}
	if has[string(model)] != nil {
		return string(model)
	}
	for i := -1; i < len(m.Aliases); i++ {
		base := m.ID
		if i >= 0 {
			base = m.Aliases[i]
		}
		if rest, ok := strings.CutPrefix(string(model), base+":"); ok && has[rest] != nil {
			return rest
		}
	}
	return ""
}

// ranksWith are the ranks that have an adapter, for routing.Request.Only.
func (ar *appRouter) ranksWith(adapter string) []routing.RankID {
	if adapter == "" {
		return nil
	}
	if ids := ar.hasAdapters()[adapter]; ids != nil {
		return ids
	}
	return []routing.RankID{}
}

// isEverywhere reports whether a request with an adapter ("": none) may go to every rank.
func (ar *appRouter) isEverywhere(adapter string) bool {
	if adapter == "" {
		return true
	}
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return len(ar.hasAdapters()[adapter]) == len(ar.ranks)
}

// isNowhere reports whether a model name selects an adapter of the application's file that no engine has any
// more. While no rank is known, its engines may have it.
func (ar *appRouter) isNowhere(model string) bool {
	name := ar.adapterOf([]byte(model))
	if name == "" || ar.hasAdapters()[name] != nil {
		return false
	}
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return len(ar.ranks) > 0
}

// engineName is how the application's engines call an adapter; "": as the client has written it. SGLang's
// read it behind a colon, after any name of the model.
func (s *appRevision) engineName(adapter, client string) string {
	name := adapter
	if s.app.Engine.Kind == app.KindSGLang || s.app.Engine.Family == app.FamilySGLang {
		base, _, _ := strings.Cut(s.app.Model.ID, ":")
		name = base + ":" + adapter
	}
	if adapter == "" || name == client {
		return ""
	}
	return name
}

// findAdapter returns the application of which an engine has the adapter that a name selects; nil if there is
// none. Of several, it is the first by name.
func (s *routeScope) findAdapter(model string) *appRoute {
	for _, e := range s.routes {
		if e.router.adapterOf([]byte(model)) != "" {
			return e
		}
	}
	return nil
}

// loadedAdapters are the adapters that engines have and no file names, sorted.
func (s *routeScope) loadedAdapters() []string {
	var out []string
	for _, e := range s.routes {
		for name := range e.router.hasAdapters() {
			if s.models[name] == nil {
				out = append(out, name)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
