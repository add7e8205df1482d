package house_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	exportedName = regexp.MustCompile(`\b([a-z][a-z0-9]*)\.([A-Z][A-Za-z0-9]*)(?:\.([A-Z][A-Za-z0-9]*))?`)
	grepHint     = regexp.MustCompile("grep `([^`]+)`")
	folderName   = regexp.MustCompile("`((?:actors|internal|cmd|cluster|engine|routing|test)/[a-z0-9/]+)`")
	pathHere     = regexp.MustCompile(`(?:^|[\s"'(])(\./[a-z][a-z0-9/_.-]*[a-z0-9])`)
	pageLink     = regexp.MustCompile(`\]\(([^)#:]+\.md)?(#[^)]+)?\)`)
)

// TestArchitectureNamesWhatExists: the folders, exported names and search words of docs/architecture.md
// exist.
func TestArchitectureNamesWhatExists(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "architecture.md"))
	require.NoError(t, err)
	source, exported := "", map[string]bool{}
	for _, s := range tree(t) {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(s.path)))
		require.NoError(t, err)
		source += string(text)
		addExported(exported, s.file)
	}
	for _, name := range exportedName.FindAllStringSubmatch(string(page), -1) {
		of := name[1] + "." + name[2]
		exists := exported[of] && (name[3] == "" || exported[of+"."+name[3]])
		assert.True(t, exists, "docs/architecture.md names %s, which does not exist", name[0])
	}
	for _, hint := range grepHint.FindAllStringSubmatch(string(page), -1) {
		isThere := strings.Contains(source, hint[1])
		assert.True(t, isThere, "docs/architecture.md: grep %q finds nothing", hint[1])
	}
	for _, folder := range folderName.FindAllStringSubmatch(string(page), -1) {
		assert.DirExists(t, filepath.Join("..", "..", filepath.FromSlash(folder[1])), "of architecture.md")
	}
}

// TestScriptsNameWhatExists: the folders and files that .ci/run and the Makefile name exist.
func TestScriptsNameWhatExists(t *testing.T) {
	made := map[string]bool{"./bin": true, "./dist": true} // by make build and make release
	for _, script := range []string{".ci/run", "Makefile"} {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(script)))
		require.NoError(t, err)
		found := pathHere.FindAllStringSubmatch(string(text), -1)
		require.NotEmpty(t, found, script)
		for _, name := range found {
			_, err := os.Stat(filepath.Join("..", "..", filepath.FromSlash(name[1])))
			assert.True(t, err == nil || made[name[1]], "%s names %s, which does not exist", script, name[1])
		}
	}
}

// addExported adds the exported names of a file as package.Name and package.Type.Method.
func addExported(names map[string]bool, file *ast.File) {
	pkg := file.Name.Name + "."
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if of := receiver(d); of != "" {
				name = of + "." + name
			}
			names[pkg+name] = true
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					names[pkg+spec.Name.Name] = true
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						names[pkg+name.Name] = true
					}
				}
			}
		}
	}
}

// receiver is the name of a method's type, "" of a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	expr := d.Recv.List[0].Type
	for {
		switch e := expr.(type) {
		case *ast.StarExpr:
			expr = e.X
		case *ast.IndexExpr:
			expr = e.X
		case *ast.IndexListExpr:
			expr = e.X
		case *ast.Ident:
			return e.Name
		default:
			return ""
		}
	}
}

// TestAddExported checks the checker on a small file.
func TestAddExported(t *testing.T) {
	const text = `package p
type T struct{}
func (t *T) Do() {}
const C = 1
func F() {}`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, parser.SkipObjectResolution)
	require.NoError(t, err)
	names := map[string]bool{}
	addExported(names, file)
	assert.Equal(t, map[string]bool{"p.T": true, "p.T.Do": true, "p.C": true, "p.F": true}, names)
}

// TestGlossaryHasEveryColumn: each head of a column that a command prints is in docs/glossary.md.
func TestGlossaryHasEveryColumn(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "glossary.md"))
	require.NoError(t, err)
	words := strings.FieldsFunc(string(page), func(r rune) bool { return strings.ContainsRune(" ,|`\n", r) })
	found := 0
	for _, s := range tree(t) {
		if s.folder() != "cmd/dpserve" {
			continue
		}
		for _, head := range columnHeads(s.file) {
			found++
			assert.True(t, slices.Contains(words, head), "%s prints a column %s", s.path, head)
		}
	}
	assert.Greater(t, found, 40, "this test no longer finds the columns of the command line")
}

// columnHeads returns the words of the literals that a file gives to a table's field head.
func columnHeads(file *ast.File) []string {
	var out []string
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.KeyValueExpr:
			if key, ok := n.Key.(*ast.Ident); ok && key.Name == "head" {
				out = append(out, literals(n.Value)...)
			}
		case *ast.AssignStmt:
			if sel, ok := n.Lhs[0].(*ast.SelectorExpr); ok && sel.Sel.Name == "head" {
				out = append(out, literals(n.Rhs[0])...)
			}
		}
		return true
	})
	return out
}

// literals returns the string literals in capitals that are elements or arguments of an expression.
func literals(expr ast.Expr) []string {
	var list []ast.Expr
	switch e := expr.(type) {
	case *ast.CompositeLit:
		list = e.Elts
	case *ast.CallExpr:
		list = e.Args
	}
	var out []string
	for _, e := range list {
		if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if word := strings.Trim(lit.Value, "\""); word != "" && word == strings.ToUpper(word) {
				out = append(out, word)
			}
		}
	}
	return out
}

// TestLinks: a link between the documents leads to a page that exists, and to a heading of it.
func TestLinks(t *testing.T) {
	for _, file := range texts(t) {
		if path.Ext(file) != ".md" {
			continue
		}
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(file)))
		require.NoError(t, err)
		for _, link := range pageLink.FindAllStringSubmatch(string(text), -1) {
			page := file
			if link[1] != "" {
				page = path.Join(path.Dir(file), link[1])
			}
			target, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(page)))
			if assert.NoError(t, err, "%s: %s", file, link[0]) && link[2] != "" {
				assert.Contains(t, anchors(string(target)), link[2], "%s: %s", file, link[0])
			}
		}
	}
}

// anchors are the fragments by which a page's headings are linked: lower case, spaces as hyphens, no
// punctuation.
func anchors(page string) []string {
	var out []string
	for line := range strings.Lines(page) {
		head := strings.TrimLeft(line, "#")
		if len(head) == len(line) || !strings.HasPrefix(head, " ") {
			continue
		}
		var anchor strings.Builder
		anchor.WriteByte('#')
		for _, r := range strings.ToLower(strings.TrimSpace(head)) {
			switch {
			case r == ' ':
				anchor.WriteByte('-')
			case r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r > 127:
				anchor.WriteRune(r)
			}
		}
		out = append(out, anchor.String())
	}
	return out
}
