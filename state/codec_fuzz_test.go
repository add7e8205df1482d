package state

import (
	"testing"

	"github.com/stretchr/testify/require"
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
	for i, c := range []Command{putNode(node("a")), put(spec("x", "1")), grant("x", 1, 0, 0, 0),
		token("h", 2, 1)} {
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
