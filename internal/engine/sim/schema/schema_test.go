package schema

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// compiled reads a schema with a library that knows every keyword.
func compiled(schema string) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("mem:///schema", doc); err != nil {
		return nil, err
	}
	return c.Compile("mem:///schema")
}

// violation says why a value does not follow a schema.
func violation(t testing.TB, schema string, value []byte) error {
	t.Helper()
	by, err := compiled(schema)
	require.NoError(t, err, schema)
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(value))
	require.NoError(t, err, "%s", value)
	return by.Validate(v)
}

func write(t testing.TB, schema string, seed uint64) ([]byte, error) {
	t.Helper()
	s, err := Parse([]byte(schema))
	if err != nil {
		return nil, err
	}
	return s.Write(seed)
}

// tree is a schema of values without a largest depth.
const tree = `{"$defs":{"Node":{"type":"object","properties":{"name":{"type":"string"},
	"children":{"type":"array","items":{"$ref":"#/$defs/Node"},"minItems":%d}},
	"required":["name","children"],"additionalProperties":false}},"$ref":"#/$defs/Node"}`

// TestWritesWhatTheSchemaAllows: the values that are written for schemas as people and libraries write them
// are valid, and have members in the order of the schema.
func TestWritesWhatTheSchemaAllows(t *testing.T) {
	for _, schema := range []string{
		`{}`, `true`, `{"type":"null"}`, `{"type":["string","null"]}`, `{"const":{"a":[1,2.50]}}`,
		`{"enum":["red","green"]}`, `{"enum":[1,"a",null,5],"type":"integer","minimum":2}`,
		`{"type":"integer","minimum":9007199254740993,"maximum":9007199254740994}`,
		`{"type":"integer","exclusiveMinimum":-3,"exclusiveMaximum":-1}`,
		`{"type":"number","minimum":0.1,"maximum":0.2}`,
		`{"type":"number","exclusiveMinimum":1,"maximum":1.01}`,
		`{"type":"number","multipleOf":0.1,"minimum":7}`, `{"type":"integer","multipleOf":2.5,"maximum":-1}`,
		`{"type":"string","minLength":200}`, `{"type":"string","maxLength":0}`,
		`{"type":"string","minLength":3,"maxLength":3}`,
		`{"type":"string","pattern":"^[A-Z]{3}-\\d+$","minLength":20}`, `{"type":"string","pattern":"b"}`,
		`{"type":"string","pattern":"^(?:a|bc)*[^x-z]?\\s$"}`,
		`{"type":"array","items":{"type":"boolean"},"minItems":3,"maxItems":3}`,
		`{"type":"array","items":{"enum":[1,2,3]},"uniqueItems":true,"minItems":3}`,
		`{"type":"array","prefixItems":[{"type":"string"},{"type":"integer"}],"items":false,"minItems":2}`,
		`{"type":"array","maxItems":0,"items":{"type":"string"}}`,
		`{"type":"object","additionalProperties":{"type":"integer"}}`,
		`{"type":"object","additionalProperties":{"type":"integer"},"minProperties":3}`,
		`{"type":"object","properties":{"a":{"type":"string"}},"required":["a","b"]}`,
		`{"type":"object","properties":{"a":false,"b":{"type":"string"}},"additionalProperties":false}`,
		`{"type":"object","properties":{"a":{},"b":{},"c":{}},"maxProperties":1,"required":["c"]}`,
		`{"type":"object","patternProperties":{"^n":{"type":"integer"}},"properties":{"n1":{"minimum":4}},
			"required":["n1"]}`,
		`{"anyOf":[{"type":"string","maxLength":5},{"type":"null"}]}`,
		`{"oneOf":[{"type":"integer","multipleOf":3},{"type":"integer","multipleOf":5}]}`,
		`{"oneOf":[{"properties":{"kind":{"const":"a"},"x":{"type":"integer"}},"required":["kind"]},
			{"properties":{"kind":{"const":"b"},"y":{"type":"string"}},"required":["kind"]}],
			"type":"object"}`,
		`{"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},
			{"properties":{"a":{"minimum":50}},"type":"object"}]}`,
		`{"type":"integer","minimum":0,"maximum":3,"not":{"enum":[0,1,2]}}`,
		`{"type":"object","properties":{"k":{"enum":["a","b"]},"v":{}},"required":["k","v"],
			"if":{"properties":{"k":{"const":"a"}}},"then":{"properties":{"v":{"type":"integer"}}},
			"else":{"properties":{"v":{"type":"boolean"}}}}`,
		`{"$defs":{"City":{"type":"string","minLength":1},"a/b":{"$ref":"#/$defs/City"}},
			"properties":{"city":{"$ref":"#/$defs/a~1b","description":"where"}},"required":["city"],
			"type":"object"}`,
		fmt.Sprintf(tree, 0),
		`{"$defs":{"E":{"anyOf":[{"type":"number"},{"type":"object","properties":{"l":{"$ref":"#/$defs/E"},
			"r":{"$ref":"#/$defs/E"}},"required":["l","r"]}]}},"$ref":"#/$defs/E"}`,
	} {
		for seed := range uint64(20) {
			value, err := write(t, schema, seed)
			if !assert.NoError(t, err, schema) {
				break
			}
			assert.NoError(t, violation(t, schema, value), "%s\n%s", schema, value)
			again, err := write(t, schema, seed)
			require.NoError(t, err)
			assert.Equal(t, value, again, "the same seed writes the same value")
		}
	}
	value, err := write(t, `{"properties":{"z":{"const":1},"a":{"const":"x"},"m":{"const":[true,null]}}}`, 1)
	require.NoError(t, err)
	inOrder := []byte(`{"z": 1, "a": "x", "m": [true, null]}`)
	assert.Equal(t, inOrder, value)
}

