package house_test

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	// rowNames is the beginning of a doc comment that names the rows of its test: "KV3, KV4: …".
	rowNames = regexp.MustCompile(`^([A-Z]{2}\d+[a-z]?(?:, [A-Z]{2}\d+[a-z]?)*): `)
	// rowOfTest is the row in the name of a test.
	rowOfTest = regexp.MustCompile(`^Test([A-Z]{2}\d+)`)
	rowParts  = regexp.MustCompile(`^([A-Z]+)(\d+)([a-z]?)$`)
)

// sections are the headings of test/acceptance.md, and the letters of their rows.
func sections() []struct{ name, rows string } {
	return []struct{ name, rows string }{
		{"Groups and ranks", "RG"},
		{"Placement", "PL"},
		{"Failures", "FS"},
		{"Members of a cluster", "MB"},
		{"Engines that outlive dpserve", "EN"},
		{"Engines are never lost without a reason", "HF"},
		{"Routing", "RT"},
		{"Routing by cost", "RA"},
		{"What ranks have cached", "KV"},
		{"The path of a request", "RP"},
		{"Relay", "RC"},
		{"Lockstep groups", "LG"},
		{"Prefill and decode", "PD"},
		{"Load", "SK"},
		{"State", "ST"},
		{"Overload", "OV"},
		{"Security", "SP"},
		{"Commands", "CC"},
	}
}

const pageHead = `# Acceptance

Which behaviour is claimed, and which tests show it; generated from their doc comments by
` + "`go test ./internal/house -write`" + `. [What no test shows](open.md) is listed apart.

Levels: **U** unit, property or law, **S** seeded simulation, **N** whole nodes with simulated engines in one
process, on fake time, **P** the real binary with a process per engine, on real sockets and files.
`

// shown is a test that shows a row.
type shown struct{ level, name, folder, text string }

// TestAcceptancePage: test/acceptance.md is what the tests say of themselves.
func TestAcceptancePage(t *testing.T) {
	rows := map[string][]shown{}
	for _, file := range texts(t) {
		if !strings.HasSuffix(file, "_test.go") {
			continue
		}
		name := filepath.Join("..", "..", filepath.FromSlash(file))
		parsed, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		for _, decl := range parsed.Decls {
			if d, ok := decl.(*ast.FuncDecl); ok && d.Recv == nil {
				ids, text := rowsOf(d)
				s := shown{level(path.Dir(file)), d.Name.Name, path.Dir(file), text}
				for _, id := range ids {
					rows[id] = append(rows[id], s)
				}
			}
		}
	}
	page := pageHead + tables(t, rows)
	file := filepath.Join("..", "..", "test", "acceptance.md")
	if *write {
		require.NoError(t, os.WriteFile(file, []byte(page), 0o600))
	}
	old, err := os.ReadFile(file)
	require.NoError(t, err)
	if string(old) != page {
		t.Error("test/acceptance.md is not what the tests say: go test ./internal/house -write")
	}
}

// rowsOf returns the rows that a test names, and the first sentence of what it says.
func rowsOf(d *ast.FuncDecl) (ids []string, text string) {
	text = strings.Join(strings.Fields(d.Doc.Text()), " ")
	if m := rowNames.FindStringSubmatch(text); m != nil {
		ids, text = strings.Split(m[1], ", "), text[len(m[0]):]
	}
	if m := rowOfTest.FindStringSubmatch(d.Name.Name); m != nil && !slices.Contains(ids, m[1]) {
		ids = append(ids, m[1])
	}
	text = strings.TrimPrefix(text, d.Name.Name+": ")
	if end := strings.Index(text, ". "); end >= 0 {
		text = text[:end]
	}
	if r, size := utf8.DecodeRuneInString(text); size > 0 && !strings.HasPrefix(text, d.Name.Name) {
		text = string(unicode.ToUpper(r)) + text[size:]
	}
	return ids, strings.TrimSuffix(text, ".")
}

// level is the kind of the tests of a folder.
func level(folder string) string {
	switch folder {
	case "test/system", "test/vllm", "test/gpu", "cmd/dpserve":
		return "P"
	case "test/inprocess":
		return "N"
	case "internal/simulate":
		return "S"
	default:
		return "U"
	}
}

// tables writes the rows, section by section.
func tables(t *testing.T, rows map[string][]shown) string {
	t.Helper()
	var out strings.Builder
	left := maps.Clone(rows)
	for _, s := range sections() {
		var ids []string
		for id := range rows {
			if strings.HasPrefix(id, s.rows) {
				ids = append(ids, id)
				delete(left, id)
			}
		}
		slices.SortFunc(ids, compareIDs)
		fmt.Fprintf(&out, "\n## %s\n\n| Row | Level | Behaviour and test |\n|---|---|---|\n", s.name)
		for _, id := range ids {
			levels, tests := map[string]bool{}, []string(nil)
			for _, s := range rows[id] {
				levels[s.level] = true
				text := strings.ReplaceAll(s.text, "|", `\|`)
				tests = append(tests, strings.TrimSpace(fmt.Sprintf("%s `%s` (%s)", text, s.name, s.folder)))
			}
			all := strings.Join(slices.Sorted(maps.Keys(levels)), ", ")
			fmt.Fprintf(&out, "| %s | %s | %s |\n", id, all, strings.Join(tests, "; "))
		}
	}
	assert.Empty(t, left, "rows of no section")
	return out.String()
}

// compareIDs orders rows by letters, number and letter behind it.
func compareIDs(a, b string) int {
	x, y := rowParts.FindStringSubmatch(a), rowParts.FindStringSubmatch(b)
	n, _ := strconv.Atoi(x[2])
	m, _ := strconv.Atoi(y[2])
	return cmp.Or(cmp.Compare(x[1], y[1]), cmp.Compare(n, m), cmp.Compare(x[3], y[3]))
}
