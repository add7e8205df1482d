package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
)

// Terminal sequences of a redraw. Terminals that know synchronized output show the whole step at once, others ignore it.
const (
	beginSync  = "\x1b[?2026h"
	endSync    = "\x1b[?2026l"
	clearBelow = "\r\x1b[J"
)

// screen owns stderr while a command runs: on a TTY some live lines at the bottom that are redrawn in place, above them lines
// that scroll away (logs too, so that they do not tear the live ones). Elsewhere live lines are not shown at all. Safe for
// concurrent use.
type screen struct {
	tty           bool
	width, height int

	mu   sync.Mutex
	w    io.Writer
	live []string
	part []byte // a log line without its end yet
}

func newScreen(s *IOStreams) *screen {
	return &screen{tty: s.ErrTTY, width: s.Width, height: s.Height, w: s.Err}
}

// say prints one prefixed line above the live ones.
func (s *screen) say(format string, args ...any) {
	var b bytes.Buffer
	talk(&b, format, args...)
	_, _ = s.Write(b.Bytes())
}

// Write takes log lines; an unfinished line waits for its end.
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
	_ = s.draw("", s.fit(lines))
}

func (s *screen) fit(lines []string) []string {
	if room := max(s.height-2, 1); len(lines) > room {
		more := fmt.Sprintf("… and %d more", len(lines)-room+1)
		lines = append(lines[:room-1:room-1], more)
	}
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = cut(l, s.width-1)
	}
	return out
}

// draw writes text above the live lines and puts the given ones in their place.
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

// cut shortens a line to width columns (counted as runes).
func cut(line string, width int) string {
	runes := []rune(line)
	if width < 1 || len(runes) <= width {
		return line
	}
	return string(runes[:width-1]) + "…"
}
