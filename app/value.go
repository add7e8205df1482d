package app

import (
	"bytes"
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

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
