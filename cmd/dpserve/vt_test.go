package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// terminalEmulator is a terminal that knows the sequences dpserve writes, and no other: a stray one is a
// fault. It keeps what has scrolled away, and wraps its rows again when its width changes, as most terminals
// do.
type terminalEmulator struct {
	mu         sync.Mutex
	cols, rows int
	lines      []vtRow
	top        int // first visible row
	x, y       int // the cursor; y counts from the first row that ever was
	pending    []byte
	colors     int // colour sequences
	faults     []string
	changed    chan struct{} // closed at each change
}

type vtRow struct {
	text    []rune
	wrapped bool // goes on in the next row
}

func newTerminalEmulator(cols, rows int) *terminalEmulator {
	return &terminalEmulator{cols: cols, rows: rows, lines: make([]vtRow, 1), changed: make(chan struct{})}
}

// Write takes what a program prints. A newline moves to the first column, as the terminal driver does it.
func (v *terminalEmulator) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.pending = append(v.pending, p...)
	for len(v.pending) > 0 {
		n := v.step(v.pending)
		if n == 0 {
			break // the rest of a character or sequence is still to come
		}
		v.pending = v.pending[n:]
	}
	close(v.changed)
	v.changed = make(chan struct{})
	return len(p), nil
}

// step handles one character or sequence and returns its length, 0 if it is incomplete.
func (v *terminalEmulator) step(p []byte) int {
	switch c := p[0]; {
	case c == '\n':
		v.x, v.lines[v.y].wrapped = 0, false
		v.down()
	case c == '\r':
		v.x = 0
	case c == 0x1b:
		return v.escape(p)
	case c < ' ' || c == 0x7f:
		v.faults = append(v.faults, fmt.Sprintf("%q", c))
	case !utf8.FullRune(p):
		return 0
	default:
		r, size := utf8.DecodeRune(p)
		v.put(r)
		return size
	}
	return 1
}

func (v *terminalEmulator) escape(p []byte) int {
	end := slices.IndexFunc(p, func(b byte) bool { return b >= '@' && b <= '~' && b != '[' })
	if end < 0 {
		return 0
	}
	seq := string(p[1 : end+1])
	var n int
	switch {
	case seq == beginSync[1:] || seq == endSync[1:]:
	case seq == "[J":
		v.lines[v.y].text = v.lines[v.y].text[:min(v.x, len(v.lines[v.y].text))]
		v.lines = v.lines[:v.y+1]
	case strings.HasSuffix(seq, "m"):
		v.colors++
	case strings.HasSuffix(seq, "A"):
		if _, err := fmt.Sscanf(seq, "[%dA", &n); err != nil {
			v.faults = append(v.faults, seq)
		}
		v.y = max(v.top, v.y-n)
	default:
		v.faults = append(v.faults, fmt.Sprintf("%q", seq))
	}
	return end + 1
}

func (v *terminalEmulator) put(r rune) {
	w := runeWidth(r)
	if v.x+w > v.cols {
		v.lines[v.y].wrapped = true
		v.x = 0
		v.down()
	}
	row := &v.lines[v.y]
	for len(row.text) < v.x+w {
		row.text = append(row.text, ' ')
	}
	row.text[v.x] = r
	v.x += w
}

func (v *terminalEmulator) down() {
	if v.y++; v.y == len(v.lines) {
		v.lines = append(v.lines, vtRow{})
	}
	v.top = max(v.top, v.y-v.rows+1)
}

// resize gives the window another size and wraps all rows again.
func (v *terminalEmulator) resize(cols, rows int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []vtRow
	var whole []rune
	y := v.y
	for i, row := range v.lines {
		if i == v.y {
			y = len(out) + len(whole)/cols
		}
		if whole = append(whole, row.text...); row.wrapped {
			continue
		}
		for len(whole) > cols {
			out = append(out, vtRow{whole[:cols:cols], true})
			whole = whole[cols:]
		}
		out = append(out, vtRow{text: whole})
		whole = nil
	}
	v.cols, v.rows, v.lines, v.y = cols, rows, out, y
	v.top = max(0, len(out)-rows)
}

// visible returns the rows of the window as text.
func (v *terminalEmulator) visible() string { return v.text(func() int { return v.top }) }

// everything also returns the rows that have scrolled away.
func (v *terminalEmulator) everything() string { return v.text(func() int { return 0 }) }

func (v *terminalEmulator) text(from func() int) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var b strings.Builder
	for _, row := range v.lines[from():] {
		if row.wrapped {
			b.WriteString(string(row.text))
		} else {
			b.WriteString(strings.TrimRight(string(row.text), " ") + "\n")
		}
	}
	return strings.TrimRight(b.String(), "\n")
}

// await waits until the window shows what ok wants, and returns it.
func (v *terminalEmulator) await(t *testing.T, what string, ok func(window string) bool) string {
	t.Helper()
	deadline := time.After(scriptWait)
	for {
		v.mu.Lock()
		changed := v.changed
		v.mu.Unlock()
		if window := v.visible(); ok(window) {
			return window
		}
		select {
		case <-changed:
		case <-deadline:
			require.Fail(t, "never on the terminal: "+what, "%s", v.everything())
		}
	}
}

func (v *terminalEmulator) awaitText(t *testing.T, text string) string {
	t.Helper()
	return v.await(t, text, func(window string) bool { return strings.Contains(window, text) })
}

// check asserts that nothing but known sequences was written.
func (v *terminalEmulator) check(t *testing.T) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	assert.Empty(t, v.faults, "sequences that the emulator does not know")
	assert.Empty(t, v.pending, "an unfinished sequence")
}

func TestTerminalEmulator(t *testing.T) {
	v := newTerminalEmulator(6, 3)
	_, _ = v.Write([]byte("one\ntwo three\nf\xc3"))
	_, _ = v.Write([]byte("\xbc\x1b[1"))
	assert.Equal(t, "two three\nfü", v.visible())
	_, _ = v.Write([]byte("A\r\x1b[Jx\x1b[31m\n"))
	assert.Equal(t, "one\ntwo thx", v.everything(), "a row further up is part of a wrapped line")
	v.check(t)
	v.resize(20, 3)
	assert.Equal(t, "one\ntwo thx", v.visible())
	_, _ = v.Write([]byte("\a\x1b[2K"))
	assert.Equal(t, []string{`'\a'`, `"[2K"`}, v.faults)
}
