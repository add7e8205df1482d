package shim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/process"
)

// Client is a node's connection to one shim. All methods are safe for concurrent use.
type Client struct {
	dir    string
	launch process.Launch // whose shim it is
	link   *link
	done   chan struct{} // closed when the connection has ended

	writing sync.Mutex

	mu      sync.Mutex
	last    uint64 // id of a request
	waiting map[uint64]chan reply
	closed  bool
}

// connect returns a client of the shim of a launch, in its folder. Errors are those of dial.
func connect(ctx context.Context, dir string, launch process.Launch) (*Client, error) {
	l, err := dial(ctx, dir, &launch)
	if err != nil {
		return nil, err
	}
	c := &Client{
		dir: dir, launch: launch, link: l, done: make(chan struct{}), waiting: map[uint64]chan reply{},
	}
	go c.read()
	return c, nil
}

// read passes replies on until the connection ends.
func (c *Client) read() {
	for {
		r, err := c.link.read()
		if err != nil {
			break
		}
		c.mu.Lock()
		to := c.waiting[r.ID]
		if !r.More {
			delete(c.waiting, r.ID)
		}
		c.mu.Unlock()
		select {
		case to <- r: // a nil channel takes nothing
		default:
		}
	}
	c.mu.Lock()
	lost := !c.closed
	c.mu.Unlock()
	c.Close()
	close(c.done)
	if lost { // the shim has ended, and may be a child of this process
		process.Reap(c.launch.Shim, answerWait)
	}
}

// Done is closed when the connection has ended: the shim has, or Close was called.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close lets go of the shim: it has no owner from now on. Idempotent.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	_ = c.link.c.Close()
}

// ask sends a request and returns the channel of its replies, which has room for two.
func (c *Client) ask(r request) (<-chan reply, uint64, error) {
	replies := make(chan reply, 2)
	c.mu.Lock()
	c.last++
	r.ID = c.last
	c.waiting[r.ID] = replies
	c.mu.Unlock()
	if err := c.send(r); err != nil {
		c.forget(r.ID)
		return nil, 0, err
	}
	return replies, r.ID, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, id)
}

func (c *Client) send(r request) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	_ = c.link.c.SetWriteDeadline(time.Now().Add(answerWait))
	if err := writeLine(c.link.c, r); err != nil {
		return answerError(err)
	}
	return nil
}

// call sends a request and waits for its answer, at most answerWait.
func (c *Client) call(ctx context.Context, r request) (reply, error) {
	replies, id, err := c.ask(r)
	if err != nil {
		return reply{}, err
	}
	answer, err := c.answer(ctx, replies)
	c.forget(id)
	return answer, err
}

func (c *Client) answer(ctx context.Context, replies <-chan reply) (reply, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerWait, ErrSilent)
	defer cancel()
	r, err := c.await(ctx, replies)
	if err != nil {
		return reply{}, err
	}
	return answered(r)
}

// await waits for a reply until the connection or ctx ends.
func (c *Client) await(ctx context.Context, replies <-chan reply) (reply, error) {
	select {
	case r := <-replies:
		return r, nil
	case <-ctx.Done():
		return reply{}, context.Cause(ctx)
	case <-c.done:
	}
	select { // the reply came before the end
	case r := <-replies:
		return r, nil
	default:
		return reply{}, ErrGone
	}
}

func answered(r reply) (reply, error) {
	if r.Error != nil {
		return r, r.Error.err()
	}
	return r, nil
}

// Info asks for the spec and the state of the engine.
func (c *Client) Info(ctx context.Context) (Info, error) {
	r, err := c.call(ctx, request{Op: opInfo})
	switch {
	case err != nil:
		return Info{}, err
	case r.Info == nil:
		return Info{}, ErrProtocol
	}
	return *r.Info, nil
}

// Watch makes this client the owner. The channel tells the engine's exit, or is closed without one when the
// connection ends. Errors: ErrOwned, ErrGone, ErrSilent.
func (c *Client) Watch(ctx context.Context) (<-chan process.Exit, error) {
	replies, id, err := c.ask(request{Op: opWatch})
	if err != nil {
		return nil, err
	}
	if _, err := c.answer(ctx, replies); err != nil {
		c.forget(id)
		return nil, err
	}
	exits := make(chan process.Exit, 1)
	go func() { // ends with the connection
		defer close(exits)
		if r, err := c.await(context.WithoutCancel(ctx), replies); err == nil {
			exits <- exitOf(r)
		}
	}()
	return exits, nil
}

func exitOf(r reply) process.Exit {
	if r.Exit == nil {
		return process.Exit{Code: -1, Signal: "unknown"}
	}
	return *r.Exit
}

