// Package schema writes JSON values that a JSON Schema allows: the answers of an engine that has no model to
// constrain.
//
// A value is written by the keywords that say what it is, then checked against all of them; where the check
// fails, another alternative or another draw is taken. Schemas that are not understood are refused with a
// ValueError, in the words for the client that sent them.
package schema

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// Bounds of a schema, and of the work for one value. Schemas of real tools have some hundred values.
const (
	maxSchemaBytes  = 1 << 20
	maxSchemaValues = 20_000
	maxSchemaDepth  = 64
	maxDigits       = 100 // of a number
	maxSteps        = 50_000
	maxDepth        = 24 // of a written value
	maxTextBytes    = 64 << 10
	draws           = 16 // values that are written until the schema allows one

	briefDepth = 3   // from here on only what must be there is written
	tries      = 256 // of one choice: values of an enum, an item that has to be unique

	pairsPerStep = 16 // comparisons of two items that count as one step
)

// ValueError says why there is no value, for the client that sent the schema.
type ValueError string

func (f ValueError) Error() string { return string(f) }

func faultf(format string, args ...any) error { return ValueError(fmt.Sprintf(format, args...)) }

var (
	errNoSchema = faultf("a schema is an object, true or false")
	errNoValue  = faultf("no value was found that the schema allows")
	errDeep     = faultf("the values of the schema are nested deeper than %d levels", maxDepth)
	errSteps    = faultf("it takes too many steps to find a value that the schema allows")
	errLarge    = faultf("the values of the schema are larger than %d bytes", maxTextBytes)
)

// isFinal says that no other alternative may be tried.
func isFinal(err error) bool { return errors.Is(err, errSteps) || errors.Is(err, errLarge) }

// Schema is a schema that values can be written for. It is not changed by that.
type Schema struct {
	all []any // the value obeys each; references refer to the first one
}

// Parse reads a schema.
func Parse(text []byte) (*Schema, error) {
	root, err := decode(text)
	return &Schema{[]any{root}}, err
}

// ParseObject reads the schema of values that are objects, whatever the schema says.
func ParseObject(text []byte) (*Schema, error) {
	s, err := Parse(text)
	object := newObject()
	object.set("type", "object")
	s.all = append(s.all, object)
	return s, err
}

// Write writes a value: the same one for the same seed.
func (s *Schema) Write(seed uint64) ([]byte, error) {
	all, fault := s.all, errNoValue
	r := &run{checker: checker{root: all[0], steps: maxSteps}}
	for draw := range uint64(draws) {
		r.rnd, r.bytes = rand.New(rand.NewPCG(seed, draw)), maxTextBytes
		v, err := r.value(all, 0)
		if err == nil {
			var n int
			if n, err = r.countAllowed(all, v); err == nil && n == len(all) {
				return appendValue(nil, v), nil
			}
		}
		if err != nil {
			fault = err
		}
		if isFinal(err) {
			break
		}
	}
	return nil, fault
}

// run writes one value.
type run struct {
	checker
	rnd   *rand.Rand
	bytes int // that may still be written
}

// spend counts bytes of the value.
func (r *run) spend(n int) error {
	if r.bytes -= n; r.bytes < 0 {
		return errLarge
	}
	return nil
}

// value writes a value that all schemas allow.
func (r *run) value(all []any, depth int) (any, error) {
	if depth > maxDepth {
		return nil, errDeep
	}
	return r.combine(nil, all, nil, depth)
}

