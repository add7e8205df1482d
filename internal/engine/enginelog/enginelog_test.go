package enginelog_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/enginelog"
)

func read(t testing.TB, name string) string {
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	return string(b)
}

func linesOf(t testing.TB, name string) []string {
	return strings.Split(strings.TrimSuffix(read(t, name), "\n"), "\n")
}

// pairs yields the messages of a file, without their class, and what they must give.
func pairs(t testing.TB, name string) func(yield func(line, want string) bool) {
	lines := linesOf(t, name)
	require.Zero(t, len(lines)%2)
	return func(yield func(line, want string) bool) {
		for i := 0; i < len(lines); i += 2 {
			class, line, ok := strings.Cut(lines[i], ": ")
			require.True(t, ok)
			require.Contains(t, []string{"captured", "source", "report"}, class)
			want, ok := strings.CutPrefix(lines[i+1], "=")
			require.True(t, ok, "%s: no = behind %q", name, lines[i])
			if !yield(line, strings.TrimPrefix(want, " ")) {
				return
			}
		}
	}
}

func TestMessagesOfAStart(t *testing.T) {
	for line, want := range pairs(t, "progress.txt") {
		var r enginelog.Reader
		r.Read([]byte(line))
		assert.Equal(t, want, r.Progress(), line)
		assert.LessOrEqual(t, len(want), 75, "the tables of the commands have no more room")
	}
}

func TestMessagesOfFailures(t *testing.T) {
	for line, want := range pairs(t, "hints.txt") {
		assert.Equal(t, want, enginelog.Hint([]string{"INFO before", line, "INFO behind"}), line)
	}
}

// stagesOf are the texts that a log shows one after the other.
func stagesOf(log string) []string {
	var r enginelog.Reader
	s := r.Stream()
	var out []string
	for line := range strings.Lines(log) {
		_, _ = s.Write([]byte(line))
		if text := r.Progress(); text != "" && (len(out) == 0 || out[len(out)-1] != text) {
			out = append(out, text)
		}
	}
	return out
}

func TestACapturedStart(t *testing.T) {
	assert.Equal(t, []string{
		"reading its settings", "starting its engine core", "loading the model",
		"KV cache of 1,048,576 tokens is made", "opening its API", "its API is open",
	}, stagesOf(read(t, "vllm_dense_start.log")))
	assert.Equal(t, []string{
		"reading its settings", "KV cache of 1,048,576 tokens is made", "opening its API", "its API is open",
	}, stagesOf(read(t, "vllm_moe_rank0_start.log")))
}

func TestCapturedFailures(t *testing.T) {
	assert.Contains(t, enginelog.Hint(linesOf(t, "vllm_dense_refused.log")), "coupling: independent")
	assert.Contains(t, enginelog.Hint(linesOf(t, "vllm_group_mismatch.log")), "rank 1 has other settings")
	assert.Equal(t, "the engine says NotImplementedError",
		enginelog.Hint(linesOf(t, "vllm_first_request_fails.log")))
	assert.Empty(t, enginelog.KnownCause(linesOf(t, "vllm_first_request_fails.log")),
		"an exception alone does not tell why an engine ends that has served")
	assert.Empty(t, enginelog.Hint(linesOf(t, "vllm_dense_start.log")), "a start that succeeds has no hint")
	assert.Empty(t, enginelog.Hint(nil))
}

// The cause stands far above the last lines, which only say that something above failed.
func TestTheCauseStandsBeforeItsConsequences(t *testing.T) {
	lines := []string{
		"(EngineCore pid=9) ERROR 11-21 03:05:02 [core.py:1112] EngineCore failed to start.",
		"(EngineCore pid=9) ERROR 11-21 03:05:02 [core.py:1112] Traceback (most recent call last):",
		"(EngineCore pid=9) ERROR 11-21 03:05:02 [core.py:1112] torch.OutOfMemoryError: CUDA out of memory" +
			". Tried to allocate 1.47 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free",
		"(Worker_TP0 pid=11) RuntimeError: NCCL error: remote process exited or there was a network error",
	}
	for range 60 {
		lines = append(lines, `(APIServer pid=8)   File "/srv/vllm/cli/serve.py", line 152, in cmd`)
	}
	lines = append(lines, "(APIServer pid=8) RuntimeError: Engine core initialization failed. See root "+
		"cause above. Failed core proc(s): {'EngineCore': 1}")
	assert.Contains(t, enginelog.Hint(lines), "GPU 0 is out of memory: 1.47 GiB wanted")

	lines[2] = "(EngineCore pid=9) ERROR 11-21 03:05:02 [core.py:1112] zmq.error.ZMQError: Too bad"
	lines[3] = ""
	assert.Equal(t, "the engine says ZMQError: Too bad", enginelog.Hint(lines))
}

