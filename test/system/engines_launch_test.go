package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// The tests of this file launch engines of kind vllm and sglang. The stub engine stands for their programs.

// stubApp is an application whose engines are stubs; they leave what they were started with in dir.
func stubApp(t *testing.T, name, kind, dir, args, env, more string) string {
	t.Helper()
	return fmt.Sprintf(`applications:
  - name: %[1]s
    model: {id: %[1]s, source: org/%[1]s, aliases: [%[1]s-alias]}
    engine:
      kind: %[2]s
      command: [%[3]q]
      args: {%[4]s}
      env: {STUB_DIR: %[5]q, %[6]s}
    graceful_shutdown_timeout_s: 2
    %[7]s
`, name, kind, harness.StubEngine(t), args, dir, env, more)
}

// stubStart is what one process was started with.
type stubStart struct {
	Argv []string `json:"argv"`
	Env  []string `json:"env"`
	PID  int      `json:"pid"`
}

func (s *stubStart) flag(name string) string {
	if i := slices.Index(s.Argv, name); i >= 0 && i+1 < len(s.Argv) {
		return s.Argv[i+1]
	}
	return ""
}

func (s *stubStart) variable(name string) string {
	for _, kv := range s.Env {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

// stubStarts reads what the processes left, by process id.
func stubStarts(t *testing.T, dir string) map[int]*stubStart {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	require.NoError(t, err)
	out := map[int]*stubStart{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		var s stubStart
		require.NoError(t, json.Unmarshal(b, &s))
		out[s.PID] = &s
	}
	return out
}

func chats(t *testing.T, r *harness.Real, model string) {
	t.Helper()
	resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat(model, "hello", 4, false))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusOK, resp.StatusCode)
}

// CC11: engines get the flags of the file as they are, and no other setting. Devices, ports and ranks are
// those of the grant.
func TestCC11LaunchedEngines(t *testing.T) {
	t.Parallel()
	r := harness.Start(t, "--gpus", "8")
	vllmEngines(t, r)
	sglangEngines(t, r)
	r.Quiet()
}

func vllmEngines(t *testing.T, r *harness.Real) {
	t.Helper()
	const flags = "max_num_seqs: 1024, gpu-memory-utilization: 0.85, trust_remote_code: true, " +
		"hf_overrides: {rope: 2}"
	want := []string{
		"--max-num-seqs", "1024", "--gpu-memory-utilization", "0.85", "--trust-remote-code",
		"--hf-overrides", `{"rope":2}`,
	}
	for name, more := range map[string]string{
		"dense":    "data_parallel: {dp_size: 2, coupling: independent}",
		"lockstep": "data_parallel: {dp_size: 2, coupling: lockstep}",
	} {
		dir := t.TempDir()
		r.Deploy(stubApp(t, name, "vllm", dir, flags, "A: b", more))
		st := r.WaitStatus(name, "RUNNING")
		starts := stubStarts(t, dir)
		require.Len(t, starts, 2)
		devices := map[string]bool{}
		for rank := range 2 {
			k, _ := r.Rank(name, 0, rank)
			s := starts[k.PID]
			require.NotNil(t, s, "rank %d", rank)
			assert.Equal(t, want, s.Argv[len(s.Argv)-len(want):])
			assert.Equal(t, []string{"org/" + name, "--served-model-name", name, name + "-alias"},
				s.Argv[1:5])
			assert.Equal(t, k.URL, "http://127.0.0.1:"+s.flag("--port"))
			assert.Equal(t, fmt.Sprint(k.Devices), "["+s.variable("CUDA_VISIBLE_DEVICES")+"]")
			devices[s.variable("CUDA_VISIBLE_DEVICES")] = true
			assert.Equal(t, "b", s.variable("A"))
			assert.Equal(t, os.Getenv("HOME"), s.variable("HOME"))
			number := ""
			if name == "lockstep" {
				number = strconv.Itoa(rank)
			}
			assert.Equal(t, number, s.flag("--data-parallel-rank"))
			for _, word := range s.Argv[:len(s.Argv)-len(want)] {
				assert.NotContains(t, []string{"--max-model-len", "--block-size", "--seed"}, word)
			}
		}
		assert.Len(t, devices, 2)
		chats(t, r, name)
		chats(t, r, name+"-alias")
		r.Delete(name)
		requireDead(t, r, pids(st))
	}
}

