package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/shim"
)

// shimProcess is an engine in a shim.
type shimProcess struct {
	l      *shims
	dir    string
	output string     // the file of its output
	state  shim.State // when it was started or found

	exited  chan struct{}
	exit    Exit
	ended   time.Time     // when exit was told
	drained chan struct{} // the output is read

	mu       sync.Mutex
	client   *shim.Client       // nil = the shim has ended, or has not answered yet
	unread   uint64             // number of the first line that no node has read
	sinks    [2]io.Writer       // of an Adopt before the shim has answered
	stop     context.CancelFunc // ends the reading of the output; nil = it is not read
	asking   context.CancelFunc // ends reach; nil = it was not begun
	killed   time.Time          // first; zero = it was not
	detached bool
	released bool
}

var _ Process = (*shimProcess)(nil)

func newShimProcess(l *shims, dir, output string, s *shim.State) *shimProcess {
	return &shimProcess{
		l: l, dir: dir, output: output, state: *s, exited: make(chan struct{}), drained: make(chan struct{}),
	}
}

// lastLines are the last lines of an engine whose shim has ended.
func (p *shimProcess) lastLines() []shim.Line {
	return shim.LastLines(p.output, p.state.Began, tailLines)
}

// connected returns the connection to the shim; nil = there is none.
func (p *shimProcess) connected() *shim.Client {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.client
}

// watch becomes the owner and waits, beside the caller, for the end of the engine.
func (p *shimProcess) watch(ctx context.Context, c *shim.Client) error {
	exits, err := c.Watch(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.client = c
	detached := p.detached
	p.mu.Unlock()
	if detached {
		c.Close()
		return errClosed
	}
	p.l.add(p)
	go func() { // ends with the engine, the shim, or Detach
		exit, ok := <-exits
		switch {
		case ok:
			p.end(exit)
		case !p.isDetached():
			p.lost()
		}
	}()
	return nil
}

// own becomes the owner of an engine that an earlier process of the node has started. Its shim may not have
// noticed the end of that process yet.
func (p *shimProcess) own(ctx context.Context, c *shim.Client, unread uint64, phase shim.Phase) error {
	p.mu.Lock()
	p.unread = unread
	p.mu.Unlock()
	err := p.watch(ctx, c)
	for errors.Is(err, shim.ErrOwned) && pause.For(ctx, ownerPoll) == nil {
		err = p.watch(ctx, c)
	}
	if err == nil && phase == shim.Ending { // it was told to end: it does not serve again
		p.Kill()
	}
	return err
}

// reach asks a shim that was silent again, beside the caller, for as long as its engine would live without a
// node, but at most silentMost. The engine is adopted meanwhile: it answers requests without its shim.
func (p *shimProcess) reach() {
	ctx, cancel := context.WithTimeout(context.Background(), min(p.l.cfg.OrphanTimeout, silentMost))
	p.asking = cancel
	p.l.add(p)
	p.l.log.Info("an engine's shim does not answer; it is asked again", slog.Int("pid", p.state.PID),
		slog.Int("shim", p.state.Shim))
	go func() {
		defer cancel()
		err := p.ask(ctx)
		for errors.Is(err, shim.ErrSilent) && pause.For(ctx, ownerPoll) == nil {
			err = p.ask(ctx)
		}
		if err == nil || p.isDetached() {
			return
		}
		p.l.log.Warn("ending an engine whose shim does not answer", slog.Int("pid", p.state.PID),
			slog.String("err", err.Error()))
		if err := p.state.End(); err != nil {
			p.l.log.Error("what an earlier process left behind does not end", slog.String("err", err.Error()))
		}
		p.mu.Lock()
		sinks := p.sinks
		p.mu.Unlock()
		if sinks[0] != nil {
			emitter(sinks[0], sinks[1])(p.lastLines(), 0)
		}
		p.end(exitWithShim(p.state.Began))
	}()
}

// ask connects to a shim that was silent.
func (p *shimProcess) ask(ctx context.Context) error {
	c, info, err := shim.Connect(ctx, p.dir, &p.state)
	if err != nil {
		return err
	}
	if err := p.own(ctx, c, info.Read, info.State.Phase); err != nil {
		c.Close()
		return err
	}
	p.mu.Lock()
	sinks := p.sinks
	p.mu.Unlock()
	if sinks[0] != nil {
		p.Adopt(sinks[0], sinks[1]) //nolint:contextcheck // ctx bounds the asking only
	}
	return nil
}

// lost takes the end of a shim that was killed. The kernel ends its engine with it; the rest is killed here.
func (p *shimProcess) lost() {
	p.l.log.Warn("an engine's shim has ended, and its engine with it", slog.Int("pid", p.state.PID))
	p.state.Kill()
	p.end(exitWithShim(p.state.Began))
}

func (p *shimProcess) end(exit Exit) {
	p.exit, p.ended = exit, time.Now()
	close(p.exited)
}

func (p *shimProcess) isDetached() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.detached
}

// PID implements Process.
func (p *shimProcess) PID() int { return p.state.PID }

// Exited implements Process.
func (p *shimProcess) Exited() <-chan struct{} { return p.exited }

// Exit implements Process.
func (p *shimProcess) Exit() Exit { return p.exit }

