package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/parallel"
)

// The interfaces that the actors use.
var (
	_ msg.Store    = (*cluster.Cluster)(nil)
	_ msg.Proposer = (*cluster.Cluster)(nil)
)

// crashDir is the variable that tells a re-executed test binary to be the process that is killed.
const crashDir = "DPSERVE_TEST_CRASH_DIR"

func TestMain(m *testing.M) {
	syscall.Umask(0o022) // t.TempDir makes data dirs that only this user may write
	if dir := os.Getenv(crashDir); dir != "" {
		writeForEver(dir)
		return
	}
	if dir := os.Getenv(fullDir); dir != "" {
		if err := fillTheDisk(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	parallel.AtLeast(8) // most of them wait for elections
	goleak.VerifyTestMain(m)
}

// limit ends a test that hangs. No test asserts it.
const limit = 30 * time.Second

func open(t testing.TB, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	cfg.SegmentSize = 1 << 20
	c, err := cluster.Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	require.NoError(t, c.Ready(ctx))
	require.True(t, c.Leader())
	return c
}

func putApp(name, spec string) state.Command {
	return state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{{
		Name: name, Spec: json.RawMessage(fmt.Sprintf(`{"name":%q,"v":%q}`, name, spec)),
		Names: []string{name},
	}}}}
}

func grant(app string, revision, expect uint64) state.Command {
	return state.Command{GrantGroup: &state.GrantGroup{
		App: app, AppRevision: revision,
		Units: []state.UnitGrant{{
			Unit: app + "/0", ExpectEpoch: expect, Attempt: 1,
			Ranks: []state.RankGrant{{Rank: 0, Node: "node-1", Slot: 0}},
		}},
	}}
}

func propose(t testing.TB, c *cluster.Cluster, cmd state.Command) state.Result {
	t.Helper()
	res, err := c.Propose(t.Context(), cmd)
	require.NoError(t, err)
	return res
}

func TestStateSurvivesAReopen(t *testing.T) {
	dir := t.TempDir()
	c := open(t, cluster.Config{DataDir: dir, NodeID: "node-1"})
	name := c.ClusterID()
	propose(t, c, putApp("demo", "one"))
	rev := propose(t, c, putApp("demo", "two")).Apps["demo"]
	require.Equal(t, uint64(1), propose(t, c, grant("demo", rev, 0)).Epochs["demo/0"])
	before, err := c.State().Encode()
	require.NoError(t, err)
	require.NoError(t, c.Close())

	c = open(t, cluster.Config{DataDir: dir, ClusterID: name})
	after, err := c.State().Encode()
	require.NoError(t, err)
	assert.JSONEq(t, string(before), string(after))
	assert.Equal(t, "node-1", c.NodeID())
	assert.Equal(t, name, c.ClusterID())
	_, err = c.Propose(t.Context(), grant("demo", rev, 0))
	require.ErrorIs(t, err, state.ErrStaleEpoch)
}

// TestLogIsCompacted writes far more entries than a snapshot needs, in small segments, and reopens.
func TestLogIsCompacted(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 3,000 entries")
	}
	dir := t.TempDir()
	c := open(t, cluster.Config{DataDir: dir})
	var wg sync.WaitGroup
	for w := range 30 {
		wg.Go(func() {
			for i := range 100 {
				propose(t, c, putApp(fmt.Sprintf("app-%d", w), strings.Repeat("x", 512)+fmt.Sprint(i)))
			}
		})
	}
	wg.Wait()
	require.NoError(t, c.Snapshot())
	index := c.State().Index
	require.NoError(t, c.Close())
	segments, err := filepath.Glob(filepath.Join(dir, "raft", "*.wal"))
	require.NoError(t, err)
	assert.LessOrEqual(t, len(segments), 2, "old segments are still there")

	c = open(t, cluster.Config{DataDir: dir})
	assert.GreaterOrEqual(t, c.State().Index, index)
	assert.Len(t, c.State().Apps, 30)
	for _, a := range c.State().Apps {
		assert.Equal(t, uint64(100), a.Revision)
	}
}

func TestChangedAndImmutableSnapshots(t *testing.T) {
	c := open(t, cluster.Config{})
	changed, before := c.Changed(), c.State()
	propose(t, c, putApp("demo", "one"))
	select {
	case <-changed:
	case <-time.After(limit):
		t.Fatal("a change was not announced")
	}
	assert.Empty(t, before.Apps, "a snapshot changed under its reader")
	assert.Contains(t, c.State().Apps, "demo", "a proposer must read its own write")

	changed = c.Changed()
	_, err := c.Propose(t.Context(), state.Command{DeleteApp: &state.DeleteApp{Name: "nobody"}})
	require.ErrorIs(t, err, state.ErrUnknownApp)
	assert.Equal(t, problem.NotFound, problem.CodeOf(err))
	select {
	case <-changed:
		t.Fatal("a refusal woke the readers")
	default:
	}
}

