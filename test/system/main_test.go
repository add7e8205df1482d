// Package system tests the built binary as its users run it: real processes, sockets and files.
package system

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// leastParallel is how many tests run side by side on however few cores: most of them wait.
const leastParallel = 4

func TestMain(m *testing.M) {
	flag.Parse()
	if p := flag.Lookup("test.parallel"); p.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) && runtime.GOMAXPROCS(0) < leastParallel {
		if err := p.Value.Set(strconv.Itoa(leastParallel)); err != nil {
			panic(err)
		}
	}
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
