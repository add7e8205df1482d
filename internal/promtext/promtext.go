// Package promtext merges the Prometheus pages of engines into one page in the text format. Pages cannot be
// put one behind the other: the format wants one HELP and one TYPE line for each metric, and all samples of a
// metric in one place. Every sample gets labels that say which rank it comes from.
package promtext

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ContentType is the media type of a page.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Bounds of a Page besides its bytes.
const (
	maxFamilies = 10_000 // different metrics
	maxHelp     = 1000   // bytes of a HELP text; a longer one is cut
)

// ErrFull is the error of a page that does not fit.
var ErrFull = errors.New("the merged page has no room for this page")

// Source is the page of one engine, and where the engine belongs.
type Source struct {
	App   string
	Pool  string // "" = the application has no pools
	Group int
	Ranks []Rank // that the engine hosts
	Text  string // in the text format; lines that cannot be read are skipped
}

// Rank is one rank of an engine.
type Rank struct {
	Number int
	// Series is how the engine's samples name the rank, in the label engine (vLLM) or dp_rank (SGLang). "" =
	// the samples do not tell ranks apart. If the engine hosts this rank alone, they are all of this rank.
	Series string
}

// Page is a merged page. Use: New, Declare, Add, Set, Print. It is not safe for concurrent use.
type Page struct {
	families map[string]*family
	room     int // bytes that may still be added
}

// family is a metric with all its samples. Those of a histogram have other names, for example
// NAME_bucket.
type family struct {
	kind  string // of the first TYPE line; "" = there was none
	help  string // of the first HELP line, with escapes
	isOwn bool   // of dpserve, not of engines
	lines []byte
}

// isKnown reports whether a TYPE line or a sample has shown the family, so that its type stays.
func (f *family) isKnown() bool { return f != nil && (f.kind != "" || len(f.lines) > 0) }

// New returns an empty page that takes about limit bytes.
func New(limit int) *Page { return &Page{families: map[string]*family{}, room: limit} }

// Declare adds a gauge of dpserve itself. Samples of engines under its name are skipped.
func (p *Page) Declare(name, help string) {
	p.families[name] = &family{kind: kindGauge, help: escapeHelp(help), isOwn: true}
}

// Set adds a sample of a declared gauge.
func (p *Page) Set(name, app, pool string, group, rank, value int) {
	f := p.families[name]
	origin := originLabels(app, pool, group)
	f.lines = fmt.Appendf(f.lines, "%s{%s,rank=\"%d\"} %d\n", name, origin, rank, value)
}

// Add adds the page of an engine. It returns the number of lines that it skipped because they cannot be read
// or because they contradict the type that another engine's page gave the metric. It adds nothing if there is
// no room for the whole page.
func (p *Page) Add(s *Source) (skipped int, err error) {
	origin := originLabels(s.App, s.Pool, s.Group)
	const rankLabel = 20 // bytes of the label rank, and of the separators
	size := len(s.Text) + strings.Count(s.Text, "\n")*(len(origin)+rankLabel)
	if size > p.room {
		return 0, ErrFull
	}
	p.room -= size
	for line := range strings.Lines(s.Text) {
		line = strings.Trim(line, " \t\r\n")
		switch {
		case line == "":
		case line[0] == '#':
			p.readComment(line[1:])
		case !p.addSample(line, origin, s):
			skipped++
		}
	}
	return skipped, nil
}

// Print writes the page: metrics in the order of their names, samples in the order in which they were added.
// A metric without samples is left out. The error is that of to.
func (p *Page) Print(to io.Writer) error {
	for _, name := range slices.Sorted(maps.Keys(p.families)) {
		f := p.families[name]
		if len(f.lines) == 0 {
			continue
		}
		head := "# TYPE " + name + " " + cmp.Or(f.kind, kindUntyped) + "\n"
		if f.help != "" {
			head = "# HELP " + name + " " + f.help + "\n" + head
		}
		if _, err := io.WriteString(to, head); err != nil {
			return err
		}
		if _, err := to.Write(f.lines); err != nil {
			return err
		}
	}
	return nil
}

