package cluster_test

import (
	"bytes"
	"context"
	"encoding/json"
	"hash/crc64"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// olderVersion reads entries with the word "future" like a version that does not know them. Opened without
// it, the same data dir is that of an upgraded node.
type olderVersion struct {
	cluster.LogStore
	reads string
}

func (o olderVersion) GetLog(index uint64, l *raft.Log) error {
	err := o.LogStore.GetLog(index, l)
	if err == nil && bytes.Contains(l.Data, []byte("future")) {
		l.Data = []byte(o.reads)
	}
	return err
}

func (olderVersion) IsMonotonic() bool { return true }

// lines is a log that goroutines of a cluster write to.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) count(words string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), words)
}

// MB6: a node that cannot read an entry of the log leaves consensus, keeps the state from before the entry,
// says what to do, and continues from its log after an upgrade.
func TestUnreadableEntryEndsTheRun(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		// the other forms of what a version cannot read: internal/state
		const reads = `{"put_future":{"app":"demo"}}`
		g := newGroup(t)
		first := g.add(cluster.Config{NodeID: "node-1", DataDir: t.TempDir()})
		g.ready(first)
		g.put(first)
		second := g.join(cluster.Config{NodeID: "node-2", DataDir: t.TempDir()}, true)
		log := &lines{}
		newer := cluster.Config{
			NodeID: "node-3", DataDir: t.TempDir(),
			Log: slog.New(slog.NewTextHandler(log, nil)),
		}
		older := newer
		older.Stores = func(s cluster.LogStore) cluster.LogStore { return olderVersion{s, reads} }
		old := g.join(older, true)
		g.propose(putApp("demo", "one"))
		// a leader applies what it has in memory
		g.retry(func() error { return old.StepDown(t.Context()) })
		g.leader(first, second)

		g.propose(putApp("future", "one"))
		g.propose(putApp("later", "one"))
		left := func() bool { return old.Fault() != nil }
		require.Eventually(t, left, limit, 5*time.Millisecond, "it went on behind what it cannot read")
		assertUnreadable(t, old.Fault())
		require.Eventually(t, func() bool { _, known := old.LeaderNode(); return !known }, limit,
			5*time.Millisecond)
		_, err := old.Propose(t.Context(), putApp("mine", "one"))
		assertUnreadable(t, err)
		require.Error(t, old.Snapshot())

		g.stop(second) // the other two are a majority, if one that has left consensus votes
		require.Eventually(t, func() bool { return !first.Leader() }, limit, 5*time.Millisecond)
		time.Sleep(1500 * time.Millisecond) // two elections
		assert.False(t, first.Leader(), "it voted")
		assert.Contains(t, old.State().Apps, "demo")
		assert.NotContains(t, old.State().Apps, "later", "a state that differs from those of the others")
		assert.Equal(t, 1, log.count("leaves consensus"), "it tries again and again")
		g.stop(old)
		g.start(second)
		g.leader(first, second)

		g.start(old) // the same version once more
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		assertUnreadable(t, old.Ready(ctx))
		g.stop(old)
		old.cfg = newer
		old.cfg.Member, old.cfg.ClusterID = true, first.ClusterID()
		g.start(old)
		g.ready(old)
		require.NoError(t, old.Fault())
		assert.Contains(t, old.State().Apps, "future")
		assert.Contains(t, old.State().Apps, "later")
		g.same()
	})
}

func assertUnreadable(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, cluster.ErrUnreadable)
	require.NotErrorIs(t, err, cluster.ErrDisk)
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, problem.Unavailable, p.Code)
	assert.Contains(t, p.Message, "newer version of dpserve")
	assert.Contains(t, p.Message, "of the log cannot be read")
	assert.Contains(t, p.Hint, "start a newer version of dpserve on this node's data dir")
}

