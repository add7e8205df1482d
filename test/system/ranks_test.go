package system

import (
	"testing"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// pids lists the engine processes of an app.
func pids(st client.AppStatus) []int {
	var out []int
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			if k.PID != 0 {
				out = append(out, k.PID)
			}
		}
	}
	return out
}

func requireDead(t *testing.T, r *harness.Real, pids []int) {
	t.Helper()
	deadline := time.Now().Add(harness.Patience)
	for _, p := range pids {
		for harness.Alive(p) {
			if time.Now().After(deadline) {
				t.Fatalf("process %d still lives; output:\n%s", p, r.Output())
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}