// addSample adds a line with a sample. It returns false if it skips the line.
func (p *Page) addSample(line, origin string, s *Source) bool {
	sample, ok := parseSample(line)
	if !ok {
		return false
	}
	f, suffix := p.familyOf(sample.name)
	if f == nil || f.isOwn || !sample.fits(f.kind, suffix) {
		return false
	}
	b := append(append(append(f.lines, sample.name...), '{'), origin...)
	if rank, ok := s.rankOf(sample.labels); ok {
		b = append(append(b, `,rank="`...), strconv.Itoa(rank)...)
		b = append(b, '"')
	}
	for _, l := range sample.labels {
		b = append(append(b, ','), exportedName(l.name, sample.labels)...)
		b = append(append(append(b, `="`...), l.value...), '"')
	}
	f.lines = append(append(append(b, "} "...), sample.value...), '\n')
	return true
}

// familyOf returns the family of a sample, and what the sample's name has behind the family's. It returns nil
// if there are too many families.
func (p *Page) familyOf(sample string) (f *family, suffix string) {
	if f, suffix = p.parentOf(sample); f != nil {
		return f, suffix
	}
	return p.family(sample), ""
}

// parentOf returns the histogram or summary that has samples of this name; nil if there is none.
func (p *Page) parentOf(sample string) (f *family, suffix string) {
	for _, suffix := range suffixesOf(kindHistogram) {
		if name, ok := strings.CutSuffix(sample, suffix); ok {
			f := p.families[name]
			if f != nil && slices.Contains(suffixesOf(f.kind), suffix) {
				return f, suffix
			}
		}
	}
	return nil, ""
}

// family returns the family of a name, which it makes if need be; nil if there are too many.
func (p *Page) family(name string) *family {
	f := p.families[name]
	if f == nil && len(p.families) < maxFamilies {
		f = &family{}
		p.families[name] = f
	}
	return f
}

// readComment reads a line behind its #. Comments other than HELP and TYPE say nothing.
func (p *Page) readComment(text string) {
	keyword, text := cutWord(text)
	name, text := cutWord(text)
	if !isName(name, true) {
		return
	}
	switch keyword {
	case "HELP":
		if f := p.family(name); f != nil && f.help == "" && !f.isOwn {
			f.help = escapeHelp(unescapeHelp(text))
		}
	case "TYPE":
		p.setKind(name, text)
	}
}

// setKind gives a family its type. The first page that shows a metric decides: pages of several versions of
// an engine may contradict each other, and one page can have one type. If a histogram would take samples that
// are a metric of their own already, its samples become metrics of their own, too.
func (p *Page) setKind(name, kind string) {
	if parent, _ := p.parentOf(name); parent != nil {
		return
	}
	for _, suffix := range suffixesOf(kind) {
		if p.families[name+suffix].isKnown() {
			return
		}
	}
	if f := p.family(name); f != nil && !f.isKnown() {
		f.kind = knownKind(kind)
	}
}

// rankOf returns the rank that a sample belongs to; false if it belongs to the engine of several ranks.
func (s *Source) rankOf(labels []label) (rank int, ok bool) {
	if len(s.Ranks) == 1 && s.Ranks[0].Series == "" {
		return s.Ranks[0].Number, true
	}
	for _, l := range labels {
		if l.name != "engine" && l.name != "dp_rank" {
			continue
		}
		for _, r := range s.Ranks {
			if r.Series == l.value && r.Series != "" {
				return r.Number, true
			}
		}
	}
	return 0, false
}

// originLabels are the labels of every sample of an engine, without the rank.
func originLabels(app, pool string, group int) string {
	text := `app="` + escapeValue(app) + `"`
	if pool != "" {
		text += `,pool="` + escapeValue(pool) + `"`
	}
	return text + `,group="` + strconv.Itoa(group) + `"`
}

// exportedName is the name of an engine's label next to those of dpserve. Prometheus renames labels of its
// targets in the same way.
func exportedName(name string, all []label) string {
	switch name {
	case "app", "pool", "group", "rank":
	default:
		return name
	}
	isTaken := func(l label) bool { return l.name == name }
	for name = "exported_" + name; slices.ContainsFunc(all, isTaken); {
		name = "exported_" + name
	}
	return name
}

// escapeValue is a text as the value of a label.
func escapeValue(text string) string {
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(strings.ToValidUTF8(text, "?"))
}

// escapeHelp is a text as that of a HELP line, cut to its bound.
func escapeHelp(text string) string {
	text = strings.ToValidUTF8(text, "?")
	for len(text) > maxHelp {
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	}
	return strings.NewReplacer(`\`, `\\`, "\n", `\n`).Replace(text)
}

// unescapeHelp is the text of a HELP line. A backslash that begins no escape stands for itself.
func unescapeHelp(text string) string {
	return strings.NewReplacer(`\\`, `\`, `\n`, "\n").Replace(text)
}
