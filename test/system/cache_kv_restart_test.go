package system

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// kvHeld is how many blocks the engine at a URL has cached.
func kvHeld(t *testing.T, url string) (int, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/_sim/blocks", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	var tables []struct{ Blocks map[uint64]int }
	if err := json.Unmarshal(b, &tables); err != nil || len(tables) != 1 {
		return 0, fmt.Errorf("%s: %s: %w", url, b, err)
	}
	return len(tables[0].Blocks), nil
}

// kvEqual waits until the index holds of every rank what its engine does and returns it.
func kvEqual(r *harness.Real, t *testing.T, app string) map[string]int {
	t.Helper()
	var got map[string]int
	r.Eventually(func() error {
		got = kvIndexed(r, app)
		for _, u := range r.App(app).Units {
			for _, k := range u.Ranks {
				n, err := kvHeld(t, k.URL)
				if err != nil {
					return err
				}
				if have := got[fmt.Sprintf("%d/%d gpu", k.Group, k.Rank)]; have != n {
					return fmt.Errorf("rank %d: %d blocks in the index, %d in its engine", k.Rank, have, n)
				}
			}
		}
		return nil
	}, "the index is what the engines hold")
	return got
}

// KV4 with a real process: one of four engines is killed.
func TestKV4KilledEngineIsForgotten(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.EngineFails, harness.RequestRefused)
	r.Deploy(simApp("a", 4, "independent", "sim_step_ms: 1") + kvRouting)
	st := r.WaitStatus("a", "RUNNING")
	kvLive(r, "a", 4)
	for i := range 8 {
		kvOn(r, "a", fmt.Sprintf("0/%d", i%4), kvPrompt(i, 320))
	}
	before := kvEqual(r, t, "a")
	victim := st.Units[1].Ranks[0]
	require.NoError(t, syscall.Kill(victim.PID, syscall.SIGKILL))
	waitEpoch(r, "a", 1, victim.Epoch+1)
	r.WaitStatus("a", "RUNNING")
	after := kvEqual(r, t, "a")
	for i := range 4 {
		key, now := fmt.Sprintf("0/%d gpu", i), r.App("a").Units[i].Ranks[0]
		if i == 1 {
			assert.Less(t, after[key], before[key])
			assert.NotEqual(t, victim.Incarnation, now.Incarnation)
			continue
		}
		assert.Equal(t, before[key], after[key])
		assert.Equal(t, st.Units[i].Ranks[0].Incarnation, now.Incarnation)
		assert.Equal(t, st.Units[i].Ranks[0].Epoch, now.Epoch)
	}
	kvOn(r, "a", "0/1", kvPrompt(50, 320))
	last := kvEqual(r, t, "a")
	assert.Equal(t, after["0/1 gpu"]+20, last["0/1 gpu"], "events of the new process count")
	r.Quiet()
	t.Logf("KV4: %v, killed: %v, one prompt later: %v", before, after, last)
}

