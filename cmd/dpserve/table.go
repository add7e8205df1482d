package main

import (
	"io"
	"strings"
	"unicode/utf8"
)

// columnGap separates the columns of a table.
const columnGap = 2

// cell is one field of a table; its colour does not count towards its width, which is why text/tabwriter does not do.
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

// lines renders the table; paint may be nil.
func (t *table) lines(paint func(color, string) string) []string {
	widths := t.widths()
	out := make([]string, 0, len(t.rows)+1)
	for _, row := range append([][]cell{cells(t.head...)}, t.rows...) {
		out = append(out, line(row, widths, paint))
	}
	return out
}

func (t *table) write(w io.Writer, paint func(color, string) string) error {
	_, err := io.WriteString(w, strings.Join(t.lines(paint), "\n")+"\n")
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