// TestSnapshotOfANewerVersionIsRefused: a data dir whose snapshot has a field that this version does not know
// is not opened, and stays as it is.
func TestSnapshotOfANewerVersionIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cfg := cluster.Config{DataDir: dir, NodeID: "node-1"}
	c := open(t, cfg)
	propose(t, c, putApp("demo", "one"))
	require.NoError(t, c.Snapshot())
	require.NoError(t, c.Close())
	plain := rewriteSnapshot(t, dir, func(b []byte) []byte {
		return append(bytes.TrimSuffix(b, []byte("}")),
			[]byte(`,"future":1}`)...)
	})

	_, err := cluster.Open(cfg)
	require.ErrorIs(t, err, cluster.ErrUnreadable)
	require.ErrorIs(t, err, state.ErrNewer)
	assert.Contains(t, err.Error(), "a snapshot cannot be read")
	assert.Contains(t, err.Error(), "newer version of dpserve")
	rewriteSnapshot(t, dir, func([]byte) []byte { return plain })
	again := open(t, cfg)
	assert.Contains(t, again.State().Apps, "demo")
}

// rewriteSnapshot changes the only snapshot of a data dir and returns the old content.
func rewriteSnapshot(t *testing.T, dir string, change func([]byte) []byte) []byte {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "raft", "snapshots", "*", "state.bin"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	was, err := os.ReadFile(found[0])
	require.NoError(t, err)
	data := change(bytes.Clone(was))
	require.NoError(t, os.WriteFile(found[0], data, 0o600))
	metaFile := filepath.Join(filepath.Dir(found[0]), "meta.json")
	raw, err := os.ReadFile(metaFile)
	require.NoError(t, err)
	var meta map[string]any
	require.NoError(t, json.Unmarshal(raw, &meta))
	sum := crc64.New(crc64.MakeTable(crc64.ECMA))
	_, _ = sum.Write(data)
	meta["CRC"], meta["Size"] = sum.Sum(nil), len(data)
	raw, err = json.Marshal(meta)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(metaFile, raw, 0o600))
	return was
}

// MB6: the copy of a worker or ingress works although the control nodes have a later version. Ignored fields
// are counted, logged once, and kept in the data dir for the node's own upgrade.
func TestFollowerPassesOverNewFields(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, dir, counted := &lines{}, t.TempDir(), 0
		send := make(chan uint64)
		cfg := cluster.WatcherConfig{
			// info and above
			NodeID: "edge", ClusterID: "alpha", DataDir: dir, Log: slog.New(slog.NewTextHandler(log, nil)),
			Unknown: func(what string) { assert.Equal(t, "state", what); counted++ },
			Watch: func(ctx context.Context, _ uint64, apply func(*cluster.Update)) error {
				for {
					select {
					case index := <-send:
						st := state.New()
						st.Cluster, st.Index = "alpha", index
						plain, err := st.Encode()
						require.NoError(t, err)
						newer := append(bytes.TrimSuffix(plain, []byte("}")),
							[]byte(`,"quotas":{"demo":3}}`)...)
						apply(&cluster.Update{Leader: "l", State: newer})
					case <-time.After(time.Second):
						apply(&cluster.Update{Leader: "l"})
					case <-ctx.Done():
						return ctx.Err()
					}
				}
			},
		}
		w, err := cluster.NewWatcher(cfg)
		require.NoError(t, err)
		for index := range uint64(3) {
			send <- 7 + index
		}
		require.NoError(t, w.Ready(t.Context()))
		synctest.Wait()
		assert.Equal(t, uint64(9), w.State().Index)
		assert.Equal(t, 3, counted)
		assert.Equal(t, 1, log.count("passes over"), "said once")
		require.NoError(t, w.Close())

		kept, err := os.ReadFile(filepath.Join(dir, "state.json"))
		require.NoError(t, err)
		assert.Contains(t, string(kept), `"quotas":{"demo":3}`,
			"an upgraded node finds the field there: nobody sends it again at the same index")
		again, err := cluster.NewWatcher(cfg)
		require.NoError(t, err)
		assert.Equal(t, uint64(9), again.State().Index)
		require.NoError(t, again.Close())
	})
}