// TestFormats: every format that is written is one that the library accepts.
func TestFormats(t *testing.T) {
	for name := range formats {
		schema := fmt.Sprintf(`{"type":"string","format":%q}`, name)
		for seed := range uint64(50) {
			value, err := write(t, schema, seed)
			require.NoError(t, err)
			assert.NoError(t, violation(t, schema, value), "%s: %s", name, value)
		}
	}
}

// TestRefusesWhatItCannotWrite: the fault names what a client has to change.
func TestRefusesWhatItCannotWrite(t *testing.T) {
	for schema, want := range map[string]string{
		`{"type":"array","contains":{}}`:                   `the keyword "contains"`,
		`{"$ref":"https://example.com/x"}`:                 "want a reference inside the schema",
		`{"$ref":"#/$defs/none"}`:                          "leads nowhere",
		`{"$ref":"#"}`:                                     "too many steps",
		fmt.Sprintf(tree, 1):                               "nested deeper than 24 levels",
		`{"type":"string","pattern":"(?=a)b"}`:             "is not understood",
		`{"type":"string","pattern":"a","maxLength":0}`:    "no text was found",
		`{"type":"string","minLength":1000000}`:            "larger than 65536 bytes",
		`{"type":"array","items":{},"minItems":1000000}`:   "larger than 65536 bytes",
		`{"type":"integer","minimum":3,"maximum":2}`:       "no value was found",
		`{"type":"wrong"}`:                                 "no value was found",
		`{"enum":[]}`:                                      "no value was found",
		`false`:                                            "no value was found",
		`17`:                                               "a schema is an object",
		`{"anyOf":17}`:                                     "no value was found",
		`{"enum":[` + strings.Repeat("1,", 30_000) + `1]}`: "more than 20000 values",
		strings.Repeat(`{"not":`, 70) + `{}` + strings.Repeat("}", 70): "deeper than 64 levels",
		`{"minimum":1e999}`:    "is too large",
		`{"type":"string"} {}`: "text behind the end",
		`{"type":`:             "is not JSON",
		`{"description":"` + strings.Repeat("x", 1<<20) + `"}`:            "the limit is 1048576",
		`{"type":"string","pattern":"` + strings.Repeat("x", 1001) + `"}`: "the limit is 1000",
	} {
		_, err := write(t, schema, 1)
		var fault ValueError
		require.ErrorAs(t, err, &fault, "%.100s", schema)
		assert.Contains(t, err.Error(), want, "%.100s", schema)
	}
	s, err := ParseObject([]byte(`{"type":"string"}`))
	require.NoError(t, err)
	_, err = s.Write(1)
	assert.Error(t, err, "arguments are objects")
}

// TestParseObject: arguments are objects also where the schema says nothing.
func TestParseObject(t *testing.T) {
	s, err := ParseObject([]byte(`{}`))
	require.NoError(t, err)
	value, err := s.Write(3)
	require.NoError(t, err)
	assert.Equal(t, "{}", string(value))
}

// TestFromPattern: the whole text matches.
func TestFromPattern(t *testing.T) {
	for _, pattern := range []string{`\d{3}-\d{4}`, `(yes|no)`, `[^a]`, `\p{Greek}+`, `a|b|`, `^x$`} {
		for seed := range uint64(20) {
			out, err := FromPattern(pattern, seed)
			require.NoError(t, err)
			assert.Regexp(t, `^(?:`+pattern+`)$`, out)
		}
	}
	_, err := FromPattern(`(`, 1)
	require.Error(t, err)
	_, err = FromPattern(strings.Repeat(`(`, 300)+`a`+strings.Repeat(`{1,3})`, 300), 1)
	require.Error(t, err)
}

