package app

import (
	"cmp"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	referencePath = "../../docs/app-yaml.md"
	schemaPath    = "../../docs/app.schema.json"
)

// comments returns the comment of each field of the schema, by type and field.
func comments(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	files := token.NewFileSet()
	read := func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := spec.Type.(*ast.StructType); ok {
			for _, f := range s.Fields.List {
				for _, name := range f.Names {
					out[spec.Name.Name+"."+name.Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				}
			}
		}
		return true
	}
	for _, name := range []string{"application.go", "rules.go", "rules_pools.go"} {
		file, err := parser.ParseFile(files, name, nil, parser.ParseComments)
		require.NoError(t, err)
		ast.Inspect(file, read)
	}
	return out
}

// schemaKey is a key with the type and the comment of its field.
type schemaKey struct {
	key
	of  reflect.Type // without pointers
	doc string
}

// schemaKeys lists the supported keys of a struct.
func schemaKeys(t *testing.T, of reflect.Type) []schemaKey {
	t.Helper()
	docs := comments(t)
	var out []schemaKey
	for _, k := range keysOf(of) {
		if k.isLater {
			continue
		}
		around := of
		for _, i := range k.field[:len(k.field)-1] {
			around = around.Field(i).Type
		}
		f := of.FieldByIndex(k.field)
		s := schemaKey{key: k, of: f.Type, doc: docs[around.Name()+"."+f.Name]}
		if s.of.Kind() == reflect.Pointer {
			s.of = s.of.Elem()
		}
		switch s.of.Kind() {
		case reflect.Int, reflect.Float64:
			require.NotNil(t, k.number, "%s.%s has no range", around.Name(), f.Name)
		case reflect.Map:
			require.True(t, k.format != nil || s.of.Elem().Kind() == reflect.Interface, f.Name)
		default:
		}
		require.NotEmpty(t, s.doc, "%s.%s has no comment for docs/app-yaml.md", around.Name(), f.Name)
		out = append(out, s)
	}
	return out
}

// TestReference keeps the tables of docs/app-yaml.md, each between two markers.
func TestReference(t *testing.T) {
	text, err := os.ReadFile(referencePath)
	require.NoError(t, err)
	sections := map[string]reflect.Type{
		"application": reflect.TypeFor[draft](), "model": reflect.TypeFor[Model](),
		"engine": reflect.TypeFor[Engine](), "ranks": reflect.TypeFor[AttachRank](),
		"services":      reflect.TypeFor[AttachService](),
		"data_parallel": reflect.TypeFor[DataParallel](), "resources": reflect.TypeFor[Resources](),
		"routing": reflect.TypeFor[Routing](), "sides": reflect.TypeFor[side](),
		"disaggregation": reflect.TypeFor[Disaggregation](),
	}
	marked := regexp.MustCompile(`(?s)(<!-- keys of (\w+) -->\n).*?(<!-- end -->\n)`)
	seen := 0
	want := marked.ReplaceAllStringFunc(string(text), func(old string) string {
		m := marked.FindStringSubmatch(old)
		require.Contains(t, sections, m[2])
		seen++
		rows := tableRows(t, sections[m[2]], "", sections)
		return m[1] + "| Key | Value | Default | Meaning |\n|---|---|---|---|\n" + rows + m[3]
	})
	assert.Len(t, sections, seen, "a table is missing")
	keepFile(t, referencePath, want)
}

// tableRows lists the keys of a struct. Structs in it that have no table of their own follow with their path.
func tableRows(t *testing.T, of reflect.Type, path string, sections map[string]reflect.Type) string {
	t.Helper()
	var b strings.Builder
	for _, k := range schemaKeys(t, of) {
		doc, inner, at := k.doc, k.of, path+k.name
		if inner.Kind() == reflect.Slice {
			inner, at = inner.Elem(), at+"[]"
		}
		isStruct := inner.Kind() == reflect.Struct && inner != reflect.TypeFor[Arg]()
		name := sectionOf(sections, inner)
		own := isStruct && name != ""
		if own {
			anchor := map[string]string{
				"ranks": "attached-ranks", "services": "attached-services", "sides": "prefill-and-decode",
			}[name]
			doc += ", [see below](#" + cmp.Or(anchor, name) + ")"
		}
		b.WriteString(
			"| `" + path + k.name + "` | " + takenText(k) + " | " + standardText(k, isStruct) + " | " +
				"" + doc + " |\n",
		)
		if isStruct && !own {
			b.WriteString(tableRows(t, inner, at+".", sections))
		}
	}
	return b.String()
}

