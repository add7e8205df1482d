package app

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// maxFaults bounds the faults of one Parse: a longer list does not help, and a hostile file must not fill
// memory.
const maxFaults = 100

// hintSmallest shows the smallest valid file.
const hintSmallest = "the smallest file: applications: [{name: demo, model: {id: demo}, engine: {kind: sim}}]"

// Fault is one error of a file, with its position.
type Fault struct {
	File string `json:"file"`
	Line int    `json:"line"`           // from 1
	Col  int    `json:"col"`            // from 1, in characters
	Path string `json:"path,omitempty"` // applications[0].engine.kind; empty for the file as a whole
	// the broken rule; may be empty when Found and Wanted are enough
	Message string `json:"message,omitempty"`
	Found   string `json:"found,omitempty"`
	Wanted  string `json:"wanted,omitempty"`
	Hint    string `json:"hint,omitempty"` // what to do next
}

// Warning is a legal value that is probably a mistake.
type Warning Fault

// String returns the one-line form, file:line:col: path: what; hint: next.
func (f Fault) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d:%d: ", f.File, f.Line, f.Col)
	if f.Path != "" {
		b.WriteString(f.Path + ": ")
	}
	b.WriteString(f.Describe())
	if f.Hint != "" {
		b.WriteString("; hint: " + f.Hint)
	}
	return b.String()
}

// Describe joins the parts of message, found and wanted that are set.
func (f Fault) Describe() string {
	var pair []string
	if f.Found != "" {
		pair = append(pair, "found "+f.Found)
	}
	if f.Wanted != "" {
		pair = append(pair, "wanted "+f.Wanted)
	}
	seen := strings.Join(pair, ", ")
	switch {
	case f.Message == "":
		return seen
	case seen == "":
		return f.Message
	default:
		return f.Message + ": " + seen
	}
}

// String returns the one-line form of a warning.
func (w Warning) String() string { return Fault(w).String() }

// Faults is every fault of a file, sorted by position. It is the error of Parse.
type Faults []Fault //nolint:errname // a list of faults, and called so everywhere

// Error returns one line per fault.
func (f Faults) Error() string { return strings.Join(f.lines(), "\n") }

// Unwrap makes problem.CodeOf return InvalidArgument.
func (f Faults) Unwrap() error { return f.Problem() }

// Problem converts f for the admin API and the CLI: one line with the count, and the faults as details.
func (f Faults) Problem() *problem.Error {
	noun := "faults"
	if len(f) == 1 {
		noun = "fault"
	}
	return problem.New(problem.InvalidArgument, "the application file has %d %s", len(f), noun).
		WithHint("correct the lines named below and run validate again").WithDetails(f.lines()...)
}

func (f Faults) lines() []string {
	out := make([]string, len(f))
	for i := range f {
		out[i] = f[i].String()
	}
	return out
}

// sorted sorts f by position, each fault once: both pools of an application find what it says for both. If
// there are more than maxFaults, it cuts the list and says so.
func (f Faults) sorted() Faults {
	slices.SortStableFunc(f, func(a, b Fault) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col))
	})
	seen := map[Fault]bool{}
	f = slices.DeleteFunc(f, func(one Fault) bool {
		again := seen[one]
		seen[one] = true
		return again
	})
	if len(f) <= maxFaults {
		return f
	}
	last := f[maxFaults]
	last = Fault{
		File: last.File, Line: last.Line, Col: last.Col,
		Message: fmt.Sprintf("%d more faults from here on are not shown", len(f)-maxFaults),
		Hint:    "correct the ones above first",
	}
	return append(f[:maxFaults:maxFaults], last)
}

// didYouMean returns the hint for a word that is close to found; "" if there is none.
func didYouMean(found string, words []string) string {
	if w := nearest.Word(found, words); w != "" {
		return "did you mean " + strconv.Quote(w) + "?"
	}
	return ""
}
