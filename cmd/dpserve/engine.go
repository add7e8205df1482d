package main

import (
	"context"
	"io"
	"os/signal"
	"syscall"

	"github.com/dpserve/dpserve/engine/sim"
)

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
