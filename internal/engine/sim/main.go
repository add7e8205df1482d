package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/process"
)

// Exit codes of Main.
const (
	exitOK      = 0
	exitStartup = 1
)

// holdFlag makes Main hold a port and do nothing else: what is left of an engine whose front process died.
const holdFlag = "--sim-hold-port"

// holdTime bounds the life of such a child.
const holdTime = 2 * time.Minute

// groupKeyVar is the environment variable with Config.GroupKey. A flag would show it to every user of the
// machine.
const groupKeyVar = "DPSERVE_GROUP_KEY"

// watchFlag ends the process when its standard input does: its parent is gone.
const watchFlag = "--sim-watch-stdin"

// Main is the process of one simulated rank: args are the flags of the engine, the result is the exit code.
// It ends with ctx, SIGTERM or SIGINT (drain, then 0), with the end of standard input under
// --sim-watch-stdin, or by an injected failure.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1) // many ranks share a machine
	}
	if i := slices.Index(args, holdFlag); i >= 0 && i+1 < len(args) {
		return hold(ctx, args[i+1], stderr)
	}
	watch := slices.Contains(args, watchFlag)
	cfg, ignored, err := ParseFlags(slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		return a == watchFlag
	}))
	if err != nil {
		return complain(stderr, err)
	}
	cfg.Logger = slog.New(slog.NewTextHandler(stderr, nil))
	if len(ignored) > 0 {
		cfg.Logger.Info("flags without effect in the simulated engine", "flags", ignored)
	}
	if err := keepAliveFromEnv(&cfg); err != nil {
		return complain(stderr, err)
	}
	kvFromEnv(&cfg)
	if err := transferFromEnv(&cfg.Transfer); err != nil {
		return complain(stderr, err)
	}
	cfg.GroupKey = os.Getenv(groupKeyVar)
	cfg.kill = func() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) }
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cfg.orphan = func(port int) error { return orphan(ctx, args, port) }
	if watch {
		go watchStdin(cancel)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	return Run(ctx, cfg, signals, stdout, stderr)
}

func complain(stderr io.Writer, err error) int {
	_, _ = fmt.Fprintf(stderr, "engine sim: %v\n", err)
	return exitStartup
}

var errParentGone = errors.New("standard input ended: the parent process is gone")

// watchStdin cannot be interrupted: it lives as long as the process.
func watchStdin(cancel context.CancelCauseFunc) {
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel(errParentGone)
}

// keepAliveFromEnv honours the imitated engine's variable.
func keepAliveFromEnv(cfg *Config) error {
	text := os.Getenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
	if text == "" {
		return nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return fmt.Errorf("VLLM_HTTP_TIMEOUT_KEEP_ALIVE is %q: want seconds", text)
	}
	cfg.KeepAlive = time.Duration(n) * time.Second
	return nil
}

// kvFromEnv honours the variables of the imitated engine that concern the prefix cache.
func kvFromEnv(cfg *Config) {
	cfg.DevMode = os.Getenv("VLLM_SERVER_DEV_MODE") == "1"
	if os.Getenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES") == "0" {
		cfg.KVEvents.Hash = KVBytes
	}
	if seed, ok := os.LookupEnv("PYTHONHASHSEED"); ok && cfg.Hashing.Algo == em.HashSHA256CBOR {
		cfg.Hashing.Root = em.RootOf(seed)
	}
}

// Run runs an engine inside this process and returns its exit code; the caller sends the signals. The end of
// ctx ends it at once, without answers.
func Run(ctx context.Context, cfg Config, signals <-chan os.Signal, stdout, stderr io.Writer) int {
	if cfg.Logger != nil {
		cfg.Logger.Info("starting", "host", cfg.Host, "port", cfg.Port)
	}
	if err := portFree(ctx, &cfg); err != nil {
		return complain(stderr, err)
	}
	cfg.out = stderr
	s, err := New(cfg)
	if err != nil {
		return complain(stderr, err)
	}
	defer func() { _ = s.Close() }()
	if code, ok := listen(ctx, s, signals, stderr); !ok {
		return code
	}
	_, _ = fmt.Fprintf(stdout, "engine sim: ready on %s\n", s.URL())
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	return s.wait(ctx, signals, served)
}

// listen starts up; a signal meanwhile ends it with exit code 0, as it does for a running engine.
func listen(ctx context.Context, s *Server, signals <-chan os.Signal, stderr io.Writer) (code int, ok bool) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-signals:
			cancel(errStopped)
		case <-done:
		}
	})
	err := s.Listen(ctx)
	close(done)
	watch.Wait() // or it would take the first signal of a running engine, and nobody would hear of it
	switch {
	case errors.Is(context.Cause(ctx), errStopped):
		return exitOK, false
	case err == nil:
		return exitOK, true
	}
	return complain(stderr, err), false
}

