package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/dpserve/dpserve/client"
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
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &silent):
		return silent.code
	case errors.Is(err, errInterrupted):
		return exitInterrupted
	case errors.Is(err, context.DeadlineExceeded):
		return problem.ExitCode(problem.Timeout)
	}
	return problem.ExitCode(problem.Code(describeError(err).Code))
}

// describeError returns what a user is told about an error of the admin API or of this process. An error that
// names no code is internal.
func describeError(err error) client.Error {
	var (
		answer *client.Error
		faults app.Faults
		p      *problem.Error
	)
	switch {
	case errors.As(err, &answer):
		return *answer
	case errors.As(err, &faults):
		e := client.Error{Code: string(problem.InvalidArgument)}
		for _, f := range faults {
			e.Faults = append(e.Faults, client.Fault(f))
		}
		return e
	case errors.As(err, &p):
		return client.Error{Code: string(p.Code), Hint: p.Hint, Doc: p.Doc, Details: p.Details}
	}
	return client.Error{Code: string(problem.Internal)}
}

// report writes an error for the user: message, details, hints. Each fault of a file is on its own line and
// begins with file:line:col, as editors expect.
func report(w io.Writer, err error) {
	if err == nil || isSilent(err) {
		return
	}
	e := describeError(err)
	if len(e.Faults) > 0 {
		printMessage(w, "%s", formatCount(len(e.Faults), "fault"))
		for _, f := range e.Faults {
			_, _ = fmt.Fprintln(w, app.Fault(f).String())
		}
		return
	}
	printMessage(w, "%s", strings.TrimSuffix(err.Error(), "."))
	for _, d := range e.Details {
		_, _ = fmt.Fprintln(w, "  "+d)
	}
	for h := range strings.Lines(e.Hint) {
		_, _ = fmt.Fprintln(w, "hint: "+strings.TrimSpace(h))
	}
	if e.Doc != "" {
		_, _ = fmt.Fprintln(w, "see: "+e.Doc)
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