// sglangEngines: one SGLang process hosts the ranks of DP attention, each of which serves; without it, every
// rank is a process.
func sglangEngines(t *testing.T, r *harness.Real) {
	t.Helper()
	for name, c := range map[string]struct {
		args, more string
		processes  int
	}{
		"attention":   {"tp_size: 4, enable_dp_attention: true", "data_parallel: {dp_size: 4}", 1},
		"independent": {"mem_fraction_static: 0.8", "data_parallel: {dp_size: 2}", 2},
	} {
		dir := t.TempDir()
		r.Deploy(stubApp(t, name, "sglang", dir, c.args, "A: b",
			c.more+"\n    routing: {policy: round-robin}"))
		st := r.WaitStatus(name, "RUNNING")
		starts := stubStarts(t, dir)
		assert.Len(t, starts, c.processes)
		for range 8 {
			chats(t, r, name)
		}
		for _, u := range st.Units {
			for _, k := range u.Ranks {
				s := starts[k.PID]
				require.NotNil(t, s)
				assert.Equal(t, "org/"+name, s.flag("--model-path"))
				assert.Equal(t, k.URL, "http://127.0.0.1:"+s.flag("--port"))
				if c.processes == 1 {
					assert.Equal(t, "4", s.flag("--dp-size"))
					assert.Equal(t, "0,1,2,3", s.variable("CUDA_VISIBLE_DEVICES"))
				}
			}
		}
		served := map[int]uint64{}
		r.Eventually(func() error {
			for _, u := range r.App(name).Units {
				for _, k := range u.Ranks {
					served[k.Rank] = k.Requests
				}
			}
			for rank, n := range served {
				if n == 0 {
					return fmt.Errorf("rank %d has served nothing", rank)
				}
			}
			return nil
		}, "every rank serves")
		r.Delete(name)
		requireDead(t, r, pids(st))
	}
}

// What is wrong with an engine's program is found early, and said once with the last lines or what to do.
func TestBadEngines(t *testing.T) {
	t.Parallel()
	r := harness.Start(t, "--gpus", "6", "--timers", "probe=300ms,start_retry=50ms")
	r.Expect(harness.EngineFails)
	const isNone = "what answers on the engine's port is no engine"
	other := strconv.Itoa(ports.Take(t, 1))
	rows := map[string]struct{ do, want, line string }{
		"dies":       {"exit=1", "engine exited with code 1", "torch.OutOfMemoryError"},
		"exits-0":    {"exit=0", "engine exited with code 0", "torch.OutOfMemoryError"},
		"garbage":    {"garbage", isNone, ""},
		"not-found":  {"not-found", isNone + ": /health answered 418", ""},
		"wrong-port": {"wrong-port=" + other, "it answers on port " + other, ""},
		"missing":    {"none", "there is no program no-such-vllm on this node; install it", ""},
	}
	for name, c := range rows {
		app := stubApp(t, name, "vllm", t.TempDir(), "", "STUB_DO: "+c.do,
			"health_check_period_s: 0.2\n    route_prefix: /"+name)
		if name == "missing" {
			app = strings.Replace(app, harness.StubEngine(t), "no-such-vllm", 1)
		}
		r.Deploy(app)
	}
	for name, c := range rows {
		u := r.WaitStatus(name, "DEPLOY_FAILED").Units[0]
		assert.Contains(t, u.Reason, c.want, name)
		assert.Contains(t, strings.Join(u.LogTail, "\n"), c.line, name)
		r.Delete(name)
	}
	r.Quiet()
}