// HF78: What the processes of an engine write of one failure: the first exception of the process in which it
// began is the cause. Before it stand exceptions that were handled, behind it those of processes that waited.
func TestTheRootCauseOfAStart(t *testing.T) {
	for name, c := range map[string]struct {
		hint string
		last string // line of an excerpt of 12 lines
	}{
		"vllm_kv_cache_fails.log": {
			"requests of 8192 tokens need 1.13 GiB of KV cache, 0.56 GiB are there; write " +
				"max_model_len: 4064 or less into engine.args, or raise --gpu-memory-utilization",
			"ValueError: To serve at least one request",
		},
		"vllm_worker_fails.log": {
			"the engine says KeyError: 'model.layers.0.mlp.gate_up_proj.weight_scale'; then RuntimeError: " +
				"the weights do not fit the model",
			"RuntimeError: the weights do not fit the model",
		},
		"vllm_old_core_fails.log": {
			"the engine says AssertionError: the scheduler got no blocks", "AssertionError: the scheduler",
		},
		"sglang_scheduler_fails.log": {
			"the engine says KeyError: 'rope_type_x'; then ValueError: unknown positions",
			"ValueError: unknown positions",
		},
		"vllm_front_fails.log": {
			"the engine says TypeError: tokenizer_config.json holds no map", "TypeError: tokenizer_config",
		},
		"vllm_first_request_fails.log": {"the engine says NotImplementedError", "NotImplementedError"},
	} {
		lines := linesOf(t, name)
		assert.Equal(t, c.hint, enginelog.Hint(lines), name)
		excerpt := enginelog.Excerpt(lines, 12)
		assert.LessOrEqual(t, len(excerpt), 12)
		assert.Contains(t, strings.Join(excerpt, "\n"), c.last, name)
		for cut := range lines { // whatever is lost of the beginning
			assert.NotContains(t, enginelog.Hint(lines[cut:]), "initialization failed", name)
		}
	}
	start := linesOf(t, "vllm_dense_start.log")
	assert.Equal(t, start[len(start)-5:], enginelog.Excerpt(start, 5), "without a failure the last ones")
	assert.Equal(t, start, enginelog.Excerpt(start, 1000))
}

// Colours and bars in front of a message do not hide it.
func TestWhatTerminalsInterpretIsLeftOut(t *testing.T) {
	assert.Equal(t, "the engine says ValueError: no good", enginelog.Hint([]string{
		"Capturing batches:   0%|          | 0/4 [00:00<?, ?it/s]\r" +
			"\x1b[1;36m(EngineCore pid=9)\x1b[0;0m ValueError: no\tgood\r",
	}))
}

// A bar draws over its line: what it shows is seen before the line has ended.
func TestABarIsReadWhileItMoves(t *testing.T) {
	var r enginelog.Reader
	out, err := r.Stream(), r.Stream()
	draw := func(n int) {
		_, _ = fmt.Fprintf(err, "\rCapturing CUDA graphs (decode, FULL): %3d%%|█       | %d/35 [00:02<00:02]",
			100*n/35, n)
	}
	draw(7)
	_, _ = out.Write([]byte("half a line of the other stream"))
	draw(8)
	assert.Equal(t, "capturing graphs 7 of 35 (decode, FULL)", r.Progress())
	draw(9)
	assert.Equal(t, "capturing graphs 8 of 35 (decode, FULL)", r.Progress())
	_, _ = err.Write([]byte("\n"))
	assert.Equal(t, "capturing graphs 9 of 35 (decode, FULL)", r.Progress())

	r.Stop()
	_, _ = out.Write([]byte("\nINFO:     Application startup complete.\n"))
	assert.Equal(t, "capturing graphs 9 of 35 (decode, FULL)", r.Progress(), "nothing is read any more")
}

func TestALongLineIsReadAtItsBeginning(t *testing.T) {
	var r enginelog.Reader
	s := r.Stream()
	for range 1 << 10 {
		n, err := s.Write(bytes.Repeat([]byte("x"), 1<<10))
		require.NoError(t, err)
		require.Equal(t, 1<<10, n)
	}
	_, _ = s.Write([]byte("Application startup complete\nStarting to load model /m..." +
		strings.Repeat("y", 1<<20) + "Application startup complete\n"))
	assert.Equal(t, "loading the model", r.Progress())
}

// However a log is cut into writes, the same is understood, in bounded words.
func FuzzStream(f *testing.F) {
	f.Add([]byte("Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]\n"), 7)
	f.Add([]byte("\r 46%|████▌     | 16/35 [00:02\rCapturing batches: 5%|| 1/9 [\r\n\x00\xff"), 1)
	f.Add([]byte("Model loading took 1 GiB\nAvailable KV cache memory: 24.17 GiB"), 30)
	f.Fuzz(func(t *testing.T, log []byte, size int) {
		var whole, parts enginelog.Reader
		a, b := whole.Stream(), parts.Stream()
		_, _ = a.Write(log)
		for rest := log; len(rest) > 0; {
			n := min(len(rest), max(1, size))
			_, _ = b.Write(rest[:n])
			rest = rest[n:]
		}
		got := whole.Progress()
		assert.Equal(t, got, parts.Progress())
		assert.True(t, utf8.ValidString(got))
		assert.LessOrEqual(t, len(got), 2<<10)
	})
}

// HF78: whatever an engine logs, excerpt and hint are short, valid text without control characters.
func FuzzHint(f *testing.F) {
	for line := range pairs(f, "hints.txt") {
		f.Add(line)
	}
	for _, name := range []string{"vllm_worker_fails.log", "sglang_scheduler_fails.log"} {
		f.Add(read(f, name))
	}
	f.Fuzz(func(t *testing.T, text string) {
		assert.LessOrEqual(t, len(enginelog.Excerpt(strings.Split(text, "\n"), 3)), 3)
		for _, hint := range []string{
			enginelog.Hint(strings.Split(text, "\n")), enginelog.KnownCause([]string{text, text}),
		} {
			assert.True(t, utf8.ValidString(hint))
			assert.LessOrEqual(t, len(hint), 400)
			assert.NotContains(t, hint, "\x1b")
			assert.False(t, strings.ContainsFunc(hint, unicode.IsControl))
		}
	})
}
