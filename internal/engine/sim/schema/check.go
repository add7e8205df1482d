package schema

import (
	"encoding/json"
	"math/big"
	"net/url"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// checker checks values against schemas, in a bounded number of steps.
type checker struct {
	root     any // what references refer to
	steps    int // schemas that may still be looked at
	patterns map[string]*regexp.Regexp
}

func (c *checker) step() error {
	if c.steps--; c.steps < 0 {
		return errSteps
	}
	return nil
}

// allows reports whether a schema allows v, which a run has written.
func (c *checker) allows(schema, v any) (bool, error) {
	if err := c.step(); err != nil {
		return false, err
	}
	s, ok := schema.(*object)
	if !ok {
		allowed, isBool := schema.(bool)
		if !isBool {
			return false, errNoSchema
		}
		return allowed, nil
	}
	for _, keyword := range s.names {
		ok, err := c.allowsBy(s, keyword, v)
		if !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// allowsBy checks v against one keyword of a schema.
func (c *checker) allowsBy(s *object, keyword string, v any) (bool, error) {
	arg := s.values[keyword]
	switch keyword {
	case "$ref":
		target, err := c.target(arg)
		if err != nil {
			return false, err
		}
		return c.allows(target, v)
	case "allOf":
		n, err := c.countAllowed(s.list(keyword), v)
		return n == len(s.list(keyword)), err
	case "anyOf":
		n, err := c.countAllowed(s.list(keyword), v)
		return n > 0, err
	case "oneOf":
		n, err := c.countAllowed(s.list(keyword), v)
		return n == 1, err
	case "not":
		ok, err := c.allows(arg, v)
		return !ok, err
	case "if":
		ok, err := c.allows(arg, v)
		next, given := s.values["then"]
		if !ok {
			next, given = s.values["else"]
		}
		if err != nil || !given {
			return true, err
		}
		return c.allows(next, v)
	case "type":
		return slices.ContainsFunc(typesOf(arg), func(t string) bool {
			return t == typeOf(v) || t == "number" && typeOf(v) == "integer"
		}), nil
	case "enum":
		return slices.ContainsFunc(s.list(keyword), func(one any) bool { return equal(one, v) }), nil
	case "const":
		return equal(arg, v), nil
	}
	if slices.Contains(unsupported, keyword) {
		return false, faultf("the simulated engine cannot write JSON for the keyword %q", keyword)
	}
	switch v := v.(type) {
	case json.Number:
		return allowsNumber(s, keyword, rational(v)), nil
	case string:
		return c.allowsText(keyword, arg, v)
	case []any:
		return c.allowsItems(s, keyword, v)
	case *object:
		return c.allowsMembers(s, keyword, v)
	}
	return true, nil
}

// unsupported are the keywords that would have to be obeyed and are not.
var unsupported = []string{
	"contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
	"propertyNames", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
}

func (c *checker) countAllowed(schemas []any, v any) (n int, err error) {
	for _, s := range schemas {
		ok, err := c.allows(s, v)
		if err != nil {
			return 0, err
		}
		if ok {
			n++
		}
	}
	return n, nil
}

// target resolves a reference inside the schema.
func (c *checker) target(arg any) (any, error) {
	ref, _ := arg.(string)
	path, ok := strings.CutPrefix(ref, "#")
	if path, err := url.PathUnescape(path); ok && err == nil && (path == "" || path[0] == '/') {
		at := c.root
		for _, word := range strings.Split(path, "/")[1:] {
			word = strings.NewReplacer("~1", "/", "~0", "~").Replace(word)
			switch in := at.(type) {
			case *object:
				at, ok = in.values[word]
			case []any:
				i, err := strconv.Atoi(word)
				if ok = err == nil && i >= 0 && i < len(in); ok {
					at = in[i]
				}
			default:
				ok = false
			}
			if !ok {
				return nil, faultf("$ref %.100q leads nowhere", ref)
			}
		}
		return at, nil
	}
	return nil, faultf("$ref %.100q: want a reference inside the schema, like #/$defs/NAME", ref)
}

// typesOf reads the keyword type: a name or a list of names.
func typesOf(arg any) []string {
	if name, ok := arg.(string); ok {
		return []string{name}
	}
	list, _ := arg.([]any)
	out := []string{}
	for _, one := range list {
		if name, ok := one.(string); ok {
			out = append(out, name)
		}
	}
	return out
}

// bound is one end of a range of numbers.
type bound struct {
	at        *big.Rat // nil: there is none
	exclusive bool
}

// boundOf reads minimum and exclusiveMinimum, or the same of the maximum. Draft 4 writes the exclusive one as
// a boolean.
func boundOf(s *object, inclusive, exclusive string) []bound {
	var out []bound
	if n, ok := s.values[inclusive].(json.Number); ok {
		isExclusive, _ := s.values[exclusive].(bool)
		out = append(out, bound{rational(n), isExclusive})
	}
	if n, ok := s.values[exclusive].(json.Number); ok {
		out = append(out, bound{rational(n), true})
	}
	return out
}

func allowsNumber(s *object, keyword string, v *big.Rat) bool {
	switch keyword {
	case "minimum", "exclusiveMinimum":
		for _, b := range boundOf(s, "minimum", "exclusiveMinimum") {
			if order := v.Cmp(b.at); order < 0 || order == 0 && b.exclusive {
				return false
			}
		}
	case "maximum", "exclusiveMaximum":
		for _, b := range boundOf(s, "maximum", "exclusiveMaximum") {
			if order := v.Cmp(b.at); order > 0 || order == 0 && b.exclusive {
				return false
			}
		}
	case "multipleOf":
		if n, ok := s.values[keyword].(json.Number); ok && rational(n).Sign() > 0 {
			return new(big.Rat).Quo(v, rational(n)).IsInt()
		}
	}
	return true
}

func (c *checker) allowsText(keyword string, arg any, v string) (bool, error) {
	switch keyword {
	case "minLength", "maxLength":
		return allowsSize(keyword == "minLength", arg, utf8.RuneCountInString(v)), nil
	case "pattern":
		text, _ := arg.(string)
		p, err := c.compile(text)
		return err == nil && p.MatchString(v), err
	}
	return true, nil
}

// allowsSize compares a size with its least or its largest value.
func allowsSize(isLeast bool, arg any, size int) bool {
	n, ok := whole(arg)
	return !ok || isLeast && size >= n || !isLeast && size <= n
}

// whole reads a size; numbers that no size reaches are cut.
func whole(arg any) (int, bool) {
	n, ok := arg.(json.Number)
	if !ok {
		return 0, false
	}
	f, err := n.Float64()
	return int(min(max(f, 0), maxSchemaBytes*2)), err == nil
}

func (c *checker) allowsItems(s *object, keyword string, v []any) (bool, error) {
	switch keyword {
	case "minItems", "maxItems":
		return allowsSize(keyword == "minItems", s.values[keyword], len(v)), nil
	case "uniqueItems":
		if s.values[keyword] == true {
			c.steps -= len(v) * len(v) / pairsPerStep
			for i := range v {
				if slices.ContainsFunc(v[:i], func(other any) bool { return equal(other, v[i]) }) {
					return false, nil
				}
			}
		}
	case "items", "prefixItems", "additionalItems":
		for i := range v {
			if item, ok := itemOf(s, keyword, i); ok {
				if ok, err := c.allows(item, v[i]); !ok || err != nil {
					return false, err
				}
			}
		}
	}
	return true, nil
}

// itemOf is the schema that a keyword sets for item i of a list.
func itemOf(s *object, keyword string, i int) (any, bool) {
	first := s.list("prefixItems")
	if list, ok := s.values["items"].([]any); ok { // before draft 2020
		first = list
	}
	arg := s.values[keyword]
	list, isList := arg.([]any)
	switch {
	case isList && i < len(list):
		return list[i], true
	case isList || i < len(first) || keyword == "additionalItems" && s.list("items") == nil:
		return nil, false
	}
	_, given := s.values[keyword]
	return arg, given
}

func (c *checker) allowsMembers(s *object, keyword string, v *object) (bool, error) {
	switch keyword {
	case "minProperties", "maxProperties":
		return allowsSize(keyword == "minProperties", s.values[keyword], len(v.names)), nil
	case "required":
		for _, name := range s.list(keyword) {
			if text, ok := name.(string); ok {
				if _, there := v.values[text]; !there {
					return false, nil
				}
			}
		}
	case "properties": // checks patternProperties and additionalProperties as well
		return c.allowsEach(s, v)
	case "patternProperties", "additionalProperties":
		if _, done := s.values["properties"]; !done {
			return c.allowsEach(s, v)
		}
	}
	return true, nil
}

func (c *checker) allowsEach(s, v *object) (bool, error) {
	for _, name := range v.names {
		schemas, err := c.memberOf(s, name)
		if err != nil {
			return false, err
		}
		n, err := c.countAllowed(schemas, v.values[name])
		if n < len(schemas) || err != nil {
			return false, err
		}
	}
	return true, nil
}

// memberOf lists the schemas that s sets for the member name.
func (c *checker) memberOf(s *object, name string) (out []any, err error) {
	if properties, ok := s.values["properties"].(*object); ok {
		if one, ok := properties.values[name]; ok {
			out = append(out, one)
		}
	}
	if patterns, ok := s.values["patternProperties"].(*object); ok {
		for _, pattern := range patterns.names {
			p, err := c.compile(pattern)
			if err != nil {
				return nil, err
			}
			if p.MatchString(name) {
				out = append(out, patterns.values[pattern])
			}
		}
	}
	if others, ok := s.values["additionalProperties"]; ok && len(out) == 0 {
		out = append(out, others)
	}
	return out, nil
}

// maxPattern bounds the text of a pattern, partsPerStep how much of the steps it takes to compile one.
const (
	maxPattern   = 1_000
	partsPerStep = 10
)

// compile reads a pattern. Schemas have those of JavaScript; Go reads all but look-around and
// back-references.
func (c *checker) compile(pattern string) (*regexp.Regexp, error) {
	if p := c.patterns[pattern]; p != nil {
		return p, c.step()
	}
	if len(pattern) > maxPattern {
		return nil, faultf("a pattern has %d bytes; the limit is %d", len(pattern), maxPattern)
	}
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return nil, faultf("the pattern %.100q is not understood: %v", pattern, err)
	}
	if c.steps -= 1 + parts(parsed)/partsPerStep; c.steps < 0 {
		return nil, errSteps
	}
	p, err := regexp.Compile(pattern)
	if err != nil {
		return nil, faultf("the pattern %.100q is not understood: %v", pattern, err)
	}
	if c.patterns == nil {
		c.patterns = map[string]*regexp.Regexp{}
	}
	c.patterns[pattern] = p
	return p, nil
}

// parts counts the instructions that a pattern is compiled to, about.
func parts(p *syntax.Regexp) int {
	n := 1 + len(p.Rune)
	for _, sub := range p.Sub {
		n += parts(sub)
	}
	return n * max(1, p.Min, p.Max)
}
