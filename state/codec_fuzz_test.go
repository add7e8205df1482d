package state

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzDecodeCommandNeverPanicsAndApplies: any bytes are an error or a command that Apply survives and that encodes again.
func FuzzDecodeCommandNeverPanicsAndApplies(f *testing.F) {
	for _, c := range []Command{
		put(spec("x", "1")), grant("x", 1, 0, 0, 0),
		{Release: ref("x/0/0", 1)},
		{UnitFailed: ref("x/0/0", 1)},
		{Init: &Init{Cluster: "c"}},
		{DeleteApp: &DeleteApp{Name: "x"}},
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
		s := New()
		first, second := put(spec("x", "1")), grant("x", 1, 0, 0, 0)
		_, err = s.Apply(1, &first)
		require.NoError(t, err)
		_, err = s.Apply(2, &second)
		require.NoError(t, err)
		_, _ = s.Apply(3, c)
		checkState(t, s)
		_, err = EncodeCommand(c)
		require.NoError(t, err)
	})
}

// FuzzDecodeSnapshotIsWholeOrRefused: any bytes are an error or a state that encodes and decodes to itself.
func FuzzDecodeSnapshotIsWholeOrRefused(f *testing.F) {
	s := New()
	first, second := put(spec("x", "1")), grant("x", 1, 0, 0, 0)
	_, _ = s.Apply(1, &first)
	_, _ = s.Apply(2, &second)
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
