package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/term"

	"github.com/dpserve/dpserve/internal/problem"
)

// Sizes that are used when the terminal does not report its own.
const (
	defaultWidth  = 100 // columns
	defaultHeight = 24  // rows
)

// ioStreams connects a command with its user. It knows which streams are terminals, how wide the terminal is
// and whether colour is wanted, so that commands do not read the environment.
type ioStreams struct {
	In  io.Reader
	Out io.Writer // data
	Err io.Writer // messages: progress, warnings, errors, logs

	InTTY  bool // the user can answer a question
	OutTTY bool // times are relative, listings are painted
	ErrTTY bool // progress is redrawn in place
	Width  int  // columns of the terminal, defaultWidth elsewhere
	Height int  // rows of the terminal, defaultHeight elsewhere
	Color  bool // escape sequences for colour may be written to a TTY
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
		Width:  defaultWidth, Height: defaultHeight,
		Color: getenv("NO_COLOR") == "" && !dumb,
	}
	if w, h, err := term.GetSize(fd(os.Stderr)); err == nil && w > 0 && h > 0 {
		s.Width, s.Height = w, h
	}
	return s
}

func isTerminal(f *os.File) bool { return term.IsTerminal(fd(f)) }

func fd(f *os.File) int { return int(f.Fd()) }

// paint wraps text in a colour for stdout. It returns the text unchanged if stdout shows no colour.
func (s *ioStreams) paint(c color, text string) string {
	if !s.Color || !s.OutTTY || c == plain || text == "" {
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

// Terminal sequences of a redraw. A terminal that supports synchronized output shows the whole step at once;
// others ignore the sequence.
const (
	beginSync  = "\x1b[?2026h"
	endSync    = "\x1b[?2026l"
	clearBelow = "\r\x1b[J"
)

// screen owns stderr while a command runs. On a TTY it redraws some live lines at the bottom in place; other
// lines, log lines included, scroll above them. Elsewhere it does not print live lines. Safe for concurrent
// use.
type screen struct {
	tty           bool
	width, height int

	mu   sync.Mutex
	w    io.Writer
	live []string
	part []byte // the unfinished log line
}

func newScreen(s *ioStreams) *screen {
	return &screen{tty: s.ErrTTY, width: s.Width, height: s.Height, w: s.Err}
}

// printMessage prints one prefixed line above the live ones.
func (s *screen) printMessage(format string, args ...any) {
	var b bytes.Buffer
	printMessage(&b, format, args...)
	_, _ = s.Write(b.Bytes())
}

// Write prints complete log lines above the live lines and keeps an unfinished line until its end arrives.
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.part = append(s.part, p...)
	end := bytes.LastIndexByte(s.part, '\n') + 1
	if end == 0 {
		return len(p), nil
	}
	err := s.draw(string(s.part[:end]), s.live)
	s.part = append(s.part[:0], s.part[end:]...)
	return len(p), err
}

// show replaces the live lines. At most the terminal's height is drawn: a taller block cannot be redrawn.
func (s *screen) show(lines ...string) {
	if !s.tty {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.draw("", s.fitToTerminal(lines))
}

func (s *screen) fitToTerminal(lines []string) []string {
	if room := max(s.height-2, 1); len(lines) > room {
		more := fmt.Sprintf("… and %d more", len(lines)-room+1)
		lines = append(lines[:room-1:room-1], more)
	}
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = truncate(l, s.width-1)
	}
	return out
}

// draw writes text above the live lines and replaces the live lines.
func (s *screen) draw(text string, live []string) error {
	if !s.tty {
		_, err := io.WriteString(s.w, text)
		return err
	}
	var b strings.Builder
	b.WriteString(beginSync)
	if n := len(s.live); n > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", n)
	}
	b.WriteString(clearBelow + text)
	for _, l := range live {
		b.WriteString(l + "\n")
	}
	b.WriteString(endSync)
	s.live = live
	_, err := io.WriteString(s.w, b.String())
	return err
}

// truncate shortens a line to width columns (counted as runes).
func truncate(line string, width int) string {
	runes := []rune(line)
	if width < 1 || len(runes) <= width {
		return line
	}
	return string(runes[:width-1]) + "…"
}

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