// drawSchema draws a schema of the keywords that are written and checked.
func drawSchema(t *rapid.T, depth int) map[string]any {
	out := map[string]any{}
	small := rapid.IntRange(0, 4)
	kinds := []string{"string", "integer", "number", "boolean", "enum", "null"}
	if depth < 3 {
		kinds = append(kinds, "object", "array", "anyOf", "oneOf", "allOf", "not", "if", "$ref")
	}
	sub := func() map[string]any { return drawSchema(t, depth+1) }
	kind := rapid.SampledFrom(kinds).Draw(t, "kind")
	switch kind {
	case "$ref":
		out["$ref"] = "#/$defs/" + rapid.SampledFrom([]string{"a", "b"}).Draw(t, "ref")
	case "enum":
		out[kind] = []any{small.Draw(t, "one"), "x", nil}
	case "anyOf", "oneOf", "allOf":
		out[kind] = []any{sub(), sub()}
	case "not":
		out[kind] = sub()
	case "if":
		out["if"], out["then"], out["else"] = sub(), sub(), sub()
	default:
		out["type"] = kind
	}
	set := func(name string, v any) {
		if rapid.Bool().Draw(t, name) {
			out[name] = v
		}
	}
	switch kind {
	case "string":
		set("minLength", small.Draw(t, "least"))
		set("maxLength", 4+small.Draw(t, "most"))
		set("pattern", rapid.SampledFrom([]string{`^a*$`, `\d`, `^[a-f]+b?`}).Draw(t, "pattern"))
	case "integer", "number":
		set("minimum", small.Draw(t, "least"))
		set("exclusiveMaximum", small.Draw(t, "most"))
		set("multipleOf", rapid.SampledFrom([]float64{0.5, 2, 1.5}).Draw(t, "of"))
	case "object":
		set("properties", map[string]any{"p": sub(), "q": sub()})
		set("required", []any{"p"})
		set("additionalProperties", rapid.SampledFrom([]any{true, false, map[string]any{"type": "null"}}).
			Draw(t, "others"))
		set("minProperties", small.Draw(t, "least"))
		set("patternProperties", map[string]any{"^p": sub()})
	case "array":
		set("items", sub())
		set("prefixItems", []any{sub()})
		set("minItems", small.Draw(t, "least"))
		set("maxItems", small.Draw(t, "most"))
		set("uniqueItems", true)
	}
	if depth == 0 {
		out["$defs"] = map[string]any{"a": sub(), "b": sub()}
	}
	return out
}

// TestEveryWrittenValueIsValid: for schemas of any mixture, a value that is written is one that the library
// accepts. That many are refused would be a fault as well.
func TestEveryWrittenValueIsValid(t *testing.T) {
	written, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		text, err := json.Marshal(drawSchema(t, 0))
		require.NoError(t, err)
		by, err := compiled(string(text))
		if err != nil {
			t.Skip(err) // references that lead to themselves
		}
		s, err := Parse(text)
		require.NoError(t, err)
		value, err := s.Write(rapid.Uint64().Draw(t, "seed"))
		if err != nil {
			refused++
			return
		}
		written++
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(value))
		require.NoError(t, err)
		require.NoError(t, by.Validate(v), "%s\n%s", text, value)
	})
	t.Logf("%d written, %d refused", written, refused)
	assert.Less(t, refused, 2*(written+10))
}

// FuzzWrite: no schema makes the writer panic, hang, or write what is not JSON.
func FuzzWrite(f *testing.F) {
	f.Add([]byte(fmt.Sprintf(tree, 0)), uint64(1))
	f.Add([]byte(`{"anyOf":[{"$ref":"#"},{"type":"string","pattern":"a{2,5}[^b]"}]}`), uint64(2))
	f.Add([]byte(`{"type":"number","minimum":1e-300,"multipleOf":1e-305}`), uint64(3))
	f.Add([]byte(`{"items":[{}],"additionalItems":{"const":0},"uniqueItems":true,"minItems":9}`), uint64(4))
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		value, err := s.Write(seed)
		if err != nil {
			return
		}
		require.True(t, json.Valid(value), "%s", value)
		require.LessOrEqual(t, len(value), 8*maxTextBytes)
	})
}

// FuzzFromPattern: no pattern makes the writer panic or hang.
func FuzzFromPattern(f *testing.F) {
	f.Add(`^(a|b)*c{2,4}\b$`, uint64(1))
	f.Add(`((x{100}){10}|[^\x00-\x{10FFFF}])`, uint64(2))
	f.Fuzz(func(t *testing.T, pattern string, seed uint64) {
		out, err := FromPattern(pattern, seed)
		require.True(t, err != nil || len(out) <= maxTextBytes+4)
	})
}
