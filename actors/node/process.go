package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/engine"
)

// pipeDelay is how long the output of a dead front process is still read if a process outside of its group
// holds the pipe.
const pipeDelay = 2 * time.Second

// reapEach is the pause between two checks for orphans that process 1 has to reap.
const reapEach = 5 * time.Second

// errClosed says that the node is closed.
var errClosed = errors.New("the node is closed")

// processes is the Launcher of real engines. One goroutine, locked to its thread for the node's life, forks
// all of them: the kernel sends the parent-death signal when the thread that forked dies, not when the
// process dies.
type processes struct {
	starts       chan startOrder
	done         chan struct{}
	once         sync.Once
	processTable *processTable
}

type startOrder struct {
	cmd   *exec.Cmd
	reply chan error
}

var _ Launcher = (*processes)(nil)

func newProcesses(l *processTable) *processes {
	p := &processes{starts: make(chan startOrder), done: make(chan struct{}), processTable: l}
	go p.serve()
	if os.Getpid() == 1 {
		go reapOrphans(p.done, reapEach, l.owns)
	}
	return p
}

func (p *processes) serve() {
	runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
	for {
		select {
		case o := <-p.starts:
			o.reply <- o.cmd.Start()
		case <-p.done:
			return
		}
	}
}

// close ends the forking thread, and with it, on Linux, every remaining engine. Idempotent.
func (p *processes) close() { p.once.Do(func() { close(p.done) }) }

// Start implements Launcher.
func (p *processes) Start(ctx context.Context, l engine.Launch, stdout, stderr io.Writer) (Process, error) {
	cmd := exec.Command(l.Argv[0], l.Argv[1:]...) //nolint:noctx // Terminate and Kill end it
	mark := p.processTable.newMark()
	cmd.Env = append(l.Env[:len(l.Env):len(l.Env)], mark)
	cmd.SysProcAttr = groupAttr()
	c := &child{
		cmd: cmd, mark: mark, exited: make(chan struct{}), drained: make(chan struct{}),
		processTable: p.processTable,
	}
	if err := c.start(ctx, p, stdout, stderr); err != nil {
		return nil, fmt.Errorf("start engine %s: %w", l.Argv[0], err)
	}
	p.processTable.add(c.pid, mark)
	go c.wait()
	return c, nil
}

func (p *processes) fork(ctx context.Context, cmd *exec.Cmd) error {
	o := startOrder{cmd: cmd, reply: make(chan error, 1)}
	select {
	case p.starts <- o:
		return <-o.reply // a fork does not block
	case <-p.done:
		return errClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// child is one engine process and its group, whose id is the child's.
type child struct {
	cmd          *exec.Cmd
	pid          int
	mark         string
	began        time.Time
	out          [2]*os.File // this process's ends of stdout and stderr
	copies       sync.WaitGroup
	exit         Exit
	processTable *processTable

	exited  chan struct{} // the front is reaped
	drained chan struct{} // and its output is read

	mu     sync.Mutex
	reaped bool // another process may have the pid
}

var _ Process = (*child)(nil)

// PID implements Process.
func (c *child) PID() int { return c.pid }

// Exited implements Process.
func (c *child) Exited() <-chan struct{} { return c.exited }

// Exit implements Process.
func (c *child) Exit() Exit { return c.exit }

// start forks with its own pipes: with those of exec, Wait does not return while a grandchild holds one.
func (c *child) start(ctx context.Context, p *processes, sinks ...io.Writer) error {
	theirs := make([]*os.File, len(sinks))
	defer func() { closeAll(theirs...) }()
	for i := range sinks {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(c.out[:]...)
			return err
		}
		c.out[i], theirs[i] = r, w
	}
	c.cmd.Stdout, c.cmd.Stderr = theirs[0], theirs[1]
	stdin, err := c.cmd.StdinPipe() // never written: its end of file tells the engine that its node is gone
	if err != nil {
		closeAll(c.out[:]...)
		return err
	}
	c.began = time.Now()
	if err := p.fork(ctx, c.cmd); err != nil {
		closeAll(c.out[:]...)
		_ = stdin.Close()
		return err
	}
	c.pid = c.cmd.Process.Pid
	for i, sink := range sinks {
		c.copies.Go(func() { _, _ = io.Copy(sink, c.out[i]) })
	}
	return nil
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// wait waits for the end of the front process.
func (c *child) wait() {
	err := c.reap()
	c.exit = exitOf(err, c.cmd.ProcessState, time.Since(c.began))
	close(c.exited)
	c.drain()
	close(c.drained)
}

// reap kills the rest of the front's group, if possible while the unreaped front still keeps the group's
// number from being used again.
func (c *child) reap() error {
	unreaped := awaitExit(c.pid)
	if !unreaped {
		err := c.cmd.Wait()
		c.signal(-c.pid, syscall.SIGKILL)
		c.setReaped()
		return err
	}
	c.signal(-c.pid, syscall.SIGKILL)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reaped = true
	return c.cmd.Wait()
}

func (c *child) setReaped() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reaped = true
}

// drain reads the rest of the output. If a process outside of the group holds the pipes, it waits pipeDelay.
func (c *child) drain() {
	cut := time.AfterFunc(pipeDelay, func() { closeAll(c.out[:]...) })
	c.copies.Wait()
	cut.Stop()
	closeAll(c.out[:]...)
}

func exitOf(err error, ps *os.ProcessState, after time.Duration) Exit {
	e := Exit{Code: -1, After: after}
	if ps == nil {
		e.Signal = fmt.Sprintf("unknown (%v)", err)
		return e
	}
	e.Code = ps.ExitCode()
	if ws, ok := ps.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		e.Signal = ws.Signal().String()
	}
	return e
}

