package system

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// CC16: SIGTERM to `up` and to `start` while a stream runs: the stream ends whole, the exit code is 0, and no
// engine lives on.
func TestCC16SIGTERMDrains(t *testing.T) {
	t.Parallel()
	yaml := strings.Replace(simApp("slow", 2, "independent", "sim_step_ms: 20"),
		"graceful_shutdown_timeout_s: 2", "graceful_shutdown_timeout_s: 60", 1)
	start := func(t *testing.T) *harness.Real {
		r := harness.Start(t)
		r.Deploy(yaml)
		r.WaitStatus("slow", "RUNNING")
		return r
	}
	up := func(t *testing.T) *harness.Real {
		file := filepath.Join(t.TempDir(), "app.yaml")
		require.NoError(t, os.WriteFile(file, []byte(yaml), 0o600))
		r := harness.Run(t, "up", file)
		upServes(t, r)
		return r
	}
	for name, run := range map[string]func(t *testing.T) *harness.Real{"start": start, "up": up} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t)
			kids := r.Children()
			require.Len(t, kids, 2)
			resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat("slow", "hi", 100, true))
			require.NoError(t, err)
			defer resp.Body.Close()
			stream := bufio.NewReader(resp.Body)
			first, err := stream.ReadString('\n')
			require.NoError(t, err)
			assert.Contains(t, first, "data: ")
			r.Signal(syscall.SIGTERM)
			rest, err := io.ReadAll(stream)
			require.NoError(t, err)
			assert.Contains(t, string(rest), "data: [DONE]")
			assert.Equal(t, 100, strings.Count(first+string(rest), `"content":`)-1, "the first one is empty")
			assert.NotContains(t, string(rest), `"error"`)
			assert.Equal(t, 0, r.ExitCode(), r.Output())
			requireDead(t, r, kids)
		})
	}
}

// CC16: a data dir of another cluster is refused with exit code 1, with the reason and what to do.
func TestCC16DataDirOfAnotherCluster(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1))
	dir := harness.DataDir(t)
	port := strconv.Itoa(c.NodePort())
	other := harness.StartIn(t, dir, "--advertise", c.NextIP(), "--node-port", port, "--gossip-port", "0",
		"--node-id", "stranger")
	other.Stop()
	for name, args := range map[string][]string{
		"join": {
			"join", c.All[0].NodePort(), "--token", c.Token(), "--advertise", c.NextIP(), "--node-port", port,
			"--gossip-port", "0", "--node-id", "stranger",
		},
		"start, as another node": {"start", "--node-id", "b"},
	} {
		r := harness.Run(t, append(args, "--data-dir", dir, "--http-bind", "127.0.0.1:0", "--admin-bind",
			"127.0.0.1:0")...)
		assert.Equal(t, 1, r.ExitCode(), "%s: %s", name, r.Output())
		assert.Regexp(t, `belongs to (another cluster than the token|node stranger, not b)`, r.Output(), name)
		assert.Contains(t, r.Output(), "\nhint: ", name)
	}
	c.WaitNode("a", "leads on", alive)
	list, err := c.Nodes()
	require.NoError(t, err)
	assert.Len(t, list, 1, "nobody else is in")
}
