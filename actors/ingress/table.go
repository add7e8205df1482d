package ingress

import (
	"encoding/json"
	"reflect"
	"sort"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// appRevision is one revision of an application, ready for use by requests. Immutable.
type appRevision struct {
	app        *app.Application
	revision   uint64
	created    int64 // unix seconds when this ingress first saw the application; shown by /v1/models
	names      []string
	adapters   map[string]string // served name → LoRA adapter
	attempts   int
	queue      time.Duration
	firstToken time.Duration
	between    time.Duration
}

// appRoute is an application in a table.
type appRoute struct {
	*appRevision
	router *appRouter
}

// routeTable finds the application of a request. Immutable; an ingress swaps whole tables.
type routeTable struct {
	root     *routeScope            // applications under "/"
	prefixed map[string]*routeScope // route prefix → its application
	prefixes []string               // longest first
	routers  []*appRouter           // of every listed application
}

// routeScope is what one route prefix reaches.
type routeScope struct {
	models map[string]*appRoute // by every served name
	names  []string             // sorted; listed by /v1/models and in the answer to an unknown model
	only   *appRoute            // the application, if there is exactly one
	apps   []string             // names of the applications
}

func newRouteScope() *routeScope { return &routeScope{models: map[string]*appRoute{}} }

func (s *routeScope) add(e *appRoute) {
	for _, name := range e.names {
		s.models[name] = e
		s.names = append(s.names, name)
	}
	s.apps = append(s.apps, e.app.Name)
	s.only = e
	if len(s.apps) > 1 {
		s.only = nil
	}
}

func newRouteTable() *routeTable {
	return &routeTable{root: newRouteScope(), prefixed: map[string]*routeScope{}}
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

// seal sorts what the answers list.
func (t *routeTable) seal() {
	for _, s := range t.prefixed {
		sort.Strings(s.names)
		sort.Strings(s.apps)
	}
	sort.Strings(t.root.names)
	sort.Strings(t.root.apps)
	sort.Slice(t.prefixes, func(i, j int) bool { return len(t.prefixes[i]) > len(t.prefixes[j]) })
}

// routes gives the names of the applications behind each route prefix.
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

// split finds the scope of a path and what is left of it behind the route prefix.
func (t *routeTable) split(path string) (*routeScope, string) {
	for _, p := range t.prefixes {
		if rest, ok := strings.CutPrefix(path, p); ok && strings.HasPrefix(rest, "/") {
			return t.prefixed[p], rest
		}
	}
	return t.root, path
}

// newRevision reads an application's specification; old is the one it replaces, nil for none.
func (in *Ingress) newRevision(a *state.App, old *appRevision) (*appRevision, error) {
	spec := &app.Application{}
	if err := json.Unmarshal(a.Spec, spec); err != nil {
		return nil, err
	}
	s := &appRevision{
		app: spec, revision: a.Revision, created: time.Now().Unix(), names: a.Names,
		attempts:   spec.Retries.Attempts,
		queue:      app.Seconds(spec.Timeouts.QueueS),
		firstToken: app.Seconds(spec.Timeouts.FirstTokenS),
		between:    app.Seconds(spec.Timeouts.BetweenTokensS),
	}
	if old != nil {
		s.created = old.created
	}
	if len(s.names) == 0 {
		s.names = spec.Model.ServedNames()
	}
	s.adapters = adaptersOf(&spec.Model)
	if s.attempts <= 0 {
		s.attempts = defaultAttempts
	}
	orDefault(&s.queue, in.timers.Queue)
	orDefault(&s.firstToken, in.timers.FirstToken)
	orDefault(&s.between, in.timers.BetweenToken)
	return s, nil
}

// adaptersOf finds an adapter by the names under which it is served (Model.ServedNames); nil without adapters.
func adaptersOf(m *app.Model) map[string]string {
	if len(m.Adapters) == 0 {
		return nil
	}
	out := make(map[string]string, 2*len(m.Adapters))
	for _, a := range m.Adapters {
		out[a.ID], out[m.ID+":"+a.ID] = a.ID, a.ID
	}
	return out
}

// sameRouting says that a Router made for old goes on under s.
func sameRouting(old, s *appRevision) bool {
	return old != nil && reflect.DeepEqual(old.app.Routing, s.app.Routing)
}

// unitProgress of an application's wanted units, as the state tells it: the ready ones with their epochs, and how many may
// still come up. Those that wait for room, as the leader says in w, are neither; noRoom is why, "" if there
// is none.
func unitProgress(st *state.State, spec *app.Application, deleting bool, w *msg.Waiting) (
	ready map[string]uint64, onTheWay int, noRoom string,
) {
	ready = map[string]uint64{}
	for id, u := range st.Units {
		if u.App == spec.Name && u.Phase == state.Ready && st.Epochs[id] <= u.Epoch && !hasNoRoom(st, w, id) {
			ready[id] = u.Epoch
		}
	}
	if deleting {
		return ready, 0, ""
	}
	for _, u := range spec.Units() {
		have := st.Units[u.ID]
		switch {
		case hasNoRoom(st, w, u.ID):
			noRoom = w.Reason
		case have == nil || have.Phase != state.Ready && have.Phase != state.Failed:
			onTheWay++
		}
	}
	return ready, onTheWay, noRoom
}
