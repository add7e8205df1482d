package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/lines"
	"github.com/dpserve/dpserve/internal/process"
)

const (
	maxConns     = 16              // connections at a time
	helloWait    = 5 * time.Second // for the first line of a connection
	acceptPause  = 100 * time.Millisecond
	outputWait   = time.Second // for the last writes to the disk, at the end of a shim
	survivorPoll = 10 * time.Millisecond
	survivorMost = time.Second // longest pause between two kills of what outlives an engine
)

// server is a running shim.
type server struct {
	dir     string
	spec    Spec
	ring    *ring
	out     [2]*lines.Writer
	child   *process.Child
	listen  *net.UnixListener
	wake    chan struct{} // one slot
	done    chan struct{} // closed at the end
	written chan struct{} // closed when the output file is complete
	noted   chan struct{} // closed when the end of the engine is on disk

	mu        sync.Mutex
	state     State
	deadlines deadlines
	owner     *conn
	conns     int
}

// open reads the folder of a shim, and listens in it. The shim's working folder is its own, because the path
// of a socket must be short.
func open(dir string) (*server, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	spec, err := readSpec(dir)
	if err != nil {
		return nil, err
	}
	if spec.Version < Oldest || spec.Version > Version {
		return nil, &VersionError{spec.Version}
	}
	if err := os.Chdir(dir); err != nil {
		return nil, err
	}
	if err := adoptOrphans(); err != nil {
		return nil, fmt.Errorf("become the parent of orphans: %w", err)
	}
	s := &server{
		dir: dir, spec: spec, ring: newRing(),
		wake: make(chan struct{}, 1), done: make(chan struct{}), written: make(chan struct{}),
		noted: make(chan struct{}),
	}
	if err := s.introduce(); err != nil {
		return nil, err
	}
	s.listen, err = net.ListenUnix("unix", &net.UnixAddr{Name: socketFile, Net: "unix"})
	if err != nil {
		return nil, err
	}
	s.out = [2]*lines.Writer{s.ring.writer(Stdout), s.ring.writer(Stderr)}
	return s, nil
}

// introduce writes who this process is and which cgroup its engine gets, before there is anything else to
// find, and makes the cgroup.
func (s *server) introduce() error {
	self, _ := process.ReadStat(os.Getpid())
	cgroup, failed := process.CgroupOf(s.spec.ID)
	s.state = State{
		Launch: process.Launch{
			Boot: process.BootID(), Cgroup: cgroup, Shim: self.PID, ShimStart: self.Start,
		},
		Folder: folderOf("."), Phase: Running,
	}
	if err := writeFile(s.dir, stateFile, &s.state); err != nil {
		return err
	}
	if failed == nil {
		failed = process.MakeCgroup(cgroup)
	}
	if failed != nil {
		s.state.Cgroup, s.state.NoCgroup = "", failed.Error()
	}
	return nil
}

// start starts the engine, and what goes on beside it.
func (s *server) start() error {
	began := time.Now()
	child, err := process.Start(process.Command{
		Path: s.spec.Path, Argv: s.spec.Argv, Env: s.spec.Env, Dir: s.spec.Dir, In: s.state.Launch,
	}, s.out[0], s.out[1])
	if err != nil {
		return err
	}
	s.child = child
	if s.state.Cgroup != "" && child.Launch().Cgroup == "" {
		s.state.NoCgroup = "the kernel does not start a process in " + s.state.Cgroup
		unused := process.Launch{Boot: process.BootID(), Cgroup: s.state.Cgroup}
		unused.End(0) // removes it
	}
	s.state.Launch, s.state.Began = child.Launch(), began
	s.deadlines = newDeadlines(began, &s.spec)
	if err := writeFile(s.dir, stateFile, &s.state); err != nil {
		s.say("%v", err) // a disk may fill up; the socket tells the same
	}
	go reapOrphans(child.PID(), s.done)
	go func() {
		defer close(s.written)
		if s.spec.Output != "" {
			file := &diskfile.Log{Path: s.spec.Output, Limit: outputSize}
			keepOutput(s.ring, file, outputRetry, s.done)
		}
	}()
	go s.accept()
	return nil
}

// say prints a line in shim.log.
func (*server) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", // there is nobody else to tell
		append([]any{time.Now().UTC().Format(time.RFC3339)}, args...)...)
}

// ask makes the shim end its engine, with the grace of the spec.
func (s *server) ask(reason string) {
	s.mu.Lock()
	first := s.deadlines.asked.IsZero() && s.deadlines.exited.IsZero()
	if first {
		s.deadlines.ask(time.Now(), reason)
		s.state.Phase, s.state.Reason = Ending, reason
	}
	s.mu.Unlock()
	if first {
		s.say("ending the engine: %s", reason)
		s.child.Terminate()
	}
}

// ended takes the exit of the engine: its status is kept, what it left behind is killed.
func (s *server) ended() {
	exit := s.child.Exit()
	s.mu.Lock()
	s.state.Phase, s.state.Exit = Exited, &exit
	s.deadlines.exited = time.Now()
	state := s.state
	s.mu.Unlock()
	s.say("%s", exit)
	go s.clean()
	go func() { // a disk may hang
		defer close(s.noted)
		if err := writeFile(s.dir, stateFile, &state); err != nil {
			s.say("%v", err)
		}
	}()
}

// clean kills what outlives the engine, until nothing does.
func (s *server) clean() {
	for wait := survivorPoll; s.child.Held() != ""; wait = min(2*wait, survivorMost) {
		s.child.Kill()
		if !pause(wait, s.done) {
			return
		}
	}
	s.out[0].End()
	s.out[1].End()
	s.ring.end()
}

