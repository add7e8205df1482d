package cluster_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
)

// failingDisk fails every write while it is sick.
type failingDisk struct {
	cluster.LogStore
	sick *atomic.Bool
}

var errNoSpace = errors.New("no space left on device")

func (d failingDisk) try(write func() error) error {
	if d.sick.Load() {
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
	return d.try(func() error { return d.LogStore.SetUint64(key, value) })
}

func (d failingDisk) IsMonotonic() bool { return true }

// failingConfig returns a config whose disk the test can let fail.
func failingConfig(cfg cluster.Config) (cluster.Config, *atomic.Bool) {
	sick := new(atomic.Bool)
	return cfg.WithStores(func(s cluster.LogStore) cluster.LogStore { return failingDisk{s, sick} }), sick
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

// TestSickDisk: a single voter whose disk refuses writes refuses proposals, keeps what it acknowledged, and
// recovers by itself.
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

// TestSickDiskOfALeader: another voter takes over, and the node comes back when its disk accepts writes
// again.
func TestSickDiskOfALeader(t *testing.T) {
	t.Parallel()
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
	sick.Store(false)
	g.retry(func() error { _, err := first.Propose(t.Context(), putApp("demo", "three")); return err })
	g.ready(first)
	g.same()
	assert.NotContains(t, g.leader().State().Apps, "refused")
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
