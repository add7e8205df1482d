package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
)

// apiVersion is part of every JSON document that dpserve prints.
const apiVersion = client.APIVersion

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

func allFormats() []format {
	return []format{formatTable, formatWide, formatJSON, formatYAML, formatName}
}

// String, Set and Type make format a flag value.
func (f *format) String() string { return string(*f) }

// Set refuses unknown formats.
func (f *format) Set(s string) error {
	if !slices.Contains(allFormats(), format(s)) {
		return fmt.Errorf("wanted %s", formatList())
	}
	*f = format(s)
	return nil
}

// Type returns the name of the value in help texts.
func (f *format) Type() string { return "format" }

func formatList() string {
	var names []string
	for _, f := range allFormats() {
		names = append(names, string(f))
	}
	return strings.Join(names, "|")
}

// addOutput adds the -o flag to a command. The default is table.
func addOutput(cmd *cobra.Command) *format {
	f := formatTable
	cmd.Flags().VarP(&f, "output", "o", "output `format`: "+formatList())
	_ = cmd.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions(strings.Split(formatList(), "|"), cobra.ShellCompDirectiveNoFileComp))
	return &f
}

// listing is a result in each form of -o. document is marshalled for json and yaml and must contain
// apiVersion.
type listing struct {
	document any
	names    []string
	table    func(wide bool) []*table
	notes    []string // lines under the tables
}

func (l *listing) write(s *ioStreams, f format) error {
	switch f {
	case formatJSON:
		return writeJSON(s.Out, l.document)
	case formatYAML:
		return writeYAML(s.Out, l.document)
	case formatName:
		return writeNames(s.Out, l.names)
	case formatTable, formatWide:
	}
	for i, t := range l.table(f == formatWide) {
		if i > 0 {
			_, _ = fmt.Fprintln(s.Out)
		}
		if err := t.write(s.Out, s.paint); err != nil {
			return err
		}
	}
	return writeNotes(s.Out, l.notes)
}

// writeNotes prints lines below the tables, after an empty line.
func writeNotes(w io.Writer, notes []string) error {
	if len(notes) == 0 {
		return nil
	}
	_, err := fmt.Fprintln(w, "\n"+strings.Join(notes, "\n"))
	return err
}

func writeNames(w io.Writer, names []string) error {
	for _, n := range names {
		if _, err := fmt.Fprintln(w, n); err != nil {
			return err
		}
	}
	return nil
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// writeYAML prints the same fields as writeJSON: the JSON names are the contract.
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
	head []string
	rows [][]cell
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
	return out
}

func (t *table) write(w io.Writer, paint func(color, string) string) error {
	_, err := io.WriteString(w, strings.Join(t.renderLines(paint), "\n")+"\n")
	return err
}

func (t *table) widths() []int {
	widths := make([]int, len(t.head))
	for _, row := range append([][]cell{cells(t.head...)}, t.rows...) {
		for i, c := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
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
		gap = widths[i] - utf8.RuneCountInString(c.text) + columnGap
		if paint != nil {
			c.text = paint(c.color, c.text)
		}
		b.WriteString(c.text)
	}
	return b.String()
}
