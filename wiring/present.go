package wiring

import (
	"encoding/json"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
)

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