// close ends what goes on beside run, and everything that descends from this process, which exits after it.
func (s *server) close() {
	if left := s.state.Launch.End(endWait); len(left) > 0 {
		s.say("processes %v do not end", left)
	}
	_ = s.listen.Close() // removes the socket
	if s.child != nil {
		late, cancel := context.WithTimeout(context.Background(), outputWait)
		defer cancel()
		for _, end := range []chan struct{}{s.written, s.noted} {
			select {
			case <-end:
			case <-late.Done():
			}
		}
	}
	close(s.done)
	s.mu.Lock()
	released := s.deadlines.released
	s.mu.Unlock()
	if released {
		_ = os.RemoveAll(s.dir)
	}
}

func (s *server) accept() {
	for {
		c, err := s.listen.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // such as too many open files
			time.Sleep(acceptPause)
			continue
		}
		s.mu.Lock()
		full := s.conns >= maxConns
		if !full {
			s.conns++
		}
		s.mu.Unlock()
		if full {
			_ = c.Close()
			continue
		}
		go s.serve(c)
	}
}

func (s *server) serve(c *net.UnixConn) {
	newConn(s, c).run()
	s.mu.Lock()
	s.conns--
	s.mu.Unlock()
}

// own makes a connection the owner's.
func (s *server) own(c *conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owner != nil && s.owner != c {
		return ErrOwned
	}
	s.owner = c
	s.deadlines.owned()
	s.nudge()
	return nil
}

// leave notes the end of a connection.
func (s *server) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owner == c {
		s.owner, s.deadlines.alone = nil, time.Now()
		s.nudge()
	}
}

// extend lets the engine of mode fence live for ttl from now.
func (s *server) extend(c *conn, ttl time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owner != c {
		return ErrOwned
	}
	s.deadlines.until = time.Now().Add(ttl)
	s.nudge()
	return nil
}

// released is called after the answer to Release is written.
func (s *server) released() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deadlines.released = true
	s.nudge()
}

// signal sends a node's signal. After it the engine is one that ends.
func (s *server) signal(name string) {
	s.mu.Lock()
	if s.state.Phase == Running {
		s.state.Phase = Ending
	}
	s.mu.Unlock()
	if name == signalTerm {
		s.child.Terminate()
		return
	}
	s.child.Kill()
}

func (s *server) info() *Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := s.state
	select {
	case <-s.child.Exited(): // run may not have noticed yet
		exit := s.child.Exit()
		state.Phase, state.Exit = Exited, &exit
	default:
	}
	return &Info{Spec: s.spec, State: state, Read: s.ring.unread()}
}

// nudge wakes run.
func (s *server) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// gcPercent keeps the heap of a shim, which holds a few hundred KiB, small.
const gcPercent = 25

// folderLook is the pause between two looks for the folder while no owner is connected.
const folderLook = 10 * time.Second

// outcome is the one line that a shim prints: whether its engine runs.
type outcome struct {
	Error string `json:"error,omitempty"`
}

// Main is a shim, from its folder on. It returns the exit code of the process, and is called by its main
// goroutine: the engine ends with the thread that has started it.
func Main(dir string) int {
	runtime.LockOSThread()
	debug.SetGCPercent(gcPercent)
	asked := make(chan os.Signal, 4)
	signal.Notify(asked, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	s, err := open(dir)
	if err == nil {
		err = s.start()
	}
	failed := tell(os.Stdout, err)
	if err = errors.Join(err, failed); err != nil {
		fmt.Fprintln(os.Stderr, "dpserve shim:", err) // there is nobody else to tell
		if s != nil {
			s.close()
		}
		return 1
	}
	debug.FreeOSMemory() // what the start needed
	s.run(asked)
	return 0
}

// tell prints the outcome and lets go of the pipe, which nobody reads any more. A node that is gone is no
// failure: the engine waits for the next one.
func tell(w io.Writer, err error) error {
	var o outcome
	if err != nil {
		o.Error = err.Error()
	}
	_ = writeLine(w, o)
	return silence()
}

// run is the life of a shim after its engine runs. One goroutine.
func (s *server) run(signals <-chan os.Signal) {
	defer s.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	exited := s.child.Exited()
	for s.act(timer) {
		select {
		case <-timer.C:
		case <-s.wake:
		case sig := <-signals: // SIGHUP and SIGPIPE mean nothing to a shim
			if sig == syscall.SIGTERM || sig == syscall.SIGINT {
				s.ask("its shim was asked to end: signal " + sig.String())
			}
		case <-exited:
			exited = nil // once
			s.ended()
		}
	}
}

// act does what the deadlines say and sets the timer for the next of them; false: the shim ends.
func (s *server) act(timer *time.Timer) bool {
	s.mu.Lock()
	alone := s.owner == nil
	s.mu.Unlock()
	lost := alone && s.isLost()
	s.mu.Lock()
	s.deadlines.lost = lost
	step, wait := s.deadlines.next(time.Now())
	if step == stepTerminate {
		s.state.Phase, s.state.Reason = Ending, s.deadlines.reason
	}
	s.mu.Unlock()
	switch step {
	case stepWait:
	case stepTerminate:
		s.say("ending the engine: %s", s.deadlines.reason)
		s.child.Terminate()
	case stepKill:
		s.child.Kill()
	case stepLeave:
		return false
	}
	timer.Stop()
	if alone && wait > folderLook {
		wait = folderLook
	}
	if wait >= 0 {
		timer.Reset(wait)
	}
	return true
}

// isLost says that the folder was removed, with a whole data dir for example.
func (s *server) isLost() bool {
	_, err := os.Stat(filepath.Join(s.dir, specFile))
	return errors.Is(err, fs.ErrNotExist)
}
