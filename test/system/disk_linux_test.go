package system

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/dpserve/dpserve/test/harness"
)

// diskWrites says whether a node's process may write to files: without, every write fails, as on a disk that
// is full or read-only. The limit is the process's own and needs no rights.
func diskWrites(t *testing.T, m *harness.Member, may bool) {
	t.Helper()
	var limit unix.Rlimit
	require.NoError(t, unix.Prlimit(m.PID, unix.RLIMIT_FSIZE, nil, &limit))
	if limit.Cur = 0; may {
		limit.Cur = math.MaxUint64
	}
	limit.Cur = min(limit.Cur, limit.Max)
	require.NoError(t, unix.Prlimit(m.PID, unix.RLIMIT_FSIZE, &limit, nil))
}
