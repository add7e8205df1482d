package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Exit codes beside those of problem.ExitCode.
const (
	exitOK          = 0
	exitDiffers     = 3   // only with --exit-code
	exitInterrupted = 130 // Ctrl-C, SIGTERM or SIGHUP
)

// silentError ends a command with an exit code and without a message, because the command has printed
// everything.
type silentError struct{ code int }

func (e *silentError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

func isSilent(err error) bool {
	var silent *silentError
	return errors.As(err, &silent)
}

// exitCode maps an error of a command to the process's exit code.
func exitCode(err error) int {
	var silent *silentError
	var faults app.Faults
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &silent):
		return silent.code
	case errors.Is(err, errInterrupted):
		return exitInterrupted
	case errors.As(err, &faults):
		return problem.ExitCode(problem.InvalidArgument)
	case errors.Is(err, context.DeadlineExceeded):
		return problem.ExitCode(problem.Timeout)
	}
	return problem.ExitCode(problem.CodeOf(err))
}

// report writes an error for the user: message, details, hints. Each fault of a file is on its own line and
// begins with file:line:col, as editors expect.
func report(w io.Writer, err error) {
	var faults app.Faults
	if err == nil || isSilent(err) {
		return
	}
	if errors.As(err, &faults) {
		reportFaults(w, faults)
		return
	}
	printMessage(w, "%s", strings.TrimSuffix(err.Error(), "."))
	var p *problem.Error
	if !errors.As(err, &p) {
		return
	}
	for _, d := range p.Details {
		_, _ = fmt.Fprintln(w, "  "+d)
	}
	for h := range strings.Lines(p.Hint) {
		_, _ = fmt.Fprintln(w, "hint: "+strings.TrimSpace(h))
	}
	if p.Doc != "" {
		_, _ = fmt.Fprintln(w, "see: "+p.Doc)
	}
}

func reportFaults(w io.Writer, faults app.Faults) {
	printMessage(w, "%s", formatCount(len(faults), "fault"))
	for _, f := range faults {
		_, _ = fmt.Fprintln(w, f.String())
	}
}

// printMessage writes one line with the prefix "dpserve: ".
func printMessage(w io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(w, "dpserve: "+format+"\n", args...)
}

func usageError(cmd, format string, args ...any) error {
	err := problem.New(problem.InvalidArgument, format, args...)
	if cmd == program {
		return err.WithHint("see `dpserve help`")
	}
	return err.WithHint("see `dpserve help %s`", cmd)
}

// formatCount returns "1 fault" or "2 faults".
func formatCount(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
