package wiring

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

type fixedStore struct{ st *state.State }

func (f *fixedStore) State() *state.State      { return f.st }
func (f *fixedStore) Changed() <-chan struct{} { return nil }

func TestSpecCacheFollowsTheRevision(t *testing.T) {
	spec := func(policy string) []byte {
		b, err := json.Marshal(app.Application{Routing: app.Routing{Policy: policy}})
		require.NoError(t, err)
		return b
	}
	store := &fixedStore{st: &state.State{Apps: map[string]*state.App{"a": {Revision: 1, Spec: spec("kv")}}}}
	p := newSpecCache(store)
	first := p.spec("a")
	require.NotNil(t, first)
	assert.Equal(t, "kv", first.Routing.Policy)
	assert.Same(t, first, p.spec("a"), "decoded once")
	store.st.Apps["a"] = &state.App{Revision: 2, Spec: spec("scoring")}
	assert.Equal(t, "scoring", p.spec("a").Routing.Policy)
	store.st.Apps["a"] = &state.App{Revision: 3, Spec: []byte("{")}
	assert.Nil(t, p.spec("a"))
	assert.Nil(t, p.spec("b"))
}
