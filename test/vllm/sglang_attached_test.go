package vllm

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// sglangServer starts a server of SGLang as a user would, with dp ranks in one process and no KV events.
func sglangServer(t *testing.T, python string, dp int) *rank {
	t.Helper()
	r := newRank(t, python)
	_, port, err := net.SplitHostPort(r.addr)
	require.NoError(t, err)
	r.argv = append([]string{"-m", "sglang.launch_server", "--port", port, "--dp-size", fmt.Sprint(dp)},
		strings.Fields("--model-path testdata/tiny-qwen2 --served-model-name "+model+" --host 127.0.0.1 "+
			"--load-format dummy --device cpu --attention-backend torch_native --sampling-backend pytorch "+
			"--grammar-backend none --dtype float32 --context-length 2048 --max-total-tokens 8192 "+
			"--disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --sleep-on-idle "+
			"--enable-metrics --enable-cache-report")...)
	r.start()
	return r
}

// TestSGLangAttached runs servers that dpserve does not start: one with two ranks behind its URL, and one
// that comes and goes by the paths of SGLang's router.
func TestSGLangAttached(t *testing.T) {
	python := sglangPython(t)
	t.Setenv("SGLANG_USE_CPU_ENGINE", "1")
	t.Setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0") // the cores of each rank of a process
	two := sglangServer(t, python, 2)
	t.Setenv("SGLANG_CPU_OMP_THREADS_BIND", "0")
	one := sglangServer(t, python, 1)
	dp := harness.Start(t, "--router-api")
	two.ready()
	one.ready()
	url := "http://" + two.addr
	dp.Deploy(fmt.Sprintf(`applications:
  - name: tiny
    model: {id: tiny}
    engine:
      kind: attach
      family: sglang
      ranks:
        - {url: %q, addressing: header, selector: 0}
        - {url: %q, addressing: header, selector: 1}
    routing: {policy: kv, identity: tokens}
`, url, url))
	dp.WaitStatus(model, "RUNNING")
	for n := range 2 {
		testNamedRank(t, dp, n)
	}
	testCachedAgain(t, dp)

	_, text, err := post(t.Context(), dp.HTTP, "/add_worker?url=http://"+one.addr, nil)
	require.NoError(t, err)
	t.Logf("%s", text)
	ready := func(n int) func() error {
		return func() error {
			if st := dp.App(model); st.Ready != n || st.Desired != n {
				return fmt.Errorf("%d of %d ranks are ready, and not %d", st.Ready, st.Desired, n)
			}
			return nil
		}
	}
	dp.Eventually(ready(3), "the added worker is ready")
	header, _, err := generate(t, dp.HTTP, "0/2", "the fox")
	require.NoError(t, err)
	assert.Equal(t, "2", header.Get("x-dpserve-rank"))
	_, text, err = post(t.Context(), dp.HTTP, "/remove_worker?url=http://"+one.addr, nil)
	require.NoError(t, err)
	t.Logf("%s", text)
	dp.Eventually(ready(2), "the removed worker is gone")
	_, _, err = generate(t, dp.HTTP, "0/2", "the fox")
	require.ErrorIs(t, err, errStatus)
}

// meta is what SGLang tells of an answer of its own route.
type meta struct {
	Rank   int `json:"dp_rank"`
	Cached int `json:"cached_tokens"`
}

// generate asks SGLang's own route of a rank.
func generate(t *testing.T, addr, to, prompt string) (http.Header, meta, error) {
	t.Helper()
	var answer struct {
		Meta meta `json:"meta_info"`
	}
	header, text, err := post(t.Context(), addr, "/generate", map[string]any{
		"text": prompt, "sampling_params": map[string]any{"max_new_tokens": 4, "temperature": 0},
	}, to)
	if err == nil {
		require.NoError(t, json.Unmarshal(text, &answer), "%s", text)
	}
	return header, answer.Meta, err
}

// testNamedRank: SGLang reads the number of the rank for its own route from the body, and for others from a
// header. What the rank has cached is known by its tokens.
func testNamedRank(t *testing.T, dp *harness.Real, n int) {
	t.Helper()
	prompt := someWords(rand.New(rand.NewPCG(7, uint64(n))), systemWords)
	for i := range 3 { // its own choice would take turns
		header, got, err := generate(t, dp.HTTP, fmt.Sprint("0/", n), prompt)
		require.NoError(t, err)
		assert.Equal(t, fmt.Sprint(n), header.Get("x-dpserve-rank"))
		assert.Equal(t, n, got.Rank)
		predicted := header.Get("x-dpserve-cached-tokens")
		t.Logf("/generate to rank %d: %d cached, %s predicted", n, got.Cached, predicted)
		assert.True(t, i == 0 || predicted == fmt.Sprint(got.Cached), predicted)
		dp.Quiet()
	}
}

// testCachedAgain: a prompt goes to the rank behind the URL that has seen it, which has it cached. Of what a
// rank was sent dpserve knows whole blocks.
func testCachedAgain(t *testing.T, dp *harness.Real) {
	t.Helper()
	for seed := range uint64(4) {
		s := newSession(seed, 1)
		first, err := s.turn(t.Context(), dp.HTTP)
		require.NoError(t, err)
		dp.Quiet()
		second, err := s.turn(t.Context(), dp.HTTP)
		require.NoError(t, err)
		t.Logf("%d tokens, then %d: %d cached, %d predicted, rank %s", first.Prompt, second.Prompt,
			second.Cached, second.Predicted, second.Rank)
		assert.Equal(t, first.Rank, second.Rank)
		assert.GreaterOrEqual(t, second.Cached, first.Prompt)
		assert.InDelta(t, second.Cached, second.Predicted, answerTokens+blockSize)
	}
}
