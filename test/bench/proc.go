//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// cpu is user+sys of the processes so far, in nanoseconds and with the threads that have ended: their CPU
// clocks, as clock_getcpuclockid(3) names them.
func cpu(pids []int) time.Duration {
	var sum time.Duration
	for _, pid := range pids {
		var ts unix.Timespec
		if unix.ClockGettime(int32(^pid<<3|cpuClockSched), &ts) == nil {
			sum += time.Duration(ts.Nano())
		}
	}
	return sum
}

// cpuClockSched is CPUCLOCK_SCHED of the kernel: the scheduler's precise sum over a thread group.
const cpuClockSched = 2

// children lists the direct children of pid.
func children(pid int) []int {
	var out []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, s := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(s); err == nil {
				out = append(out, n)
			}
		}
	}
	return out
}

// rss is the resident set of pid in MB.
func rss(pid int) float64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, after, ok := bytes.Cut(b, []byte("VmRSS:"))
	if !ok {
		return 0
	}
	kb, _ := strconv.ParseFloat(strings.Fields(string(after))[0], 64)
	return kb / 1024
}

// freeAddr returns a loopback address on which no program listens now.
func freeAddr() string {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return "127.0.0.1:0"
	}
	defer l.Close()
	return l.Addr().String()
}

// spawn starts a child that ends with us, and waits until addr accepts.
func spawn(ctx context.Context, addr, name string, args ...string) (*exec.Cmd, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	// the main goroutine is locked to its thread
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return cmd, waitPort(ctx, addr)
}

func waitPort(ctx context.Context, addr string) error {
	for range 500 {
		if c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr); err == nil {
			return c.Close()
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: nobody listens on %s after 5 s", errUnexpected, addr)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
