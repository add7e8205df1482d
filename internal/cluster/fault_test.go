package cluster_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
)

// sickness is the state of a failingDisk, and counts the writes that it failed.
type sickness struct {
	atomic.Bool
	tests, others atomic.Int64 // of a node that tries whether writes succeed; of raft
}

// failingDisk fails every write while it is sick.
type failingDisk struct {
	cluster.LogStore
	sick *sickness
}

var errNoSpace = errors.New("no space left on device")

func (d failingDisk) try(write func() error) error {
	if d.sick.Load() {
		d.sick.others.Add(1)
		return errNoSpace
	}
	return write()
}

func (d failingDisk) StoreLogs(logs []*raft.Log) error {
	return d.try(func() error { return d.LogStore.StoreLogs(logs) })
}

func (d failingDisk) DeleteRange(from, to uint64) error {
	return d.try(func() error { return d.LogStore.DeleteRange(from, to) })
}

func (d failingDisk) Set(key, value []byte) error {
	return d.try(func() error { return d.LogStore.Set(key, value) })
}

func (d failingDisk) SetUint64(key []byte, value uint64) error {
	if string(key) == "DiskTest" && d.sick.Load() {
		d.sick.tests.Add(1)
		return errNoSpace
	}
	return d.try(func() error { return d.LogStore.SetUint64(key, value) })
}

func (d failingDisk) IsMonotonic() bool { return true }

// failingConfig returns a config whose disk the test can let fail.
func failingConfig(cfg cluster.Config) (cluster.Config, *sickness) {
	sick := new(sickness)
	cfg.Stores = func(s cluster.LogStore) cluster.LogStore { return failingDisk{s, sick} }
	return cfg, sick
}

// untilFault proposes until the answer is the fault of the disk, and checks it.
func untilFault(t testing.TB, c *cluster.Cluster) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := c.ProposeHere(t.Context(), putApp("refused", "one"))
		return errors.Is(err, cluster.ErrDisk)
	}, limit, 5*time.Millisecond)
	var p *problem.Error
	require.Eventually(t, func() bool { return errors.As(c.Fault(), &p) }, limit, 5*time.Millisecond)
	assert.Equal(t, problem.Unavailable, p.Code)
	assert.Contains(t, p.Message, "the disk of the data dir refuses writes")
	assert.Contains(t, p.Hint, "free disk space")
}

// MB10: a single voter whose disk refuses writes refuses proposals, keeps what it acknowledged, and recovers
// by itself.
func TestSickDisk(t *testing.T) {
	t.Parallel()
	cfg, sick := failingConfig(cluster.Config{DataDir: t.TempDir()})
	c := open(t, cfg)
	kept := propose(t, c, putApp("demo", "one"))
	for range 2 {
		sick.Store(true)
		untilFault(t, c)
		require.Eventually(t, func() bool { return !c.Leader() }, limit, 5*time.Millisecond)
		assert.Contains(t, c.State().Apps, "demo", "the copy goes on to be read")
		sick.Store(false)
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		require.NoError(t, c.Ready(ctx))
		cancel()
		require.NoError(t, c.Fault())
		assert.GreaterOrEqual(t, c.State().Revision, kept.Revision)
		assert.Contains(t, c.State().Apps, "demo")
		kept = propose(t, c, putApp("demo", fmt.Sprint(kept.Revision)))
	}
	sick.Store(true)
	untilFault(t, c)
	require.NoError(t, c.Close(), "closes with a sick disk too")
	require.ErrorIs(t, c.Ready(t.Context()), cluster.ErrClosed)
}

// MB10: another voter takes over, and the node comes back when its disk accepts writes again. Before that its
// raft does not start: it would promise votes that it cannot keep.
func TestSickDiskOfALeader(t *testing.T) {
	t.Parallel()
	onFakeTime(t, func(t *testing.T) {
		g := newGroup(t)
		cfg, sick := failingConfig(cluster.Config{NodeID: "node-1", DataDir: t.TempDir()})
		first := g.add(cfg)
		g.ready(first)
		g.put(first)
		g.join(cluster.Config{NodeID: "node-2"}, true)
		g.join(cluster.Config{NodeID: "node-3"}, true)
		g.propose(putApp("demo", "one"))
		g.retry(func() error { // first leads now, and its disk is sick before it can lose that
			if !first.Leader() {
				return errors.Join(cluster.ErrNotLeader, g.leader().StepDown(t.Context()))
			}
			return nil
		})
		sick.Store(true)
		_, _ = first.ProposeHere(t.Context(), putApp("refused", "one"))
		next := g.leader(g.others(first)...)
		propose(t, next.Cluster, putApp("demo", "two"))
		require.Eventually(t, func() bool { return sick.tests.Load() > 0 }, limit, 5*time.Millisecond)
		others := sick.others.Load()
		require.Eventually(t, func() bool { return sick.tests.Load() > 1 }, limit, 5*time.Millisecond)
		assert.Equal(t, others, sick.others.Load(), "raft writes to a disk that fails its test")
		sick.Store(false)
		g.retry(func() error { _, err := first.Propose(t.Context(), putApp("demo", "three")); return err })
		g.ready(first)
		g.same()
		assert.NotContains(t, g.leader().State().Apps, "refused")
	})
}

