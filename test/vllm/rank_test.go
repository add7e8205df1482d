package vllm

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// How the engines are started. 384 blocks are little on purpose: blocks are evicted while the tests run.
const (
	model      = "tiny"
	blockSize  = 16
	blocks     = 384 // of a rank
	maxContext = 2048

	startTimeout = 300 * time.Second // seen: 18 to 150 s
	stopTimeout  = 15 * time.Second
)

// guard runs an engine and ends its whole process group, itself included, when its standard input does: at stop, and when the test
// dies without coming to that.
const guard = `exec 3<&0; (read -r _ <&3; kill -KILL 0) & "$@" </dev/null 3<&-`

// rank is one engine process with its ports, which it keeps over restarts.
type rank struct {
	t       *testing.T
	program string
	dir     string // home and sockets

	addr   string // host:port of the OpenAI server
	events string // tcp://HOST:PORT that the engine dials to publish
	replay string // tcp://HOST:PORT where the engine answers replays

	cmd   *exec.Cmd
	stdin io.Closer
	out   *harness.Buffer
	done  chan struct{} // closed with the engine's end
}

func newRank(t *testing.T, program string) *rank {
	t.Helper()
	dir, err := os.MkdirTemp("", "dpserve-vllm-") // short: it holds the engine's sockets
	require.NoError(t, err)
	r := &rank{t: t, program: program, dir: dir, addr: harness.FreeAddr(t), events: "tcp://" + harness.FreeAddr(t), replay: "tcp://" + harness.FreeAddr(t)}
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("engine on %s: %s", r.addr, r.tail())
		}
		assert.NoError(t, os.RemoveAll(dir))
	})
	return r
}

func (r *rank) args() []string {
	path, err := filepath.Abs("testdata/tiny-qwen2")
	require.NoError(r.t, err)
	_, port, err := net.SplitHostPort(r.addr)
	require.NoError(r.t, err)
	return []string{
		"serve", path, "--served-model-name", model, "--load-format", "dummy", "--enforce-eager", "--dtype", "float32",
		"--max-model-len", fmt.Sprint(maxContext), "--block-size", fmt.Sprint(blockSize), "--num-gpu-blocks-override", fmt.Sprint(blocks),
		"--max-num-seqs", "64", "--host", "127.0.0.1", "--port", port, "--enable-prompt-tokens-details",
		"--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":""}`, r.events, r.replay),
	}
}

func (r *rank) env() []string {
	return append(os.Environ(),
		"VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "TORCHDYNAMO_DISABLE=1",
		"VLLM_WORKER_MULTIPROC_METHOD=spawn", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
		"VLLM_SERVER_DEV_MODE=1", // opens /reset_prefix_cache
		"HOME="+r.dir, "TMPDIR="+r.dir, "VLLM_RPC_BASE_PATH="+r.dir)
}

// start launches the engine, in a process group of its own.
func (r *rank) start() {
	r.t.Helper()
	r.out, r.done = &harness.Buffer{}, make(chan struct{})
	r.cmd = exec.Command("sh", append([]string{"-c", guard, "sh", r.program}, r.args()...)...)
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = r.env(), r.out, r.out
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

// stop ends the engine as a crash does, with everything it started. Idempotent.
func (r *rank) stop() {
	if r.cmd == nil {
		return
	}
	group := r.cmd.Process.Pid
	all := descendants(group)
	_ = r.stdin.Close()
	gone := assert.Eventually(r.t, func() bool { return syscall.Kill(-group, 0) == syscall.ESRCH }, stopTimeout, 20*time.Millisecond, "the process group ends")
	if !gone {
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
	<-r.done
	for _, pid := range all {
		assert.False(r.t, harness.Alive(pid), "process %d of the engine is left", pid)
	}
	r.cmd = nil
}

// restart replaces the engine by a new one on the same ports.
func (r *rank) restart() {
	r.t.Helper()
	r.stop()
	r.start()
	r.ready()
}

// resetCache drops every block of the engine's prefix cache.
func (r *rank) resetCache(ctx context.Context) error {
	_, _, err := post(ctx, r.addr, "/reset_prefix_cache", nil)
	return err
}

// tail is the end of what the engine printed.
func (r *rank) tail() string {
	text := r.out.String()
	return strings.TrimSpace(text[max(0, len(text)-4000):])
}
