package vllm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// engineOf is the entry `engine:` of a launched CPU engine, with more arguments and variables.
func engineOf(t *testing.T, args, env map[string]any) string {
	t.Helper()
	for _, kv := range cpuEnv() {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	for k, v := range map[string]any{
		"enforce_eager": true, "dtype": "float32", "max_model_len": maxContext, "block_size": blockSize,
		"max_num_seqs": 64,
	} {
		args[k] = v
	}
	b, err := json.Marshal(map[string]any{ // JSON is YAML
		"kind": "vllm", "command": []string{"vllm", "serve"}, "env": env, "args": args,
		"startup_timeout_s": startTimeout.Seconds(),
	})
	require.NoError(t, err)
	return string(b)
}

// mixture makes a folder with the model of experts, and one with the plugin that lets its ranks meet without
// a GPU.
func mixture(t *testing.T) (model, plugin string) {
	t.Helper()
	model, plugin = t.TempDir(), t.TempDir()
	files := map[string]string{
		"testdata/tiny-qwen2moe/config.json":         filepath.Join(model, "config.json"),
		"testdata/tiny-qwen2/tokenizer.json":         filepath.Join(model, "tokenizer.json"),
		"testdata/tiny-qwen2/tokenizer_config.json":  filepath.Join(model, "tokenizer_config.json"),
		"testdata/tiny-qwen2/generation_config.json": filepath.Join(model, "generation_config.json"),
		"testdata/cpu_ep_plugin.py":                  filepath.Join(plugin, "cpu_ep_plugin.py"),
	}
	for from, to := range files {
		b, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, b, 0o600))
	}
	// vLLM finds plugins by the record of an installed package
	info := filepath.Join(plugin, "cpu_ep_plugin-0.0.1.dist-info")
	require.NoError(t, os.Mkdir(info, 0o700))
	for name, text := range map[string]string{
		"METADATA":         "Metadata-Version: 2.1\nName: cpu_ep_plugin\nVersion: 0.0.1\n",
		"entry_points.txt": "[vllm.general_plugins]\ncpu_ep = cpu_ep_plugin:register\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(info, name), []byte(text), 0o600))
	}
	return model, plugin
}

// TestLaunchedGroup: two ranks with experts that meet in collectives are one unit.
func TestLaunchedGroup(t *testing.T) {
	program := installed(t)
	folder, plugin := mixture(t)
	a := startNode(t, program)
	engine := engineOf(t, map[string]any{"load_format": "dummy", "num_gpu_blocks_override": blocks},
		map[string]any{"PYTHONPATH": plugin})
	a.deploy("moe", fmt.Sprintf(`applications:
  - name: moe
    model: {id: %s, source: %q}
    engine: %s
    data_parallel: {dp_size: 2, coupling: lockstep}
    resources: {gpus: 0}
    routing: {policy: kv, identity: tokens}
    timeouts: {queue_s: %d}
`, model, folder, engine, int(startTimeout.Seconds())), 2)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *launched)
	}{
		{"Waves", testWaves},
		{"RankKilled", testRankOfGroupKilled},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, a.of(t)) }) {
			return
		}
	}
}

// testWaves: each rank serves while the other one has nothing to do, both serve together, and both serve
// again after a pause in which the group has come to rest.
func testWaves(t *testing.T, a *launched) {
	ctx, cancel := context.WithTimeout(t.Context(), askTime)
	defer cancel()
	ask := func(addr string, seed uint64) streamed {
		return stream(ctx, addr, "/v1/completions", map[string]any{
			"model": model, "prompt": randomIDs(newFamilies(seed).rng, 60), "stream": true,
			"max_tokens": streamTokens, "ignore_eos": true,
		})
	}
	for round := range uint64(2) {
		for n := range 2 {
			rank, began := a.alive(0, n), time.Now()
			got := ask(rank.addr(), 10*round+uint64(n))
			assert.True(t, got.whole(), "rank %d alone: %+v", n, got)
			t.Logf("round %d: rank %d alone, %d events in %s", round, n, got.events, since(began))
		}
		const together = 8
		all, began := make([]streamed, together), time.Now()
		var work sync.WaitGroup
		for i := range all {
			work.Go(func() { all[i] = ask(a.dp.HTTP, 100+10*round+uint64(i)) })
		}
		work.Wait()
		ranks := map[string]int{}
		for i := range all {
			assert.True(t, all[i].whole(), "%+v", all[i])
			ranks[all[i].Rank]++
		}
		t.Logf("round %d: %d streams through dpserve in %s, by rank %v", round, together, since(began), ranks)
		assert.Len(t, ranks, 2, "both ranks serve")
		sleep(ctx, 3*time.Second) // the engines stop to step
	}
	a.dp.Quiet()
}

