package enginelog

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/nearest"
)

// Bounds of Hint.
const (
	hintLines = 4096    // the last lines that are looked at
	lineLimit = 4 << 10 // bytes of a line that are looked at
	hintLimit = 400     // bytes of a hint
	cutMark   = "…"     // ends what was cut
	hintWords = 200     // bytes of an engine's own words in a hint
)

// Hint says why an engine failed to start and what to do about it, by the lines that it has written; "" if
// they say nothing that is understood. It knows the causes that are common. Of others it repeats the engine's
// own words: the exception that made the others follow.
func Hint(lines []string) string {
	lines = bounded(lines)
	root := rootCause(lines)
	var text string
	if root != nil {
		text = cmp.Or(explain(failures, root.lines), explain(followUps, root.lines))
	}
	text = cmp.Or(text, explain(failures, lines))
	if text == "" && root != nil {
		text = root.words()
	}
	return cutAt(cmp.Or(text, simWords(lines), explain(followUps, lines)), hintLimit, cutMark)
}

// KnownCause is Hint without the engine's own words. An engine that serves writes exceptions of single
// requests, from which nothing else follows.
func KnownCause(lines []string) string {
	lines = bounded(lines)
	return cutAt(cmp.Or(explain(failures, lines), explain(followUps, lines)), hintLimit, cutMark)
}

// Excerpt returns at most so many of an engine's lines that show why it failed: those up to the exception
// that made the others follow, or the last ones.
func Excerpt(lines []string, most int) []string {
	lines = lines[max(0, len(lines)-hintLines):]
	if root := rootCause(bounded(lines)); root != nil {
		lines = lines[:max(root.end+1, min(len(lines), most))]
	}
	return lines[max(0, len(lines)-most):]
}

// bounded returns the last lines, each cut to what is looked at.
func bounded(lines []string) []string {
	lines = slices.Clone(lines[max(0, len(lines)-hintLines):])
	for i, l := range lines {
		l = strings.TrimRight(l, "\r")
		l = l[strings.LastIndexByte(l, '\r')+1:] // in front of it is what a progress bar has drawn
		lines[i] = plain(cutAt(l, lineLimit, ""))
	}
	return lines
}

// colour is a sequence by which terminals change the look of the text behind it.
var colour = expr(`\x1b\[[0-9;]*[A-Za-z]`)

// plain leaves out what is no text: a hint is printed to terminals.
func plain(line string) string {
	if strings.IndexByte(line, 0x1b) >= 0 {
		line = colour().ReplaceAllString(line, "")
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(line, "?"))
}

// explain is the text of the first message of a table that any line matches; "" if none does.
func explain(table []message, lines []string) string {
	for i := range table {
		for _, l := range lines {
			if text := table[i].explain(l); text != "" {
				return text
			}
		}
	}
	return ""
}

// cutAt cuts a text to at most so many bytes, between two characters, and ends it with mark.
func cutAt(text string, limit int, mark string) string {
	if len(text) <= limit {
		return text
	}
	end := limit - len(mark)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + mark
}

// message is a message that tells why an engine failed, or what it does from then on.
type message struct {
	word string                // the line contains it
	expr func() *regexp.Regexp // nil: word is enough. Its groups stand for $1, $2 … in text
	text string
}

// expr compiles a pattern at its first use: most processes never read an engine's log, and the tables take
// milliseconds.
func expr(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}

// explain is the text for a line; "" if the line is another message. An unknown flag is compared with those
// that engines have.
func (m *message) explain(line string) string {
	if !strings.Contains(line, m.word) {
		return ""
	}
	if m.expr == nil {
		return m.text
	}
	at := m.expr().FindStringSubmatchIndex(line)
	if at == nil {
		return ""
	}
	for group := 2; group+1 < len(at); group += 2 { // an engine's own words, such as a list of choices
		if at[group] >= 0 {
			at[group+1] = at[group] + len(cutAt(line[at[group]:at[group+1]], hintWords, ""))
		}
	}
	text := string(m.expr().ExpandString(nil, m.text, line, at))
	if m.word == unknownFlag {
		return text + meantFlag(line[at[2]:at[3]])
	}
	return text
}

// unknownFlag begins the flags that an engine's command line does not know.
const unknownFlag = "unrecognized arguments:"

// meantFlag is the flag that was probably meant, as a part of a hint.
func meantFlag(found string) string {
	name, _, _ := strings.Cut(strings.TrimLeft(found, "-"), " ")
	name, _, _ = strings.Cut(name, "=")
	known := append(engineflags.Names(engineflags.VLLM), engineflags.Names(engineflags.SGLang)...)
	if meant := nearest.Word(name, known); meant != "" {
		return ", did you mean --" + meant + "?"
	}
	return ", or install the version of the engine that has it"
}

// ownWords begins the last line of a simulated engine that fails.
const ownWords = "engine sim: "

// simWords is why a simulated engine failed, in its own words; "" if it has said nothing.
func simWords(lines []string) string {
	for _, l := range slices.Backward(lines) {
		if own, ok := strings.CutPrefix(l, ownWords); ok && !strings.HasPrefix(own, "ready on") {
			return cutAt(own, hintWords, cutMark)
		}
	}
	return ""
}
