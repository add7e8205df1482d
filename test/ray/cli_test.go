// Package ray runs the command line of Ray Serve, unmodified, against a node.
package ray

import (
	"context"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.RemoveBinary()
	os.Exit(code)
}

const document = `applications:
- name: demo
  route_prefix: /
  import_path: dpserve:app
  args:
    model: {id: demo}
    engine: {kind: sim, args: {sim_step_ms: 0}}
    data_parallel: {dp_size: 2}
`

// commandLimit bounds one command. Ray takes seconds to be imported.
const commandLimit = 2 * time.Minute

// Ray's own serve deploys a file, shows it, prints it as a file that deploys again, and deletes it. A file
// that dpserve cannot run ends with exit code 1 and leaves the application as it is.
func TestCommandLineOfRayServe(t *testing.T) {
	if os.Getenv("DPSERVE_RAY") == "" {
		t.Skip("make test-ray-cli runs it")
	}
	cache := os.Getenv("DPSERVE_RAY_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		require.NoError(t, err)
		cache = filepath.Join(home, ".cache", "dpserve", "ray")
	}
	r := harness.Start(t)
	folder := t.TempDir()
	serve := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), commandLimit)
		defer cancel()
		run := exec.CommandContext(ctx, filepath.Join(cache, "venv", "bin", "serve"), args...)
		run.Dir = folder
		run.Env = append(os.Environ(), "RAY_USAGE_STATS_ENABLED=0", "RAY_DASHBOARD_ADDRESS=http://"+r.Admin,
			"RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN="+shownToken(r.Admin))
		out, err := run.CombinedOutput()
		t.Logf("$ serve %s\n%s", strings.Join(args, " "), out)
		return string(out), err
	}
	deploy := func(text string) error {
		require.NoError(t, os.WriteFile(filepath.Join(folder, "app.yaml"), []byte(text), 0o600))
		_, err := serve("deploy", "app.yaml")
		return err
	}

	require.NoError(t, deploy(document))
	r.WaitStatus("demo", "RUNNING")
	out, err := serve("status")
	require.NoError(t, err)
	for _, line := range []string{"demo:", "status: RUNNING", "status: HEALTHY", "RUNNING: 2"} {
		require.Contains(t, out, line)
	}

	out, err = serve("config", "-n", "demo")
	require.NoError(t, err)
	require.NoError(t, deploy("applications:\n- "+strings.ReplaceAll(strings.TrimSpace(out), "\n", "\n  ")))
	require.Error(t, deploy("applications: [{name: other, import_path: 'module:app'}]"))
	require.Equal(t, "RUNNING", r.App("demo").Status)

	_, err = serve("shutdown", "-y")
	require.NoError(t, err)
	out, err = serve("status")
	require.NoError(t, err)
	require.NotContains(t, out, "status: RUNNING")
}

// shownToken is the admin token of the node at an address.
func shownToken(address string) string {
	r := &http.Request{URL: &url.URL{Host: address}, Header: http.Header{}}
	harness.ShowToken(r)
	return strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
}
