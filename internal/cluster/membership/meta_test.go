package membership_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
)

func TestMetaSurvivesTheWire(t *testing.T) {
	text := rapid.StringN(0, 40, 60)
	rapid.Check(t, func(r *rapid.T) {
		m := membership.Meta{
			Cluster: rapid.StringN(1, 30, 60).Draw(r, "cluster"),
			UID:     rapid.StringN(1, 30, 60).Draw(r, "uid"), Address: text.Draw(r, "address"),
			Version: text.Draw(r, "version"), Zone: text.Draw(r, "zone"),
			Roles: rapid.SliceOfN(rapid.StringN(1, 10, 20), 1, 5).Draw(r, "roles"),
		}
		b, err := m.Encode()
		require.NoError(r, err)
		assert.LessOrEqual(r, len(b), 510)
		got, err := membership.DecodeMeta(b)
		require.NoError(r, err)
		assert.Equal(r, m, got)
		got, err = membership.DecodeMeta(append(b, 200, 3, 'n', 'e', 'w'))
		require.NoError(r, err, "a newer version may add fields")
		assert.Equal(r, m, got)
	})
}

func TestMetaIsBounded(t *testing.T) {
	ok := membership.Meta{Cluster: "c", UID: "u"}
	for name, m := range map[string]membership.Meta{
		"long field":  {Cluster: "c", UID: "u", Zone: strings.Repeat("z", 256)},
		"long in all": {Cluster: "c", UID: strings.Repeat("u", 255), Zone: strings.Repeat("z", 255)},
		"many roles":  {Cluster: "c", UID: "u", Roles: strings.Split(strings.Repeat("r,", 20), ",")},
	} {
		_, err := m.Encode()
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err), name)
	}
	b, err := ok.Encode()
	require.NoError(t, err)
	for i := range b {
		_, err := membership.DecodeMeta(b[:i])
		if i < 7 { // cluster and UID are needed, the rest is not
			require.Error(t, err, "%d bytes", i)
		}
	}
	_, err = membership.DecodeMeta(append([]byte{9}, b[1:]...))
	require.Error(t, err, "another format")
	_, err = membership.DecodeMeta(append(b, make([]byte, 600)...))
	require.Error(t, err)
}

func TestNames(t *testing.T) {
	node, incarnation, err := membership.SplitName("a#b#ff")
	require.NoError(t, err)
	assert.Equal(t, "a#b", node)
	assert.EqualValues(t, 255, incarnation)
	for _, bad := range []string{"", "a", "#1", "a#", "a#xyz"} {
		_, _, err := membership.SplitName(bad)
		require.Error(t, err, bad)
	}
}

func FuzzMeta(f *testing.F) {
	b, err := membership.Meta{Cluster: "c", UID: "u", Roles: []string{"control"}}.Encode()
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte{1, 1, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := membership.DecodeMeta(b)
		if err != nil {
			assert.Equal(t, membership.Meta{}, m)
			return
		}
		again, err := m.Encode()
		if err != nil {
			return // well-formed, but longer in our own words: a role list with empty fields, say
		}
		got, err := membership.DecodeMeta(again)
		require.NoError(t, err)
		assert.Equal(t, m.UID, got.UID)
		assert.Equal(t, m.Address, got.Address)
	})
}
