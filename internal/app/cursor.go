package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

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
		c.refuse(Fault{
			Found:  fmt.Sprintf("%d items", len(c.n.items)),
			Wanted: fmt.Sprintf("at most %d", limit),
		})
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

var argName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$`)

// readArgs reads engine.args in file order.
func readArgs(c cursor, e *Engine) {
	if !c.isMap() {
		return
	}
	for _, entry := range c.n.entries {
		item := c.key(entry)
		item.mark()
		if !argName.MatchString(entry.key) {
			c.d.fault(entry.place, item.path, Fault{
				Found:  strconv.Quote(entry.key),
				Wanted: "the name of a flag without dashes in front, like max_num_seqs",
			})
			continue
		}
		if entry.value.shape == nullShape {
			item.refuseValue("a value", "write true for a flag without a value, or leave it out")
			continue
		}
		item.askOnOff()
		if v, ok := item.value(); ok {
			e.Args = append(e.Args, Arg{Name: entry.key, Value: v})
		}
	}
}

// askOnOff warns about words that older YAML reads as booleans.
func (c cursor) askOnOff() {
	if c.n.shape != textShape || c.n.quoted {
		return
	}
	switch strings.ToLower(c.n.text) {
	case "on", "off", "yes", "no", "y", "n":
		c.d.warn(c.path, "read as the text "+strconv.Quote(c.n.text),
			"write true or false for a flag, or put the text in quotes")
	}
}

// readParams reads routing.params. The policy checks them.
func readParams(c cursor, r *Routing) {
	if !c.isMap() {
		return
	}
	if v, ok := c.value(); ok {
		if m, isMap := v.(map[string]any); isMap && len(m) > 0 {
			r.Params = m
		}
	}
}

// value accepts any value: string, bool, int64, float64, nil, []any or map[string]any; false after a fault.
func (c cursor) value() (any, bool) {
	switch c.n.shape {
	case nullShape:
		return nil, true
	case boolShape:
		return c.n.truth(), true
	case intShape:
		if v, ok := c.n.whole(); ok {
			return v, true
		}
		c.refuseValue("an integer of 64 bits", "put it in quotes to pass it on as text")
		return nil, false
	case floatShape:
		if v, ok := c.n.real(); ok {
			return v, true
		}
		c.refuseValue("a finite number", "put it in quotes to pass it on as text")
		return nil, false
	case listShape:
		return c.list()
	case mapShape:
		return c.table()
	case refusedShape:
		c.d.bad[c.path] = true
		return nil, false
	case textShape:
	}
	var s string
	c.text(&s)
	return s, c.d.isGood(c.path)
}

func (c cursor) list() (any, bool) {
	out, good := make([]any, 0, len(c.n.items)), true
	for i, item := range c.n.items {
		v, ok := cursor{c.d, item, index(c.path, i)}.value()
		out, good = append(out, v), good && ok
	}
	return out, good
}

func (c cursor) table() (any, bool) {
	out, good := make(map[string]any, len(c.n.entries)), true
	for _, e := range c.n.entries {
		v, ok := c.key(e).value()
		out[e.key], good = v, good && ok
	}
	return out, good
}

// appendJSON appends v as compact JSON with sorted keys. Floats always have a point or an exponent, so that
// they are read back as floats. v has only the types that value returns.
func appendJSON(b []byte, v any) []byte {
	switch t := v.(type) {
	case bool:
		return strconv.AppendBool(b, t)
	case int64:
		return strconv.AppendInt(b, t, 10)
	case int:
		return strconv.AppendInt(b, int64(t), 10)
	case float64:
		return appendFloat(b, t)
	case string:
		return appendText(b, t)
	case []any:
		b = append(b, '[')
		for i, item := range t {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendJSON(b, item)
		}
		return append(b, ']')
	case map[string]any:
		b = append(b, '{')
		for i, k := range slices.Sorted(maps.Keys(t)) {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendJSON(append(appendText(b, k), ':'), t[k])
		}
		return append(b, '}')
	default:
		return append(b, "null"...)
	}
}

func appendFloat(b []byte, v float64) []byte {
	text := strconv.FormatFloat(v, 'g', -1, 64)
	b = append(b, text...)
	if !strings.ContainsAny(text, ".e") {
		b = append(b, ".0"...)
	}
	return b
}

// appendText appends s as a JSON string without HTML escapes.
func appendText(b []byte, s string) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil { // a string cannot fail
		return append(b, `""`...)
	}
	return append(b, bytes.TrimSuffix(buf.Bytes(), []byte{'\n'})...)
}

// field is one key of a map of the file. The fields are the schema: the reader, the hints and the test of the
// sample use them.
type field[T any] struct {
	key   string
	later bool // known, but not supported yet: a fault, never ignored silently
	read  func(c cursor, into *T)
}

// readFields reads the map at c into t. Keys that are not in fields are faults. An empty value counts as not
// written.
func readFields[T any](c cursor, t *T, fields []field[T]) {
	if !c.isMap() {
		return
	}
	for _, e := range c.n.entries {
		sub := c.key(e)
		f := find(fields, e.key)
		switch {
		case f == nil:
			c.d.fault(e.place, sub.path, Fault{
				Message: "unknown key " + strconv.Quote(e.key),
				Hint:    keyHint(e.key, fields),
			})
		case f.later:
			c.d.fault(e.place, sub.path, notYet(strconv.Quote(e.key)))
		case e.value.shape != nullShape:
			sub.mark()
			f.read(sub, t)
		}
	}
}

func find[T any](fields []field[T], key string) *field[T] {
	for i := range fields {
		if fields[i].key == key {
			return &fields[i]
		}
	}
	return nil
}

func keyHint[T any](key string, fields []field[T]) string {
	var known []string
	list := ""
	for _, f := range fields {
		known = append(known, f.key)
		if !f.later {
			list += ", " + f.key
		}
	}
	if hint := didYouMean(key, known); hint != "" {
		return hint
	}
	return "the keys here are " + list[len(", "):]
}

// notYet is the fault of a key or a word that is not supported yet.
func notYet(what string) Fault {
	return Fault{
		Message: what + " is not supported in this version",
		Hint:    "it comes with a later version; leave it out",
	}
}

// child makes a reader of a map inside T.
func child[T, S any](part func(*T) *S, fields func() []field[S]) func(cursor, *T) {
	return func(c cursor, t *T) { readFields(c, part(t), fields()) }
}

// text and the functions below it make readers of one value of T.
func text[T any](part func(*T) *string) func(cursor, *T) {
	return func(c cursor, t *T) { c.text(part(t)) }
}

func word[T any](part func(*T) *string, words ...string) func(cursor, *T) {
	return func(c cursor, t *T) { c.word(part(t), words...) }
}

func whole[T any](part func(*T) *int, low, high int64) func(cursor, *T) {
	return func(c cursor, t *T) { c.whole(part(t), low, high) }
}

func seconds[T any](part func(*T) *float64) func(cursor, *T) {
	return func(c cursor, t *T) { c.seconds(part(t)) }
}

func texts[T any](part func(*T) *[]string) func(cursor, *T) {
	return func(c cursor, t *T) { c.texts(part(t)) }
}
