// Command dpserve serves data-parallel LLM engines behind one OpenAI endpoint: it starts one engine per rank, hands out the
// ranks, routes requests over them and restarts what dies.
//
// One file holds one command. Data goes to stdout and talk to stderr, errors start with "dpserve: " and end with hint lines,
// and exit codes are those of `dpserve help`.
package main

import "os"

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
