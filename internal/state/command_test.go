package state

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

// FuzzDecodeCommandNeverPanicsAndApplies: any bytes are an error or a command that Apply survives and that
// encodes again.
func FuzzDecodeCommandNeverPanicsAndApplies(f *testing.F) {
	for _, c := range []Command{
		put(spec("x", "1")), grant("x", 1, 0, 0, 0),
		{Release: ref("x/0/0", 1)},
		{UnitFailed: ref("x/0/0", 1)},
		{Init: &Init{Cluster: "c"}},
		{DeleteApp: &DeleteApp{Name: "x"}},
		putNode(node("a")), putNode(node("b", RoleWorker)),
		{NodeLost: nodeRef("a")},
		{NodeBack: nodeRef("a")},
		{DrainNode: &DrainNode{Node: "a", By: 1}},
		{RemoveNode: &RemoveNode{Node: "a"}},
		token("h", 2, 1), use("h", "u", 1),
	} {
		b, err := EncodeCommand(&c)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Add([]byte(`{"later":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeCommand(b)
		if err != nil {
			return
		}
		m := withNodes(t, "a")
		m.must(put(spec("x", "1")))
		m.must(grant("x", 1, 0, 0, 0))
		m.must(token("h", 2, 1))
		_, _ = m.Apply(5, c)
		checkState(t, m.State)
		_, err = EncodeCommand(c)
		require.NoError(t, err)
	})
}

// FuzzDecodeSnapshotIsWholeOrRefused: any bytes are an error or a state that encodes and decodes to itself.
func FuzzDecodeSnapshotIsWholeOrRefused(f *testing.F) {
	s := New()
	for i, c := range []Command{
		putNode(node("a")), put(spec("x", "1")), grant("x", 1, 0, 0, 0),
		token("h", 2, 1),
	} {
		_, err := s.Apply(uint64(i+1), &c)
		require.NoError(f, err)
	}
	b, err := s.Encode()
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte(`{"apps":{},"units":{},"epochs":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Decode(b)
		if err != nil {
			return
		}
		out, err := s.Encode()
		require.NoError(t, err)
		again, err := Decode(out)
		require.NoError(t, err)
		twice, err := again.Encode()
		require.NoError(t, err)
		require.JSONEq(t, string(out), string(twice))
	})
}

// leveled is a control node of a version with a level; 0 = one that says none.
func leveled(id string, level int, roles ...Role) *Node {
	return &Node{ID: id, UID: "uid-" + id, Roles: append(roles, RoleIngress), Level: level}
}

func TestControlLevelIsThatOfTheOldestControlNode(t *testing.T) {
	s := New()
	assert.Equal(t, Level, s.ControlLevel(), "no control node is known yet")
	s.Nodes["w"] = leveled("w", 0, RoleWorker)
	s.Nodes["a"] = leveled("a", Level+3, RoleControl)
	assert.Equal(t, Level, s.ControlLevel(),
		"this version proposes nothing above its own level; workers do not read the log")
	s.Nodes["b"] = leveled("b", 0, RoleControl)
	s.Nodes["b"].Lost = true
	assert.Equal(t, 1, s.ControlLevel(), "a lost node comes back to the log")
	c, err := s.Readable(Command{DeleteApp: &DeleteApp{Name: "x"}})
	require.NoError(t, err)
	assert.Equal(t, Command{DeleteApp: &DeleteApp{Name: "x"}}, c)
}

// TestCopyOfANewerStateIsRead: a follower reads the known fields and names an unknown one. A node of
// consensus refuses the state.
func TestCopyOfANewerStateIsRead(t *testing.T) {
	s := New()
	s.Cluster, s.Index = "alpha", 7
	s.Nodes["a"] = leveled("a", 1, RoleControl)
	plain, err := s.Encode()
	require.NoError(t, err)
	got, newer, err := DecodeCopy(plain)
	require.NoError(t, err)
	assert.Empty(t, newer)
	assert.Equal(t, s, got)
	for _, in := range []string{
		strings.Replace(string(plain), `"cluster"`, `"quotas":{"demo":3},"cluster"`, 1),
		strings.Replace(string(plain), `"uid"`, `"lift":[1,2],"uid"`, 1),
	} {
		_, err := Decode([]byte(in))
		require.ErrorIs(t, err, ErrNewer, in)
		got, newer, err := DecodeCopy([]byte(in))
		require.NoError(t, err, in)
		assert.Contains(t, newer, "unknown field")
		assert.Equal(t, s, got)
	}
	for _, in := range []string{``, `{}x`, `{"apps":null,"later":1}`, `{"apps":7,"later":1}`} {
		_, _, err := DecodeCopy([]byte(in))
		require.Error(t, err, in)
		require.NotErrorIs(t, err, ErrNewer, in)
	}
}

// The spec is read once: by Apply, or with the snapshot. Its bytes stay as they were proposed.
func TestApplicationIsReadOncePerRevision(t *testing.T) {
	s := New()
	put := func(spec string) *App {
		_, err := s.Apply(s.Index+1, &Command{PutApps: &PutApps{Apps: []AppSpec{
			{Name: "a", Spec: []byte(spec), Names: []string{"m"}},
		}}})
		require.NoError(t, err)
		return s.Apps["a"]
	}
	old := put(`[{"routing":{"policy":"kv"},"of_next_version":1}]`)
	first, err := old.Pools()
	require.NoError(t, err)
	assert.Equal(t, "kv", first[0].Routing.Policy)
	assert.Equal(t, app.Default().Timeouts, first[0].Timeouts, "a key that an earlier version did not have")
	again, err := s.Clone().Apps["a"].Pools()
	require.NoError(t, err)
	assert.Same(t, first[0], again[0])
	next, err := put(`[{"routing":{"policy":"scoring"}}]`).Pools()
	require.NoError(t, err)
	assert.Equal(t, "scoring", next[0].Routing.Policy)

	data, err := s.Encode()
	require.NoError(t, err)
	restored, err := Decode(data)
	require.NoError(t, err)
	assert.Equal(t, s.Apps, restored.Apps)
	_, err = put(`[{"routing":7}]`).Pools()
	require.Error(t, err, "the state keeps a spec that this version cannot read")
	_, err = (&App{Spec: []byte(`[{"name":"by hand"}]`)}).Pools()
	require.NoError(t, err)
}
