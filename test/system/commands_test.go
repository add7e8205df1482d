package system

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

var errNotYet = errors.New("not yet")

// written is a file with a text, for commands.
func written(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// command runs a dpserve command against a node and returns its exit code and all that it wrote.
func command(m *harness.Member, args ...string) (code int, text string) {
	m.T.Helper()
	return commandAt(m.T, m.Admin, args...)
}

// commandAt is command with the node's admin address.
func commandAt(t testing.TB, admin string, args ...string) (code int, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Binary(t), args...)
	cmd.Env = append(os.Environ(), "DPSERVE_ADDR="+admin)
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("dpserve %v: %v\n%s", args, err, b)
	}
	return cmd.ProcessState.ExitCode(), string(b)
}

// counted is a counter's sum over the lines of /metrics that have all of the words.
func counted(t *testing.T, m *harness.Member, words ...string) (sum float64) {
	t.Helper()
	_, text, err := m.Ask("GET", "/metrics", "")
	require.NoError(t, err)
lines:
	for line := range strings.Lines(text) {
		for _, w := range words {
			if strings.HasPrefix(line, "#") || !strings.Contains(line, w) {
				continue lines
			}
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(strings.TrimSpace(line),
			' '):]), 64)
		require.NoError(t, err, line)
		sum += v
	}
	return sum
}

func answersAt(t *testing.T, app string, endpoints ...string) {
	t.Helper()
	load := harness.StartLoad(t, app, 4, 8, endpoints...)
	load.Reaches(20)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "%s: %v", app, y)
}
