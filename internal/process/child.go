// Package process starts an engine's process, knows what belongs to it, and ends all of it.
package process

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Path is where the file of this program was when Path was first called. A later upgrade may rename it.
var Path = sync.OnceValues(os.Executable)

// Start runs a command in its own session, whose id is the child's. Both streams go to the writers. If the
// kernel does not start it in the cgroup, it is started outside: see Child.Launch. On Linux the child is
// killed when the calling thread ends: the caller has locked it, for the life of its process.
func Start(c Command, stdout, stderr io.Writer) (*Child, error) {
	p, err := startIn(&c, stdout, stderr)
	if err != nil && c.In.Cgroup != "" {
		c.In.Cgroup = ""
		p, err = startIn(&c, stdout, stderr)
	}
	if err != nil {
		return nil, err
	}
	go p.wait()
	return p, nil
}

func startIn(c *Command, stdout, stderr io.Writer) (*Child, error) {
	cmd := exec.Command(c.Argv[0], c.Argv[1:]...) //nolint:noctx // Terminate and Kill end it
	if c.Path != "" {
		cmd.Path, cmd.Err = c.Path, nil
	}
	cmd.Env, cmd.Dir = c.Env, c.Dir
	attr, closeAttr, err := sessionAttr(c.In.Cgroup)
	if err != nil {
		return nil, err
	}
	defer closeAttr()
	cmd.SysProcAttr = attr
	p := &Child{cmd: cmd, exited: make(chan struct{}), drained: make(chan struct{})}
	if err := p.start(stdout, stderr); err != nil {
		return nil, err
	}
	at, _ := ReadStat(p.pid)
	p.launch = c.In
	p.launch.Boot, p.launch.PID, p.launch.Start = BootID(), p.pid, at.Start
	return p, nil
}

// Command says what to run.
type Command struct {
	Path string   // of the program; "" = look Argv[0] up
	Argv []string // Argv[0] is the program
	Env  []string // the whole environment
	Dir  string   // "" = this process's folder

	In Launch // Cgroup and Shim of what is started; zero = it has neither
}

// pipeDelay is how long the output of a dead front process is still read if a process outside of its group
// holds the pipe.
const pipeDelay = 2 * time.Second

// Child is a front process and all that it starts. All methods are safe for concurrent use and return at
// once.
type Child struct {
	cmd    *exec.Cmd
	pid    int
	launch Launch
	began  time.Time
	out    [2]*os.File // this process's ends of stdout and stderr
	copies sync.WaitGroup
	exit   Exit

	exited  chan struct{} // the front is reaped
	drained chan struct{} // and its output is read

	mu     sync.Mutex
	reaped bool // another process may have the pid
}

// PID is the number of the front process, of its session and of its group.
func (c *Child) PID() int { return c.pid }

// Launch tells by what everything that the front process has started is known.
func (c *Child) Launch() Launch { return c.launch }

// Exited is closed when the front process has ended; the rest of its group may live on.
func (c *Child) Exited() <-chan struct{} { return c.exited }

// Exit is valid once Exited is closed.
func (c *Child) Exit() Exit { return c.exit }

// start forks with its own pipes: with those of exec, Wait does not return while a grandchild holds one.
func (c *Child) start(sinks ...io.Writer) error {
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
	if err := c.cmd.Start(); err != nil {
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
func (c *Child) wait() {
	err := c.reap()
	c.exit = exitOf(err, c.cmd.ProcessState, time.Since(c.began))
	c.exit.note(c.launch.Cgroup, c.pid)
	close(c.exited)
	c.drain()
	close(c.drained)
}

// reap kills the rest of the front's group, if possible while the unreaped front still keeps the group's
// number from being used again.
func (c *Child) reap() (err error) {
	unreaped := awaitExit(c.pid)
	if !unreaped {
		err = c.cmd.Wait()
	}
	c.signal(-c.pid, syscall.SIGKILL)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reaped = true
	if unreaped {
		err = c.cmd.Wait()
	}
	return err
}

// drain reads the rest of the output. If a process outside of the group holds the pipes, it waits pipeDelay.
func (c *Child) drain() {
	cut := time.AfterFunc(pipeDelay, func() { closeAll(c.out[:]...) })
	c.copies.Wait()
	cut.Stop()
	closeAll(c.out[:]...)
}

// Terminate sends SIGTERM to the front process.
func (c *Child) Terminate() { c.signal(c.pid, syscall.SIGTERM) }

// Kill sends SIGKILL to everything of the launch.
func (c *Child) Kill() {
	c.signal(-c.pid, syscall.SIGKILL)
	c.launch.Kill()
}

// signal sends to the front or the group while the front is unreaped.
func (c *Child) signal(to int, sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.reaped {
		_ = syscall.Kill(to, sig)
	}
}

// Held describes what lives of the launch, or still has to be read; "" when nothing is left.
func (c *Child) Held() string {
	if !closed(c.exited) {
		return fmt.Sprintf("process %d", c.pid)
	}
	if left := c.launch.PIDs(); len(left) > 0 {
		return fmt.Sprintf("processes %v of the engine that process %d was", left, c.pid)
	}
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

// Exit describes the end of a front process.
type Exit struct {
	Code   int           `json:"code"`             // -1: by a signal
	Signal string        `json:"signal,omitempty"` // "" if by itself
	After  time.Duration `json:"after_ns"`
	Memory string        `json:"out_of_memory,omitempty"` // what the kernel has ended for want of memory
}

// String describes the exit. Exit code 0 is no success: engines exit with it when their core dies.
func (e Exit) String() string {
	how := "exited with "
	if e.Signal != "" {
		how = "was ended by "
	}
	text := fmt.Sprintf("engine %s%s after %s", how, e.How(), e.After.Round(time.Millisecond))
	if e.Memory != "" {
		text += fmt.Sprintf(": the kernel ended %s of the engine: out of memory", e.Memory)
	}
	return text
}

// How is the exit in two words: "code 1" or "signal killed".
func (e Exit) How() string {
	if e.Signal != "" {
		return "signal " + e.Signal
	}
	return fmt.Sprintf("code %d", e.Code)
}

// note notes what the kernel has ended for want of memory: the front process or another one.
func (e *Exit) note(cgroup string, front int) {
	switch {
	case outOfMemory(cgroup) == 0:
	case e.Signal == syscall.SIGKILL.String():
		e.Memory = fmt.Sprintf("process %d", front)
	default:
		e.Memory = "a process"
	}
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
