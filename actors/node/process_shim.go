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
	id     string // of the launch
	pid    int
	start  string // of pid
	began  time.Time
	client *shim.Client // nil = the shim has ended
	unread uint64       // number of the first line that no node has read

	exited  chan struct{}
	exit    Exit
	ended   time.Time     // when exit was told
	drained chan struct{} // the output is read

	mu       sync.Mutex
	stop     context.CancelFunc // ends the reading of the output; nil = it is not read
	killed   time.Time          // first; zero = it was not
	detached bool
	released bool
}

var _ Process = (*shimProcess)(nil)

func newShimProcess(l *shims, dir, id string, s shim.State, c *shim.Client) *shimProcess {
	return &shimProcess{
		l: l, dir: dir, id: id, pid: s.PID, start: s.Start, began: s.Began, client: c,
		exited: make(chan struct{}), drained: make(chan struct{}),
	}
}

// watch becomes the owner and waits, beside the caller, for the end of the engine.
func (p *shimProcess) watch(ctx context.Context) error {
	exits, err := p.client.Watch(ctx)
	if err != nil {
		return err
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

// lost takes the end of a shim that was killed. The kernel ends its engine with it; the rest of the group is
// killed here.
func (p *shimProcess) lost() {
	p.l.log.Warn("an engine's shim has ended, and its engine with it", slog.Int("pid", p.pid))
	process.KillAll(shim.Left(p.id))
	p.end(exitWithShim(p.began))
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
func (p *shimProcess) PID() int { return p.pid }

// Exited implements Process.
func (p *shimProcess) Exited() <-chan struct{} { return p.exited }

// Exit implements Process.
func (p *shimProcess) Exit() Exit { return p.exit }

// Terminate implements Process. A shim that does not take it is ended by Kill.
func (p *shimProcess) Terminate() {
	if !closed(p.exited) {
		_ = p.client.Signal(syscall.SIGTERM)
	}
}

// Kill implements Process: the shim kills the group, and this process what carries the mark, also if the shim
// does not answer. A shim that hangs, and so does not tell that its engine has ended, is killed as well.
func (p *shimProcess) Kill() {
	if !closed(p.exited) {
		_ = p.client.Signal(syscall.SIGKILL)
	}
	process.KillAll(process.Descendants(p.pid, p.start, process.Mark(p.id)))
	if p.isUntold() {
		process.KillAll(shim.Left(p.id))
	}
}

// isUntold says that the engine has ended some time after a Kill, and the shim does not tell.
func (p *shimProcess) isUntold() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed.IsZero() {
		p.killed = time.Now()
	}
	s, there := process.ReadStat(p.pid)
	lives := there && !s.Zombie && s.Start == p.start
	return !lives && !closed(p.exited) && time.Since(p.killed) > untoldWait
}

// untoldWait is how long a shim may take to tell of the end of a killed engine.
const untoldWait = 2 * time.Second

// outputWait is how long a shim may take to pass on the output of an engine that has ended.
const outputWait = 10 * time.Second

// Held implements Process.
func (p *shimProcess) Held() string {
	if !closed(p.exited) {
		return fmt.Sprintf("process %d", p.pid)
	}
	if left := process.Descendants(p.pid, p.start, process.Mark(p.id)); len(left) > 0 {
		return fmt.Sprintf("processes %v of group %d", left, p.pid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.stop == nil || closed(p.drained):
		return ""
	case time.Since(p.ended) > outputWait:
		p.stop()
	}
	return fmt.Sprintf("the output of process %d", p.pid)
}

// Adopt implements Process.
func (p *shimProcess) Adopt(stdout, stderr io.Writer) {
	if p.client != nil {
		p.follow(p.unread-min(p.unread, tailLines), stdout, stderr)
		return
	}
	emitter(stdout, stderr)(shim.LastLines(p.dir, tailLines), 0)
}

// follow passes the output on from a line on, once. It goes on until the output ends or Detach.
func (p *shimProcess) follow(next uint64, stdout, stderr io.Writer) {
	ctx, cancel := context.WithCancel(context.Background())
	p.mu.Lock()
	first := p.stop == nil && !p.detached
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
			err := p.client.Logs(ctx, next, func(lines []shim.Line, missed uint64) {
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
			_, _ = fmt.Fprintf(stderr, "dpserve: %d lines are missing here; the last ones are in out.log of "+
				"the engine's folder\n", missed)
		}
		for i := range lines {
			w := stdout
			if lines[i].Stream == shim.Stderr {
				w = stderr
			}
			_, _ = io.WriteString(w, lines[i].Text+"\n") // a failing log must not stop an engine
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
	if p.client == nil {
		return shim.Remove(p.dir, p.id)
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseWait)
	defer cancel()
	err := p.client.Release(ctx)
	for errors.Is(err, shim.ErrRunning) && pause.For(ctx, ownerPoll) == nil {
		err = p.client.Release(ctx)
	}
	p.client.Close()
	if errors.Is(err, shim.ErrRunning) {
		err = shim.Remove(p.dir, p.id)
	}
	return err
}

// Detach implements Process.
func (p *shimProcess) Detach() {
	p.mu.Lock()
	p.detached = true
	stop := p.stop
	p.mu.Unlock()
	if stop != nil {
		stop()
	}
	if p.client != nil {
		p.client.Close()
	}
	p.l.remove(p)
}
