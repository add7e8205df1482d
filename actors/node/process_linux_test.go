package node

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestStatLines(t *testing.T) {
	s, ok := readStat(os.Getpid())
	assert.True(t, ok)
	group, err := syscall.Getpgid(0)
	require.NoError(t, err)
	assert.Equal(t, group, s.group)
	assert.False(t, s.zombie)
	assert.NotEmpty(t, s.start)

	// A process may have any name.
	s, ok = parseStat(7, "7 (VLLM) Z 1 99 (x) S 1 42 42 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3")
	assert.True(t, ok)
	assert.Equal(t, stat{pid: 7, parent: 1, group: 42, start: "12345"}, s)
}

// FuzzParseStat: incomplete and strange lines are refused without a panic.
func FuzzParseStat(f *testing.F) {
	f.Add("7 (a) Z 1 42 42 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3")
	f.Add(")")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		if s, ok := parseStat(1, line); ok && s.start == "" {
			t.Fatal("accepted without a start time")
		}
	})
}
