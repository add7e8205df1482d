package system

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// simFail tells a simulated engine, on its own loopback port, to fail.
func simFail(t *testing.T, r *harness.Real, app string, group, rank int, body string) {
	t.Helper()
	simPost(t, r, app, group, rank, "fail", body)
}

func simPost(t *testing.T, r *harness.Real, app string, group, rank int, path, body string) {
	t.Helper()
	require.NoError(t, trySimPost(t, r, app, group, rank, path, body))
}

// trySimPost is simPost for a rank whose engine may be on its way.
func trySimPost(t *testing.T, r *harness.Real, app string, group, rank int, path, body string) error {
	t.Helper()
	k, _ := r.Rank(app, group, rank)
	if k.URL == "" {
		return fmt.Errorf("rank %d/%d has no engine", group, rank)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, k.URL+"/_sim/"+path,
		strings.NewReader(body))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	require.NoError(t, resp.Body.Close())
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s", path, body, resp.Status)
	}
	return nil
}

// simVanish is simFail for modes that end the process, sometimes before it has answered.
func simVanish(t *testing.T, r *harness.Real, app string, group, rank int, body string) {
	t.Helper()
	k, ok := r.Rank(app, group, rank)
	require.True(t, ok, "rank %d/%d is listed", group, rank)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, k.URL+"/_sim/fail",
		strings.NewReader(body))
	require.NoError(t, err)
	if resp, err := http.DefaultClient.Do(req); err == nil {
		_ = resp.Body.Close()
	}
}

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

// RG9: engines that ignore SIGTERM, a front process whose child lives on with its ports, and workers that
// outlive their engine are gone after a delete.
func TestRG9StubbornEngines(t *testing.T) {
	t.Parallel()
	r := harness.Start(t, "--timers", "kill_grace=500ms")
	r.Expect(harness.EngineFails)
	r.Deploy(simApp("stubborn", 2, "lockstep", ""))
	st := r.WaitStatus("stubborn", "RUNNING")
	for rank := range 2 {
		simFail(t, r, "stubborn", 0, rank, `{"mode":"ignore-sigterm"}`)
	}
	r.Delete("stubborn")
	requireDead(t, r, pids(st))

	r.Deploy(simApp("orphan", 2, "lockstep", ""))
	before := r.WaitStatus("orphan", "RUNNING")
	simVanish(t, r, "orphan", 0, 1, `{"mode":"orphan"}`)
	r.Eventually(func() error {
		if st := r.App("orphan"); st.Status != "RUNNING" || st.Units[0].Epoch <= before.Units[0].Epoch {
			return fmt.Errorf("%s, epoch %d", st.Status, st.Units[0].Epoch)
		}
		return nil
	}, "group restarted after its orphan was killed")
	for _, pid := range pids(before) {
		assert.False(t, harness.Alive(pid), "no start before process %d has ended", pid)
	}
	r.Delete("orphan")

	r.Deploy(stubApp(t, "workers", "vllm", t.TempDir(), "", "STUB_DO: workers",
		"data_parallel: {dp_size: 2, coupling: independent}\n    resources: {gpus: 0}"))
	st = r.WaitStatus("workers", "RUNNING")
	all := append(pids(st), r.Children()...)
	r.Delete("workers")
	requireDead(t, r, all)
	assert.Empty(t, r.Children(), "no process is left")
}
