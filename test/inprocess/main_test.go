// Package inprocess tests whole nodes in one process on fake time: what needs minutes of waiting takes
// milliseconds, and every moment is exact.
package inprocess

import (
	"fmt"
	"os"
	"runtime/debug"
	"testing"

	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/test/harness"
)

// The garbage collector runs after an allocation of garbage percent of the heap, and more often once the
// process has heap bytes. A GOGC of the environment goes before. The nodes of a test allocate much and keep
// little, so the default of 100 percent costs a tenth of the processor time.
const (
	garbage = 400
	heap    = 1 << 30
)

func TestMain(m *testing.M) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbage)
		debug.SetMemoryLimit(heap)
	}
	goleak.VerifyTestMain(m)
}

// simApp is an app.yaml with one simulated app; more are further lines of the application.
func simApp(name string, dp int, coupling, args string, more ...string) string {
	text := fmt.Sprintf(`applications:
  - name: %[1]s
    model: {id: %[1]s}
    engine: {kind: sim, args: {%[4]s}}
    data_parallel: {dp_size: %[2]d, coupling: %[3]s}
`, name, dp, coupling, args)
	for _, line := range more {
		text += "    " + line + "\n"
	}
	return text
}

// gone says what is left of an app.
func gone(c *harness.Cluster, app string) func() error {
	return func() error {
		if st, ok := c.App(app); ok {
			return fmt.Errorf("%s is %s", app, st.Status)
		}
		return nil
	}
}
