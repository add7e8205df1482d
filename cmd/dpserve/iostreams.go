package main

import (
	"io"
	"os"

	"golang.org/x/term"
)

// Sizes taken when the terminal does not tell its own.
const (
	defaultWidth  = 100 // columns
	defaultHeight = 24  // rows
)

// IOStreams is the one way a command reaches its user. It knows what is a terminal, how wide it is and whether colour is
// wanted, so that no command asks the environment itself.
type IOStreams struct {
	In  io.Reader
	Out io.Writer // data
	Err io.Writer // talk: progress, warnings, errors, logs

	InTTY  bool // a person can answer a question
	OutTTY bool // times are relative, listings are painted
	ErrTTY bool // progress is redrawn in place
	Width  int  // columns of the terminal, defaultWidth elsewhere
	Height int  // rows of the terminal, defaultHeight elsewhere
	Color  bool // escape sequences for colour may be written to a TTY
}

// systemStreams are the process's own streams. NO_COLOR (any value) and TERM=dumb switch colour off; TERM=dumb also stops
// redrawing, because such a terminal cannot move its cursor.
func systemStreams(getenv func(string) string) *IOStreams {
	dumb := getenv("TERM") == "dumb"
	s := &IOStreams{
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

// paint wraps s in a colour for stdout, or leaves it alone where nobody would see it.
func (s *IOStreams) paint(c color, text string) string {
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
