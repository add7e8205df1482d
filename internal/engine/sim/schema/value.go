package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"slices"
	"strconv"
)

// object is a JSON object that keeps the order of its members. Other JSON values are nil, bool, string,
// json.Number and []any.
type object struct {
	names  []string
	values map[string]any
}

func newObject() *object { return &object{values: map[string]any{}} }

func (o *object) set(name string, v any) {
	if _, known := o.values[name]; !known {
		o.names = append(o.names, name)
	}
	o.values[name] = v
}

// list returns a member that is a list; nil if it is none.
func (o *object) list(name string) []any {
	list, _ := o.values[name].([]any)
	return list
}

// reader decodes JSON into ordered values, within bounds.
type reader struct {
	d    *json.Decoder
	left int // values that may follow
}

// decode reads one JSON value.
func decode(text []byte) (any, error) {
	if len(text) > maxSchemaBytes {
		return nil, faultf("the schema has %d bytes; the limit is %d", len(text), maxSchemaBytes)
	}
	r := reader{json.NewDecoder(bytes.NewReader(text)), maxSchemaValues}
	r.d.UseNumber()
	v, err := r.value(0)
	if err != nil {
		return nil, err
	}
	if _, err := r.d.Token(); !errors.Is(err, io.EOF) {
		return nil, faultf("there is text behind the end of the schema")
	}
	return v, nil
}

func (r *reader) value(depth int) (any, error) {
	if r.left--; r.left < 0 {
		return nil, faultf("the schema has more than %d values", maxSchemaValues)
	}
	if depth > maxSchemaDepth {
		return nil, faultf("the schema is nested deeper than %d levels", maxSchemaDepth)
	}
	t, err := r.d.Token()
	if err != nil {
		return nil, faultf("the schema is not JSON: %v", err)
	}
	switch t {
	case json.Delim('{'):
		return r.object(depth)
	case json.Delim('['):
		return r.array(depth)
	}
	if n, ok := t.(json.Number); ok {
		if _, err := n.Float64(); err != nil || len(n) > maxDigits {
			return nil, faultf("the number %.40s is too large", n.String())
		}
	}
	return t, nil
}

func (r *reader) object(depth int) (any, error) {
	out := newObject()
	for r.d.More() {
		name, err := r.d.Token()
		if err != nil {
			return nil, faultf("the schema is not JSON: %v", err)
		}
		v, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		text, _ := name.(string) // the decoder gives nothing else here
		out.set(text, v)
	}
	_, err := r.d.Token()
	return out, err
}

func (r *reader) array(depth int) (any, error) {
	out := []any{}
	for r.d.More() {
		v, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	_, err := r.d.Token()
	return out, err
}

// appendValue appends v as Python's json.dumps writes it, which is how models are taught to write JSON.
func appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...)
	case bool:
		return strconv.AppendBool(b, v)
	case json.Number:
		return append(b, v...)
	case string:
		return AppendString(b, v)
	case []any:
		b = append(b, '[')
		for i, item := range v {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = appendValue(b, item)
		}
		return append(b, ']')
	case *object:
		b = append(b, '{')
		for i, name := range v.names {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(AppendString(b, name), ": "...)
			b = appendValue(b, v.values[name])
		}
		return append(b, '}')
	}
	return b
}

// AppendString appends s as a JSON string in which only those characters are escaped that must be.
func AppendString(b []byte, s string) []byte {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil { // strings always have a JSON form
		return append(b, `""`...)
	}
	return append(b, bytes.TrimSuffix(out.Bytes(), []byte{'\n'})...)
}

// rational is the exact value of a number that decode has let pass.
func rational(n json.Number) *big.Rat {
	r, ok := new(big.Rat).SetString(n.String())
	if !ok {
		return new(big.Rat)
	}
	return r
}

// equal compares values as JSON Schema does: 1 and 1.0 are one number, and members have no order.
func equal(a, b any) bool {
	switch a := a.(type) {
	case json.Number:
		b, ok := b.(json.Number)
		return ok && (a == b || rational(a).Cmp(rational(b)) == 0)
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, equal)
	case *object:
		b, ok := b.(*object)
		if !ok || len(a.names) != len(b.names) {
			return false
		}
		for name, v := range a.values {
			other, ok := b.values[name]
			if !ok || !equal(v, other) {
				return false
			}
		}
		return true
	case nil, bool, string:
		switch b.(type) {
		case nil, bool, string:
			return a == b
		}
	}
	return false
}

// typeOf names the type of a value as schemas do; whole numbers are "integer".
func typeOf(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case string:
		return "string"
	case []any:
		return "array"
	case *object:
		return "object"
	case json.Number:
		if rational(v).IsInt() {
			return "integer"
		}
		return "number"
	}
	return ""
}
