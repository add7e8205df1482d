package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
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
	_, silent := errors.AsType[*silentError](err)
	return silent
}

// exitCode maps an error of a command to the process's exit code.
func exitCode(err error) int {
	if silent, ok := errors.AsType[*silentError](err); ok {
		return silent.code
	}
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errInterrupted):
		return exitInterrupted
	case errors.Is(err, context.DeadlineExceeded):
		return problem.ExitCode(problem.Timeout)
	}
	return problem.ExitCode(problem.Code(describeError(err).Code))
}

// codeInterrupted is the code of an interrupted command in JSON. The admin API has no such code.
const codeInterrupted = "interrupted"

// describeError returns what a user is told about an error of the admin API or of this process. An error that
// names no code is internal.
func describeError(err error) client.Error {
	var (
		answer *client.Error
		faults app.Faults
		p      *problem.Error
	)
	e := client.Error{Code: string(problem.Internal), Message: err.Error()}
	switch {
	case errors.Is(err, errInterrupted):
		e.Code = codeInterrupted
	case errors.As(err, &answer):
		e = *answer
		e.Message = err.Error()
	case errors.As(err, &faults):
		p = faults.Problem()
		e.Code, e.Message, e.Hint = string(p.Code), p.Message, p.Hint
		e.Faults = api.ConvertFaults(faults)
	case errors.As(err, &p):
		e.Code, e.Hint, e.Doc, e.Details = string(p.Code), p.Hint, p.Doc, p.Details
	case errors.Is(err, context.DeadlineExceeded):
		e.Code = string(problem.Timeout)
	}
	e.Message = strings.TrimSuffix(e.Message, ".")
	return e
}

// errorDocument is an error with -o json.
type errorDocument struct {
	APIVersion string     `json:"apiVersion"`
	Error      errorFacts `json:"error"`
}

type errorFacts struct {
	client.Error
	ExitCode int `json:"exit_code"`
}

// reportJSON writes an error as one line of JSON.
func reportJSON(w io.Writer, err error) {
	if err == nil || isSilent(err) {
		return
	}
	facts := errorFacts{describeError(err), exitCode(err)}
	facts.Faults = completeFaults(facts.Faults)
	if len(facts.Faults) > 0 {
		facts.Details = nil // the same as text
	}
	_ = writeJSONLine(w, errorDocument{client.APIVersion, facts}) // there is nobody else to tell
}

// completeFaults gives every fault a message that says all of it.
func completeFaults(faults []client.Fault) []client.Fault {
	out := slices.Clone(faults)
	for i := range out {
		out[i].Message = app.Fault(out[i]).Describe()
	}
	return out
}

// wantsJSON reports whether the command line asks for -o json, also if it was refused before its flags were
// read.
func wantsJSON(cmd *cobra.Command, args []string) bool {
	f := cmd.Flag("output")
	if f == nil {
		return false
	}
	if f.Changed {
		return f.Value.String() == string(formatJSON)
	}
	for i, arg := range args {
		switch arg {
		case "--":
			return false
		case "-ojson", "-o=json", "--output=json":
			return true
		case "-o", "--output":
			return i+1 < len(args) && args[i+1] == string(formatJSON)
		}
	}
	return false
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
	printMessage(w, "%s", e.Message)
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
