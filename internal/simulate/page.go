package simulate

import (
	"html/template"
	"io"
	"slices"
)

const plotSVG = `{{define "plot"}}<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" ` +
	`font-family="sans-serif" font-size="12" fill="#222"><rect width="640" height="300" fill="#fff"/>
<text x="46" y="20" font-size="13">{{.Title}}</text>
{{range .Y}}<path d="M46 {{.At}}H460" stroke="#ddd"/><text x="40" y="{{.At}}" dy="4" text-anchor="end">` +
	`{{.Text}}</text>
{{end}}{{range .X}}<text x="{{.At}}" y="286" text-anchor="middle">{{.Text}}</text>
{{end}}{{range .Lines}}<g stroke="{{.Color}}" fill="{{.Color}}"><path d="M{{.Path}}" fill="none" ` +
	`stroke-width="1.5" stroke-dasharray="{{.Dashes}}"/>
{{range .Marks}}<path d="M{{.X}} {{.Low}}V{{.High}}"/><circle cx="{{.X}}" cy="{{.Y}}" r="2.5"><title>` +
	`{{.Text}}</title></circle>
{{end}}<text x="470" y="{{.Label}}" dy="4" stroke="none">{{.Name}}</text></g>
{{end}}</svg>{{end}}`

const reportPage = `<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>dpserve simulate {{.App}}</title>
<style>body{font-family:sans-serif;color:#222;max-width:84em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;font-size:.85em;margin:.5em 0 1.5em}
td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(34em,1fr));gap:1em}</style>
<h1>{{.App}}: {{.Trace}}</h1>
<p>Goals: first token within {{.TTFTMs}} ms, {{.TPOTMs}} ms per token after it. Ingresses: {{.Ingresses}}, ` +
	`records {{.LagMs}} ms old. Means of {{.Seeds}} seeds, and half of their 95 % confidence intervals. ` +
	`The last two rows are bounds: each request alone on an idle rank whose cache holds all prompts ` +
	`before it, and one rank as fast as all together.</p>
<div class="plots">{{range .Plots}}<div>{{template "plot" .}}</div>
{{end}}</div>
{{range .Tables}}<h2>Rate {{.Load.Load}}</h2>
<p>{{.Load.Requests}} requests, {{.Load.Refused}} of them longer than a rank holds.</p>
<table><tr>{{range .Head}}<th>{{.}}{{end}}
{{range .Rows}}<tr>{{range .}}<td>{{.}}{{end}}
{{end}}</table>
{{end}}</html>
`

// Table is the rows of a load with the figures that some row has.
func (l *Load) Table() (head []string, rows [][]string) {
	head = []string{"POLICY"}
	all := l.rows()
	for i := range all {
		rows = append(rows, []string{all[i].Name})
	}
	for _, m := range Measures() {
		if !slices.ContainsFunc(all, func(r Row) bool { return r.has(m) }) {
			continue
		}
		head = append(head, m.Title)
		for i := range all {
			text := ""
			if all[i].has(m) {
				text = all[i].Figures[m.Key].Text(m.Format)
			}
			rows[i] = append(rows[i], text)
		}
	}
	return head, rows
}

func (r *Row) has(m Measure) bool { _, ok := r.Figures[m.Key]; return ok }

// pageTable is a Load as the page shows it.
type pageTable struct {
	Load *Load
	Head []string
	Rows [][]string
}

// WritePage writes the report as a page of HTML that needs nothing else.
func (r *Report) WritePage(w io.Writer) error {
	page := struct {
		*Report
		Plots  []plot
		Tables []pageTable
	}{Report: r}
	for _, m := range Measures() {
		if !m.Rare {
			page.Plots = append(page.Plots, r.newPlot(m))
		}
	}
	for i := range r.Loads {
		head, rows := r.Loads[i].Table()
		page.Tables = append(page.Tables, pageTable{&r.Loads[i], head, rows})
	}
	return template.Must(template.New("page").Parse(plotSVG+reportPage)).Execute(w, page)
}

// WritePlot writes goodput by the load as SVG.
func (r *Report) WritePlot(w io.Writer) error {
	text := template.Must(template.New("svg").Parse(plotSVG + `{{template "plot" .}}` + "\n"))
	return text.Execute(w, r.newPlot(Measures()[0]))
}