func TestConcurrentProposals(t *testing.T) {
	var timed atomic.Int64
	c := open(t, cluster.Config{DataDir: t.TempDir(), ApplySeconds: func(time.Duration) { timed.Add(1) }})
	started := timed.Load() // naming the cluster is a proposal too
	const writers, writes = 16, 20
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for i := range writes {
				_, err := c.Propose(t.Context(), putApp("demo", fmt.Sprint(i)))
				if !assert.NoError(t, err) { //nolint:testifylint // not the test's goroutine
					return
				}
				assert.NotZero(t, c.State().Revision)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, int64(writers*writes), timed.Load()-started)
}

// TestOneWinner: of many proposers that expect the same revision exactly one succeeds.
func TestOneWinner(t *testing.T) {
	c := open(t, cluster.Config{})
	var won, lost atomic.Int64
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			cmd := putApp("demo", fmt.Sprint(i))
			cmd.PutApps.Expect = map[string]uint64{"demo": 0}
			switch _, err := c.Propose(t.Context(), cmd); {
			case err == nil:
				won.Add(1)
			case errors.Is(err, state.ErrStaleRevision):
				lost.Add(1)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, int64(1), won.Load())
	assert.Equal(t, int64(31), lost.Load())
}

// HF72: a data dir in use, of another cluster or node, or damaged is refused, and the message says what to
// do.
func TestRefusedDataDirs(t *testing.T) {
	mine := t.TempDir()
	c := open(t, cluster.Config{DataDir: mine, NodeID: "node-1", ClusterID: "alpha"})
	_, err := cluster.Open(cluster.Config{DataDir: mine})
	assertConflict(t, err, "data dir "+mine+" is in use by another dpserve",
		"stop the other one, or choose another --data-dir")
	require.NoError(t, c.Close())

	file := filepath.Join(mine, "cluster.json")
	for name, tc := range map[string]struct {
		cfg          cluster.Config
		content      string
		message, tip string
	}{
		"other cluster": {
			cfg:     cluster.Config{ClusterID: "beta"},
			message: "data dir " + mine + " belongs to cluster alpha, not beta",
			tip:     "choose another --data-dir, or an empty one to start anew",
		},
		"other node": {
			cfg:     cluster.Config{NodeID: "node-2"},
			message: "data dir " + mine + " belongs to node node-1, not node-2",
			tip:     "leave --node-id out, or choose another --data-dir",
		},
		"newer format": {
			content: `{"format":2,"cluster":"alpha","node":"node-1"}`,
			message: "data dir " + mine + " has format 2, this dpserve knows up to 1",
			tip:     "use the newer dpserve that wrote it, or choose an empty --data-dir",
		},
		"half a file": {
			content: `{"format":1,"clu`,
			message: "cluster.json in " + mine + " cannot be read: unexpected end of JSON input",
			tip:     "restore the data dir from a backup, or choose an empty --data-dir",
		},
		"empty names": {
			content: `{"format":1}`,
			message: "cluster.json in " + mine + " lacks format, node or UID",
			tip:     "restore the data dir from a backup, or choose an empty --data-dir",
		},
	} {
		t.Run(name, func(t *testing.T) {
			good, err := os.ReadFile(file)
			require.NoError(t, err)
			if tc.content != "" {
				require.NoError(t, os.WriteFile(file, []byte(tc.content), 0o600))
				defer func() { require.NoError(t, os.WriteFile(file, good, 0o600)) }()
			}
			tc.cfg.DataDir = mine
			_, err = cluster.Open(tc.cfg)
			assertConflict(t, err, tc.message, tc.tip)
		})
	}
	require.NoError(t, os.Chmod(mine, 0o777))
	_, err = cluster.Open(cluster.Config{DataDir: mine})
	require.ErrorContains(t, err, "data dir: "+mine+" has mode 0777, so that other users may write there")
	_, err = cluster.Identify(mine, "node-1")
	require.ErrorContains(t, err, "has mode 0777")
	require.NoError(t, os.Chmod(mine, 0o700))
	open(t, cluster.Config{DataDir: mine}) // each refusal left the dir as it was, and unlocked
}

func assertConflict(t *testing.T, err error, message, hint string) {
	t.Helper()
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, problem.Conflict, p.Code)
	assert.Equal(t, message, p.Message)
	assert.Equal(t, hint, p.Hint)
}

