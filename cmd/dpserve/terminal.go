package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
	"golang.org/x/text/width"

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

	// Size returns the columns and rows that the terminal has now, the default size without one
	Size func() (width, height int)
	// Terminal is the terminal of Err, whose signals a screen follows; nil in tests.
	Terminal *os.File
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

// escapes matches the sequences with which programs colour text and move the cursor.
var escapes = regexp.MustCompile(`\x1b(\[[0-9;:?<=>]*[ -/]*[@-~]` + // CSI
	`|\][^\x07\x1b]*(\x07|\x1b\\)?` + // OSC, such as a title
	`|[()*+][0-9A-Za-z]|[@-Z\\^_])`)

// cleanText removes escape sequences and control characters from text of other programs, such as an engine's
// last words. They would move the cursor of the user's terminal.
func cleanText(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, escapes.ReplaceAllString(s, ""))
}

// runeWidth returns how many columns of a terminal a character takes.
func runeWidth(r rune) int {
	if unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf) {
		return 0
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	default:
		return 1
	}
}

// textWidth returns how many columns a line takes. Colour takes none.
func textWidth(line string) int {
	n := 0
	for _, r := range escapes.ReplaceAllString(line, "") {
		n += runeWidth(r)
	}
	return n
}

// truncate shortens a line to a number of columns. A colour that is cut ends there.
func truncate(line string, columns int) string {
	if columns < 1 || textWidth(line) <= columns {
		return line
	}
	var b strings.Builder
	left := columns - 1 // the last column holds the ellipsis
	colored := false
	for i := 0; i < len(line); {
		if at := escapes.FindStringIndex(line[i:]); at != nil && at[0] == 0 {
			code := line[i : i+at[1]]
			b.WriteString(code)
			colored = code != string(resetColor)
			i += at[1]
			continue
		}
		r, size := utf8.DecodeRuneInString(line[i:])
		if left -= runeWidth(r); left < 0 {
			break
		}
		b.WriteRune(r)
		i += size
	}
	b.WriteString("…")
	if colored {
		b.WriteString(string(resetColor))
	}
	return b.String()
}

// wrapIndent begins every line of a wrapped text but the first one.
const wrapIndent = "  "

// wrap breaks a text at spaces into lines of at most so many columns; the later ones begin with wrapIndent. A
// word that is longer stays whole.
func wrap(text string, columns int) []string {
	var out []string
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case textWidth(line)+1+textWidth(word) > columns:
			out = append(out, line)
			line = wrapIndent + word
		default:
			line += " " + word
		}
	}
	return append(out, line)
}
