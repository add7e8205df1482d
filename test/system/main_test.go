// Package system tests the built binary as its users run it: real processes, sockets and files.
package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/parallel"
)

// sideBySide is how many clusters run at a time on however few cores: most tests wait most of the time.
const sideBySide = 8

func TestMain(m *testing.M) {
	parallel.AtLeast(sideBySide)
	code := m.Run()
	harness.RemoveBinary()
	os.Exit(code)
}

// simApp is an app.yaml with one simulated app.
func simApp(name string, dp int, coupling string, args string) string {
	return fmt.Sprintf(`applications:
  - name: %[1]s
    model: {id: %[1]s}
    engine: {kind: sim, args: {%[4]s}}
    data_parallel: {dp_size: %[2]d, coupling: %[3]s}
    graceful_shutdown_timeout_s: 2
`, name, dp, coupling, args)
}

// decode reads a JSON answer to its end.
func decode(t *testing.T, resp *http.Response, into any) {
	t.Helper()
	defer resp.Body.Close()
	require.NoError(t, json.NewDecoder(resp.Body).Decode(into))
}