// combine writes a value that the schemas known and more allow, and one alternative of each choice. Schemas
// go from more to known; what they refer to is added to more, what they leave open to choices.
func (r *run) combine(known []*object, more []any, choices [][][]any, depth int) (any, error) {
	known, choices = slices.Clip(known), slices.Clip(choices)
	for len(more) > 0 {
		if err := r.step(); err != nil {
			return nil, err
		}
		first := more[0]
		more = more[1:]
		s, ok := first.(*object)
		switch {
		case first == true:
			continue
		case first == false:
			return nil, errNoValue
		case !ok:
			return nil, errNoSchema
		}
		known = append(known, s)
		if ref, ok := s.values["$ref"]; ok {
			target, err := r.target(ref)
			if err != nil {
				return nil, err
			}
			more = append(slices.Clip(more), target)
		}
		more = append(slices.Clip(more), s.list("allOf")...)
		for _, keyword := range []string{"anyOf", "oneOf"} {
			if _, ok := s.values[keyword]; ok {
				choices = append(choices, r.alternatives(s.list(keyword), depth))
			}
		}
		if condition, ok := s.values["if"]; ok {
			choices = append(choices, [][]any{given(condition, s.values["then"]), given(s.values["else"])})
		}
	}
	if len(choices) == 0 {
		return r.checked(known, depth)
	}
	fault := errNoValue
	for _, alternative := range choices[0] {
		v, err := r.combine(known, alternative, choices[1:], depth)
		if err == nil || isFinal(err) {
			return v, err
		}
		fault = err
	}
	return nil, fault
}

// given lists the schemas that are there.
func given(schemas ...any) []any {
	return slices.DeleteFunc(schemas, func(s any) bool { return s == nil })
}

// alternatives orders the schemas of anyOf or oneOf as they are tried: drawn, but null last. Deep inside,
// simple values come first, so that values have an end.
func (r *run) alternatives(schemas []any, depth int) [][]any {
	out, simple, last := [][]any{}, [][]any{}, [][]any{}
	for _, i := range r.rnd.Perm(len(schemas)) {
		one, _ := schemas[i].(*object)
		switch {
		case one != nil && one.values["type"] == "null":
			last = append(last, []any{schemas[i]})
		case depth >= briefDepth && one != nil && isSimple(one):
			simple = append(simple, []any{schemas[i]})
		default:
			out = append(out, []any{schemas[i]})
		}
	}
	if depth >= briefDepth {
		simple = append(simple, last...)
		last = nil
	}
	return append(append(simple, out...), last...)
}

// isSimple says that a schema is one of values that hold no others.
func isSimple(s *object) bool {
	types := typesOf(s.values["type"])
	isList := slices.Contains(types, "array") || slices.Contains(types, "object")
	return len(types) > 0 && !isList || s.values["enum"] != nil || s.values["const"] != nil
}

// checked writes a value by schemas that leave nothing open, and checks it where they say more than what a
// value is made of.
func (r *run) checked(all []*object, depth int) (any, error) {
	v, err := r.plain(all, depth)
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if s.values["oneOf"] == nil && s.values["not"] == nil && s.values["if"] == nil {
			continue
		}
		ok, err := r.allows(s, v)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, errNoValue
		}
	}
	return v, nil
}

// plain writes a value of one of the types that all schemas allow, or one that they list.
func (r *run) plain(all []*object, depth int) (any, error) {
	for _, s := range all {
		if v, ok := s.values["const"]; ok {
			return r.listed([]any{v}, all)
		}
		if _, ok := s.values["enum"]; ok {
			return r.listed(s.list("enum"), all)
		}
	}
	fault := errNoValue
	for _, t := range r.types(all, depth) {
		v, err := r.typed(t, all, depth)
		if err == nil || isFinal(err) {
			return v, err
		}
		fault = err
	}
	return nil, fault
}

// listed draws one of the values that all schemas allow.
func (r *run) listed(values []any, all []*object) (any, error) {
	if len(values) == 0 {
		return nil, errNoValue
	}
	first := r.rnd.IntN(len(values))
	for i := range min(len(values), tries) {
		v, ok := values[(first+i)%len(values)], true
		for _, s := range all {
			var err error
			if ok, err = r.allows(s, v); err != nil {
				return nil, err
			}
			if !ok {
				break
			}
		}
		if ok {
			return v, r.spend(len(appendValue(nil, v)))
		}
	}
	return nil, errNoValue
}

// hints are the keywords that tell the type of a value where none is written.
var hints = map[string]string{
	"properties": "object", "required": "object", "additionalProperties": "object",
	"patternProperties": "object", "minProperties": "object",
	"items": "array", "prefixItems": "array", "minItems": "array", "uniqueItems": "array",
	"pattern": "string", "minLength": "string", "maxLength": "string", "format": "string",
	"minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
	"multipleOf": "number",
}

