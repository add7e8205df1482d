package cluster_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
)

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
		[]byte(`{"format":1,"cluster":"alpha","node":"node-1"}`), 0o600))
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