// testRankOfGroupKilled: one dead rank fences the group, and the group starts again as a whole. Requests that
// were not begun wait for it.
func testRankOfGroupKilled(t *testing.T, a *launched) {
	old := []life{a.alive(0, 0), a.alive(0, 1)}
	c := a.clients()
	a.some(c, clientsAtOnce)
	core := slices.IndexFunc(old[1].processes, func(pid int) bool {
		return strings.Contains(title(pid), "EngineCore")
	})
	require.NotEqual(t, -1, core, "%s", describe(old[1].processes))
	began := time.Now()
	require.NoError(t, syscall.Kill(old[1].processes[core], syscall.SIGKILL))
	for i := range old {
		now := a.back(old[i])
		t.Logf("rank %d is back after %s in epoch %d", i, since(began), now.epoch)
		a.gone(old[i], &now)
	}
	a.some(c, clientsAtOnce)
	c.end(t, "core of rank 1 killed", clientsAtOnce)
	a.dp.Quiet()
}

// TestLaunchedPair: a prefill engine and a decode engine that dpserve starts meet, and texts are those of an
// unbroken run.
func TestLaunchedPair(t *testing.T) {
	program := installed(t)
	needNIXL(t, program)
	weights := makeWeights(t, program)
	a := startNode(t, program)
	args := map[string]any{
		"num_gpu_blocks_override": decodeBlocks,
		"kv_transfer_config":      map[string]any{"kv_buffer_device": "cpu"},
	}
	a.deploy("pair", fmt.Sprintf(`applications:
  - name: pair
    model: {id: %s, source: %q}
    engine: %s
    resources: {gpus: 0}
    prefill: {data_parallel: {dp_size: 1}}
    decode: {data_parallel: {dp_size: 1}}
    disaggregation: {transfer: nixl, decide: always, fallback: local}
`, model, weights, engineOf(t, args, map[string]any{})), 2)
	p := &pairs{t: t, dp: a.dp}
	p.met(1)
	decode := a.engineOfPool("pair.decode")
	all := p.questions(pairTexts, 40)
	p.unbroken(decode, all)
	const source = "vllm:prompt_tokens_by_source_total"
	moved := metric(t, []*rank{decode}, source, `"external_kv_transfer"`)
	c := p.askAll(all, pairsAtOnce)
	c.served(t, fmt.Sprintf("%d texts:", pairTexts))
	assert.Equal(t, pairTexts, c.whole)
	assert.Equal(t, pairTexts, c.remote, "decide: always")
	moved = metric(t, []*rank{decode}, source, `"external_kv_transfer"`) - moved
	t.Logf("prompt tokens moved from the prefill engine: %.0f", moved)
	assert.Positive(t, moved)
	a.dp.Quiet()
}

// engineOfPool is the engine of a pool's only rank.
func (a *launched) engineOfPool(pool string) *rank {
	a.t.Helper()
	st, err := a.status()
	require.NoError(a.t, err)
	for i := range st.Units {
		if u := &st.Units[i]; strings.HasPrefix(u.Unit, pool+"/") && len(u.Ranks) == 1 {
			return &rank{t: a.t, addr: strings.TrimPrefix(u.Ranks[0].URL, "http://")}
		}
	}
	require.Fail(a.t, "the pool has no rank", "%s in %+v", pool, st.Units)
	return nil
}
