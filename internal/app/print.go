package app

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Print returns f as canonical YAML without values at their default. Parse of the result gives f again.
// `validate --print` shows it.
func (f *File) Print() []byte {
	var p page
	p.line(0, "applications:")
	for _, a := range f.Applications {
		p.list(1, linesOf(reflect.ValueOf(a.withoutImplied())))
	}
	return p.text
}

// withoutImplied returns a copy of a without the values that follow from others.
func (a *Application) withoutImplied() Application {
	b := *a
	b.NumGroups = 0
	if b.Model.Source == b.Model.ID {
		b.Model.Source = ""
	}
	if b.Routing.Policy == DefaultPolicy(b.DataParallel.Coupling) {
		b.Routing.Policy = ""
	}
	if !b.Resources.GPUsSet {
		b.Resources.GPUs = 0
	}
	return b
}

// line is one key of a map with its text, the map below it, or a list of maps.
type line struct {
	key   string
	text  string
	below []line
	each  [][]line
}

// linesOf returns the keys of a struct that are required or not at their default.
func linesOf(v reflect.Value) []line {
	var out []line
	for _, k := range keysOf(v.Type()) {
		if k.isLater {
			continue
		}
		f := v.FieldByIndex(k.field)
		written := k.need != "" || isWritten(v.Interface(), k.name)
		if f.Kind() == reflect.Pointer {
			if f.IsNil() {
				continue
			}
			written, f = true, f.Elem()
		}
		if f.IsZero() && k.standard == "" || fmt.Sprint(f.Interface()) == k.standard {
			if !written {
				continue
			}
		}
		if l := lineOf(k.name, f); l.text != "" || len(l.below)+len(l.each) > 0 {
			out = append(out, l)
		}
	}
	return out
}

// isWritten reports keys of a struct whose zero value says something.
func isWritten(around any, key string) bool {
	switch around := around.(type) {
	case Resources:
		return key == "gpus" && around.GPUsSet
	case AttachRank:
		return key == "selector" && around.Addressing != AddressURL
	default:
		return false
	}
}

func lineOf(key string, v reflect.Value) line {
	l := line{key: key}
	switch value := v.Interface().(type) {
	case Args:
		for _, a := range value {
			l.below = append(l.below, line{key: plainOrQuoted(a.Name), text: valueText(a.Value)})
		}
		return l
	case map[string]any:
		l.below = linesOfMap(value)
		return l
	case map[string]string:
		l.below = linesOfMap(value)
		return l
	case []string:
		words := make([]string, len(value))
		for i, s := range value {
			words[i] = plainOrQuoted(s)
		}
		l.text = "[" + strings.Join(words, ", ") + "]"
		return l
	}
	switch v.Kind() { //nolint:exhaustive // fields have no other kinds
	case reflect.Struct:
		l.below = linesOf(v)
	case reflect.Slice:
		for i := range v.Len() {
			l.each = append(l.each, linesOf(v.Index(i)))
		}
	case reflect.Float64:
		l.text = strconv.FormatFloat(v.Float(), 'g', -1, 64)
	case reflect.String:
		l.text = plainOrQuoted(v.String())
	default:
		l.text = fmt.Sprint(v.Interface())
	}
	return l
}

func linesOfMap[V any](m map[string]V) []line {
	var out []line
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, line{key: plainOrQuoted(k), text: valueText(m[k])})
	}
	return out
}

// valueText returns any argument as text: lists and maps as JSON, which is YAML.
func valueText(v any) string {
	if s, ok := v.(string); ok {
		return plainOrQuoted(s)
	}
	return string(appendJSON(nil, v))
}

var plainWord = regexp.MustCompile(`^[A-Za-z_/][A-Za-z0-9_./-]*$`)

// plainOrQuoted writes s without quotes if no YAML reader, of any version, reads it as something other than
// this text.
func plainOrQuoted(s string) string {
	switch strings.ToLower(s) {
	case "null", "true", "false", "yes", "no", "on", "off", "y", "n":
	default:
		if plainWord.MatchString(s) {
			return s
		}
	}
	return string(appendText(nil, s))
}

// page collects lines with two spaces per level.
type page struct{ text []byte }

func (p *page) line(level int, text string) {
	p.text = append(p.text, strings.Repeat("  ", level)...)
	p.text = append(append(p.text, text...), '\n')
}

func (p *page) block(level int, l []line) {
	for _, e := range l {
		switch {
		case len(e.each) > 0:
			p.line(level, e.key+":")
			for _, item := range e.each {
				p.list(level+1, item)
			}
		case len(e.below) > 0:
			p.line(level, e.key+":")
			p.block(level+1, e.below)
		default:
			p.line(level, e.key+": "+e.text)
		}
	}
}

// list adds l as one item of a list: its first line has the dash.
func (p *page) list(level int, l []line) {
	start := len(p.text)
	p.block(level+1, l)
	copy(p.text[start+2*level:], "- ")
}
