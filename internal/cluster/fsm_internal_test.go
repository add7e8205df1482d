package cluster

import (
	"bytes"
	"io"
	"testing"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/state"
)

func logEntry(t *testing.T, index uint64, c state.Command) *raft.Log {
	t.Helper()
	b, err := state.EncodeCommand(&c)
	require.NoError(t, err)
	return &raft.Log{Index: index, Type: raft.LogCommand, Data: b}
}

// TestNothingIsAppliedBehindAnUnreadableEntry: earlier entries of the same batch are published, later ones
// change nothing.
func TestNothingIsAppliedBehindAnUnreadableEntry(t *testing.T) {
	t.Parallel()
	f := newFSM()
	var ended []error
	f.startRun(func(err error) { ended = append(ended, err) })
	token := func(hash string) state.Command {
		return state.Command{PutToken: &state.Token{Hash: hash, Expires: 1, Uses: 1}}
	}
	out := f.ApplyBatch([]*raft.Log{
		logEntry(t, 1, state.Command{Init: &state.Init{Cluster: "c"}}),
		logEntry(t, 2, token("before")),
		{Index: 3, Type: raft.LogCommand, Data: []byte(`{"quota":{"app":"demo","limit":3}}`)},
		logEntry(t, 4, token("behind")),
	})
	for i, ok := range []bool{true, true, false, false} {
		a, is := out[i].(applyResult)
		require.True(t, is)
		assert.Equal(t, ok, a.err == nil, "entry %d: %v", i+1, a.err)
	}
	f.Apply(logEntry(t, 5, token("later")))
	require.Len(t, ended, 1)
	require.ErrorIs(t, ended[0], ErrUnreadable)
	require.ErrorIs(t, ended[0], state.ErrUnknownCommand)
	assert.Equal(t, uint64(2), f.State().Index)
	assert.Contains(t, f.State().Tokens, "before")
	assert.Len(t, f.State().Tokens, 1)
	_, err := f.Snapshot()
	require.ErrorIs(t, err, ErrUnreadable, "raft would keep this state under the index of the entry")
}

// TestRestoreOfANewerSnapshotEndsTheRun: a leader of a later version may send a snapshot instead of its log.
func TestRestoreOfANewerSnapshotEndsTheRun(t *testing.T) {
	t.Parallel()
	st := state.New()
	st.Cluster, st.Index = "alpha", 7
	plain, err := st.Encode()
	require.NoError(t, err)
	newer := append(bytes.TrimSuffix(plain, []byte("}")), []byte(`,"quotas":{}}`)...)
	f := newFSM()
	var ended error
	f.startRun(func(err error) { ended = err })
	require.ErrorIs(t, f.Restore(io.NopCloser(bytes.NewReader(newer))), ErrUnreadable)
	require.ErrorIs(t, ended, ErrUnreadable)
	assert.Zero(t, f.State().Index)
	ended = nil
	f.startRun(func(err error) { ended = err })
	require.Error(t, f.Restore(io.NopCloser(bytes.NewReader(plain[:9]))), "damaged")
	require.NoError(t, ended, "raft tries the snapshot before it")
	require.NoError(t, f.Restore(io.NopCloser(bytes.NewReader(plain))))
	assert.Equal(t, uint64(7), f.State().Index)
}
