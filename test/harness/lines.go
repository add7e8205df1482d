package harness

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Line is a WARN or ERROR line that nodes of a test may write. The harness refuses every other one when the
// test ends.
type Line struct {
	Msg  string // a regular expression for the whole message
	With string // a regular expression for some part of the line; "" = any line
	Why  string
}

// Fault is something that a test does to its nodes or engines, as the lines that they may write then.
type Fault []Line

// Expected are the lines that one test expects. Safe for concurrent use.
type Expected struct {
	mu    sync.Mutex
	lines []Line
}

// Expect names the faults that the test brings about. Call it once, where the test begins.
func (e *Expected) Expect(faults ...Fault) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lines = append(e.lines, slices.Concat(faults...)...)
}

// unexpected gives each message at level WARN or above that no line names, once, with its first whole line.
func (e *Expected) unexpected(log string, also Fault) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	allowed := compile(slices.Concat(e.lines, noise, also))
	var order []string
	count, first := map[string]int{}, map[string]string{}
	for line := range strings.Lines(log) {
		message, ok := complaint(line)
		if !ok || slices.ContainsFunc(allowed, func(p pattern) bool {
			return p.msg.MatchString(message) && p.with.MatchString(line)
		}) {
			continue
		}
		if count[message]++; count[message] == 1 {
			order, first[message] = append(order, message), strings.TrimSpace(line)
		}
	}
	var out []string
	for _, message := range order {
		out = append(out, fmt.Sprintf("%d times %q: %s", count[message], message, first[message]))
	}
	return out
}

// Check fails t for unexpected lines of the log of a process that the harness did not start, and for a panic
// or a data race.
func (e *Expected) Check(t testing.TB, who, log string) {
	t.Helper()
	e.check(t, who, log, len(log))
}

// check fails t for unexpected lines of a log, and for a panic or a data race, which have no level. The first
// size bytes were written before the harness asked all nodes to end at once.
func (e *Expected) check(t testing.TB, who, log string, size int) {
	t.Helper()
	assert.Empty(t, e.unexpected(log[:size], nil), "unexpected WARN and ERROR lines of %s", who)
	assert.Empty(t, e.unexpected(log[size:], allEnd), "unexpected WARN and ERROR lines at the end of %s", who)
	for _, bad := range []string{"panic:", "DATA RACE"} {
		assert.NotContains(t, log, bad, who)
	}
}

// pattern is a Line, compiled.
type pattern struct{ msg, with *regexp.Regexp }

func compile(lines []Line) []pattern {
	var out []pattern
	for _, l := range lines {
		out = append(out, pattern{regexp.MustCompile("^(?:" + l.Msg + ")$"), regexp.MustCompile(l.With)})
	}
	return out
}

var (
	textLine = regexp.MustCompile(`level=(?:WARN|ERROR)\S* msg=("(?:[^"\\]|\\.)*"|\S+)`)
	jsonLine = regexp.MustCompile(`"level":"(?:WARN|ERROR)[^"]*","msg":("(?:[^"\\]|\\.)*")`)
)

// moreLines ends the message of the line that stands for lines which were left out.
var moreLines = regexp.MustCompile(` … \d+ more$`)

// complaint is the message of a line at level WARN or above, in the text or the JSON form of log lines. One
// that stands for others has their message.
func complaint(line string) (message string, ok bool) {
	found := textLine.FindStringSubmatch(line)
	if found == nil {
		found = jsonLine.FindStringSubmatch(line)
	}
	if found == nil {
		return "", false
	}
	message = found[1]
	if text, err := strconv.Unquote(message); err == nil {
		message = text
	}
	return moreLines.ReplaceAllString(message, ""), true
}
