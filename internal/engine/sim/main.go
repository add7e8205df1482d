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
	return run(ctx, cfg, stdout, stderr)
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

// run runs the engine's process and returns its exit code.
func run(ctx context.Context, cfg Config, stdout, stderr io.Writer) int {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	return Run(ctx, cfg, signals, stdout, stderr)
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
	addr := net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port))
	l, err := cfg.listen(ctx, addr)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l.Close()
}

// orphan starts this program again, as a child in the same process group that only holds port.
func orphan(ctx context.Context, args []string, port int) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	own := os.Args[1:max(1, len(os.Args)-len(args))] // the words in front of the engine's flags: "engine sim"
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program,
		append(slices.Clone(own), holdFlag, strconv.Itoa(port))...)
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
	addr := net.JoinHostPort(defaultHost, strconv.Itoa(port))
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
	select {
	case <-ctx.Done():
	case <-time.After(holdTime):
	}
	return exitOK
}
