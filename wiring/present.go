package wiring

import (
	"encoding/json"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
)

// present is the applications' files as they are now, each decoded once per revision. Safe for concurrent use.
type present struct {
	store msg.Store

	mu   sync.Mutex
	apps map[string]*revision
}

type revision struct {
	number uint64
	app    *app.Application // nil: not readable
}

func newPresent(store msg.Store) *present {
	return &present{store: store, apps: map[string]*revision{}}
}

// app is the present file of an application; nil if there is none.
func (p *present) app(name string) *app.Application {
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
	p.apps[name] = &revision{number: a.Revision, app: spec}
	return spec
}
