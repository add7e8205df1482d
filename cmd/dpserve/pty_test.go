//go:build unix

package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/creack/pty"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// ptyProcess is a process on a pseudo terminal, which an emulator shows.
type ptyProcess struct {
	*terminalEmulator
	cmd *exec.Cmd
	pty *os.File

	drained chan struct{} // closed when the terminal's output has ended
	folder  string        // TMPDIR of the process
}

// startOnPTY starts a program on a terminal of its own. The environment is TERM=xterm and vars.
func startOnPTY(t *testing.T, cols, rows int, vars []string, program string, args ...string) *ptyProcess {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*scriptWait)
	t.Cleanup(cancel)
	p := &ptyProcess{
		terminalEmulator: newTerminalEmulator(cols, rows), cmd: exec.CommandContext(ctx, program, args...),
		drained: make(chan struct{}), folder: t.TempDir(),
	}
	p.cmd.Env = slices.DeleteFunc(os.Environ(), func(s string) bool {
		return strings.HasPrefix(s, "DPSERVE_") || strings.HasPrefix(s, "NO_COLOR=")
	})
	p.cmd.Env = append(append(p.cmd.Env, "TERM=xterm", "TMPDIR="+p.folder), vars...)
	blocking, err := pty.StartWithSize(p.cmd, windowSize(cols, rows))
	require.NoError(t, err)
	p.pty = unblock(t, blocking)
	go func() {
		defer close(p.drained)
		_, _ = io.Copy(p.terminalEmulator, p.pty) // ends with EIO when the process has closed the terminal
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		_ = p.pty.Close()
		<-p.drained
	})
	return p
}

func windowSize(cols, rows int) *pty.Winsize {
	return &pty.Winsize{Cols: uint16(cols), Rows: uint16(rows)}
}

// unblock returns the same terminal as a file whose Close ends a Read.
func unblock(t *testing.T, blocking *os.File) *os.File {
	t.Helper()
	handle, err := unix.FcntlInt(blocking.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.SetNonblock(handle, true))
	require.NoError(t, blocking.Close())
	return os.NewFile(uintptr(handle), blocking.Name())
}

// upOnPTY runs `dpserve up` on a terminal until all ranks are ready.
func upOnPTY(t *testing.T, cols, rows int, vars ...string) *ptyProcess {
	t.Helper()
	p := startOnPTY(t, cols, rows, vars, asDpserve(t), "up")
	p.awaitText(t, "4/4 ready")
	return p
}

func (p *ptyProcess) pid() string { return strconv.Itoa(p.cmd.Process.Pid) }

// typeKeys sends what a user types.
func (p *ptyProcess) typeKeys(t *testing.T, keys string) {
	t.Helper()
	_, err := p.pty.WriteString(keys)
	require.NoError(t, err)
}

// setSize resizes the window; the process gets SIGWINCH.
func (p *ptyProcess) setSize(t *testing.T, cols, rows int) {
	t.Helper()
	p.resize(cols, rows)
	require.NoError(t, pty.Setsize(p.pty, windowSize(cols, rows)))
}

// exitCode waits for the end of the process.
func (p *ptyProcess) exitCode(t *testing.T) int {
	t.Helper()
	_ = p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode()
}
