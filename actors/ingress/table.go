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

// appRevision is one revision of an application, prepared for requests. Immutable.
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

// appRoute is an application in a route table.
type appRoute struct {
	*appRevision
	router *appRouter
}

// routeTable finds the application of a request. Immutable; an ingress replaces the whole table.
type routeTable struct {
	root     *routeScope            // applications under "/"
	prefixed map[string]*routeScope // route prefix → its application
	prefixes []string               // longest first
	routers  []*appRouter           // of every listed application
}

// routeScope is the set of applications behind one route prefix.
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

// seal sorts the names that answers list.
func (t *routeTable) seal() {
	for _, s := range t.prefixed {
		sort.Strings(s.names)
		sort.Strings(s.apps)
	}
	sort.Strings(t.root.names)
	sort.Strings(t.root.apps)
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

// newRevision decodes an application's specification; old is the revision before, nil for none.
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

// adaptersOf maps the names under which adapters are served (Model.ServedNames) to the adapters; nil without
// adapters.
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

// sameRouting reports whether the Router of old can be kept under s.
func sameRouting(old, s *appRevision) bool {
	return old != nil && reflect.DeepEqual(old.app.Routing, s.app.Routing)
}

// unitProgress returns the application's ready units with their epochs, and the number of wanted units that
// may still become ready. Units for which the leader finds no room, as w says, are neither; noRoom is the
// reason, "" if there are none.
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