// Terminate implements Process.
func (c *child) Terminate() { c.signal(c.pid, syscall.SIGTERM) }

// Kill implements Process. After the front's end it kills the rest of its group.
func (c *child) Kill() {
	if !c.signal(-c.pid, syscall.SIGKILL) {
		killAll(c.survivors())
	}
}

// survivors returns the living processes of the launch after its front was reaped. The group's number stays
// taken while a member lives, so a process that leads it now belongs to the launch only if it has the mark.
func (c *child) survivors() []int {
	if ids := descendants(c.pid, "", c.mark); len(ids) > 0 || hasProc() {
		return ids
	}
	if syscall.Kill(-c.pid, 0) == nil { // no /proc
		return []int{-c.pid}
	}
	return nil
}

// signal sends to the front or the group while the front is unreaped.
func (c *child) signal(to int, sig syscall.Signal) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return false
	}
	_ = syscall.Kill(to, sig)
	return true
}

// Held implements Process. An empty group is removed from the table.
func (c *child) Held() string {
	if !closed(c.exited) {
		return fmt.Sprintf("process %d", c.pid)
	}
	if left := c.survivors(); len(left) > 0 {
		return fmt.Sprintf("processes %v of group %d", left, c.pid)
	}
	c.processTable.remove(c.pid)
	if !closed(c.drained) {
		return fmt.Sprintf("the output of process %d", c.pid)
	}
	return ""
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Launcher starts engines. The node's own launcher starts processes; tests start engines inside their own
// process.
type Launcher interface {
	// Start runs l and returns once it runs. ctx bounds the start, not the engine. Lines of both streams go
	// to the writers.
	Start(ctx context.Context, l engine.Launch, stdout, stderr io.Writer) (Process, error)
}

// Process is a started engine and everything that it started. All methods are safe for concurrent use and
// return at once.
type Process interface {
	PID() int                // 0 if it has no process of its own
	Exited() <-chan struct{} // closed when the front process has ended; the rest of its group may live on
	Exit() Exit              // valid once Exited is closed
	Terminate()              // SIGTERM to the front process
	Kill()                   // SIGKILL to the whole group
	Held() string            // describes the living processes of the group; "" when it is empty
}

// Exit describes the end of a front process.
type Exit struct {
	Code   int    // -1: by a signal
	Signal string // "" if by itself
	After  time.Duration
}

// String describes the exit. Exit code 0 is no success: engines exit with it when their core dies.
func (e Exit) String() string {
	if e.Signal != "" {
		return fmt.Sprintf("engine was ended by signal %s after %s", e.Signal,
			e.After.Round(time.Millisecond))
	}
	return fmt.Sprintf("engine exited with code %d after %s", e.Code, e.After.Round(time.Millisecond))
}
