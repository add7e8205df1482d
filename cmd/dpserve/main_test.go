package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/test/parallel"
	"github.com/dpserve/dpserve/test/ports"
)

// TestMain lets test scripts run this test binary as dpserve, so that exit codes, signals and child engines
// are real.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "engine" || os.Args[1] == shim.Command) {
		os.Exit(runProcess()) // an engine or a shim that a node under test started from this binary
	}
	syscall.Umask(0o022) // t.TempDir makes data dirs that only this user may write
	// Children would inherit a signal that is ignored, as nohup and the & of scripts do. A shell that a test
	// ends with it would wait for ever.
	for _, s := range []os.Signal{syscall.SIGHUP, os.Interrupt} {
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	testscript.Main(leakChecked{m}, map[string]func(){"dpserve": func() { os.Exit(runProcess()) }})
}

// leakChecked fails a passing run that leaves goroutines behind. The default ports are taken while it runs:
// otherwise a test would find them free or taken, depending on whether another one runs `up` at that moment.
type leakChecked struct{ m *testing.M }

func (l leakChecked) Run() int {
	parallel.AtLeast(8) // the scripts and the parts of the README wait
	release, err := ports.TakeFixed(context.Background(), server.DefaultHTTPBind, server.DefaultAdminBind)
	if err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1
	}
	code := l.m.Run()
	release()
	if code != 0 {
		return code
	}
	if err := goleak.Find(); err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1
	}
	return 0
}
