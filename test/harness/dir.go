package harness

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	memoryFiles    = "/dev/shm"
	memoryFilesMin = 1 << 30 // bytes free: what all the tests of a run may keep there together
)

// DataDir makes a data dir that goes with the test: in memory where the machine has such files, because a
// node says when a write takes more than a second, and the disk of a busy machine does that. Tests of disks
// make the fault themselves.
func DataDir(t testing.TB) string {
	t.Helper()
	var fs syscall.Statfs_t
	if syscall.Statfs(memoryFiles, &fs) != nil || fs.Bavail*uint64(fs.Bsize) < memoryFilesMin {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(memoryFiles, "dpserve-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}
