package app

import (
	"fmt"
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
	for _, pools := range ByName(f.Applications) {
		if len(pools) == 2 {
			p.item(1, reflect.ValueOf(joinPools(pools[0], pools[1])))
		} else {
			p.item(1, reflect.ValueOf(withoutImplied(pools[0])))
		}
	}
	return p.text
}

// withoutImplied removes the values that follow from others.
func withoutImplied(pool *Application) Application {
	a := *pool.asInFile()
	a.NumGroups = 0
	if len(a.Engine.Services) > 0 {
		a.DataParallel.DPSize, a.NumReplicas = 0, 0
	}
	if a.Model.Source == a.Model.ID {
		a.Model.Source = ""
	}
	if a.Routing.Policy == DefaultPolicy(a.DataParallel.Coupling) {
		a.Routing.Policy = ""
	}
	if a.PlacementGroupStrategy == DefaultStrategy(&a) {
		a.PlacementGroupStrategy = ""
	}
	if !a.Resources.GPUsSet {
		a.Resources.GPUs = 0
	}
	return a
}

// joinPools returns the entry of the file that two pools are. Values that both have are the application's,
// except for sizes, all others are in its sides. Parse of it gives the pools again.
func joinPools(prefill, decode *Application) draft {
	first, second := withoutImplied(prefill), withoutImplied(decode)
	ranks := slices.Concat(first.Engine.Ranks, second.Engine.Ranks)
	services := slices.Concat(first.Engine.Services, second.Engine.Services)
	first.Engine.Ranks, second.Engine.Ranks = nil, nil
	first.Engine.Services, second.Engine.Services = nil, nil
	out := draft{Application: second, Prefill: sideOf(&first), Decode: sideOf(&second)}
	shared := out.Decode
	joinValues(reflect.ValueOf(&shared).Elem(), reflect.ValueOf(&out.Prefill).Elem(),
		reflect.ValueOf(&out.Decode).Elem())
	devices, others := &first.Resources, &second.Resources
	shared.Resources.GPUsSet = devices.GPUsSet && others.GPUsSet && devices.GPUs == others.GPUs
	if shared.Resources.GPUsSet { // else a side may have a written `gpus: 0`, and the other none
		out.Prefill.Resources.GPUsSet, out.Decode.Resources.GPUsSet = false, false
	}
	if first.Routing.Policy != second.Routing.Policy { // parameters do not go from one policy to another
		shared.Routing, out.Prefill.Routing, out.Decode.Routing = Routing{}, first.Routing, second.Routing
		setDefaults(reflect.ValueOf(&shared.Routing).Elem())
	}
	shared.DataParallel, out.Prefill.DataParallel, out.Decode.DataParallel = DataParallel{},
		first.DataParallel, second.DataParallel
	shared.NumReplicas, out.Prefill.NumReplicas, out.Decode.NumReplicas = 0, first.NumReplicas,
		second.NumReplicas
	shared.Engine.Ranks, shared.Engine.Services = ranks, services
	shared.applyTo(&out.Application)
	return out
}

// joinValues resets the values that two sides have in common in both, and the other ones in shared, which is
// a copy of the second side.
func joinValues(shared, first, second reflect.Value) {
	for _, k := range keysOf(shared.Type()) {
		if k.isLater {
			continue
		}
		s, a, b := shared.FieldByIndex(k.field), first.FieldByIndex(k.field), second.FieldByIndex(k.field)
		switch {
		case s.Kind() == reflect.Struct:
			joinValues(s, a, b)
		case reflect.DeepEqual(a.Interface(), b.Interface()):
			k.reset(a)
			k.reset(b)
		default:
			k.reset(s)
		}
	}
}

// page collects lines with two spaces per level.
type page struct {
	text    []byte
	overlay bool // the keys of a side: no key is required
}

func (p *page) line(level int, text string) {
	p.text = append(p.text, strings.Repeat("  ", level)...)
	p.text = append(append(p.text, text...), '\n')
}

// block adds a key with the lines that add makes below it; nothing if it makes none.
func (p *page) block(level int, key string, add func()) {
	before := len(p.text)
	p.line(level, key+":")
	head := len(p.text)
	if add(); len(p.text) == head {
		p.text = p.text[:before]
	}
}

// item adds a struct as one item of a list: its first line has the dash.
func (p *page) item(level int, v reflect.Value) {
	start := len(p.text)
	p.keys(level+1, v)
	copy(p.text[start+2*level:], "- ")
}

func (p *page) keys(level int, v reflect.Value) {
	for _, k := range keysOf(v.Type()) {
		if k.isLater {
			continue
		}
		f := v.FieldByIndex(k.field)
		standard := f.IsZero() && k.standard == "" || fmt.Sprint(f.Interface()) == k.standard
		if standard && (k.need == "" || p.overlay) && !isWritten(v.Interface(), k.name) {
			continue
		}
		if f.Kind() == reflect.Pointer {
			f = f.Elem()
		}
		p.value(level, k.name, f)
	}
}

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

func (p *page) value(level int, key string, v reflect.Value) {
	switch value := v.Interface().(type) {
	case Args:
		p.block(level, key, func() {
			for _, a := range value {
				p.line(level+1, plainOrQuoted(a.Name)+": "+valueText(a.Value))
			}
		})
		return
	case []string:
		words := make([]string, len(value))
		for i, s := range value {
			words[i] = plainOrQuoted(s)
		}
		p.line(level, key+": ["+strings.Join(words, ", ")+"]")
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		p.overlay = p.overlay || v.Type() == reflect.TypeFor[side]()
		p.block(level, key, func() { p.keys(level+1, v) })
		p.overlay = p.overlay && v.Type() != reflect.TypeFor[side]()
	case reflect.Map:
		p.block(level, key, func() {
			for _, k := range slices.SortedFunc(slices.Values(v.MapKeys()), compareTexts) {
				p.line(level+1, plainOrQuoted(k.String())+": "+valueText(v.MapIndex(k).Interface()))
			}
		})
	case reflect.Slice:
		p.block(level, key, func() {
			for i := range v.Len() {
				p.item(level+1, v.Index(i))
			}
		})
	case reflect.String:
		p.line(level, key+": "+plainOrQuoted(v.String()))
	case reflect.Float64:
		p.line(level, key+": "+strconv.FormatFloat(v.Float(), 'g', -1, 64))
	default:
		p.line(level, key+": "+fmt.Sprint(v.Interface()))
	}
}

func compareTexts(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) }

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
	return string(appendJSON(nil, s))
}
