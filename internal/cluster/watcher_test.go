package cluster_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

var (
	_ msg.Store    = cluster.Store(nil)
	_ msg.Proposer = cluster.Store(nil)
)

// source is the control node that a Watcher of these tests follows. It can be made silent or unreachable.
type source struct {
	of       *cluster.Cluster
	down     atomic.Bool
	mute     atomic.Bool
	attempts atomic.Int64
}

var errDown = errors.New("connection refused")

func (s *source) watch(ctx context.Context, from uint64, apply func(*cluster.Update)) error {
	s.attempts.Add(1)
	if s.down.Load() {
		return errDown
	}
	return s.of.Follow(ctx, from, func(u *cluster.Update) error {
		if s.down.Load() {
			return errDown
		}
		if !s.mute.Load() {
			apply(u)
		}
		return nil
	})
}

func (s *source) forward(ctx context.Context, leader state.Node, c state.Command) (state.Result, error) {
	if leader.UID != s.of.UID() {
		return state.Result{}, errDown
	}
	return s.of.ProposeHere(ctx, c)
}

// watcher follows a single voter in memory.
func watcher(t testing.TB, cfg cluster.WatcherConfig) (*cluster.Watcher, *source) {
	t.Helper()
	c := open(t, cluster.Config{ClusterID: "alpha"})
	s := &source{of: c}
	cfg.ClusterID, cfg.Watch, cfg.Forward = "alpha", s.watch, s.forward
	w, err := cluster.NewWatcher(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Close()) })
	return w, s
}

func TestWatcherFollows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s := watcher(t, cluster.WatcherConfig{NodeID: "edge"})
		require.NoError(t, w.Ready(t.Context()))
		require.False(t, w.Leader())
		uid, ok := w.LeaderNode()
		require.True(t, ok)
		assert.Equal(t, s.of.UID(), uid)

		propose(t, s.of, state.Command{PutToken: &state.Token{Hash: "h", Expires: 1 << 50, Uses: 1}})
		res, err := w.Propose(t.Context(), putApp("demo", "one"))
		require.NoError(t, err)
		assert.Contains(t, w.State().Apps, "demo", "a proposer must read its own write")
		assert.GreaterOrEqual(t, w.State().Index, res.Index)
		assert.Empty(t, w.State().Tokens, "not a follower's business")
		assert.Empty(t, w.State().Secrets)
		assert.Equal(t, s.of.State().Secret, w.State().Secret)
		_, err = w.Propose(t.Context(), state.Command{DeleteApp: &state.DeleteApp{Name: "nobody"}})
		require.ErrorIs(t, err, state.ErrUnknownApp)

		time.Sleep(time.Minute) // heartbeats alone keep it
		assert.Equal(t, int64(1), s.attempts.Load())
		_, ok = w.LeaderNode()
		assert.True(t, ok)
		require.NoError(t, w.Close())
		_, err = w.Propose(t.Context(), putApp("demo", "two"))
		require.ErrorIs(t, err, cluster.ErrClosed)
		require.NoError(t, s.of.Close())
	})
}

// HF44: the data dir stays locked until the hanging write has returned.
func TestWatcherClosesOverAHungDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		of := open(t, cluster.Config{ClusterID: "alpha"})
		s := &source{of: of}
		var hangs atomic.Bool
		answers := make(chan struct{})
		cfg := cluster.WatcherConfig{
			ClusterID: "alpha", DataDir: dir, Watch: s.watch, Forward: s.forward,
			Replace: func(path string, data []byte) error {
				if hangs.Load() {
					<-answers
				}
				return diskfile.Replace(path, data)
			},
		}
		w, err := cluster.NewWatcher(cfg)
		require.NoError(t, err)
		require.NoError(t, w.Ready(t.Context()))
		time.Sleep(10 * time.Second)
		hangs.Store(true)
		propose(t, of, putApp("demo", "one"))
		time.Sleep(10 * time.Second)
		began := time.Now()
		err = w.Close()
		assert.Equal(t, 10*time.Second, time.Since(began))
		require.ErrorIs(t, err, diskfile.ErrHangs)
		require.ErrorContains(t, err, "data dir "+dir+": its disk does not answer")
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		require.Equal(t, err, w.Close(), "the second time it does not wait again")
		assert.Equal(t, 10*time.Second, time.Since(began))
		_, err = cluster.NewWatcher(cfg)
		require.ErrorContains(t, err, "in use", "the hung write has the data dir still")

		hangs.Store(false)
		close(answers)
		time.Sleep(time.Second)
		w, err = cluster.NewWatcher(cfg)
		require.NoError(t, err)
		assert.Contains(t, w.State().Apps, "demo", "what was written late")
		require.NoError(t, w.Close())
		require.NoError(t, of.Close())
	})
}

// TestWatcherSavesWhatItCouldNotSave: after a disk was full for a moment, the next start has the newest
// state.
func TestWatcherSavesWhatItCouldNotSave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		block := filepath.Join(dir, "state.json.tmp") // where the file is written first
		require.NoError(t, os.Mkdir(block, 0o700))
		w, s := watcher(t, cluster.WatcherConfig{DataDir: dir})
		propose(t, s.of, putApp("demo", "one"))
		time.Sleep(10 * time.Second)
		require.Contains(t, w.State().Apps, "demo")
		require.NoFileExists(t, filepath.Join(dir, "state.json"))
		require.NoError(t, os.Remove(block))
		time.Sleep(2 * time.Second) // nothing new comes
		saved, err := os.ReadFile(filepath.Join(dir, "state.json"))
		require.NoError(t, err)
		assert.Contains(t, string(saved), `"demo"`)
		require.NoError(t, w.Close())
		require.NoError(t, s.of.Close())
	})
}

