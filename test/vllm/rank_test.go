package vllm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// How the engines are started. CPU attention wants blocks of 32. 256 of them hold what is in flight at once,
// and little more: blocks are evicted while the tests run.
const (
	model      = "tiny"
	blockSize  = 32
	blocks     = 256 // of a rank
	maxContext = 2048

	startTimeout = 900 * time.Second // seen: 18 to 150 s, and on a machine with 40 other jobs 400 s
	stopTimeout  = 20 * time.Second  // longer than the guard's patience
)

// guard runs an engine and ends it when its standard input ends, which also comes if the test dies: SIGTERM,
// ten seconds, a moment for helpers that tidy up, then SIGKILL for the process group, guard included. $0 is
// the engine's folder, $@ its command.
const guard = `exec 3<&0
"$@" </dev/null 3<&- & front=$!
(
	read -r _ <&3
	kill -TERM $front
	for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do kill -0 $front || break; sleep 0.5; done
	sleep 1
	rm -rf "$0"
	kill -KILL 0
) 2>/dev/null &
wait $front`

// rank is one engine process with its ports, which it keeps over restarts.
type rank struct {
	t       *testing.T
	program string

	addr   string   // host:port of the OpenAI server
	events string   // tcp://HOST:PORT that the engine dials to publish
	replay string   // tcp://HOST:PORT where the engine answers replays
	side   *side    // of a pair; nil = it is in none
	argv   []string // of another program than vLLM; nil = vLLM's

	cmd   *exec.Cmd
	stdin io.Closer
	out   *harness.Buffer
	done  chan struct{} // closed with the engine's end
}

func newRank(t *testing.T, program string) *rank {
	t.Helper()
	// The engine dials its event port from the start and for ever: inside the kernel's range of ports for
	// connections such a dial would meet itself one day, and nobody could listen there any more. No port of a
	// test is from that range.
	addr, events, replay := ports.TakeAddr(t), ports.TakeAddr(t), ports.TakeAddr(t)
	r := &rank{t: t, program: program, addr: addr, events: "tcp://" + events, replay: "tcp://" + replay}
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("engine on %s: %s", r.addr, r.tail())
		}
	})
	return r
}

func (r *rank) args() []string {
	if r.argv != nil {
		return r.argv
	}
	path, err := filepath.Abs("testdata/tiny-qwen2")
	require.NoError(r.t, err)
	_, port, err := net.SplitHostPort(r.addr)
	require.NoError(r.t, err)
	room, own := blocks, []string{"--load-format", "dummy"}
	if r.side != nil {
		path, room, own = r.side.weights, r.side.blocks, []string{"--kv-transfer-config", r.side.config()}
	}
	return append([]string{
		"serve", path, "--served-model-name", model, "--enforce-eager", "--dtype", "float32",
		"--max-model-len", fmt.Sprint(maxContext), "--block-size", fmt.Sprint(blockSize),
		"--num-gpu-blocks-override", fmt.Sprint(room),
		"--max-num-seqs", "64", "--host", "127.0.0.1", "--port", port, "--enable-prompt-tokens-details",
		"--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,`+
			`"replay_endpoint":%q,"topic":""}`, r.events, r.replay),
	}, own...)
}

// env is the engine's environment; dir is its home and holds its sockets.
func (r *rank) env(dir string) []string {
	env := os.Environ()
	if r.side != nil {
		env = append(env, "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1",
			"VLLM_NIXL_SIDE_CHANNEL_PORT="+r.side.port)
	}
	return append(append(env, cpuEnv()...),
		"VLLM_SERVER_DEV_MODE=1", // opens /reset_prefix_cache
		"HOME="+dir, "TMPDIR="+dir, "VLLM_RPC_BASE_PATH="+dir)
}

// cpuEnv is the environment of an engine without a GPU and without a network.
func cpuEnv() []string {
	return []string{
		"VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind",
		"OMP_NUM_THREADS=1", "TORCHDYNAMO_DISABLE=1",
		"VLLM_WORKER_MULTIPROC_METHOD=spawn", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1",
		"VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
	}
}

// start launches the engine, in a process group of its own.
func (r *rank) start() {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "dpserve-vllm-") // a short path: sockets have little room for theirs
	require.NoError(r.t, err)
	r.out, r.done = &harness.Buffer{}, make(chan struct{})
	r.cmd = exec.Command("sh", append([]string{"-c", guard, dir, r.program}, r.args()...)...)
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = r.env(dir), r.out, r.out
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r.cmd.WaitDelay = time.Second
	stdin, err := r.cmd.StdinPipe()
	require.NoError(r.t, err)
	r.stdin = stdin
	require.NoError(r.t, r.cmd.Start())
	go func(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }(r.cmd, r.done)
}

// ready waits until the engine serves.
func (r *rank) ready() {
	r.t.Helper()
	began := time.Now()
	for time.Since(began) < startTimeout {
		if r.healthy() {
			r.t.Logf("engine on %s serves after %s", r.addr, time.Since(began).Round(time.Second))
			return
		}
		select {
		case <-r.done:
			r.t.Fatalf("the engine ended: %s", r.tail())
		case <-time.After(200 * time.Millisecond):
		}
	}
	r.t.Fatalf("the engine does not serve after %s: %s", startTimeout, r.tail())
}

func (r *rank) healthy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.addr+"/health", nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// stop ends the engine. Idempotent.
func (r *rank) stop() {
	if r.cmd == nil {
		return
	}
	all := r.processes()
	_ = r.stdin.Close()
	r.ended(all)
}

// crash kills the engine's core process; the others end after it.
func (r *rank) crash() {
	r.t.Helper()
	all := r.processes()
	shared := sharedMemory(all)
	r.signalCore(syscall.SIGKILL)
	r.ended(all)
	for _, name := range shared { // most of it goes with the engine
		_ = os.Remove(name)
	}
}

// signalCore sends a signal to the engine's core process: SIGSTOP holds everything that it computes, while
// the front goes on to take requests.
func (r *rank) signalCore(sig syscall.Signal) {
	r.t.Helper()
	all := r.processes()
	core := slices.IndexFunc(all, func(pid int) bool { return strings.Contains(title(pid), "EngineCore") })
	require.NotEqual(r.t, -1, core, "the engine's core process")
	require.NoError(r.t, syscall.Kill(all[core], sig))
}

// processes are those of the engine, without the guard's.
func (r *rank) processes() []int {
	return slices.DeleteFunc(descendants(r.cmd.Process.Pid),
		func(pid int) bool { return strings.HasPrefix(title(pid), "sh\x00") })
}

// ended waits for the end of the engine and of everything it started.
func (r *rank) ended(all []int) {
	assert.Eventually(r.t, func() bool { return !slices.ContainsFunc(all, harness.Alive) }, stopTimeout,
		20*time.Millisecond, "its processes end")
	group := r.cmd.Process.Pid
	_ = r.stdin.Close()
	assert.Eventually(r.t, func() bool { return errors.Is(syscall.Kill(-group, 0), syscall.ESRCH) },
		stopTimeout, 20*time.Millisecond,
		"its process group ends")
	<-r.done
	r.cmd = nil
}

// resetCache drops every block of the engine's prefix cache.
func (r *rank) resetCache(ctx context.Context) error {
	_, _, err := post(ctx, r.addr, "/reset_prefix_cache", nil)
	return err
}

// tail is the end of what the engine printed.
func (r *rank) tail() string {
	if r.out == nil {
		return "it was not started"
	}
	text := r.out.String()
	return strings.TrimSpace(text[max(0, len(text)-30000):])
}