// types lists the types that all schemas allow, in the order in which they are tried.
func (r *run) types(all []*object, depth int) []string {
	out := []string{"string", "integer", "number", "boolean", "object", "array", "null"}
	isWritten, hint := false, "string"
	for _, s := range all {
		arg, ok := s.values["type"]
		if !ok {
			for _, keyword := range s.names {
				if t := hints[keyword]; t != "" {
					hint = t
				}
			}
			continue
		}
		isWritten = true
		allowed := typesOf(arg)
		out = slices.DeleteFunc(out, func(t string) bool {
			isNumber := t == "integer" && slices.Contains(allowed, "number")
			return !slices.Contains(allowed, t) && !isNumber
		})
	}
	switch {
	case !isWritten: // the type that the keywords tell, then any other
		at := slices.Index(out, hint)
		out[0], out[at] = out[at], out[0]
		return out
	case slices.Contains(out, "number"): // has all that integer has
		out = slices.DeleteFunc(out, func(t string) bool { return t == "integer" })
	}
	if n := len(out); n > 1 && depth < briefDepth {
		if out[n-1] == "null" {
			n--
		}
		first := r.rnd.IntN(n)
		out[0], out[first] = out[first], out[0]
	}
	return out
}

func (r *run) typed(name string, all []*object, depth int) (any, error) {
	switch name {
	case "null":
		return nil, nil
	case "boolean":
		return r.rnd.IntN(2) == 0, nil
	case "string":
		return r.text(all)
	case "array":
		return r.array(all, depth)
	case "object":
		return r.object(all, depth)
	}
	n, err := r.number(all, name == "integer")
	if err != nil {
		return nil, err
	}
	return n, r.spend(len(n))
}

// size is the largest minimum, or the smallest maximum, that the schemas set; otherwise if they set none.
func size(all []*object, keyword string, otherwise int) int {
	out, isLeast, set := otherwise, strings.HasPrefix(keyword, "min"), false
	for _, s := range all {
		n, ok := whole(s.values[keyword])
		if ok && (!set || isLeast == (n > out)) {
			out, set = n, true
		}
	}
	return out
}