// Signal sends SIGTERM to the engine, or SIGKILL to its whole group.
func (c *Client) Signal(sig syscall.Signal) error {
	name := signalTerm
	if sig == syscall.SIGKILL {
		name = signalKill
	}
	return c.send(request{Op: opSignal, Signal: name})
}

// Extend lets an engine of mode fence live for ttl from now. Only the owner may.
func (c *Client) Extend(ttl time.Duration) error {
	return c.send(request{Op: opExtend, TTL: min(max(ttl, 0), maxExtend).Milliseconds()})
}

// Logs passes on the engine's lines from a number on, in batches; missed are lines before a batch that the
// shim does not hold any more. It returns when the output has ended. Errors: those of dial, ErrGone if the
// shim ends before that, the cause of ctx.
func (c *Client) Logs(ctx context.Context, since uint64, emit func(lines []Line, missed uint64)) error {
	l, err := dial(ctx, c.dir, &c.launch)
	if err != nil {
		return err
	}
	defer func() { _ = l.c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = l.c.Close() })
	defer stop()
	if err := writeLine(l.c, request{ID: 1, Op: opLogs, Since: since, Follow: true}); err != nil {
		return answerError(err)
	}
	for {
		r, err := l.read()
		if err == nil {
			r, err = answered(r)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return answerError(err)
		}
		if len(r.Lines) > 0 || r.Missed > 0 {
			emit(r.Lines, r.Missed)
		}
		if !r.More {
			return nil
		}
	}
}

// Release forgets an engine that has ended and whose end is reported: the shim ends and the folder is
// removed. It waits at most twice answerWait, and kills a shim that does not end. Errors: ErrRunning, or of
// the disk.
func (c *Client) Release(ctx context.Context) error {
	if _, err := c.call(ctx, request{Op: opRelease}); err == ErrRunning { //nolint:errorlint // as it is
		return err
	}
	over := time.NewTimer(answerWait)
	defer over.Stop()
	select {
	case <-c.done:
	case <-over.C:
		c.Close()
	}
	state := State{Launch: c.launch}
	err := state.End()
	process.Reap(c.launch.Shim, answerWait)
	if err != nil {
		return err
	}
	return os.RemoveAll(c.dir)
}

// answerWait bounds the wait for an answer of a shim, which answers at once.
const answerWait = 2 * time.Second

// link is a connection to a shim, as the node sees it. One goroutine reads it.
type link struct {
	c  *net.UnixConn
	in *bufio.Reader
}

// dial connects to the shim of a launch. Errors: ErrGone, ErrForeign, ErrSilent, ErrProtocol, *VersionError.
func dial(ctx context.Context, dir string, launch *process.Launch) (*link, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerWait, ErrSilent)
	defer cancel()
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = folder.Close() }()
	path, done, err := socketPath(folder)
	if err != nil {
		return nil, err
	}
	defer done()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil, ErrGone
	case errors.Is(err, syscall.EAGAIN): // nobody has accepted for long
		return nil, ErrSilent
	case err != nil:
		return nil, fmt.Errorf("connect to a shim: %w", err)
	}
	unix, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("%w: no unix socket", ErrProtocol)
	}
	l := &link{c: unix, in: bufio.NewReader(unix)}
	if err := l.greet(ctx, launch); err != nil {
		_ = c.Close()
		return nil, err
	}
	return l, nil
}

// greet checks who the other side is and agrees on the version.
func (l *link) greet(ctx context.Context, launch *process.Launch) error {
	uid, pid, err := peer(l.c)
	switch {
	case err != nil:
		return err
	case uid != os.Geteuid():
		return fmt.Errorf("%w: user %d", ErrForeign, uid)
	case pid != launch.Shim || !launch.HasShim():
		if s, there := process.ReadStat(pid); pid > 0 && (!there || s.Exiting) { // its socket still connects
			return ErrGone
		}
		return fmt.Errorf("%w: process %d is not the shim of this launch", ErrForeign, pid)
	}
	until, _ := ctx.Deadline()
	_ = l.c.SetDeadline(until)
	line, err := readLine(l.in, requestLimit)
	if err != nil {
		return answerError(err)
	}
	h, err := parseHello(line)
	if err != nil {
		return err
	}
	if h.Version < Oldest || h.Version > Version {
		return &VersionError{h.Version}
	}
	if err := writeLine(l.c, hello{h.Version}); err != nil {
		return answerError(err)
	}
	return l.c.SetDeadline(time.Time{})
}

// answerError tells a shim that does not answer from one that is gone.
func answerError(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrSilent
	case errors.Is(err, ErrProtocol):
		return err
	}
	return fmt.Errorf("%w: %w", ErrGone, err)
}

func (l *link) read() (reply, error) {
	line, err := readLine(l.in, replyLimit)
	if err != nil {
		return reply{}, err
	}
	return parse[reply](line)
}