// sectionOf returns the section that has the table of a type, "" if there is none.
func sectionOf(sections map[string]reflect.Type, of reflect.Type) string {
	for name, t := range sections {
		if t == of {
			return name
		}
	}
	return ""
}

// takenText says what a key takes.
func takenText(k schemaKey) string {
	text := k.wanted
	switch {
	case k.words != nil:
		text = "`" + strings.Join(k.words, "`, `") + "`"
	case k.format != nil:
		text = k.format.wanted
	}
	switch k.of.Kind() {
	case reflect.Struct, reflect.Map:
		if short := shortFormOf(k.of); short.isAccepted {
			return "map, or its `" + short.key + "`"
		}
		return "map"
	case reflect.Slice:
		if k.of == reflect.TypeFor[Args]() {
			return "map"
		}
		if short := shortFormOf(k.of.Elem()); short.isAccepted {
			return "list of maps, or of each one's `" + short.key + "`"
		}
		return "list"
	default:
		if text == "" {
			return "text"
		}
		return text
	}
}

func standardText(k schemaKey, isStruct bool) string {
	switch {
	case k.need != "":
		return "required"
	case k.standard != "":
		return "`" + k.standard + "`"
	case k.unset != "":
		return k.unset
	case isStruct:
		return ""
	default:
		return "none"
	}
}

// keepFile compares a generated file, or writes it with DPSERVE_UPDATE=1.
func keepFile(t *testing.T, path, want string) {
	t.Helper()
	if os.Getenv("DPSERVE_UPDATE") != "" {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, want, string(got),
		"the schema has changed; look at the difference, then run this test with DPSERVE_UPDATE=1")
}

// TestSchema keeps docs/app.schema.json.
func TestSchema(t *testing.T) {
	text, err := json.MarshalIndent(fileSchema(t), "", "  ")
	require.NoError(t, err)
	keepFile(t, schemaPath, string(text)+"\n")
}

type object = map[string]any

func fileSchema(t *testing.T) object {
	t.Helper()
	application := structSchema(t, reflect.TypeFor[draft](), false)
	applications := object{"type": "array", "minItems": 1.0, "items": application}
	return object{
		"$schema": "http://json-schema.org/draft-07/schema#", "title": "dpserve application file",
		"type": "object", "additionalProperties": false, "required": []any{"applications"},
		"properties":        object{"applications": applications},
		"patternProperties": object{"^x-": object{}},
	}
}

// structSchema allows a map with the keys of a struct. No key of an overlay is required: its application has
// it.
func structSchema(t *testing.T, of reflect.Type, isOverlay bool) object {
	t.Helper()
	properties, required := object{}, []any{}
	for _, k := range schemaKeys(t, of) {
		s := valueSchema(t, k, k.of, isOverlay || of == reflect.TypeFor[side]())
		s["description"] = k.doc
		if k.need != "" && !isOverlay {
			required = append(required, k.name)
		} else { // an empty value counts as not written
			s["type"] = append(slices.Clone(types(s)), "null")
		}
		properties[k.name] = s
	}
	out := object{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		out["required"] = required
	}
	return out
}

// types returns the types that a schema allows.
func types(s object) []any {
	if list, ok := s["type"].([]any); ok {
		return list
	}
	return []any{s["type"]}
}

func valueSchema(t *testing.T, k schemaKey, of reflect.Type, isOverlay bool) object {
	t.Helper()
	s := object{}
	switch {
	case of == reflect.TypeFor[Args](), of == reflect.TypeFor[map[string]any]():
		return object{"type": "object"}
	case of.Kind() == reflect.Map:
		return object{"type": "object", "additionalProperties": textSchema(nil)}
	case of.Kind() == reflect.Struct && shortFormOf(of).isAccepted:
		s = structSchema(t, of, isOverlay)
		s["type"] = []any{"object", "string"}
		return s
	case of.Kind() == reflect.Struct:
		return structSchema(t, of, isOverlay)
	case of.Kind() == reflect.Bool:
		return object{"type": "boolean"}
	case of.Kind() == reflect.Slice:
		return object{"type": "array", "items": valueSchema(t, k, of.Elem(), isOverlay)}
	case k.words != nil:
		s["type"], s["enum"] = "string", []any{}
		for _, w := range k.words {
			s["enum"] = append(s["enum"].([]any), w)
		}
		if k.need == "" {
			s["enum"] = append(s["enum"].([]any), nil)
		}
	case k.number != nil:
		s["type"], s["minimum"], s["maximum"] = "number", k.number.low, k.number.high
		if k.number.above {
			delete(s, "minimum")
			s["exclusiveMinimum"] = k.number.low
		}
		if of.Kind() == reflect.Int {
			s["type"] = "integer"
		}
	default:
		s = textSchema(k.format)
	}
	if k.standard != "" {
		s["default"] = k.standard
		if of.Kind() == reflect.Bool {
			s["default"] = k.standard == "true"
		}
		if k.number != nil {
			var n float64
			require.NoError(t, json.Unmarshal([]byte(k.standard), &n))
			s["default"] = n
		}
	}
	return s
}

