package main

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
)

// Terminal sequences of a redraw. A terminal that supports synchronized output shows the whole step at once;
// others ignore the sequence. The cursor is never hidden, so that a process that ends by a signal leaves
// nothing to restore.
const (
	beginSync  = "\x1b[?2026h"
	endSync    = "\x1b[?2026l"
	clearBelow = "\r\x1b[J"
)

// renderer returns the live lines for a terminal of this size.
type renderer func(width, height int) []string

// screen owns stderr while a command runs. On a TTY it redraws some live lines at the bottom in place; other
// lines, log lines included, scroll above them. Elsewhere it does not print live lines. Every command has one
// screen (env.screen), so that a changed window, Ctrl-Z and a process in the background are handled in one
// place. Safe for concurrent use.
type screen struct {
	tty          bool
	size         func() (width, height int)
	isForeground func() bool   // false: a shell has moved the process into the background
	done         chan struct{} // closed by close

	mu    sync.Mutex
	w     io.Writer
	live  renderer // nil: no live lines
	drawn []string // the live lines that are on the terminal now
	part  []byte   // the unfinished log line
}

func newScreen(s *ioStreams) *screen {
	return &screen{
		tty: s.ErrTTY, size: s.Size, w: s.Err, done: make(chan struct{}),
		isForeground: func() bool { return s.Terminal == nil || isForeground(s.Terminal) },
	}
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
	err := s.draw(string(s.part[:end]))
	s.part = append(s.part[:0], s.part[end:]...)
	return len(p), err
}

// show replaces the live lines. The screen calls live again, from another goroutine, when the terminal has
// changed.
func (s *screen) show(live renderer) {
	if !s.tty {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = live
	_ = s.draw("")
}

// showLine makes one line the live line.
func (s *screen) showLine(line string) {
	s.show(func(int, int) []string { return []string{line} })
}

// clear removes the live lines.
func (s *screen) clear() { s.show(nil) }

// redraw draws the live lines again. If the cursor is no longer below them, they are drawn at the cursor.
func (s *screen) redraw(moved bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if moved {
		s.drawn = nil
	}
	_ = s.draw("")
}

// standStill calls stop, which stops the process, while nothing is drawn. If the process has stood still, the
// live lines are drawn below what the shell has printed since.
func (s *screen) standStill(stop func() (stopped bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if stop() {
		s.drawn = nil
		_ = s.draw("")
	}
}

// draw writes text above the live lines and brings the live lines up to date. In the background it writes
// only the text, because the terminal belongs to the shell. The caller holds mu.
func (s *screen) draw(text string) error {
	if !s.tty || !s.isForeground() {
		s.drawn = nil
		if text == "" {
			return nil
		}
		_, err := io.WriteString(s.w, text)
		return err
	}
	width, height := s.size()
	var live []string
	if s.live != nil {
		live = fitToTerminal(s.live(width, height), width, height)
	}
	if text == "" && slices.Equal(live, s.drawn) {
		return nil
	}
	var b strings.Builder
	b.WriteString(beginSync)
	if n := countRows(s.drawn, width); n > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", n)
	}
	b.WriteString(clearBelow + text)
	for _, l := range live {
		b.WriteString(l + "\n")
	}
	b.WriteString(endSync)
	s.drawn = live
	_, err := io.WriteString(s.w, b.String())
	return err
}

// fitToTerminal shortens lines to one row each and drops those for which there is no row: a block that is
// taller than the terminal cannot be redrawn.
func fitToTerminal(lines []string, width, height int) []string {
	if room := liveRows(height); len(lines) > room {
		more := fmt.Sprintf("… and %d more", len(lines)-room+1)
		lines = append(lines[:room-1:room-1], more)
	}
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = truncate(l, width-1)
	}
	return out
}

// liveRows returns how many live lines a terminal of this height shows.
func liveRows(height int) int { return max(height-2, 1) }

// countRows returns how many rows of the terminal the lines take. A line of a window that was made narrower
// takes several: most terminals wrap it again.
func countRows(lines []string, width int) int {
	rows := 0
	for _, l := range lines {
		rows += max(1, (textWidth(l)+width-1)/max(width, 1))
	}
	return rows
}
