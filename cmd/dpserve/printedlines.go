package main

import (
	"regexp"
	"time"
)

// numbersEvery is the least time between two lines about a subject whose words are the same and whose numbers
// differ: a drain of 30 minutes would otherwise fill a log with counts of requests.
const numbersEvery = 10 * time.Second

// printedLines decides which lines a watch prints off a terminal. Its key is the subject of a line.
type printedLines map[string]printedLine

// printedLine is the last line that was printed about a subject.
type printedLine struct {
	state, text string
	at          time.Time
}

// isNew reports whether a line is to be printed, and records that it is: its state or the words of its text
// have changed, or its numbers have changed and the last line is older than numbersEvery. Each number of a
// state counts as a change.
func (c printedLines) isNew(now time.Time, subject, state, text string) bool {
	last, wasPrinted := c[subject]
	switch {
	case !wasPrinted || last.state != state || wordsOf(last.text) != wordsOf(text):
	case last.text == text || now.Sub(last.at) < numbersEvery:
		return false
	}
	c[subject] = printedLine{state: state, text: text, at: now}
	return true
}

// number is a number with its unit; the digits of a name, such as gpu-1 or demo/0/2, are none.
var number = regexp.MustCompile(`(^|[\s(])\d+(\.\d+)?( \w+?)?s?\b`)

// wordsOf returns a text without its numbers: "3 ranks" has the words of "1 rank".
func wordsOf(text string) string { return number.ReplaceAllString(text, "$1#$3") }
