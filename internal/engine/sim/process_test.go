package sim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/ports"
)

// simProcess is an engine in a process of its own: this test binary as the engine (TestMain).
type simProcess struct {
	cmd    *exec.Cmd
	port   int
	stdin  io.WriteCloser
	ready  chan struct{}
	ended  chan struct{}
	mu     sync.Mutex
	stderr strings.Builder
}

func launch(t testing.TB, args ...string) *simProcess {
	t.Helper()
	return launchOn(t, ports.Take(t, 1), args...)
}

func launchOn(t testing.TB, port int, args ...string) *simProcess {
	t.Helper()
	p := &simProcess{port: port, ready: make(chan struct{}), ended: make(chan struct{})}
	p.cmd = exec.CommandContext(context.Background(), os.Args[0],
		append([]string{"--port", strconv.Itoa(p.port)}, args...)...)
	p.cmd.Env = append(os.Environ(), asEngine+"=1", "GOMAXPROCS=", "GORACE=atexit_sleep_ms=0")
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.WaitDelay = time.Second
	p.cmd.Stderr = p
	var err error
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.ended)
		lines := bufio.NewScanner(out)
		if lines.Scan() {
			close(p.ready)
		}
		_ = p.cmd.Wait() // closes the pipe: a child may hold its other end
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.ended
	})
	return p
}

// Write collects what the process logs.
func (p *simProcess) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.Write(b)
}

func (p *simProcess) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.String()
}

func (p *simProcess) url() string { return fmt.Sprintf("http://127.0.0.1:%d", p.port) }

func (p *simProcess) waitReady(t testing.TB) {
	t.Helper()
	select {
	case <-p.ready:
	case <-p.ended:
		t.Fatalf("the engine ended while starting: %s", p.log())
	case <-time.After(60 * time.Second):
		t.Fatalf("the engine is not ready: %s", p.log())
	}
}

func (p *simProcess) exitCode(t testing.TB) int {
	t.Helper()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(60 * time.Second):
		t.Fatalf("the engine does not end: %s", p.log())
		return -2
	}
}

func TestProcessStopsOnSignals(t *testing.T) {
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		p := launch(t, "--shutdown-timeout", "5")
		p.waitReady(t)
		require.NoError(t, p.cmd.Process.Signal(sig))
		assert.Zero(t, p.exitCode(t))
	}
}

func TestProcessDrainsAStream(t *testing.T) {
	p := launch(t, "--shutdown-timeout", "20", "--sim-step-ms", "5", "--sim-speed", "100")
	p.waitReady(t)
	resp := postURL(t, p.url()+"/v1/completions", streamBody)
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Contains(t, string(body), `"finish_reason":"length"`)
	assert.Zero(t, p.exitCode(t))
}

func TestProcessEndsWithItsParent(t *testing.T) {
	p := launch(t, "--sim-watch-stdin", "--shutdown-timeout", "100")
	p.waitReady(t)
	require.NoError(t, p.stdin.Close())
	assert.Zero(t, p.exitCode(t))
}

func TestProcessFailures(t *testing.T) {
	for _, c := range []struct {
		fault string
		code  int
	}{
		{`{"mode":"crash"}`, 1},
		{`{"mode":"crash","exit_code":0}`, 0},
		{`{"mode":"kill"}`, -1},
		{`{"mode":"core-dead"}`, 0},
	} {
		p := launch(t, "--sim-speed", "10")
		p.waitReady(t)
		_ = postURL(t, p.url()+"/_sim/fail", c.fault).Body.Close()
		assert.Equal(t, c.code, p.exitCode(t), c.fault)
	}
}

func TestProcessIgnoresSigtermAsTold(t *testing.T) {
	p := launch(t, "--sim-fail", "ignore-sigterm")
	p.waitReady(t)
	eventually(t, func() bool { return strings.Contains(p.log(), "failure injected") })
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	eventually(t, func() bool { return strings.Contains(p.log(), "signal ignored") })
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGKILL))
	assert.Equal(t, -1, p.exitCode(t))
}

// The front process dies, a child in its process group keeps a port: only killing the group frees it.
func TestProcessLeavesAnOrphan(t *testing.T) {
	t.Parallel()
	p := launch(t)
	p.waitReady(t)
	held := ports.TakeAddr(t)
	_, port, _ := net.SplitHostPort(held)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url()+"/_sim/fail",
		strings.NewReader(`{"mode":"orphan","port":`+port+`}`))
	require.NoError(t, err)
	if resp, err := client.Do(req); err == nil {
		_ = resp.Body.Close()
	}
	assert.Equal(t, -1, p.exitCode(t))
	_, err = net.Listen("tcp", held)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.NoError(t, syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL), "the group still lives")
	eventually(t, func() bool {
		l, err := net.Listen("tcp", held)
		if err == nil {
			_ = l.Close()
		}
		return err == nil
	})
}

