package cluster

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/state"
)

// slowLog is a log with slow writes.
type slowLog struct {
	*raft.InmemStore
	mu    sync.Mutex
	takes time.Duration
}

func (l *slowLog) StoreLogs(logs []*raft.Log) error {
	l.mu.Lock()
	takes := l.takes
	l.mu.Unlock()
	time.Sleep(takes)
	return l.InmemStore.StoreLogs(logs)
}

func (l *slowLog) take(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.takes = d
}

func guarded(log LogStore) *guard {
	return newGuard(log, &addressBook{}, guardHooks{
		alone: new(atomic.Bool), wrote: func() {},
		failed: func(error) {},
	})
}

// TestGuardGivesUpAWriteThatHangs: raft gets the error at the limit, not before. The write goes on alone, and
// no other write begins.
func TestGuardGivesUpAWriteThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &slowLog{InmemStore: raft.NewInmemStore(), takes: diskLimit - time.Millisecond}
		g := guarded(log)
		require.NoError(t, g.StoreLog(&raft.Log{Index: 1, Term: 1}))
		log.take(time.Minute)
		began := time.Now()
		require.ErrorIs(t, g.StoreLog(&raft.Log{Index: 2, Term: 1}), errDiskHangs)
		assert.Equal(t, diskLimit, time.Since(began))
		log.take(0)
		require.ErrorIs(t, g.StoreLog(&raft.Log{Index: 2, Term: 1}), ErrDisk)
		require.ErrorIs(t, g.Set([]byte("key"), nil), ErrDisk)
		require.ErrorIs(t, g.DeleteRange(1, 1), ErrDisk)
		g.awaitCalls()
		assert.Equal(t, time.Minute, time.Since(began))
	})
}

// slowSnapshots are snapshots with slow writes.
type slowSnapshots struct{ raft.SnapshotStore }

type slowSink struct{ raft.SnapshotSink }

func (s slowSnapshots) Create(
	v raft.SnapshotVersion, index, term uint64, c raft.Configuration, at uint64, t raft.Transport,
) (raft.SnapshotSink, error) {
	sink, err := s.SnapshotStore.Create(v, index, term, c, at, t)
	return slowSink{sink}, err
}

func (s slowSink) Write(p []byte) (int, error) {
	time.Sleep(time.Minute)
	return s.SnapshotSink.Write(p)
}

// TestSnapshotThatHangsEndsTheRun: a follower writes the snapshot of its leader in the main loop of raft.
func TestSnapshotThatHangsEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := guarded(raft.NewInmemStore())
		snaps := &guardedSnapshots{slowSnapshots{raft.NewInmemSnapshotStore()}, g}
		_, transport := raft.NewInmemTransport("a")
		sink, err := snaps.Create(raft.SnapshotVersionMax, 7, 1, raft.Configuration{}, 1, transport)
		require.NoError(t, err)
		began := time.Now()
		_, err = sink.Write([]byte("state"))
		require.ErrorIs(t, err, errDiskHangs)
		assert.Equal(t, diskLimit, time.Since(began))
		select {
		case <-g.failed:
		default:
			assert.Fail(t, "the run goes on")
		}
		require.ErrorIs(t, sink.Cancel(), ErrDisk)
		g.awaitCalls()
	})
}

// TestSnapshotHoldsWhatThisRunHasApplied: readers keep the state of an earlier run, but the snapshot of a run
// that has not replayed it yet does not contain it.
func TestSnapshotHoldsWhatThisRunHasApplied(t *testing.T) {
	entry := func(index uint64, name string) *raft.Log {
		data, err := state.EncodeCommand(&state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{
			{Name: name, Spec: []byte(`{}`), Names: []string{name}},
		}}})
		require.NoError(t, err)
		return &raft.Log{Index: index, Type: raft.LogCommand, Data: data}
	}
	f := newFSM()
	f.ApplyBatch([]*raft.Log{entry(1, "one"), entry(2, "two")})
	f.startRun(func(err error) { t.Error(err) })
	f.Apply(entry(1, "one"))
	require.Contains(t, f.State().Apps, "two", "readers do not go back")
	made, err := f.Snapshot()
	require.NoError(t, err)
	store := raft.NewInmemSnapshotStore()
	sink, err := store.Create(raft.SnapshotVersionMax, 1, 1, raft.Configuration{}, 1, nil)
	require.NoError(t, err)
	require.NoError(t, made.Persist(sink))
	_, data, err := store.Open(sink.ID())
	require.NoError(t, err)
	again := newFSM()
	require.NoError(t, again.Restore(data))
	assert.Equal(t, uint64(1), again.State().Index)
	assert.NotContains(t, again.State().Apps, "two")
}

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
