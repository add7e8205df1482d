package main

import (
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/test/harness"
)

// TestMain lets test scripts run this test binary as dpserve, so that exit codes, signals and child engines
// are real.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "engine" || os.Args[1] == shim.Command) {
		os.Exit(runProcess()) // an engine or a shim that a node under test started from this binary
	}
	// Under nohup, children would inherit the ignored signal, and a script that closes a terminal would wait
	// for ever.
	if signal.Ignored(syscall.SIGHUP) {
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	testscript.Main(leakChecked{m}, map[string]func(){"dpserve": func() { os.Exit(runProcess()) }})
}

// leakChecked fails a passing run that leaves goroutines behind.
type leakChecked struct{ m *testing.M }

func (l leakChecked) Run() int {
	harness.RunSideBySide(8) // the scripts and the parts of the README wait
	code := l.m.Run()
	if code != 0 {
		return code
	}
	if err := goleak.Find(); err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1
	}
	return 0
}
