package state

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// pools are the two pools of the application pd, which serves the model m.
func pools(prefill, decode string) []AppSpec {
	p, d := spec("pd.prefill", prefill), spec("pd.decode", decode, "m")
	p.Names, p.Route = nil, ""
	return []AppSpec{p, d}
}

func (m *machine) revisions() map[string]uint64 {
	out := map[string]uint64{}
	for name, a := range m.Apps {
		out[name] = a.Revision
	}
	return out
}

// Both pools have one revision, whichever of them changes, and it goes on from that of the application with
// one pool.
func TestPoolsHaveOneRevision(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("pd", "1", "m")))
	m.must(put(spec("pd", "2", "m")))
	two := PutApps{
		Apps: pools("1", "1"), End: []string{"pd"}, Expect: map[string]uint64{"pd": 2, "pd.decode": 0},
	}
	r := m.must(Command{PutApps: &two})
	assert.Equal(t, map[string]uint64{"pd": 2, "pd.prefill": 3, "pd.decode": 3}, m.revisions())
	assert.Equal(t, map[string]uint64{"pd.prefill": 3, "pd.decode": 3}, r.Apps)
	assert.True(t, m.Apps["pd"].Deleting)
	assert.Len(t, FindApps(m.State, "pd"), 3)

	r = m.must(put(pools("1", "2")...))
	assert.Equal(t, map[string]uint64{"pd.prefill": 4, "pd.decode": 4}, r.Apps)
	r = m.must(put(pools("2", "2")[0]))
	assert.Equal(t, map[string]uint64{"pd.prefill": 5}, r.Apps)
	assert.Equal(t, uint64(5), m.Apps["pd.decode"].Revision)
	assert.Equal(t, m.Revision, m.Apps["pd.decode"].ChangedAt)
	before := m.Revision
	m.must(put(pools("2", "2")...))
	assert.Equal(t, before, m.Revision, "byte-equal is no change")

	m.must(Command{ForgetApp: &ForgetApp{Name: "pd"}})
	m.must(Command{PutApps: &PutApps{
		Apps: []AppSpec{spec("pd", "1", "m")},
		End:  []string{"pd.prefill", "pd.decode", "pd.gone"},
	}})
	assert.Equal(t, uint64(6), m.Apps["pd"].Revision)
	assert.True(t, m.Apps["pd.prefill"].Deleting && m.Apps["pd.decode"].Deleting)
}

func TestFindPools(t *testing.T) {
	m := newMachine(t)
	m.must(put(append(pools("1", "1"), spec("x", "1"))...))
	names := func(name string) []string {
		var out []string
		for _, a := range FindApps(m.State, name) {
			out = append(out, a.Name)
		}
		return out
	}
	assert.Equal(t, []string{"pd.prefill", "pd.decode"}, names("pd"))
	assert.Equal(t, []string{"pd.decode"}, names("pd.decode"))
	assert.Equal(t, []string{"x"}, names("x"))
	assert.Empty(t, names("y"))
}

func TestEndedApps(t *testing.T) {
	m := newMachine(t)
	m.must(put(append(pools("1", "1"), spec("x", "1"))...))
	other := pools("1", "1")[0]
	other.Name = "other.prefill" // two prefill pools have no route that they could share
	m.must(put(other))
	err := m.refused(put(spec("z", "1", "m")), ErrNameTaken, problem.Conflict)
	require.ErrorContains(t, err, `applications "pd" and "z" both serve the model "m"`)
	m.refused(Command{PutApps: &PutApps{Apps: pools("2", "2"), End: []string{"pd.decode"}}}, ErrBadCommand,
		problem.InvalidArgument)
	m.refused(Command{PutApps: &PutApps{
		End: []string{"pd.decode"}, Expect: map[string]uint64{"pd.decode": 7},
	}}, ErrStaleRevision, problem.Conflict)
	end := Command{PutApps: &PutApps{End: []string{"pd.prefill", "pd.decode"}}}
	r := m.must(end)
	assert.Equal(t, m.Revision, r.Revision)
	assert.True(t, m.Apps["pd.prefill"].Deleting && m.Apps["pd.decode"].Deleting)
	assert.False(t, m.Apps["x"].Deleting)
	before := m.Revision
	m.must(end)
	assert.Equal(t, before, m.Revision, "a second command changes nothing")
	m.must(put(spec("y", "1", "m")))
	m.must(Command{ForgetApp: &ForgetApp{Name: "pd.prefill"}})
	m.must(Command{ForgetApp: &ForgetApp{Name: "pd.decode"}})
	assert.Empty(t, FindApps(m.State, "pd"))
}