// textSchema allows every scalar, as the reader does.
func textSchema(f *format) object {
	s := object{"type": []any{"string", "number", "boolean"}}
	if f != nil && !strings.Contains(f.pattern.String(), `\p`) && f != formats["word"] { // Go's own syntax
		s["pattern"] = f.pattern.String()
	}
	return s
}

// CC8: the schema takes the files that the reader accepts, and refuses what the reader refuses.
func TestSchemaAcceptsExamples(t *testing.T) {
	schema := fileSchema(t)
	files, err := filepath.Glob("../../examples/*/app.yaml")
	require.NoError(t, err)
	texts := []string{string(Sample()), "x-any: [1]\n" + one("num_replicas: 1"), shortText}
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		texts = append(texts, string(text))
	}
	for _, text := range texts {
		assert.Empty(t, violations(schema, decoded(t, text), "file"), text)
	}
	for text, want := range map[string]string{
		one("num_replica: 4"):                       "num_replica is unknown",
		one("num_replicas: 0"):                      "num_replicas is too small",
		one("num_replicas: '4'"):                    "num_replicas has another type",
		one("routing: {policy: mexx}"):              "policy is another word",
		one("route_prefix: a/"):                     "route_prefix has another form",
		one("health_check_period_s: 0"):             "health_check_period_s is too small",
		"applications: [{name: a}]":                 "engine is missing",
		one("resources: {labels: [a]}"):             "labels has another type",
		one("graceful_shutdown_timeout_s: 9999999"): "graceful_shutdown_timeout_s is too large",
	} {
		assert.Contains(t, strings.Join(violations(schema, decoded(t, text), "file"), "\n"), want, text)
		assert.NotEmpty(t, faultsOf(t, text))
	}
}

func decoded(t *testing.T, text string) any {
	t.Helper()
	asJSON, err := yaml.YAMLToJSON([]byte(text))
	require.NoError(t, err)
	var v any
	require.NoError(t, json.Unmarshal(asJSON, &v))
	return v
}

// violations checks a value with the parts of JSON Schema that the schema uses.
func violations(schema object, v any, name string) []string {
	var out []string
	kind := map[reflect.Kind]string{
		reflect.Map: "object", reflect.Slice: "array", reflect.String: "string", reflect.Float64: "number",
		reflect.Bool: "boolean", reflect.Invalid: "null",
	}[reflect.ValueOf(v).Kind()]
	if n, ok := v.(float64); ok && n == float64(int64(n)) && slices.Contains(types(schema), any("integer")) {
		kind = "integer"
	}
	if !slices.Contains(types(schema), any(kind)) {
		return []string{name + " has another type"}
	}
	if words, ok := schema["enum"].([]any); ok && !slices.Contains(words, v) {
		out = append(out, name+" is another word")
	}
	switch v := v.(type) {
	case string:
		if p, ok := schema["pattern"].(string); ok && !regexp.MustCompile(p).MatchString(v) {
			out = append(out, name+" has another form")
		}
	case float64:
		low, hasLow := schema["minimum"].(float64)
		above, hasAbove := schema["exclusiveMinimum"].(float64)
		if hasLow && v < low || hasAbove && v <= above {
			out = append(out, name+" is too small")
		}
		if high, ok := schema["maximum"].(float64); ok && v > high {
			out = append(out, name+" is too large")
		}
	case []any:
		for _, item := range v {
			out = append(out, violations(schema["items"].(object), item, name+"[]")...)
		}
	case map[string]any:
		known, _ := schema["properties"].(object)
		_, extensible := schema["patternProperties"]
		for key, item := range v {
			if extensible && strings.HasPrefix(key, "x-") {
				continue
			}
			if s, ok := known[key].(object); ok {
				out = append(out, violations(s, item, key)...)
			} else if schema["additionalProperties"] == false {
				out = append(out, key+" is unknown")
			}
		}
		required, _ := schema["required"].([]any)
		for _, key := range required {
			if _, ok := v[key.(string)]; !ok {
				out = append(out, key.(string)+" is missing")
			}
		}
	}
	return out
}
