package app

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// decoder collects what Parse finds: faults, warnings, and where each path was written.
type decoder struct {
	file     string
	faults   Faults
	warnings []Warning
	at       map[string]place // path → its value
	bad      map[string]bool  // paths that have a fault already, so that rules do not pile up on it
}

// fault records f at a place; path may be empty.
func (d *decoder) fault(at place, path string, f Fault) {
	f.File, f.Line, f.Col, f.Path = d.file, at.line, at.col, path
	d.faults = append(d.faults, f)
	if path != "" {
		d.bad[path] = true
	}
}

// broken records a fault of a rule at path, or, if path was not written, at the nearest written thing around it.
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

// parentOf cuts the last key or index off a path.
func parentOf(path string) string { return path[:max(0, strings.LastIndexAny(path, ".["))] }

// has says whether path was written (an empty value does not count).
func (d *decoder) has(path string) bool {
	_, ok := d.at[path]
	return ok
}

// good says that no fault is known at any of the paths or around them.
func (d *decoder) good(paths ...string) bool {
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

// join is path.key; keys that would not read well are quoted.
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

// mark remembers that the value was written.
func (c cursor) mark() { c.d.at[c.path] = c.n.place }

func (c cursor) refuse(f Fault) {
	if c.n.shape == refusedShape {
		c.d.bad[c.path] = true
		return
	}
	c.d.fault(c.n.place, c.path, f)
}

// wrong is the fault of a value of another shape or range.
func (c cursor) wrong(wanted, hint string) {
	c.refuse(Fault{Found: c.n.say(), Wanted: wanted, Hint: hint})
}

// isMap says whether the value is a map, and refuses it if not.
func (c cursor) isMap() bool {
	if c.n.shape != mapShape {
		c.wrong("a map", "")
	}
	return c.n.shape == mapShape
}

// text takes any scalar by its source text, because ids and names like 1234 or on arrive as numbers and booleans (TRAPS 15).
func (c cursor) text(dst *string) {
	if !c.n.scalar() || c.n.shape == nullShape {
		c.wrong("text", "")
		return
	}
	if strings.ContainsRune(c.n.text, 0) {
		c.refuse(Fault{Message: "a NUL character in a text", Hint: "remove it"})
		return
	}
	*dst = c.n.text
}

// word takes one of a list of words.
func (c cursor) word(dst *string, words ...string) {
	if !c.n.scalar() {
		c.wrong(strings.Join(words, " | "), "")
		return
	}
	for _, w := range words {
		if c.n.text == w {
			*dst = w
			return
		}
	}
	c.wrong(strings.Join(words, " | "), didYouMean(c.n.text, words))
}

// whole takes an integer of [low, high].
func (c cursor) whole(dst *int, low, high int64) {
	v, ok := c.n.whole()
	if !ok || v < low || v > high {
		c.wrong(fmt.Sprintf("an integer from %d to %d", low, high), c.unquote())
		return
	}
	*dst = int(v)
}

// unquote is the hint for a number in quotes.
func (c cursor) unquote() string {
	if c.n.quoted && shapeOf(c.n.text) != textShape {
		return "write it without quotes"
	}
	return ""
}

// number takes a finite number of [low, high]; low itself only if it is above 0 or zeroOK.
func (c cursor) number(dst *float64, high float64, zeroOK bool, unit string) {
	v, ok := c.n.real()
	low := math.SmallestNonzeroFloat64
	rule := "above 0"
	if zeroOK {
		low, rule = 0, "from 0"
	}
	if !ok || v < low || v > high {
		c.wrong(fmt.Sprintf("%s %s to %s", unit, rule, strconv.FormatFloat(high, 'f', -1, 64)), c.unquote())
		return
	}
	*dst = v
}

// maxSeconds bounds every time of the file (30 days), so that a duration never overflows.
const maxSeconds = 30 * 24 * 3600

// seconds takes a time above 0.
func (c cursor) seconds(dst *float64) { c.number(dst, maxSeconds, false, "seconds") }

// secondsOrZero takes a time from 0.
func (c cursor) secondsOrZero(dst *float64) { c.number(dst, maxSeconds, true, "seconds") }

// each walks a list of at most limit items.
func (c cursor) each(limit int, visit func(item cursor)) {
	if c.n.shape != listShape {
		c.wrong("a list", "")
		return
	}
	if len(c.n.items) > limit {
		c.refuse(Fault{Found: fmt.Sprintf("%d items", len(c.n.items)), Wanted: fmt.Sprintf("at most %d", limit)})
		return
	}
	for i, item := range c.n.items {
		child := cursor{c.d, item, index(c.path, i)}
		child.mark()
		visit(child)
	}
}

// texts takes a list of texts.
func (c cursor) texts(dst *[]string) {
	c.each(maxListItems, func(item cursor) {
		var s string
		item.text(&s)
		*dst = append(*dst, s)
	})
}

// pairs takes a map of texts whose keys match name.
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

// maxListItems bounds lists of words; ranks have their own bound.
const maxListItems = 1_000
