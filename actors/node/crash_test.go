package node_test

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/node"
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

func TestAKilledNodeLeavesNoEngine(t *testing.T) {
	pids := crash(t, t.TempDir(), "stubborn")
	require.Len(t, pids, 2)
	for _, pid := range pids {
		waitDead(t, pid)
	}
}

func TestLeftoversOfAKilledNodeAreSweptByTheNext(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	dir := t.TempDir()
	pids := crash(t, dir, "orphan")
	require.Len(t, pids, 4)
	orphans := 0
	// let the front processes end; the assertion below does not depend on it
	time.Sleep(50 * time.Millisecond)
	for _, pid := range pids {
		if !dead(pid) {
			orphans++
		}
	}
	require.GreaterOrEqual(t, orphans, 2, "children outlive a parent-death signal that is not theirs")
	newRig(t, func(c *node.Config) { c.DataDir = dir })
	for _, pid := range pids {
		assert.True(t, dead(pid), "%d", pid)
	}
}

func TestTheSweepTouchesNobodyElse(t *testing.T) {
	dir := t.TempDir()
	other := exec.Command("sleep", "60")
	other.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, other.Start())
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	processTable := `[{"group":` + strconv.Itoa(other.Process.Pid) +
		`,"start":"1","mark":"DPSERVE_OWNER=x.1"}]`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pgids"), []byte(processTable), 0o600))
	newRig(t, func(c *node.Config) { c.DataDir = dir })
	assert.False(t, dead(other.Process.Pid))
}

func waitDead(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(patience); !dead(pid); {
		require.True(t, time.Now().Before(end), "process %d lives on", pid)
		time.Sleep(5 * time.Millisecond)
	}
}