func TestProcessStartFailures(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	marker := filepath.Join(t.TempDir(), "failed-once")
	for _, c := range []struct {
		name string
		port int
		args []string
		log  string
	}{
		{"told", 0, []string{"--sim-fail", "start-exit"}, "start fails as told"},
		{"once", 0, []string{"--sim-fail", "start-exit-once=" + marker}, "the next one succeeds"},
		{"while", 0, []string{"--sim-fail", "start-exit-while=" + os.Args[0]}, "while there is"},
		{"port taken", taken.Addr().(*net.TCPAddr).Port, nil, "address already in use"},
		{"memory", 0, []string{"--max-model-len", "99999999"}, "raise num_gpu_blocks_override"},
		{"number", 0, []string{"--max-num-seqs", "many"}, "--max-num-seqs: cannot use"},
		{"fault", 0, []string{"--sim-fail", "explode@3"}, "unknown fault mode"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := launchOn(t, c.port, c.args...)
			assert.Equal(t, 1, p.exitCode(t))
			assert.Contains(t, p.log(), c.log)
		})
	}
	again := launch(t, "--sim-fail", "start-exit-once="+marker)
	again.waitReady(t)
}

func TestProcessRefusesUntilReady(t *testing.T) {
	p := launch(t, "--sim-fail", "start-hang")
	_, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.port))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.Eventually(t, func() bool { return strings.Contains(p.log(), "msg=starting") }, 60*time.Second,
		5*time.Millisecond)
	_, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.port))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	assert.Zero(t, p.exitCode(t))
}

func TestFlagsOfTheLaunchProfile(t *testing.T) {
	cfg, ignored, err := ParseFlags([]string{
		"--host", "127.0.0.1", "--port", "20000", "--served-model-name", "demo", "alias",
		"--shutdown-timeout", "10",
		"--enable-prompt-tokens-details", "--data-parallel-size", "4", "--data-parallel-rank", "2",
		"--data-parallel-size-local", "1",
		"--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "20020", "--max-num-seqs", "8",
		"--block-size=32",
		"--no-enable-prefix-caching", "--enable-expert-parallel", "--gpu-memory-utilization", "0.9",
		"--enforce-eager",
		"--hf-overrides", `{"a":1}`, "--sim-speed", "50", "--sim-fail", "crash=3@1.5", "--sim-fail",
		"slow=4@2", "--sim-death", "nccl",
	})
	require.NoError(t, err)
	assert.Equal(t, []string{"demo", "alias"}, cfg.Names)
	assert.Equal(t, 4, cfg.DPSize)
	assert.Equal(t, 2, cfg.DPRank)
	assert.Equal(t, "127.0.0.1:20020", cfg.RPCAddr)
	assert.Equal(t, 8, cfg.Model.MaxSeqs)
	assert.Equal(t, 21856, cfg.Model.Blocks, "the memory stays when blocks grow")
	assert.False(t, cfg.Model.PrefixCaching)
	assert.True(t, cfg.PromptTokensDetails && cfg.ExpertParallel && cfg.Model.NCCL && cfg.Model.Lockstep)
	assert.Equal(t, 10*time.Second, cfg.ShutdownTimeout)
	require.Len(t, cfg.Schedule, 2)
	assert.Equal(t, 1500*time.Millisecond, cfg.Schedule[0].After)
	assert.Equal(t, 3, *cfg.Schedule[0].Fault.ExitCode)
	assert.InDelta(t, 4.0, cfg.Schedule[1].Fault.Factor, 0)
	assert.Equal(t, []string{
		"--data-parallel-size-local", "--gpu-memory-utilization", "--enforce-eager",
		"--hf-overrides",
	}, ignored)

	internal, _, err := ParseFlags([]string{"--data-parallel-size", "2"})
	require.NoError(t, err)
	assert.Equal(t, 2, internal.InternalLB)
}

// Fixed properties of a process that a node starts many of.
func TestProcessIsSmallAndQuick(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("figures of the plain build")
	}
	p := launch(t)
	p.waitReady(t)
	for range 20 {
		_ = postURL(t, p.url()+"/v1/completions", `{"prompt":"x","max_tokens":1}`).Body.Close()
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("no /proc")
	}
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(t, err)
	assert.Less(t, kib, 25<<10, "idle RSS of a rank")
}
