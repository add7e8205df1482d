package vllm

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What TestSGLang runs on; both are set by the target test-sglang of the Makefile, and by nobody else.
const (
	envSGLang      = "DPSERVE_SGLANG"       // 1: run
	envSGLangCache = "DPSERVE_SGLANG_CACHE" // what install-sglang.sh made
)

// sglangApp is two ranks on the CPU. A page of its cache is one token.
const sglangApp = `applications:
  - name: tiny
    model: {id: tiny, source: test/vllm/testdata/tiny-qwen2}
    engine:
      kind: sglang
      args:
        load_format: dummy
        device: cpu
        attention_backend: torch_native
        sampling_backend: pytorch
        grammar_backend: none
        dtype: float32
        context_length: 2048
        max_total_tokens: 8192
        disable_overlap_schedule: true
        disable_cuda_graph: true
        skip_server_warmup: true
        sleep_on_idle: true
      env: {SGLANG_USE_CPU_ENGINE: "1", OMP_NUM_THREADS: "1", HF_HUB_OFFLINE: "1"}
      startup_timeout_s: %d
    data_parallel: {dp_size: 2, coupling: independent}
    resources: {gpus: 0}
    routing: {policy: kv, identity: tokens}
    graceful_shutdown_timeout_s: 20
`

// sglangPython gives the interpreter that has SGLang, or skips the test.
func sglangPython(t *testing.T) string {
	t.Helper()
	if os.Getenv(envSGLang) != "1" {
		t.Skip("needs SGLang: run make test-sglang")
	}
	cache := os.Getenv(envSGLangCache)
	if cache == "" {
		home, err := os.UserHomeDir()
		require.NoError(t, err)
		cache = filepath.Join(home, ".cache", "dpserve", "sglang-cpu-0.5.23")
	}
	if _, err := os.Stat(filepath.Join(cache, ".complete")); err != nil {
		t.Skipf("needs SGLang, and it is not in %s: run make test-sglang", cache)
	}
	return filepath.Join(cache, "venv", "bin", "python3")
}

// TestSGLang runs real SGLang servers that dpserve starts.
func TestSGLang(t *testing.T) {
	a := startNode(t, sglangPython(t))
	a.deploy(model, fmt.Sprintf(sglangApp, int(startTimeout.Seconds())), 2)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *launched)
	}{
		{"Cached", testCached},
		{"Predictions", testSGLangPredictions},
		{"SchedulerKilled", testSchedulerKilled},
		{"Restart", testRestartOfDpserve},
		{"DpserveKilled", testDpserveKilled},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, a.of(t)) }) {
			return
		}
	}
}

// testSGLangPredictions: chats and token ids; what dpserve expects a rank to have cached is what it reports.
// A turn that comes at once may find the tokens of the last answer, of which SGLang has not told yet.
func testSGLangPredictions(t *testing.T, a *launched) {
	l := runSessions(t.Context(), a.dp.HTTP, 42, sessions/2)
	require.NoError(t, l.err)
	t.Logf("%s; by rank %v", &l.tally, l.ranks)
	assert.Zero(t, l.tally.over, &l.tally)
	assert.LessOrEqual(t, l.tally.cached-l.tally.predicted, answerTokens*l.tally.under, &l.tally)
	assert.Greater(t, l.tally.share(), 0.7, &l.tally)
	assert.Len(t, l.ranks, 2, "both ranks serve")
}

// testSchedulerKilled: the process that computes dies. The front lives on for a while and answers nothing.
func testSchedulerKilled(t *testing.T, a *launched) {
	a.killed(t, "scheduler of rank 1 killed", 1, func(l *life) int {
		scheduler := slices.IndexFunc(l.processes, func(pid int) bool {
			return strings.Contains(title(pid), "scheduler")
		})
		require.NotEqual(t, -1, scheduler, "the scheduler among %s", describe(l.processes))
		return l.processes[scheduler]
	})
}

// testDpserveKilled: dpserve dies and is started again. It takes the engines over, and no request is refused
// once it listens.
func testDpserveKilled(t *testing.T, a *launched) {
	old := []life{a.alive(0, 0), a.alive(0, 1)}
	a.dp.Signal(syscall.SIGKILL)
	<-a.dp.Exited()
	a.dp.Again()
	a.wait("it listens", func() error {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", a.dp.HTTP)
		if err != nil {
			return err
		}
		return c.Close()
	})
	began := time.Now()
	l := runSessions(t.Context(), a.dp.HTTP, 43, atOnce)
	require.NoError(t, l.err)
	t.Logf("after a new start of dpserve, %s: %s; by rank %v", since(began), &l.tally, l.ranks)
	for i := range old {
		now := a.alive(0, i)
		assert.Equal(t, old[i].front, now.front, "the engine's process")
		assert.Equal(t, old[i].incarnation, now.incarnation)
	}
}