// TestWatcherLosesItsNode: the watcher retries after silence and refusals, within 3 s and with at most a
// second between attempts.
func TestWatcherLosesItsNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s := watcher(t, cluster.WatcherConfig{})
		require.NoError(t, w.Ready(t.Context()))
		s.mute.Store(true)
		time.Sleep(5 * time.Second)
		assert.Equal(t, int64(2), s.attempts.Load(),
			"silence of 3 s ends an attempt, and the next one hears nothing either")
		_, ok := w.LeaderNode()
		assert.False(t, ok, "who leads is not known while nobody says so")
		s.mute.Store(false)
		s.down.Store(true)
		time.Sleep(10 * time.Second)
		assert.Less(t, s.attempts.Load(), int64(20), "attempts must back off")

		begin := time.Now()
		_, err := w.Propose(t.Context(), putApp("demo", "one"))
		require.ErrorIs(t, err, cluster.ErrNoMajority)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		assert.Equal(t, 5*time.Second, time.Since(begin))

		propose(t, s.of, putApp("demo", "one"))
		s.down.Store(false)
		time.Sleep(1100 * time.Millisecond)
		assert.Contains(t, w.State().Apps, "demo")
		require.NoError(t, w.Close())
		require.NoError(t, s.of.Close())
	})
}

// TestWatcherKeepsItsState: a node that starts while no control node answers has its last state.
func TestWatcherKeepsItsState(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, s := watcher(t, cluster.WatcherConfig{DataDir: dir, NodeID: "edge"})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, w.Ready(ctx))
	_, err := w.Propose(ctx, putApp("demo", "one"))
	require.NoError(t, err)
	require.NoError(t, w.Close())

	s.down.Store(true)
	reopen := func(cfg cluster.WatcherConfig) *cluster.Watcher {
		cfg.DataDir, cfg.Watch = dir, s.watch
		w, err := cluster.NewWatcher(cfg)
		require.NoError(t, err)
		return w
	}
	again := reopen(cluster.WatcherConfig{})
	assert.Contains(t, again.State().Apps, "demo")
	assert.Equal(t, w.UID(), again.UID())
	assert.Equal(t, "alpha", again.ClusterID())
	assert.Equal(t, "edge", again.NodeID())
	cancelled, stop := context.WithCancel(ctx)
	stop()
	assert.Equal(t, problem.Timeout, problem.CodeOf(again.Ready(cancelled)), "nobody has confirmed it")
	_, err = again.Propose(ctx, putApp("demo", "two"))
	require.ErrorIs(t, err, cluster.ErrNotLeader, "without Forward")
	_, err = cluster.NewWatcher(cluster.WatcherConfig{DataDir: dir, Watch: s.watch})
	assert.Equal(t, problem.Conflict, problem.CodeOf(err), "the data dir is in use")
	require.NoError(t, again.Close())

	require.NoError(t, os.WriteFile(filepath.Join(dir, "state.json"), []byte(`{"clu`), 0o600))
	damaged := reopen(cluster.WatcherConfig{})
	assert.Empty(t, damaged.State().Apps,
		"a damaged copy is no reason not to start: the control nodes have the whole")
	require.NoError(t, damaged.Close())
}

// TestWatcherRefusesWhatIsNotItsCluster: neither another cluster's state nor an older one replaces the
// watcher's.
func TestWatcherRefusesWhatIsNotItsCluster(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		own, other := open(t, cluster.Config{ClusterID: "alpha"}), open(t, cluster.Config{ClusterID: "beta"})
		for range 5 {
			propose(t, other, putApp("foreign", time.Now().String()))
		}
		turn := 0
		w, err := cluster.NewWatcher(cluster.WatcherConfig{
			ClusterID: "alpha",
			Watch: func(ctx context.Context, from uint64, apply func(*cluster.Update)) error {
				turn++
				if turn%2 == 0 {
					return (&source{of: own}).watch(ctx, 0, apply)
				}
				return (&source{of: other}).watch(ctx, from, apply)
			},
		})
		require.NoError(t, err)
		require.NoError(t, w.Ready(t.Context()))
		assert.Equal(t, "alpha", w.State().Cluster)
		assert.NotContains(t, w.State().Apps, "foreign")
		for _, c := range []cluster.Store{w, own, other} {
			require.NoError(t, c.Close())
		}
	})
}

// TestFollowOfManyNodes: a follower of a voter that does not lead gets changes too, and gets nothing from a
// voter that is cut off.
func TestFollowOfManyNodes(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := threeVoters(t, false)
		voter := g.others(g.leader())[0]
		s := &source{of: voter.Cluster}
		w, err := cluster.NewWatcher(cluster.WatcherConfig{
			ClusterID: voter.ClusterID(), Watch: s.watch,
			Forward: g.forward,
		})
		require.NoError(t, err)
		defer func() { require.NoError(t, w.Close()) }()
		g.retry(func() error { _, err := w.Propose(t.Context(), putApp("demo", "one")); return err })
		assert.Contains(t, w.State().Apps, "demo")
		g.testNetwork.isolate(voter.address, true)
		require.Eventually(t, func() bool { _, ok := w.LeaderNode(); return !ok }, limit, 10*time.Millisecond,
			"a control node that knows nobody who leads must not pass for one that does")
	})
}

func FuzzDecodeCopy(f *testing.F) {
	f.Add([]byte(`{"index":1,"cluster":"alpha","apps":{},"units":{},"epochs":{},"revisions":{}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := cluster.DecodeCopy(data)
		if err == nil {
			_, err = st.State().Encode()
			require.NoError(t, err)
		}
	})
}
