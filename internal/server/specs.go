package server

import (
	"encoding/json"
	"fmt"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// ParseApps reads app.yaml and applies every package's rules. The commands and the server both call it, so
// that they find the same faults.
func ParseApps(file string, text []byte) (*app.File, []app.Warning, error) {
	return app.Parse(file, text, routingRule)
}

// routingRule lets the policy check its own parameters.
func routingRule(a *app.Application) (string, error) {
	_, err := routing.New(a.Routing.Policy, a.Routing.Preset, a.Routing.Params)
	return "routing.params", err
}

// specCache decodes each application's spec once per revision. Safe for concurrent use.
type specCache struct {
	store msg.Store

	mu   sync.Mutex
	apps map[string]*decodedSpec
}

type decodedSpec struct {
	number uint64
	app    *app.Application // nil: not readable
}

func newSpecCache(store msg.Store) *specCache {
	return &specCache{store: store, apps: map[string]*decodedSpec{}}
}

// spec returns an application's current spec; nil if there is none.
func (p *specCache) spec(name string) *app.Application {
	a := p.store.State().Apps[name]
	p.mu.Lock()
	defer p.mu.Unlock()
	if a == nil {
		delete(p.apps, name)
		return nil
	}
	if r := p.apps[name]; r != nil && r.number == a.Revision {
		return r.app
	}
	spec := &app.Application{}
	if json.Unmarshal(a.Spec, spec) != nil {
		spec = nil
	}
	p.apps[name] = &decodedSpec{number: a.Revision, app: spec}
	return spec
}

func decodeSpec(s *state.App) (*app.Application, error) {
	a := new(app.Application)
	if err := json.Unmarshal(s.Spec, a); err != nil {
		return nil, fmt.Errorf("read the stored specification of %s: %w", s.Name, err)
	}
	return a, nil
}