// KV2 and KV4 with an attached engine: dpserve ends and begins again in front of it, then the engine does in
// its place.
func TestKV2DpserveRestartsBesideAnEngine(t *testing.T) {
	t.Parallel()
	api, events, replay := ports.TakeAddr(t), ports.TakeAddr(t), ports.TakeAddr(t)
	hand := func() *harness.Real {
		host, port, err := net.SplitHostPort(api)
		require.NoError(t, err)
		_, pub, err := net.SplitHostPort(events)
		require.NoError(t, err)
		kv := fmt.Sprintf(`{"enable_kv_cache_events":true,"endpoint":"tcp://*:%s",`+
			`"replay_endpoint":"tcp://%s"}`, pub, replay)
		e := harness.Run(t, "engine", "sim", "--host", host, "--port", port, "--served-model-name", "a",
			"--sim-step-ms", "1", "--kv-events-config", kv)
		e.Eventually(func() error { _, err := kvHeld(t, "http://"+api); return err }, "the engine answers")
		return e
	}
	engine := hand()
	dir := t.TempDir()
	r := harness.StartIn(t, dir)
	r.Expect(harness.EngineReplaced, harness.RequestRefused)
	r.Deploy(fmt.Sprintf(`applications:
  - name: a
    model: {id: a}
    engine:
      kind: attach
      family: vllm
      ranks:
        - {url: "http://%s", kv_events: {connect: "tcp://%s", replay: "tcp://%s"}}
%s`, api, events, replay, kvRouting))
	r.WaitStatus("a", "RUNNING")
	kvLive(r, "a", 1)
	for i := range 10 {
		kvOn(r, "a", "0/0", kvPrompt(i, 320))
	}
	before := kvEqual(r, t, "a")
	r.Stop()

	r = harness.StartIn(t, dir)
	r.Expect(harness.EngineReplaced, harness.RequestRefused)
	r.WaitStatus("a", "RUNNING")
	kvLive(r, "a", 1)
	after := kvEqual(r, t, "a")
	assert.Equal(t, before["0/0 gpu"], after["0/0 gpu"], "by replay")

	old, _ := r.Rank("a", 0, 0)
	engine.Signal(syscall.SIGKILL)
	engine.Again()
	r.Eventually(func() error {
		if k, _ := r.Rank("a", 0, 0); k.Incarnation == old.Incarnation || k.Phase != "ready" {
			return fmt.Errorf("%s, incarnation %s", k.Phase, k.Incarnation)
		}
		return nil
	}, "the engine is another one")
	now, _ := r.Rank("a", 0, 0)
	assert.Equal(t, old.Epoch, now.Epoch, "the epoch is kept")
	last := kvEqual(r, t, "a")
	assert.Less(t, last["0/0 gpu"], after["0/0 gpu"])
	r.Quiet()
	t.Logf("KV2: %v before dpserve restarted, %v after; KV4: %v when the engine had", before, after, last)
}

// KV9 and KV16 with real processes: what status prints of a surprising block size, and what engines are told
// on their command lines.
func TestKV9AndKV16RealProcesses(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.CachingOff)
	list := func(yaml string) string { return strings.TrimPrefix(yaml, "applications:\n") }
	r.Deploy(simApp("settled", 1, "independent",
		"sim_step_ms: 1, block_size: 16, sim_settle_block_size: 768") + kvRouting +
		list(simApp("uncached", 1, "independent", "sim_step_ms: 1, enable_prefix_caching: false")) +
		kvRouting +
		list(strings.Replace(simApp("off", 1, "independent", "sim_step_ms: 1"), "{kind: sim,",
			"{kind: sim, kv_events: off,", 1)) + kvRouting +
		list(simApp("weightless", 1, "independent", "sim_step_ms: 1")) +
		"    routing: {policy: kv, params: {overlap_score_weight: 0}}\n")
	for app, told := range map[string]bool{
		"settled": true, "uncached": false, "off": false,
		"weightless": false,
	} {
		st := r.WaitStatus(app, "RUNNING")
		assert.Equal(t, told, strings.Contains(cmdline(t, st.Units[0].Ranks[0].PID), "--kv-events-config"),
			app)
		kvOn(r, app, "0/0", kvPrompt(1, 2000))
	}
	kvEqual(r, t, "settled")
	var text string
	r.Eventually(func() error {
		cmd := exec.CommandContext(t.Context(), harness.Binary(t), "status")
		cmd.Env = append(os.Environ(), "DPSERVE_ADDR="+r.Admin)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if text = string(out); !strings.Contains(text, "blocks of 768 tokens, the engine reported 16") ||
			!strings.Contains(text, "uncached/0/0: the engine runs without prefix caching") {
			return fmt.Errorf("status says\n%s", text)
		}
		return nil
	}, "status names both sizes")
	assert.NotContains(t, text, "silent")
	assert.Equal(t, 1, strings.Count(r.Output(), "every engine runs without prefix caching"), "said once")
	r.Quiet()
	t.Logf("KV9, KV16:\n%s", text)
}
