package state

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// A unit has the name of its pool, and a pool of its own has ranks of its own.
func TestGrantsOfPools(t *testing.T) {
	m := newMachine(t)
	m.must(put(AppSpec{
		Name: "pd", Spec: json.RawMessage(`[{"name":"pd","pool":"prefill"},{"name":"pd","pool":"decode"}]`),
	}))
	for i, pool := range []string{app.PoolPrefill, app.PoolDecode} {
		c := grant("pd", 1, 0, i, 0)
		c.GrantGroup.Pool = pool
		m.refused(c, ErrBadCommand, problem.InvalidArgument)
		c.GrantGroup.Units[0] = unitGrant("pd."+pool, 0, i, 0)
		m.must(c)
		u := m.Units["pd."+pool+"/0/0"]
		require.NotNil(t, u)
		assert.Equal(t, []string{"pd", pool, "pd." + pool}, []string{u.App, u.Pool, u.PoolName()})
		a, p := m.Pool("pd." + pool)
		require.NotNil(t, p)
		assert.Equal(t, m.Apps["pd"], a)
		assert.Equal(t, pool, p.Pool)
		m.must(Command{UnitReady: ref(u.ID, 1)})
	}
	a, p := m.Pool("pd")
	assert.True(t, a == nil && p == nil)

	m.must(Command{DeleteApp: &DeleteApp{Name: "pd"}})
	m.refused(Command{ForgetApp: &ForgetApp{Name: "pd"}}, ErrUnitsLeft, problem.Conflict)
	m.must(Command{Release: ref("pd.prefill/0/0", 1)})
	m.must(Command{Release: ref("pd.decode/0/0", 1)})
	m.must(Command{ForgetApp: &ForgetApp{Name: "pd"}})
	assert.Empty(t, m.Served)
}