// fullDir is the variable that tells a re-executed test binary to run against a full disk.
const fullDir = "DPSERVE_TEST_FULL_DIR"

// fillTheDisk is the process whose files may not grow from some moment on: every write then fails as on a
// full disk.
func fillTheDisk(dir string) error {
	c, err := cluster.Open(cluster.Config{DataDir: dir, SegmentSize: 64 << 10})
	if err != nil {
		return err
	}
	if err := c.Ready(context.Background()); err != nil {
		return err
	}
	if _, err := c.Propose(context.Background(), putApp("demo", "one")); err != nil {
		return err
	}
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		return err
	}
	none := was
	none.Cur = 0
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &none); err != nil {
		return err
	}
	_, err = c.Propose(context.Background(), putApp("demo", "two"))
	fmt.Println("full:", errors.Is(err, cluster.ErrDisk), errors.Is(err, syscall.EFBIG))
	time.Sleep(1500 * time.Millisecond) // at least one attempt to go on meets the full disk
	_, err = c.Propose(context.Background(), putApp("demo", "two"))
	fmt.Println("still full:", errors.Is(err, cluster.ErrDisk))
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		return err
	}
	if err := c.Ready(context.Background()); err != nil {
		return err
	}
	res, err := c.Propose(context.Background(), putApp("demo", "three"))
	fmt.Println("healed:", err, res.Revision >= 2, c.Fault())
	return c.Close()
}

// TestFullDisk tests the same with raft-wal and bolt over real files that the kernel refuses to extend.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), fullDir+"="+t.TempDir())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var lines []string
	for s := bufio.NewScanner(out); s.Scan(); {
		lines = append(lines, s.Text())
	}
	require.NoError(t, cmd.Wait())
	assert.Equal(t, "full: true true\nstill full: true\nhealed: <nil> true <nil>", strings.Join(lines, "\n"))
}

// writeForEver is the process that is killed: it prints each revision after its acknowledgement.
func writeForEver(dir string) {
	c, err := cluster.Open(cluster.Config{DataDir: dir, SegmentSize: 64 << 10})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := c.Ready(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for i := c.State().Revision; ; i++ {
		res, err := c.Propose(context.Background(), putApp("demo", strconv.FormatUint(i, 10)))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(res.Revision)
	}
}

// TestNothingAcknowledgedIsLost kills the writing process several times and reads the data dir again.
func TestNothingAcknowledgedIsLost(t *testing.T) {
	dir, rounds := t.TempDir(), 4
	if testing.Short() {
		rounds = 1
	}
	for round := range rounds {
		acknowledged := killAfter(t, dir, 150+100*round)
		c := open(t, cluster.Config{DataDir: dir})
		require.GreaterOrEqual(t, c.State().Revision, acknowledged, "an acknowledged write is gone")
		require.LessOrEqual(t, c.State().Revision, acknowledged+1, "more came back than was proposed")
		require.Equal(t, c.State().Revision, c.State().Apps["demo"].Revision)
		require.NoError(t, c.Close())
	}
}

// killAfter runs the writer until it has acknowledged n writes, kills it, and returns the last acknowledged
// revision.
func killAfter(t *testing.T, dir string, n int) uint64 {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashDir+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var last uint64
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		last, err = strconv.ParseUint(lines.Text(), 10, 64)
		require.NoError(t, err)
		if n--; n == 0 {
			// the lines still in the pipe were acknowledged too: read on
			require.NoError(t, cmd.Process.Kill())
		}
	}
	require.Error(t, cmd.Wait(), "the writer ended by itself")
	require.NotZero(t, last)
	return last
}

// TestCrashDuringTheFirstStart: after a kill inside raft's bootstrap the data dir has a term without voters.
// The node must start.
func TestCrashDuringTheFirstStart(t *testing.T) {
	dir := t.TempDir()
	raftDir := filepath.Join(dir, "raft")
	require.NoError(t, os.MkdirAll(raftDir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cluster.json"),
		[]byte(`{"format":1,"cluster":"alpha","node":"node-1","uid":"u"}`), 0o600))
	meta := &metadb.BoltMetaDB{}
	w, err := wal.Open(raftDir, wal.WithSegmentSize(1<<20), wal.WithMetaStore(meta))
	require.NoError(t, err)
	require.NoError(t, w.SetUint64([]byte("CurrentTerm"), 1))
	has, err := raft.HasExistingState(w, w, raft.NewInmemSnapshotStore())
	require.NoError(t, err)
	require.True(t, has, "raft's name for the term has changed: see disk.go")
	require.NoError(t, w.Close())
	require.NoError(t, meta.Close())

	c := open(t, cluster.Config{DataDir: dir})
	propose(t, c, putApp("demo", "one"))
	assert.Equal(t, "alpha", c.State().Cluster)
}