// Terminate implements Process. A shim that does not take it is ended by Kill.
func (p *shimProcess) Terminate() { p.signal(syscall.SIGTERM) }

func (p *shimProcess) signal(sig syscall.Signal) {
	if c := p.connected(); c != nil && !closed(p.exited) {
		_ = c.Signal(sig)
	}
}

// Kill implements Process: the shim kills all of the engine, and so does this process, also if the shim does
// not answer. A shim that hangs, and so does not tell that its engine has ended, is killed as well.
func (p *shimProcess) Kill() {
	p.signal(syscall.SIGKILL)
	p.state.Kill()
	if p.isEndUnreported() {
		p.state.KillShim()
	}
}

// isEndUnreported says that the engine has ended some time after a Kill, and the shim does not tell.
func (p *shimProcess) isEndUnreported() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed.IsZero() {
		p.killed = time.Now()
	}
	return !p.state.HasFront() && !closed(p.exited) && time.Since(p.killed) > endReportWait
}

// endReportWait is how long a shim may take to tell of the end of a killed engine.
const endReportWait = 2 * time.Second

// outputWait is how long a shim may take to pass on the output of an engine that has ended.
const outputWait = 10 * time.Second

// Held implements Process.
func (p *shimProcess) Held() string {
	if !closed(p.exited) {
		return fmt.Sprintf("process %d", p.state.PID)
	}
	if left := p.state.PIDs(); len(left) > 0 {
		return fmt.Sprintf("processes %v of the engine that process %d was", left, p.state.PID)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.stop == nil || closed(p.drained):
		return ""
	case time.Since(p.ended) > outputWait:
		p.stop()
	}
	return fmt.Sprintf("the output of process %d", p.state.PID)
}

// Memory implements Process.
func (p *shimProcess) Memory() uint64 { return process.Memory(p.state.Cgroup) }

// Adopt implements Process.
func (p *shimProcess) Adopt(stdout, stderr io.Writer) {
	p.mu.Lock()
	isThere, unread := p.client != nil, p.unread
	p.sinks = [2]io.Writer{stdout, stderr}
	p.mu.Unlock()
	switch {
	case isThere:
		p.follow(unread-min(unread, tailLines), stdout, stderr)
	case closed(p.exited):
		emitter(stdout, stderr)(p.lastLines(), 0)
	}
}

// follow passes the output on from a line on, once. It goes on until the output ends or Detach.
func (p *shimProcess) follow(next uint64, stdout, stderr io.Writer) {
	ctx, cancel := context.WithCancel(context.Background())
	p.mu.Lock()
	first, client := p.stop == nil && !p.detached, p.client
	if first {
		p.stop = cancel
	}
	p.mu.Unlock()
	if !first {
		cancel()
		return
	}
	go func() {
		defer cancel()
		defer close(p.drained)
		emit := emitter(stdout, stderr)
		for {
			err := client.Logs(ctx, next, func(lines []shim.Line, missed uint64) {
				emit(lines, missed)
				next += missed + uint64(len(lines))
			})
			if err == nil || errors.Is(err, shim.ErrGone) || pause.For(ctx, followAgain) != nil {
				return
			}
		}
	}()
}

// followAgain is the pause after a shim has not passed on the output, because it is slow or out of files.
const followAgain = time.Second

// emitter returns a function that writes lines to the writer of their stream.
func emitter(stdout, stderr io.Writer) func(lines []shim.Line, missed uint64) {
	return func(lines []shim.Line, missed uint64) {
		if missed > 0 {
			_, _ = fmt.Fprintf(stderr,
				"dpserve: %d lines are missing here; they are in the rank's log file\n", missed)
		}
		for i := range lines {
			w, end := stdout, "\n"
			if lines[i].Stream == shim.Stderr {
				w = stderr
			}
			if lines[i].Bar {
				end = "\r"
			}
			_, _ = io.WriteString(w, lines[i].Text+end) // a failing log must not stop an engine
		}
	}
}

// Release implements Process.
func (p *shimProcess) Release() {
	p.mu.Lock()
	first := !p.released && closed(p.exited)
	p.released = p.released || first
	p.mu.Unlock()
	if !first {
		return
	}
	p.l.remove(p)
	p.l.releasing.Go(func() {
		if err := p.remove(); err != nil {
			p.l.log.Warn("cannot remove what a shim has left", slog.String("dir", p.dir),
				slog.String("err", err.Error()))
		}
	})
}

// remove ends the shim and removes its folder.
func (p *shimProcess) remove() error {
	c := p.connected()
	if c == nil {
		return shim.Remove(p.dir)
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseWait)
	defer cancel()
	err := c.Release(ctx)
	for errors.Is(err, shim.ErrRunning) && pause.For(ctx, ownerPoll) == nil {
		err = c.Release(ctx)
	}
	c.Close()
	if errors.Is(err, shim.ErrRunning) {
		err = shim.Remove(p.dir)
	}
	return err
}

// Detach implements Process.
func (p *shimProcess) Detach() {
	p.mu.Lock()
	p.detached = true
	stop, client := p.stop, p.client
	p.mu.Unlock()
	if p.asking != nil {
		p.asking()
	}
	if stop != nil {
		stop()
	}
	if client != nil {
		client.Close()
	}
	p.l.remove(p)
}
