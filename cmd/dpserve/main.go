// Command dpserve serves data-parallel LLM engines behind one OpenAI endpoint: it starts one engine per rank,
// assigns the ranks, routes requests over them and restarts engines that die.
//
// Results go to stdout, messages to stderr. An error line starts with "dpserve: " and is followed by hint
// lines. `dpserve help` lists the exit codes.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/dpserve/dpserve/internal/engine/sim"
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
