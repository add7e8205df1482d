package app

import (
	"fmt"
	"reflect"
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

func (c cursor) mark() { c.d.at[c.path] = c.n.place }

func (c cursor) refuse(f Fault) {
	if c.n.shape == refusedShape {
		c.d.bad[c.path] = true
		return
	}
	c.d.fault(c.n.place, c.path, f)
}

func (c cursor) refuseValue(wanted, hint string) {
	c.refuse(Fault{Found: c.n.describe(), Wanted: wanted, Hint: hint})
}

// isMap reports whether the value is a map, and refuses it if not. of is the type that it is read into, nil
// for the files of other tools.
func (c cursor) isMap(of reflect.Type) bool {
	if c.n.shape != mapShape {
		c.refuseValue("a map", c.hintMap(of))
	}
	return c.n.shape == mapShape
}

// readStruct reads a map into a struct. Keys that the struct does not have are faults, and so are required
// keys that are missing. An empty value counts as not written.
func (c cursor) readStruct(into reflect.Value) {
	c = c.expand(into.Type())
	if !c.isMap(into.Type()) {
		return
	}
	keys := c.d.keys(into.Type())
	for _, e := range c.n.entries {
		sub, k := c.key(e), findKey(keys, e.key)
		switch {
		case k == nil:
			c.d.fault(e.place, sub.path, Fault{
				Message: "unknown key " + strconv.Quote(e.key), Hint: c.d.suggestKey(e.key, c.path, keys),
			})
		case k.isLater:
			c.d.fault(e.place, sub.path, notYet(strconv.Quote(e.key)))
		case e.value.shape != nullShape:
			sub.mark()
			sub.read(into.FieldByIndex(k.field), k)
		}
	}
	for i := range keys {
		if keys[i].need != "" && !c.d.isOverlay {
			c.d.need(c.path, keys[i].name, keys[i].need)
		}
	}
}

// notYet is the fault of a key or a word that is not supported yet.
func notYet(what string) Fault {
	return Fault{
		Message: what + " is not supported in this version",
		Hint:    "it comes with a later version; leave it out",
	}
}

// read reads a value into a field of a struct, by the type of the field and the tags of its key.
func (c cursor) read(into reflect.Value, k *key) {
	switch into := into.Addr().Interface().(type) {
	case *[]*draft:
		c.readDrafts(into)
		return
	case *Args:
		c.readArgs(into)
		return
	case *map[string]any:
		c.readParams(into)
		return
	case *map[string]string:
		c.readPairs(into, k.format)
		return
	case *side:
		if c.isMap(reflect.TypeFor[side]()) {
			into.written = &c
		}
		return
	}
	switch into.Kind() { //nolint:exhaustive // fields have no other kinds; the test of the sample reads all
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		if into.Elem().Kind() == reflect.Struct {
			setDefaults(into.Elem())
		}
		c.read(into.Elem(), k)
	case reflect.Struct:
		c.readStruct(into)
	case reflect.Slice:
		c.readList(into, k)
	case reflect.String:
		c.readText(into, k)
	case reflect.Int:
		c.readWhole(into, k)
	case reflect.Float64:
		c.readNumber(into, k)
	case reflect.Bool:
		if c.n.shape != boolShape {
			c.refuseValue(k.wanted, "")
			return
		}
		into.SetBool(c.n.truth())
	}
}

// readText accepts one of the key's words, or text in the key's format.
func (c cursor) readText(into reflect.Value, k *key) {
	if k.words != nil {
		c.readWord(into, k)
		return
	}
	s, ok := c.text()
	if ok && k.format != nil && !k.format.fits(s) {
		c.refuse(Fault{Found: strconv.Quote(s), Wanted: k.format.wanted})
	}
	into.SetString(s)
}

// text accepts any scalar by its source text, because YAML reads ids and names like 1234 or on as numbers and
// booleans.
func (c cursor) text() (string, bool) {
	switch {
	case !c.n.isScalar() || c.n.shape == nullShape:
		c.refuseValue("text", "")
	case strings.ContainsRune(c.n.text, 0):
		c.refuse(Fault{Message: "a NUL character in a text", Hint: "remove it"})
	default:
		return c.n.text, true
	}
	return "", false
}

func (c cursor) readWord(into reflect.Value, k *key) {
	switch text := c.n.text; {
	case slices.Contains(k.later, text):
		f := notYet(k.name + " " + strconv.Quote(text))
		if k.name == "policy" {
			f.Wanted, f.Hint = k.wanted, "it comes with a later version; take one of these until then"
		}
		c.refuse(f)
	case !c.n.isScalar():
		c.refuseValue(k.wanted, "")
	case slices.Contains(k.words, text):
		into.SetString(text)
	case k.name == "policy" && replacements[text] != "":
		c.refuseValue(k.wanted, "dpserve has no "+text+"; write policy: "+replacements[text])
	default:
		c.refuseValue(k.wanted, didYouMean(text, k.words))
	}
}

// readWhole accepts an integer in the range of the key. It refuses Ray's -1 (no bound) for the queue by name:
// an unbounded queue turns overload into time-outs for all requests.
func (c cursor) readWhole(into reflect.Value, k *key) {
	v, ok := c.n.whole()
	switch {
	case ok && v < 0 && k.name == "max_queued_requests":
		c.refuseValue(k.wanted, "a queue without a bound is refused; leave the key out for "+k.standard)
	case !ok || !k.number.hold(float64(v)):
		c.refuseValue(k.wanted, c.quoteHint())
	default:
		into.SetInt(v)
	}
}

// readNumber accepts a finite number in the range of the key.
func (c cursor) readNumber(into reflect.Value, k *key) {
	v, ok := c.n.real()
	if !ok || !k.number.hold(v) {
		c.refuseValue(k.wanted, c.quoteHint())
		return
	}
	into.SetFloat(v)
}

// quoteHint returns the hint for a number in quotes.
func (c cursor) quoteHint() string {
	if c.n.quoted && shapeOf(c.n.text) != textShape {
		return "write it without quotes"
	}
	return ""
}

// each visits the items of a list of at most limit items.
func (c cursor) each(limit int, visit func(item cursor)) {
	if c.n.shape != listShape {
		c.refuseValue("a list", c.hintList())
		return
	}
	if n := len(c.n.items); n > limit {
		c.refuse(Fault{Found: fmt.Sprintf("%d items", n), Wanted: fmt.Sprintf("at most %d", limit)})
		return
	}
	for i, item := range c.n.items {
		child := cursor{c.d, item, index(c.path, i)}
		child.mark()
		visit(child)
	}
}

// readList reads a list of texts or of structs.
func (c cursor) readList(into reflect.Value, k *key) {
	limit, blank := maxListItems, reflect.New(into.Type().Elem()).Elem()
	if blank.Kind() == reflect.Struct {
		setDefaults(blank)
	}
	if blank.Type() == reflect.TypeFor[AttachRank]() {
		limit = MaxRanks
	}
	c.each(limit, func(item cursor) {
		into.Set(reflect.Append(into, blank))
		item.read(into.Index(into.Len()-1), k)
	})
}

func (c cursor) readDrafts(into *[]*draft) {
	c.each(maxApplications, func(item cursor) {
		a := &draft{Application: c.d.base, path: item.path, d: c.d}
		item.readStruct(reflect.ValueOf(a).Elem())
		*into = append(*into, a)
	})
	if c.n.shape == listShape && len(c.n.items) == 0 {
		c.refuse(Fault{Found: "an empty list", Wanted: "at least one application", Hint: hintSmallest})
	}
}

// readPairs accepts a map of texts whose keys have the given format.
func (c cursor) readPairs(into *map[string]string, names *format) {
	if !c.isMap(reflect.TypeFor[map[string]string]()) {
		return
	}
	out := make(map[string]string, len(c.n.entries))
	for _, e := range c.n.entries {
		item := c.key(e)
		c.d.at[item.path] = e.place
		if !names.fits(e.key) {
			c.d.fault(e.place, item.path, Fault{Found: strconv.Quote(e.key), Wanted: names.wanted})
			continue
		}
		out[e.key], _ = item.text()
	}
	if len(out) > 0 {
		*into = out
	}
}

var argName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$`)

func (c cursor) readArgs(into *Args) {
	if !c.isMap(reflect.TypeFor[Args]()) {
		return
	}
	for _, e := range c.n.entries {
		item := c.key(e)
		item.mark()
		if !argName.MatchString(e.key) {
			c.d.fault(e.place, item.path, Fault{
				Found:  strconv.Quote(e.key),
				Wanted: "the name of a flag without dashes in front, like max_num_seqs",
			})
			continue
		}
		if e.value.shape == nullShape {
			item.refuseValue("a value", "write true for a flag without a value, or leave it out")
			continue
		}
		item.askOnOff()
		if v, ok := item.value(); ok {
			*into = append(*into, Arg{Name: e.key, Value: v})
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
func (c cursor) readParams(into *map[string]any) {
	if !c.isMap(reflect.TypeFor[map[string]any]()) {
		return
	}
	if v, ok := c.value(); ok {
		if m, isMap := v.(map[string]any); isMap && len(m) > 0 {
			*into = m
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
		out, good := make([]any, 0, len(c.n.items)), true
		for i, item := range c.n.items {
			v, ok := cursor{c.d, item, index(c.path, i)}.value()
			out, good = append(out, v), good && ok
		}
		return out, good
	case mapShape:
		out, good := make(map[string]any, len(c.n.entries)), true
		for _, e := range c.n.entries {
			v, ok := c.key(e).value()
			out[e.key], good = v, good && ok
		}
		return out, good
	case refusedShape:
		c.d.bad[c.path] = true
		return nil, false
	case textShape:
	}
	return c.text()
}
