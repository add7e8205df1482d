package shim

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/process"
)

// startWait bounds a start: the shim is a program that has nothing to load.
const startWait = 30 * time.Second

// processors is GOMAXPROCS of a shim: fewer of them need less memory.
const processors = "1"

// Start makes the folder of a launch, dir/<spec.ID>, writes the spec, and starts the shim with executable. It
// returns once the engine runs; after an error nothing is left. ctx bounds the start only.
func Start(ctx context.Context, executable, dir string, spec Spec) (*Client, Info, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startWait, ErrSilent)
	defer cancel()
	if ctx.Err() != nil {
		return nil, Info{}, context.Cause(ctx)
	}
	spec.Version = Version
	if err := spec.check(); err != nil {
		return nil, Info{}, err
	}
	folder, err := filepath.Abs(filepath.Join(dir, spec.ID))
	if err != nil {
		return nil, Info{}, err
	}
	err = os.MkdirAll(dir, 0o700)
	if err == nil {
		err = os.Mkdir(folder, 0o700)
	}
	if err != nil {
		return nil, Info{}, fmt.Errorf("make the folder of a shim: %w", err)
	}
	client, info, err := launch(ctx, executable, folder, &spec)
	if err != nil {
		return nil, Info{}, errors.Join(err, Remove(folder))
	}
	return client, info, nil
}

func launch(ctx context.Context, executable, folder string, spec *Spec) (*Client, Info, error) {
	if err := writeFile(folder, specFile, spec); err != nil {
		return nil, Info{}, fmt.Errorf("write what the shim is to do: %w", err)
	}
	if ctx.Err() != nil { // the disk took so long that the start was given up
		return nil, Info{}, context.Cause(ctx)
	}
	if err := spawn(ctx, executable, folder); err != nil {
		return nil, Info{}, err
	}
	state := readState(folder)
	return Connect(ctx, folder, &state)
}

// spawn starts a shim and waits until its engine runs.
func spawn(ctx context.Context, executable, folder string) error {
	ownLog, err := os.OpenFile(filepath.Join(folder, ownLogFile),
		os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = ownLog.Close() }()
	out, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command(executable, Command, folder) //nolint:noctx // it outlives ctx
	if executable == process.Self() {
		cmd.Args[0] = os.Args[0] // ps shows it
	}
	cmd.Env = environment()
	cmd.Stdout, cmd.Stderr = theirs, ownLog
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return fmt.Errorf("start a shim: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = out.SetReadDeadline(time.Now()) })
	defer stop()
	err = outcomeOf(out)
	switch {
	case err == nil:
		return cmd.Process.Release() // its end is seen by the end of the connection
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case errors.Is(err, ErrProtocol):
		err = fmt.Errorf("the shim has not started: %s", lastLine(folder))
	}
	_ = cmd.Process.Kill() // and its engine with it
	_ = cmd.Wait()
	return err
}

// environment is a shim's own: it has no use for the node's secrets.
func environment() []string {
	env := []string{"GOMAXPROCS=" + processors}
	if dir, ok := os.LookupEnv("GOCOVERDIR"); ok {
		env = append(env, "GOCOVERDIR="+dir)
	}
	return env
}

// outcomeOf reads whether the engine runs.
func outcomeOf(out *os.File) error {
	line, err := readLine(bufio.NewReader(out), requestLimit)
	var o outcome
	if err != nil || json.Unmarshal(line, &o) != nil {
		return ErrProtocol
	}
	if o.Error != "" {
		return errors.New(o.Error)
	}
	return nil
}

// lastLine is the last that a shim has said itself.
func lastLine(folder string) string {
	text, err := os.ReadFile(filepath.Join(folder, ownLogFile))
	if err != nil {
		return err.Error()
	}
	said := strings.TrimSpace(string(text))
	return said[strings.LastIndexByte(said, '\n')+1:]
}
