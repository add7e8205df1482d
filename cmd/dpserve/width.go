package main

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/width"
)

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
	case width.Neutral, width.EastAsianAmbiguous, width.EastAsianNarrow, width.EastAsianHalfwidth:
	}
	return 1
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

// wrap breaks a text at spaces into lines of at most so many columns; the later ones begin with indent. A
// word that is longer stays whole.
func wrap(text string, columns int, indent string) []string {
	var out []string
	line, first := "", true
	for _, word := range strings.Fields(text) {
		switch {
		case first:
			line, first = word, false
		case textWidth(line)+1+textWidth(word) > columns:
			out = append(out, line)
			line = indent + word
		default:
			line += " " + word
		}
	}
	return append(out, line)
}
