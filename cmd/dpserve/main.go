// Command dpserve serves data-parallel LLM engines behind one OpenAI endpoint: it starts one engine per rank, hands out the
// ranks, routes requests over them and restarts what dies.
//
// One file holds one command. Data goes to stdout and talk to stderr, errors start with "dpserve: " and end with hint lines,
// and exit codes are those of `dpserve help`.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/dpserve/dpserve/engine/sim"
)

func main() {
	os.Exit(Main())
}

// Main runs the process's command line on the real streams, signals and environment and gives the exit code.
func Main() int {
	args := os.Args[1:]
	if code, done := runEngine(args, os.Stdout, os.Stderr); done {
		return code // an engine process never pays for the CLI
	}
	sig := watchSignals()
	defer sig.stop()
	e := newEnv(systemStreams(os.Getenv), sig)
	return e.run(args)
}

// runEngine is the hidden command `dpserve engine sim FLAGS`: one rank of the built-in engine, started by a node. It is
// looked for before anything of the CLI exists, and its flags go to the engine as they are. done is false for every other
// command line.
func runEngine(args []string, stdout, stderr io.Writer) (code int, done bool) {
	if len(args) < 2 || args[0] != "engine" || args[1] != "sim" {
		return 0, false
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return sim.Main(ctx, args[2:], stdout, stderr), true
}
