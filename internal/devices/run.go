package devices

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

const (
	maxOutput = 1 << 20 // bytes of standard output; more is an error
	maxErrors = 4 << 10 // bytes of standard error that are kept
	// killWait is how long a command that was killed may take to end. A process that hangs in the driver does
	// not end at all.
	killWait = time.Second
)

// toolFolders are where installers put the programs that they do not put into PATH.
var toolFolders = map[string]string{rocmSMI: "/opt/rocm/bin/"}

// commands runs the programs of this machine, one at a time: one that hangs in the driver keeps the slot
// until it ends, so that there is never more than one.
type commands struct{ slot chan struct{} }

// NewRunner returns a Runner for the programs of this machine. It returns when its context ends, also if the
// program does not.
func NewRunner() Runner { return (&commands{slot: make(chan struct{}, 1)}).run }

func (c *commands) run(ctx context.Context, name string, args ...string) ([]byte, error) {
	path, err := findTool(name)
	if err != nil {
		return nil, err
	}
	select {
	case c.slot <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("an earlier call has not ended: %w", context.Cause(ctx))
	}
	type result struct {
		out []byte
		err error
	}
	ended := make(chan result, 1)
	go func() { // ends with the program
		defer func() { <-c.slot }()
		out, err := execute(ctx, path, args)
		ended <- result{out, err}
	}()
	select {
	case r := <-ended:
		if ctx.Err() == nil {
			return r.out, r.err
		}
		return nil, context.Cause(ctx)
	case <-ctx.Done():
	}
	late := time.NewTimer(2 * killWait)
	defer late.Stop()
	select {
	case <-ended:
		return nil, context.Cause(ctx)
	case <-late.C:
		return nil, fmt.Errorf("%w, and it cannot be killed", context.Cause(ctx))
	}
}

func findTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) && toolFolders[name] != "" {
		path, err = exec.LookPath(toolFolders[name] + name)
	}
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
	}
	return path, err
}

// execute runs a program in its own process group, which is killed when ctx ends.
func execute(ctx context.Context, path string, args []string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, path, args...) //nolint:gosec // findTool gave the path
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killWait
	out, errs := &limitedBuffer{max: maxOutput}, &limitedBuffer{max: maxErrors, drop: true}
	cmd.Stdout, cmd.Stderr = out, errs
	err := cmd.Run()
	if err != nil && out.full {
		err = fmt.Errorf("it prints more than %d bytes", maxOutput)
	} else if line := firstLine(string(errs.kept)); err != nil && line != "" {
		err = fmt.Errorf("%w: %s", err, line)
	}
	return out.kept, err
}

// limitedBuffer keeps the first max bytes. Then it drops the rest, or fails. It is no bytes.Buffer with more
// methods: io.Copy would use that one's ReadFrom, which has no bound.
type limitedBuffer struct {
	kept []byte
	max  int
	drop bool
	full bool
}

var errTooMuch = errors.New("too much output")

// Write implements io.Writer.
func (b *limitedBuffer) Write(p []byte) (int, error) {
	room := min(len(p), b.max-len(b.kept))
	b.kept = append(b.kept, p[:room]...)
	if room == len(p) {
		return room, nil
	}
	b.full = true
	if b.drop {
		return len(p), nil
	}
	return room, errTooMuch
}
