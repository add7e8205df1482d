package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/shim"
)

// shimMemory is the private memory that a shim may have.
const shimMemory = 12 << 20

// TestShimIsSmall: the whole binary is the shim, with all that its packages set up; still it has little
// memory of its own, and uses no CPU while its engine runs.
func TestShimIsSmall(t *testing.T) {
	t.Parallel()
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	id := fmt.Sprintf("small-%d.%d", os.Getpid(), time.Now().UnixNano())
	c, info, err := shim.Start(t.Context(), os.Args[0], t.TempDir(), shim.Spec{
		ID: id, Path: sleep, Argv: []string{"sleep", "3600"}, Dir: "/", Orphan: time.Hour, Grace: time.Second,
	})
	require.NoError(t, err)
	defer func() {
		require.NoError(t, info.State.End())
		<-c.Done()
	}()
	_, err = c.Watch(t.Context())
	require.NoError(t, err)
	private := privateMemory(t, info.State.Shim)
	used := 2
	for second := 0; used > 1 && second < 20; second++ { // on a busy machine it may still be starting
		began := cpuTicks(t, info.State.Shim)
		time.Sleep(time.Second)
		used = cpuTicks(t, info.State.Shim) - began
	}
	t.Logf("a shim has %.1f MiB of private memory, and used %d ticks of CPU in a second",
		float64(private)/(1<<20), used)
	assert.LessOrEqual(t, used, 1)
	if !isRaced() {
		assert.LessOrEqual(t, private, shimMemory)
	}
}

// privateMemory is what only this process has, written or not.
func privateMemory(t *testing.T, pid int) (bytes int) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	require.NoError(t, err)
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var kib int
		name, value, _ := strings.Cut(lines.Text(), ":")
		if strings.HasPrefix(name, "Private_") && !strings.HasSuffix(name, "Hugetlb") {
			_, err := fmt.Sscanf(value, "%d kB", &kib)
			require.NoError(t, err)
			bytes += kib << 10
		}
	}
	return bytes
}

// cpuTicks is the CPU time of a process, in ticks of 10 ms.
func cpuTicks(t *testing.T, pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var user, system int
	_, err = fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
	require.NoError(t, err)
	return user + system
}

// isRaced says that this binary has the race detector, whose memory is not a shim's.
func isRaced() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
