package app

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// decoder collects the results of Parse: faults, warnings, and the position of each path.
type decoder struct {
	file     string
	faults   Faults
	warnings []Warning
	at       map[string]place // path → position of its value
	bad      map[string]bool  // paths that have a fault, so that no rule adds a second one
}

// fault records f at a position. path may be empty.
func (d *decoder) fault(at place, path string, f Fault) {
	f.File, f.Line, f.Col, f.Path = d.file, at.line, at.col, path
	d.faults = append(d.faults, f)
	if path != "" {
		d.bad[path] = true
	}
}

// broken records a fault of a rule at path. If path was not written, the fault is at the nearest written
// parent.
func (d *decoder) broken(path string, f Fault) { d.fault(d.where(path), path, f) }

func (d *decoder) warn(path, message, hint string) {
	at := d.where(path)
	d.warnings = append(d.warnings, Warning{
		File: d.file, Line: at.line, Col: at.col, Path: path, Message: message, Hint: hint,
	})
}

func (d *decoder) where(path string) place {
	for p := path; p != ""; p = parentOf(p) {
		if at, ok := d.at[p]; ok {
			return at
		}
	}
	return place{1, 1}
}

// parentOf removes the last key or index from a path.
func parentOf(path string) string { return path[:max(0, strings.LastIndexAny(path, ".["))] }

// has reports whether path was written. An empty value does not count.
func (d *decoder) has(path string) bool {
	_, ok := d.at[path]
	return ok
}

// isGood reports that no fault is known at the paths or at their parents.
func (d *decoder) isGood(paths ...string) bool {
	for _, path := range paths {
		for p := path; p != ""; p = parentOf(p) {
			if d.bad[p] {
				return false
			}
		}
	}
	return true
}

// cursor is one value of the file with its path.
type cursor struct {
	d    *decoder
	n    *node
	path string
}

var plainKey = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]*$`)

// join returns path.key. Keys with special characters are quoted.
func join(path, key string) string {
	switch {
	case !plainKey.MatchString(key):
		const longest = 40
		if len(key) > longest {
			key = strings.ToValidUTF8(key[:longest], "") + "…"
		}
		return path + "[" + strconv.Quote(key) + "]"
	case path == "":
		return key
	default:
		return path + "." + key
	}
}

func index(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

func (c cursor) key(e entry) cursor { return cursor{c.d, e.value, join(c.path, e.key)} }

// mark records that the value was written.
func (c cursor) mark() { c.d.at[c.path] = c.n.place }

func (c cursor) refuse(f Fault) {
	if c.n.shape == refusedShape {
		c.d.bad[c.path] = true
		return
	}
	c.d.fault(c.n.place, c.path, f)
}

// refuseValue records that the value has the wrong shape or range.
func (c cursor) refuseValue(wanted, hint string) {
	c.refuse(Fault{Found: c.n.describe(), Wanted: wanted, Hint: hint})
}

// isMap reports whether the value is a map, and refuses it if not.
func (c cursor) isMap() bool {
	if c.n.shape != mapShape {
		c.refuseValue("a map", "")
	}
	return c.n.shape == mapShape
}

// text accepts any scalar by its source text, because YAML reads ids and names like 1234 or on as numbers and
// booleans.
func (c cursor) text(dst *string) {
	if !c.n.isScalar() || c.n.shape == nullShape {
		c.refuseValue("text", "")
		return
	}
	if strings.ContainsRune(c.n.text, 0) {
		c.refuse(Fault{Message: "a NUL character in a text", Hint: "remove it"})
		return
	}
	*dst = c.n.text
}

// word accepts one of a list of words.
func (c cursor) word(dst *string, words ...string) {
	if !c.n.isScalar() {
		c.refuseValue(strings.Join(words, " | "), "")
		return
	}
	for _, w := range words {
		if c.n.text == w {
			*dst = w
			return
		}
	}
	c.refuseValue(strings.Join(words, " | "), didYouMean(c.n.text, words))
}

// whole accepts an integer in [low, high].
func (c cursor) whole(dst *int, low, high int64) {
	v, ok := c.n.whole()
	if !ok || v < low || v > high {
		c.refuseValue(fmt.Sprintf("an integer from %d to %d", low, high), c.quoteHint())
		return
	}
	*dst = int(v)
}

// quoteHint returns the hint for a number in quotes.
func (c cursor) quoteHint() string {
	if c.n.quoted && shapeOf(c.n.text) != textShape {
		return "write it without quotes"
	}
	return ""
}

// number accepts a finite number above 0 (from 0 if zeroOK) up to high.
func (c cursor) number(dst *float64, high float64, zeroOK bool, unit string) {
	v, ok := c.n.real()
	low := math.SmallestNonzeroFloat64
	rule := "above 0"
	if zeroOK {
		low, rule = 0, "from 0"
	}
	if !ok || v < low || v > high {
		c.refuseValue(fmt.Sprintf("%s %s to %s", unit, rule, strconv.FormatFloat(high, 'f', -1, 64)),
			c.quoteHint())
		return
	}
	*dst = v
}

// maxSeconds bounds every time of the file (30 days), so that no duration overflows.
const maxSeconds = 30 * 24 * 3600

// seconds accepts a time above 0.
func (c cursor) seconds(dst *float64) { c.number(dst, maxSeconds, false, "seconds") }

// secondsOrZero accepts a time from 0.
func (c cursor) secondsOrZero(dst *float64) { c.number(dst, maxSeconds, true, "seconds") }

// each visits the items of a list of at most limit items.
func (c cursor) each(limit int, visit func(item cursor)) {
	if c.n.shape != listShape {
		c.refuseValue("a list", "")
		return
	}
	if len(c.n.items) > limit {
		c.refuse(Fault{Found: fmt.Sprintf("%d items", len(c.n.items)),
			Wanted: fmt.Sprintf("at most %d", limit)})
		return
	}
	for i, item := range c.n.items {
		child := cursor{c.d, item, index(c.path, i)}
		child.mark()
		visit(child)
	}
}

// texts accepts a list of texts.
func (c cursor) texts(dst *[]string) {
	c.each(maxListItems, func(item cursor) {
		var s string
		item.text(&s)
		*dst = append(*dst, s)
	})
}

// pairs accepts a map of texts whose keys match name.
func (c cursor) pairs(dst *map[string]string, name *regexp.Regexp, wanted string) {
	if !c.isMap() {
		return
	}
	out := make(map[string]string, len(c.n.entries))
	for _, e := range c.n.entries {
		item := c.key(e)
		c.d.at[item.path] = e.place
		if !name.MatchString(e.key) {
			c.d.fault(e.place, item.path, Fault{Found: strconv.Quote(e.key), Wanted: wanted})
			continue
		}
		var s string
		item.text(&s)
		out[e.key] = s
	}
	if len(out) > 0 {
		*dst = out
	}
}

// maxListItems bounds lists of texts. Ranks have their own bound.
const maxListItems = 1_000
