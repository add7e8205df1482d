package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/dpserve/dpserve/internal/problem"
)

// Sizes that are used when the terminal does not report its own.
const (
	defaultWidth  = 100 // columns
	defaultHeight = 24  // rows
)

// ioStreams connects a command with its user. It knows which streams are terminals, the size of the terminal
// and whether colour is wanted, so that commands do not read the environment.
type ioStreams struct {
	In  io.Reader
	Out io.Writer // data
	Err io.Writer // messages: progress, warnings, errors, logs

	InTTY  bool // the user can answer a question
	OutTTY bool // times are relative, listings are painted
	ErrTTY bool // progress is redrawn in place
	Color  bool // escape sequences for colour may be written to a TTY

	// Size returns the columns and rows that the terminal has now. nil: defaultWidth and defaultHeight.
	Size func() (width, height int)
	// Terminal is the terminal of Err, whose signals a screen follows; nil in tests.
	Terminal *os.File
}

// size returns the columns and rows of the terminal, the default size elsewhere.
func (s *ioStreams) size() (width, height int) {
	if s.Size == nil {
		return defaultWidth, defaultHeight
	}
	return s.Size()
}

// systemStreams returns the process's own streams. NO_COLOR (any value) and TERM=dumb switch colour off.
// TERM=dumb also stops redrawing, because such a terminal cannot move its cursor.
func systemStreams(getenv func(string) string) *ioStreams {
	dumb := getenv("TERM") == "dumb"
	s := &ioStreams{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
		InTTY:  isTerminal(os.Stdin),
		OutTTY: isTerminal(os.Stdout),
		ErrTTY: isTerminal(os.Stderr) && !dumb,
		Color:  getenv("NO_COLOR") == "" && !dumb,
		Size:   terminalSize,
	}
	if s.ErrTTY {
		s.Terminal = os.Stderr
	}
	return s
}

// terminalSize returns the present size of the terminal of stderr, else of stdout, else the default size.
func terminalSize() (width, height int) {
	for _, f := range []*os.File{os.Stderr, os.Stdout} {
		if w, h, err := term.GetSize(fd(f)); err == nil && w > 0 && h > 0 {
			return w, h
		}
	}
	return defaultWidth, defaultHeight
}

func isTerminal(f *os.File) bool { return term.IsTerminal(fd(f)) }

func fd(f *os.File) int { return int(f.Fd()) }

// paint wraps text in a colour for stdout. It returns the text unchanged if stdout shows no colour.
func (s *ioStreams) paint(c color, text string) string { return paintIf(s.Color && s.OutTTY, c, text) }

// paintLive wraps text in a colour for the live lines of a screen.
func (s *ioStreams) paintLive(c color, text string) string {
	return paintIf(s.Color && s.ErrTTY, c, text)
}

func paintIf(colored bool, c color, text string) string {
	if !colored || c == plain || text == "" {
		return text
	}
	return string(c) + text + string(resetColor)
}

// color is an ANSI sequence.
type color string

// The colours dpserve uses, by meaning.
const (
	plain      color = ""
	good       color = "\x1b[32m"
	busy       color = "\x1b[33m"
	bad        color = "\x1b[31m"
	faint      color = "\x1b[2m"
	resetColor color = "\x1b[0m"
)

// confirm asks the user to type a name before a command destroys something. Without a terminal no user can
// answer, so only --yes confirms.
func (e *env) confirm(what, name string, yes bool) error {
	if yes {
		return nil
	}
	if !e.io.InTTY || !e.io.ErrTTY {
		return problem.New(problem.InvalidArgument,
			"%s: this needs a confirmation, and there is no terminal to ask on", what).
			WithHint("--yes confirms it")
	}
	_, _ = fmt.Fprintf(e.io.Err, "dpserve: %s; type %s to confirm: ", what, name)
	answer, err := bufio.NewReader(e.io.In).ReadString('\n')
	if err == nil && strings.TrimSpace(answer) == name {
		return nil
	}
	return problem.New(problem.InvalidArgument, "not confirmed, nothing was changed").
		WithHint("type %s, or pass --yes", name)
}
