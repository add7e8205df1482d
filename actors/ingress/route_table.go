package ingress

import (
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

// appRevision is one revision of an application, prepared for requests. Immutable.
type appRevision struct {
	app        *app.Application
	revision   uint64
	created    int64 // unix seconds when this ingress first saw the application; shown by /v1/models
	names      []string
	nameValue  []string          // header value of answers: the application's name; shared by all answers
	ranks      []routing.RankID  // ascending
	adapters   map[string]string // served name → LoRA adapter
	attempts   int
	queue      time.Duration
	firstToken time.Duration
	between    time.Duration
	keepalive  time.Duration // 0: none
	continues  bool          // streams go on from another rank …
	goesOn     *goesOn       // … if the engines can
}

// wants reports whether the rank is one of the application's.
func (a *appRevision) wants(id routing.RankID) bool {
	_, found := slices.BinarySearch(a.ranks, id)
	return found
}

// rankRange names the application's first and last rank.
func (a *appRevision) rankRange() string {
	switch n := len(a.ranks); n {
	case 0:
		return "none"
	case 1:
		return a.ranks[0].String()
	default:
		return a.ranks[0].String() + " to " + a.ranks[n-1].String()
	}
}

// appRoute is an application in a route table.
type appRoute struct {
	*appRevision
	router *appRouter
	pair   *pairApp // nil: it has one pool
}

// routeTable finds the application of a request. Immutable; an ingress replaces the whole table.
type routeTable struct {
	root     *routeScope            // applications under "/"
	prefixed map[string]*routeScope // route prefix → its application
	prefixes []string               // longest first
	routers  []*appRouter           // of every listed application
	pairs    map[string]*pairApp    // by the names of applications with two pools
}

// routeScope is the set of applications behind one route prefix.
type routeScope struct {
	models map[string]*appRoute // by every served name
	names  []string             // sorted; listed by /v1/models and in the answer to an unknown model
	only   *appRoute            // the application, if there is exactly one
	apps   []string             // names of the applications
	routes []*appRoute          // of the applications, by name
}

func newRouteScope() *routeScope { return &routeScope{models: map[string]*appRoute{}} }

func (s *routeScope) add(e *appRoute) {
	for _, name := range e.names {
		s.models[name] = e
		s.names = append(s.names, name)
	}
	s.apps, s.routes = append(s.apps, e.app.Name), append(s.routes, e)
	s.only = e
	if len(s.apps) > 1 {
		s.only = nil
	}
}

func (s *routeScope) sort() {
	sort.Strings(s.names)
	sort.Strings(s.apps)
	sort.Slice(s.routes, func(i, j int) bool { return s.routes[i].app.Name < s.routes[j].app.Name })
}

func newRouteTable() *routeTable {
	return &routeTable{
		root: newRouteScope(), prefixed: map[string]*routeScope{}, pairs: map[string]*pairApp{},
	}
}

func (t *routeTable) add(e *appRoute) {
	t.routers = append(t.routers, e.router)
	prefix := strings.TrimSuffix(e.app.RoutePrefix, "/")
	if prefix == "" {
		t.root.add(e)
		return
	}
	if t.prefixed[prefix] == nil {
		t.prefixed[prefix] = newRouteScope()
		t.prefixes = append(t.prefixes, prefix)
	}
	t.prefixed[prefix].add(e)
}

// seal sorts the names that answers list.
func (t *routeTable) seal() {
	for _, s := range t.prefixed {
		s.sort()
	}
	t.root.sort()
	sort.Slice(t.prefixes, func(i, j int) bool { return len(t.prefixes[i]) > len(t.prefixes[j]) })
}

// routes returns the names of the applications behind each route prefix.
func (t *routeTable) routes() map[string]string {
	out := make(map[string]string, len(t.prefixed)+1)
	if len(t.root.apps) > 0 {
		out["/"] = strings.Join(t.root.apps, ",")
	}
	for prefix, s := range t.prefixed {
		out[prefix] = strings.Join(s.apps, ",")
	}
	return out
}

// split returns the scope of a path and the rest of the path after the route prefix.
func (t *routeTable) split(path string) (*routeScope, string) {
	for _, p := range t.prefixes {
		if rest, ok := strings.CutPrefix(path, p); ok && strings.HasPrefix(rest, "/") {
			return t.prefixed[p], rest
		}
	}
	return t.root, path
}
