package simulate

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Sizes of a plot, in units of its view box.
const (
	plotLeft, plotRight  = 46, 460
	plotTop, plotBottom  = 34, 268
	plotInset            = 20
	labelHeight, decimal = 15, 10
)

// plot is a measure of all settings by the load, laid out.
type plot struct {
	Title string
	X, Y  []tick
	Lines []plotLine
}

type tick struct {
	At   float64
	Text string
}

// plotLine is a setting, or a bound.
type plotLine struct {
	Name, Color string
	Dashes      string
	Path        string
	Marks       []mark
	Label       float64 // y of its name
}

// mark is a value with its interval.
type mark struct {
	X, Y, Low, High float64
	Text            string
}

// rows are the settings and the bounds at a load.
func (l *Load) rows() []Row { return append(slices.Clip(l.Settings), l.Alone, l.Pooled) }

// newPlot lays a measure out. The rows of all loads are the same.
func (r *Report) newPlot(m Measure) plot {
	p := plot{Title: m.Name + " by rate"}
	colors := []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c00", "#444444"}
	least, most, top := slices.Min(r.rates()), slices.Max(r.rates()), 0.0
	for i := range r.Loads {
		for _, row := range r.Loads[i].rows() {
			top = max(top, row.Figures[m.Key].Mean+row.Figures[m.Key].Half)
		}
	}
	step := niceStep(top)
	if top = step * math.Ceil(top/step); strings.HasSuffix(m.Key, "_percent") {
		top = min(top, 100)
	}
	x := func(load float64) float64 {
		if most == least {
			return (plotLeft + plotRight) / 2
		}
		return round(plotLeft + plotInset + (plotRight-plotLeft-2*plotInset)*(load-least)/(most-least))
	}
	y := func(v float64) float64 { return round(plotBottom - (plotBottom-plotTop)*min(v/max(top, 1e-9), 1)) }
	for v := 0.0; v <= top*1.001; v += step {
		p.Y = append(p.Y, tick{y(v), fmt.Sprintf("%g", math.Round(v*1e6)/1e6)})
	}
	for _, load := range r.rates() {
		p.X = append(p.X, tick{x(load), fmt.Sprintf("%g", load)})
	}
	settings := len(r.Loads[0].Settings)
	for i, row := range r.Loads[0].rows() {
		line := plotLine{Name: row.Name, Color: colors[i%len(colors)]}
		if i >= settings {
			line.Color, line.Dashes = "#888888", [...]string{"2 3", "6 3"}[i-settings]
		}
		for k := range r.Loads {
			f, ok := r.Loads[k].rows()[i].Figures[m.Key]
			if !ok {
				continue
			}
			at := mark{X: x(r.Loads[k].Load), Y: y(f.Mean), Low: y(f.Mean - f.Half), High: y(f.Mean + f.Half)}
			at.Text = fmt.Sprintf("%s, rate %g: %s", row.Name, r.Loads[k].Load, f.Text(m.Format))
			line.Path += fmt.Sprintf(" %g %g", at.X, at.Y)
			line.Marks = append(line.Marks, at)
		}
		if len(line.Marks) > 0 {
			line.Label = line.Marks[len(line.Marks)-1].Y
			p.Lines = append(p.Lines, line)
		}
	}
	p.spread()
	return p
}

func round(x float64) float64 { return math.Round(decimal*x) / decimal }

func (r *Report) rates() (out []float64) {
	for i := range r.Loads {
		out = append(out, r.Loads[i].Load)
	}
	return out
}

// spread moves the names of lines apart that end at about one height.
func (p *plot) spread() {
	slices.SortStableFunc(p.Lines, func(a, b plotLine) int { return cmp.Compare(a.Label, b.Label) })
	for i := 1; i < len(p.Lines); i++ {
		p.Lines[i].Label = max(p.Lines[i].Label, p.Lines[i-1].Label+labelHeight)
	}
	low := float64(plotBottom)
	for i := len(p.Lines) - 1; i >= 0; i-- {
		p.Lines[i].Label = min(p.Lines[i].Label, low)
		low = p.Lines[i].Label - labelHeight
	}
}

// niceStep is a round number of which four to ten make top.
func niceStep(top float64) float64 {
	if !(top > 0) {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(top/4)))
	for _, n := range []float64{5, 2} {
		if top/(n*power) >= 4 {
			return n * power
		}
	}
	return power
}
