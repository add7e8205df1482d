package node

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/dpserve/dpserve/internal/process"
)

// The test's process inherits orphans as process 1 does. A child that lives is not touched.
func TestProcessOneReapsOrphans(t *testing.T) {
	require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer func() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) }()
	own := exec.CommandContext(t.Context(), "sh", "-c", "read line; exit 7")
	line, err := own.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, own.Start())
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "sleep 0.05 >/dev/null & echo $!").Output()
	require.NoError(t, err)
	orphan, err := strconv.Atoi(strings.TrimSpace(string(out)))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		s, ok := process.ReadStat(orphan)
		return ok && s.Zombie && s.Parent == os.Getpid()
	}, time.Minute, time.Millisecond)

	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		reapOrphans(done, 10*time.Millisecond)
	}()
	require.Eventually(t, func() bool { _, there := process.ReadStat(orphan); return !there }, time.Minute,
		time.Millisecond)
	close(done)
	<-ended
	require.NoError(t, line.Close())
	require.Error(t, own.Wait())
	require.Equal(t, 7, own.ProcessState.ExitCode())
}