// object writes the properties that the schemas name, further ones where some must be there, and one of a
// map.
func (r *run) object(all []*object, depth int) (any, error) {
	least, most := size(all, "minProperties", 0), size(all, "maxProperties", maxTextBytes)
	names, required := []string{}, map[string]bool{}
	isMap := false
	for _, s := range all {
		if properties, ok := s.values["properties"].(*object); ok {
			names = append(names, properties.names...)
		}
		for _, one := range s.list("required") {
			if name, ok := one.(string); ok {
				required[name] = true
				names = append(names, name)
			}
		}
		_, isOpen := s.values["additionalProperties"].(*object)
		isMap = isMap || isOpen
	}
	out, open := newObject(), len(required)
	for _, name := range names {
		_, done := out.values[name]
		isOptional := !required[name]
		if done || isOptional && (depth >= briefDepth || len(out.names)+open >= most) {
			continue
		}
		err := r.member(out, name, all, depth)
		if err != nil && (!isOptional || isFinal(err)) {
			return nil, err
		}
		if !isOptional {
			open--
		}
	}
	if isMap && len(names) == 0 && depth < briefDepth {
		least = min(max(least, 1), most)
	}
	for i := 1; len(out.names) < least; i++ {
		if err := r.member(out, "key"+strconv.Itoa(i), all, depth); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *run) member(out *object, name string, all []*object, depth int) error {
	var schemas []any
	for _, s := range all {
		more, err := r.memberOf(s, name)
		if err != nil {
			return err
		}
		schemas = append(schemas, more...)
	}
	if err := r.spend(len(name)); err != nil {
		return err
	}
	v, err := r.value(schemas, depth+1)
	if err == nil {
		out.set(name, v)
	}
	return err
}

// array writes one or two items, or as many as there must be.
func (r *run) array(all []*object, depth int) (any, error) {
	least, most := size(all, "minItems", 0), size(all, "maxItems", maxTextBytes)
	unique, count := false, 0
	for _, s := range all {
		unique = unique || s.values["uniqueItems"] == true
		count = max(count, len(s.list("prefixItems")), len(s.list("items")))
		if _, ok := s.values["items"].(*object); ok {
			count = max(count, 1+r.rnd.IntN(2))
		}
	}
	if depth >= briefDepth {
		count = 0
	}
	count = min(max(count, least), most)
	out := []any{}
	for attempt := 0; len(out) < count; attempt++ {
		var schemas []any
		for _, s := range all {
			for _, keyword := range []string{"prefixItems", "items", "additionalItems"} {
				if item, ok := itemOf(s, keyword, len(out)); ok {
					schemas = append(schemas, item)
				}
			}
		}
		if unique {
			r.steps -= len(out) / pairsPerStep
		}
		v, err := r.value(schemas, depth+1)
		switch {
		case isFinal(err):
			return nil, err
		case err == nil && unique && slices.ContainsFunc(out, func(o any) bool { return equal(o, v) }):
			if attempt < tries+count {
				continue
			}
			err = errNoValue
		}
		if err != nil {
			if len(out) >= least {
				break
			}
			return nil, err
		}
		if err := r.spend(2); err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	if len(out) < least {
		return nil, errNoValue
	}
	return out, nil
}

// usual is the range of numbers whose schema sets none.
const usual = 100

// number writes a number on a grid: whole numbers, quarters, or what multipleOf says.
func (r *run) number(all []*object, isWhole bool) (json.Number, error) {
	var low, high bound
	step := big.NewRat(1, 4)
	if isWhole {
		step = big.NewRat(1, 1)
	}
	for _, s := range all {
		for _, b := range boundOf(s, "minimum", "exclusiveMinimum") {
			if low.at == nil || b.at.Cmp(low.at) > 0 || b.exclusive && b.at.Cmp(low.at) == 0 {
				low = b
			}
		}
		for _, b := range boundOf(s, "maximum", "exclusiveMaximum") {
			if high.at == nil || b.at.Cmp(high.at) < 0 || b.exclusive && b.at.Cmp(high.at) == 0 {
				high = b
			}
		}
		if n, ok := s.values["multipleOf"].(json.Number); ok && rational(n).Sign() > 0 {
			if step = rational(n); isWhole {
				step = new(big.Rat).SetInt(step.Num()) // the multiples that are whole are those of p in p/q
			}
		}
	}
	span := new(big.Rat).Mul(step, big.NewRat(usual, 1))
	if low.at == nil {
		low.at = new(big.Rat)
		if high.at != nil && high.at.Sign() <= 0 {
			low.at = new(big.Rat).Sub(high.at, span)
		}
	}
	if high.at == nil {
		high.at = new(big.Rat).Add(low.at, span)
	}
	first, last := onGrid(low, step, 1), onGrid(high, step, -1)
	if first.Cmp(last) > 0 {
		if isWhole || low.at.Cmp(high.at) >= 0 {
			return "", errNoValue
		}
		middle := new(big.Rat).Add(low.at, high.at) // between two points of the grid
		return decimal(middle.Mul(middle, big.NewRat(1, 2))), nil
	}
	points := new(big.Rat).Quo(new(big.Rat).Sub(last, first), step)
	n := int64(usual)
	if points.Cmp(big.NewRat(usual, 1)) < 0 {
		n = points.Num().Int64()
	}
	v := new(big.Rat).Mul(step, big.NewRat(r.rnd.Int64N(n+1), 1))
	return decimal(v.Add(v, first)), nil
}

// onGrid is the multiple of step that is next to an end of a range, inside.
func onGrid(b bound, step *big.Rat, inward int64) *big.Rat {
	n := new(big.Rat).Quo(b.at, step)
	whole, rest := new(big.Int).DivMod(n.Num(), n.Denom(), new(big.Int))
	switch isExact := rest.Sign() == 0; {
	case isExact && b.exclusive:
		whole.Add(whole, big.NewInt(inward))
	case !isExact && inward > 0: // DivMod rounds down
		whole.Add(whole, big.NewInt(1))
	}
	return new(big.Rat).Mul(new(big.Rat).SetInt(whole), step)
}

// decimal writes a number whose denominator has no other factors than 2 and 5.
func decimal(v *big.Rat) json.Number {
	digits, _ := v.FloatPrec()
	return json.Number(v.FloatString(digits))
}
