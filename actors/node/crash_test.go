package node_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/shim"
)

// standalone stands in for *testing.T where a test's rig runs in a process of its own, which is killed from
// outside.
type standalone struct {
	testing.TB
}

func (*standalone) Helper()                   {}
func (*standalone) Cleanup(func())            {}
func (*standalone) Output() io.Writer         { return os.Stderr }
func (*standalone) Context() context.Context  { return context.Background() }
func (*standalone) Errorf(f string, a ...any) { _, _ = io.WriteString(os.Stderr, f+"\n"); _ = a }
func (*standalone) FailNow()                  { os.Exit(1) }
func (*standalone) Fatal(...any)              { os.Exit(1) }
func (*standalone) TempDir() string           { return "" }

// crash starts a node in a process of its own, kills it with SIGKILL and returns the engines' processes.
func crash(t *testing.T, dir, mode string) []int {
	cmd := exec.Command(os.Args[0], nodeWord, dir, mode)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(line, "pids "), line)
	var pids []int
	for _, f := range strings.Fields(line)[1:] {
		pid, err := strconv.Atoi(f)
		require.NoError(t, err)
		pids = append(pids, pid)
	}
	for _, pid := range pids {
		assert.False(t, dead(pid))
	}
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	return pids
}

// HF62: Engines that are to end with the node end with all their processes when it is killed, and their shims
// too.
func TestAKilledNodeLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	pids := crash(t, dir, "stubborn,orphan")
	require.Len(t, pids, 4)
	for _, pid := range pids {
		waitDead(t, pid)
	}
	folders := filepath.Join(dir, "engines")
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		left, err := os.ReadDir(folders)
		require.NoError(t, err)
		if len(left) == 0 {
			break
		}
		require.True(t, time.Now().Before(end), "a shim lives on")
	}
}

// Engines that are to outlive a killed node do. A node whose engines do not outlive it ends what it finds.
func TestEnginesInShimsOutliveAKilledNode(t *testing.T) {
	dir := t.TempDir()
	pids := crash(t, dir, "shims")
	require.Len(t, pids, 2)
	entries, err := shim.Discover(t.Context(), filepath.Join(dir, "engines"))
	require.NoError(t, err)
	require.Len(t, entries, 2)
	for i := range entries {
		e := &entries[i]
		require.NoError(t, e.Err)
		assert.Contains(t, pids, e.State.PID)
		assert.False(t, dead(e.State.PID))
		e.Client.Close()
		<-e.Client.Done()
	}
	newRig(t, func(c *node.Config) { c.DataDir = dir })
	for _, pid := range pids {
		assert.True(t, dead(pid))
	}
}

func waitDead(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(patience); !dead(pid); {
		require.True(t, time.Now().Before(end), "process %d lives on", pid)
		time.Sleep(5 * time.Millisecond)
	}
}

func TestLogsOfAllRanksAreMergedAndFollowed(t *testing.T) {
	r := newRig(t)
	m := r.start(demo(app.Lockstep, 2, ""))
	r.ready(m)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lines := make(chan node.LogLine, 100)
	ended := make(chan error, 1)
	go func() {
		ended <- r.node.Logs(ctx, node.LogQuery{App: "demo", Rank: -1, Follow: true},
			func(l node.LogLine) error {
				lines <- l
				return nil
			})
	}()
	assert.Equal(t, "stdout", (<-lines).Stream)
	assert.Equal(t, m.Unit, (<-lines).Unit)
	r.stop(m, 0)
	assert.Equal(t, "SIGTERM", (<-lines).Text)
	assert.Equal(t, "SIGTERM", (<-lines).Text)
	cancel()
	require.NoError(t, <-ended)
	r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)

	var tail []node.LogLine
	require.NoError(t, r.node.Logs(t.Context(), node.LogQuery{Unit: m.Unit, Rank: 1, Tail: 1},
		func(l node.LogLine) error {
			tail = append(tail, l)
			return nil
		}))
	require.Len(t, tail, 1)
	assert.Equal(t, [...]any{1, "SIGTERM", uint64(1)}, [...]any{tail[0].Rank, tail[0].Text, tail[0].Epoch})
	r.eventually("the file of a rank", func() bool { // the shim writes it
		file, err := os.ReadFile(filepath.Join(r.dir, "logs", "demo.0.1.log"))
		return err == nil && strings.Contains(string(file), " stdout engine rank 1 on port ")
	})
}

// fakeNode is a node in its own process: it starts a unit, prints the process ids once it is ready, and
// waits.
func fakeNode(args []string) int {
	t := &standalone{}
	r := newRig(t, func(c *node.Config) {
		c.DataDir = args[0]
		if args[1] == "shims" {
			inShims(c)
		}
	})
	m := r.start(demo(app.Lockstep, 2, args[1]))
	r.ready(m)
	var pids []string
	for _, s := range r.statuses(m) {
		for _, pid := range group(s.PID) {
			pids = append(pids, strconv.Itoa(pid))
		}
	}
	fmt.Println("pids", strings.Join(pids, " "))
	time.Sleep(time.Hour)
	return 0
}
