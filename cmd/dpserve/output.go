package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
)

// format is the value of -o.
type format string

// The output formats of every listing.
const (
	formatTable format = "table"
	formatWide  format = "wide"
	formatJSON  format = "json"
	formatYAML  format = "yaml"
	formatName  format = "name"
)

// formatNames are the values of -o, as help texts list them.
const formatNames = "table|wide|json|yaml|name"

// isTable reports whether the output is for people.
func (f *format) isTable() bool { return *f == formatTable || *f == formatWide }

// String, Set and Type make format a flag value.
func (f *format) String() string { return string(*f) }

// Set refuses unknown formats.
func (f *format) Set(s string) error {
	if !slices.Contains(strings.Split(formatNames, "|"), s) {
		return errors.New("wanted " + formatNames)
	}
	*f = format(s)
	return nil
}

// Type returns the name of the value in help texts.
func (f *format) Type() string { return "format" }

// addOutput adds the -o flag to a command. The default is table.
func addOutput(cmd *cobra.Command) *format {
	f := formatTable
	cmd.Flags().VarP(&f, "output", "o", "output `format`: "+formatNames)
	_ = cmd.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions(strings.Split(formatNames, "|"), cobra.ShellCompDirectiveNoFileComp))
	return &f
}

// listing is a result in each form of -o. document is what JSON and YAML print after apiVersion.
type listing struct {
	document any
	names    []string
	table    func(wide bool) []*table
	notes    []string // lines under the tables
	more     []string // lines before notes with -o wide
}

func (l *listing) write(s *ioStreams, f format) error {
	if !f.isTable() {
		return writeDocument(s.Out, f, versioned{l.document}, l.names)
	}
	for i, t := range l.table(f == formatWide) {
		if i > 0 {
			_, _ = fmt.Fprintln(s.Out)
		}
		if s.OutTTY {
			width, _ := s.Size()
			t.fit(width, 0)
		}
		if err := t.write(s.Out, s.paint); err != nil {
			return err
		}
	}
	notes := l.notes
	if f == formatWide {
		notes = slices.Concat(l.more, l.notes)
	}
	if len(notes) == 0 {
		return nil
	}
	_, err := fmt.Fprintln(s.Out, "\n"+strings.Join(notes, "\n"))
	return err
}

// versioned is a document with the field apiVersion before its own fields. It has at least one of them.
type versioned struct{ document any }

// MarshalJSON leaves the characters of HTML to the encoder that calls it.
func (v versioned) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v.document); err != nil {
		return nil, err
	}
	return slices.Insert(b.Bytes(), 1, []byte(`"apiVersion":"`+client.APIVersion+`",`)...), nil
}

// writeDocument prints a result for programs: a document as JSON or YAML, or the names.
func writeDocument(w io.Writer, f format, document any, names []string) error {
	switch f {
	case formatJSON:
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		return enc.Encode(document)
	case formatYAML:
		return writeYAML(w, document)
	default:
		return writeNames(w, names)
	}
}

func writeNames(w io.Writer, names []string) error {
	for _, n := range names {
		if _, err := fmt.Fprintln(w, n); err != nil {
			return err
		}
	}
	return nil
}

// writeYAML prints the same fields as JSON has: its names are the contract.
func writeYAML(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	out, err := yaml.JSONToYAML(text)
	if err != nil {
		return err
	}
	_, err = w.Write(out)
	return err
}

// writeJSONLine prints a document on one line, for programs that read line by line.
func writeJSONLine(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }

// columnGap separates the columns of a table.
const columnGap = 2

// cell is one field of a table. text/tabwriter cannot be used, because it counts colour sequences as width.
type cell struct {
	text  string
	color color
}

// table prints left-aligned columns with a heading.
type table struct {
	head     []string
	rows     [][]cell
	notes    []string // lines under the rows
	optional []string // headings of the columns that a narrow terminal does without, the first one first
}

func (t *table) add(cells ...cell) { t.rows = append(t.rows, cells) }

func cells(texts ...string) []cell {
	out := make([]cell, len(texts))
	for i, s := range texts {
		out[i] = cell{text: s}
	}
	return out
}

// renderLines renders the table; paint may be nil.
func (t *table) renderLines(paint func(color, string) string) []string {
	widths := t.widths()
	out := make([]string, 0, len(t.rows)+1)
	for _, row := range append([][]cell{cells(t.head...)}, t.rows...) {
		out = append(out, line(row, widths, paint))
	}
	return append(out, t.notes...)
}

// reasonWidth is how many columns of the last one, a reason, a narrow terminal shows before it shows other
// columns.
const reasonWidth = 24

// fit leaves out optional columns until the table is as wide as the terminal. The last column has at least
// so many columns reserved: a table that is redrawn would otherwise change its columns with every reason.
func (t *table) fit(columns, reserved int) {
	for _, head := range t.optional {
		widths := t.widths()
		last := len(widths) - 1
		total := max(min(widths[last], reasonWidth), reserved)
		for _, w := range widths[:last] {
			total += w + columnGap
		}
		if total <= columns {
			return
		}
		t.dropColumn(slices.Index(t.head, head))
	}
}

func (t *table) dropColumn(i int) {
	if i < 0 {
		return
	}
	t.head = slices.Delete(slices.Clone(t.head), i, i+1)
	for n, row := range t.rows {
		t.rows[n] = slices.Delete(slices.Clone(row), i, i+1)
	}
}

func (t *table) write(w io.Writer, paint func(color, string) string) error {
	_, err := io.WriteString(w, strings.Join(t.renderLines(paint), "\n")+"\n")
	return err
}

func (t *table) widths() []int {
	widths := make([]int, len(t.head))
	for _, row := range append([][]cell{cells(t.head...)}, t.rows...) {
		for i, c := range row {
			widths[i] = max(widths[i], textWidth(c.text))
		}
	}
	return widths
}

func line(row []cell, widths []int, paint func(color, string) string) string {
	var b strings.Builder
	gap := 0
	for i, c := range row {
		if c.text == "" {
			gap += widths[i] + columnGap
			continue
		}
		b.WriteString(strings.Repeat(" ", gap))
		gap = widths[i] - textWidth(c.text) + columnGap
		if paint != nil {
			c.text = paint(c.color, c.text)
		}
		b.WriteString(c.text)
	}
	return b.String()
}
