// Command dpserve serves data-parallel LLM engines behind one OpenAI endpoint: it starts one engine per rank,
// assigns the ranks, routes requests over them and restarts engines that die.
//
// Results go to stdout, messages to stderr. An error line starts with "dpserve: " and is followed by hint
// lines. `dpserve help` lists the exit codes.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/internal/shim"
)

func main() {
	os.Exit(runProcess())
}

// runProcess runs the process's command line on the real streams, signals and environment and returns the
// exit code.
func runProcess() int {
	args := os.Args[1:]
	if code, done := runEngine(args, os.Stdout, os.Stderr); done {
		return code // an engine process does not build the CLI
	}
	if len(args) == 2 && args[0] == shim.Command { // hidden: started by a node, see internal/shim
		return shim.Main(args[1])
	}
	sig := watchSignals()
	defer sig.stop()
	e := newEnv(systemStreams(os.Getenv), sig)
	return e.run(args)
}

// runEngine is the hidden command `dpserve engine sim FLAGS`: one rank of the built-in engine, started by a
// node. Main checks for it before it builds the CLI, and passes the flags to the engine unchanged. done is
// false for every other command line.
func runEngine(args []string, stdout, stderr io.Writer) (code int, done bool) {
	if len(args) < 2 || args[0] != "engine" || args[1] != "sim" {
		return 0, false
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return sim.Main(ctx, args[2:], stdout, stderr), true
}

// errInterrupted is the cause of a context that a signal ended; its exit code is 130.
var errInterrupted = errors.New("interrupted")

// duplicateWindow is the time within which two signals count as one: timeout(1) and some supervisors signal
// the process and then its group, and a user does not press Ctrl-C twice so fast.
const duplicateWindow = 250 * time.Millisecond

// interrupts counts SIGINT, SIGTERM and SIGHUP (a closed terminal), which have the same meaning: the first
// asks the command to finish, the second to stop at once. After the second the default behaviour is restored,
// so that a third signal always ends the process.
type interrupts struct {
	first  chan struct{} // closed by the first signal
	second chan struct{} // closed by the second
	stop   func()        // ends the delivery of signals; idempotent
}

func watchSignals() *interrupts {
	in := make(chan os.Signal, 4)
	signal.Notify(in, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores SIGHUP, and that must stay so
		signal.Notify(in, syscall.SIGHUP)
	}
	done := make(chan struct{})
	i := newInterrupts()
	i.stop = sync.OnceFunc(func() { signal.Stop(in); close(done) })
	go i.count(in, done)
	return i
}

func newInterrupts() *interrupts {
	return &interrupts{first: make(chan struct{}), second: make(chan struct{}), stop: func() {}}
}

func (i *interrupts) count(in chan os.Signal, done <-chan struct{}) {
	var last time.Time
	for _, c := range []chan struct{}{i.first, i.second} {
		for {
			select {
			case <-in:
			case <-done:
				return
			}
			if now := time.Now(); now.Sub(last) > duplicateWindow {
				last = now
				break
			}
		}
		close(c)
	}
	signal.Stop(in)
}

// context is cancelled with errInterrupted by the first signal.
func (i *interrupts) context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	go func() {
		select {
		case <-i.first:
			cancel(errInterrupted)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(context.Canceled) }
}