// TestMixedDataDir: Open refuses a cluster.json beside another cluster's log, and no caller waits for it.
func TestMixedDataDir(t *testing.T) {
	dir := t.TempDir()
	c := open(t, cluster.Config{DataDir: dir, NodeID: "node-1", ClusterID: "alpha"})
	require.NoError(t, c.Close())
	rename := func(uid string) {
		whose := fmt.Sprintf(`{"format":1,"cluster":"beta","node":"node-1","uid":%q}`, uid)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cluster.json"), []byte(whose), 0o600))
	}
	rename("another")
	_, err := cluster.Open(cluster.Config{DataDir: dir})
	assertConflict(t, err, "the log in the data dir has the votes of other nodes",
		"start this node with --advertise, as it was; if two data dirs were mixed, restore one from a backup")

	rename(c.UID())
	c, err = cluster.Open(cluster.Config{DataDir: dir})
	require.NoError(t, err)
	assertConflict(t, c.Ready(t.Context()),
		"the log in the data dir is of cluster alpha, its cluster.json says beta",
		"two data dirs were mixed; restore one from a backup or choose an empty --data-dir")
	_, err = c.Propose(t.Context(), putApp("demo", "one"))
	assert.Equal(t, problem.Conflict, problem.CodeOf(err))
	assert.False(t, c.Leader())
	require.NoError(t, c.Close())

	require.NoError(t, os.Remove(filepath.Join(dir, "cluster.json")))
	_, err = cluster.Open(cluster.Config{DataDir: dir})
	assertConflict(t, err, "data dir "+dir+" has a log but no cluster.json",
		"restore the data dir from a backup, or choose an empty --data-dir")
}

func TestUnwritableDataDir(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err := cluster.Open(cluster.Config{DataDir: filepath.Join(file, "data")})
	require.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
}

func TestCloseAndContext(t *testing.T) {
	c := open(t, cluster.Config{DataDir: t.TempDir()})
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("test over")
	cancel(why)
	_, err := c.Propose(ctx, putApp("demo", "one"))
	require.ErrorIs(t, err, why)
	_, err = c.Propose(t.Context(), state.Command{})
	require.ErrorIs(t, err, state.ErrUnknownCommand)

	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 1000 {
				if _, err := c.Propose(t.Context(), putApp("demo", fmt.Sprint(i))); err != nil {
					assert.ErrorIs(t, err, cluster.ErrClosed)
					return
				}
			}
		})
	}
	for range 3 {
		wg.Go(func() { assert.NoError(t, c.Close()) })
	}
	wg.Wait()
	require.ErrorIs(t, c.Ready(t.Context()), cluster.ErrClosed)
	assert.Equal(t, problem.Unavailable, problem.CodeOf(c.Ready(t.Context())))
	assert.False(t, c.Leader())
}

func TestReadyGivesUpWithTheContext(t *testing.T) {
	c, err := cluster.Open(cluster.Config{})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // ready may win the race, an error must be the right one
		if err := c.Ready(ctx); err != nil {
			assert.Equal(t, problem.Timeout, problem.CodeOf(err))
		}
	}
	require.NoError(t, c.Close())
}

// TestFakeTime: the in-memory cluster runs in a synctest bubble, as whole nodes do in the harness, and needs
// less than a second of it.
func TestFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		c := open(t, cluster.Config{Log: slog.New(slog.DiscardHandler)})
		propose(t, c, putApp("demo", "one"))
		assert.Less(t, time.Since(begin), 200*time.Millisecond,
			"the only voter waited for a leader that cannot exist")
		require.NoError(t, c.Close())
	})
}

// TestLargeCommand: an app file at the API's limit fits into one entry, although it is larger than a segment.
func TestLargeCommand(t *testing.T) {
	dir := t.TempDir()
	c := open(t, cluster.Config{DataDir: dir})
	propose(t, c, putApp("demo", strings.Repeat("x", 2<<20)))
	propose(t, c, putApp("demo", "small"))
	require.NoError(t, c.Close())
	c = open(t, cluster.Config{DataDir: dir})
	assert.Equal(t, uint64(2), c.State().Apps["demo"].Revision)
}

func BenchmarkPropose(b *testing.B) {
	for name, dir := range map[string]string{"memory": "", "disk": b.TempDir()} {
		b.Run(name, func(b *testing.B) {
			c := open(b, cluster.Config{DataDir: dir})
			i := 0
			for b.Loop() {
				i++
				propose(b, c, putApp("demo", fmt.Sprint(i)))
			}
		})
	}
}

// BenchmarkStart is the time from Open to the first durable write of a new data dir.
func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		c := open(b, cluster.Config{DataDir: b.TempDir()})
		propose(b, c, putApp("demo", "one"))
		require.NoError(b, c.Close())
	}
}