var errStopped = errors.New("stopped while starting")

// portFree finds a taken port before the long start, not after it.
func portFree(ctx context.Context, cfg *Config) error {
	if cfg.Port == 0 {
		return nil
	}
	addr := hostPort(cfg.Host, cfg.Port)
	l, err := cfg.listen(ctx, addr)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l.Close()
}

// orphan starts this program again, as a child in the same process group that only holds port.
func orphan(ctx context.Context, args []string, port int) error {
	own := os.Args[1:max(1, len(os.Args)-len(args))] // the words in front of the engine's flags: "engine sim"
	cmd := exec.CommandContext(context.WithoutCancel(ctx), process.Self(),
		append(slices.Clone(own), holdFlag, strconv.Itoa(port))...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr // as a real engine's children do
	ready, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = ready.Close()
	return portTaken(ctx, port)
}

// portTaken waits until the child holds its port.
func portTaken(ctx context.Context, port int) error {
	addr := hostPort(defaultHost, port)
	for end := time.Now().Add(frameTimeout); time.Now().Before(end); time.Sleep(dialPause) {
		d := net.Dialer{Timeout: time.Second}
		c, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			return c.Close()
		}
	}
	return fmt.Errorf("nothing listens on %s", addr)
}

// hold keeps a port until it is killed or its time is over.
func hold(ctx context.Context, port string, stderr io.Writer) int {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(defaultHost, port))
	if err != nil {
		return complain(stderr, err)
	}
	defer func() { _ = l.Close() }()
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
	_ = pause.For(ctx, holdTime)
	return exitOK
}

// startup simulates the load time and the failures of a start.
func startup(ctx context.Context, cfg *Config) error {
	if cfg.StartHang {
		<-ctx.Done()
		return fmt.Errorf("start hangs as told: %w", context.Cause(ctx))
	}
	if err := loadModel(ctx, cfg); err != nil {
		return fmt.Errorf("interrupted while starting: %w", err)
	}
	if cfg.StartExit {
		return errors.New("start fails as told: drop --sim-fail start-exit")
	}
	if file := cfg.StartExitWhile; file != "" {
		if _, err := os.Stat(file); err == nil {
			return errors.New("start fails as told, while there is " + file)
		}
	}
	if file := cfg.StartExitOnce; file != "" {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil {
			return errors.Join(errors.New("start fails once as told: the next one succeeds"), f.Close())
		}
		if !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("mark the failed start: %w", err)
		}
	}
	return nil
}

// loadParts is how many shards and how many graphs a slow load counts.
const loadParts = 8

// loadLine is a line of a slow load, in the words of vLLM.
type loadLine struct {
	at   float64 // the part of the load that is over
	text string
}

// loadLines are what vLLM writes while it loads a model: weights for the first 60 % of the time, graphs for
// the last 30 %. The bar of the graphs draws over its line, that of the weights does not.
func loadLines(model string) []loadLine {
	lines := []loadLine{{0, "INFO [gpu_model_runner.py] Starting to load model " + model + "...\n"}}
	for i := range loadParts + 1 {
		lines = append(lines, loadLine{0.6 * float64(i) / loadParts, fmt.Sprintf(
			"Loading safetensors checkpoint shards: %3d%% Completed | %d/%d [00:00<00:00,  1.00it/s]\n",
			100*i/loadParts, i, loadParts)})
	}
	lines = append(lines, loadLine{0.6, "INFO [backends.py] Dynamo bytecode transform time: 1.00 s\n"},
		loadLine{0.7, "INFO [gpu_worker.py] Available KV cache memory: 1.00 GiB\n"})
	for i := range loadParts + 1 {
		lines = append(lines, loadLine{0.7 + 0.25*float64(i)/loadParts, fmt.Sprintf(
			"\rCapturing CUDA graphs (decode, FULL): %3d%%|%-8s| %d/%d [00:00<00:00,  1.00it/s]",
			100*i/loadParts, "########"[:i], i, loadParts)})
	}
	return append(lines, loadLine{0.95, "\nINFO [core.py] init engine (profile, create kv cache, warmup " +
		"model) took 1.00 s\n"})
}

// loadModel takes the time of the start, and says what it does as vLLM would.
func loadModel(ctx context.Context, cfg *Config) error {
	var lines []loadLine
	if cfg.Startup > 0 && cfg.out != nil {
		lines = loadLines(cfg.Names[0])
	}
	begin := time.Now()
	for _, l := range lines {
		due := time.Duration(l.at * float64(cfg.Startup))
		if err := pause.For(ctx, due-time.Since(begin)); err != nil {
			return err
		}
		_, _ = fmt.Fprint(cfg.out, l.text) // a log that fails does not stop an engine
	}
	return pause.For(ctx, cfg.Startup-time.Since(begin))
}
