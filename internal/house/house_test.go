package house_test

import (
	"fmt"
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// source is one Go file that can be linked into the product, so no test.
type source struct {
	path string // slash separated, relative to the module
	file *ast.File
	fset *token.FileSet
}

func (s source) folder() string { return path.Dir(s.path) }

// at returns "file:line: ", as compilers write it.
func (s source) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d: ", s.path, s.fset.Position(n.Pos()).Line)
}

func (s source) imports(yield func(*ast.ImportSpec, string) bool) {
	for _, spec := range s.file.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err == nil && !yield(spec, name) {
			return
		}
	}
}

// isSkipped says that a folder holds no Go code of ours.
func isSkipped(name string) bool {
	isHidden := name != "." && name != ".." && strings.HasPrefix(name, ".")
	return isHidden || name == "testdata" || name == "vendor"
}

// tree returns every Go file of the repository, without tests. They are parsed once per test run.
func tree(t *testing.T) []source {
	t.Helper()
	out, err := parseTree()
	require.NoError(t, err)
	require.NotEmpty(t, out, "no source found: is the test run from its own folder?")
	return out
}

var parseTree = sync.OnceValues(func() (out []source, err error) {
	root := filepath.Join("..", "..")
	err = filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if file != root && isSkipped(d.Name()) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return nil
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			return err
		}
		if isLinked(parsed) {
			out = append(out, source{path: filepath.ToSlash(rel), file: parsed, fset: fset})
		}
		return nil
	})
	return out, err
})

// isLinked says whether a file can be part of a binary: files with the build tags "tools" and "ignore" never
// are.
func isLinked(file *ast.File) bool {
	for _, group := range file.Comments {
		if group.Pos() > file.Package {
			break
		}
		for _, c := range group.List {
			if expr, err := constraint.Parse(c.Text); err == nil {
				return expr.Eval(func(tag string) bool { return tag != "tools" && tag != "ignore" })
			}
		}
	}
	return true
}

// TestLayers: an area imports only areas of lower layers. Areas of one layer use the messages and interfaces
// of actors/msg, and internal/server connects them.
func TestLayers(t *testing.T) {
	for _, s := range tree(t) {
		own, ok := areaOf(s.folder())
		if !assert.True(t, ok, "%s: folder %s is in no area; add a row to areas()", s.path, s.folder()) {
			continue
		}
		for spec, imported := range s.imports {
			if fault := layerFault(own, imported); fault != "" {
				t.Error(s.at(spec) + fault)
			}
		}
	}
}

// layerFault says why an area may not import a path; "" if it may.
func layerFault(own area, imported string) string {
	if matchesAny(imported, own.deny) {
		return fmt.Sprintf("%s must not import %s", own.name, imported)
	}
	folder, ours := strings.CutPrefix(imported, module)
	if !ours {
		if own.isPure() && strings.Contains(imported, ".") && !matchesAny(imported, pureLibraries()) {
			return fmt.Sprintf("pure %s must not link %s", own.name, imported)
		}
		return ""
	}
	other, ok := areaOf(folder)
	switch {
	case !ok:
		return fmt.Sprintf("imports %s, which is in no area", imported)
	case other.name == own.name, slices.Contains(own.also, other.name):
		return ""
	case own.isPure() && other.name == "internal" && !slices.Contains(pureHelpers(), folder):
		return fmt.Sprintf("pure %s must not import %s", own.name, folder)
	case other.layer >= own.layer:
		return fmt.Sprintf("%s (layer %d) must not import %s (layer %d)",
			own.name, own.layer, other.name, other.layer)
	}
	return ""
}

// TestTestLibraries: no test library is linked into the binary.
func TestTestLibraries(t *testing.T) {
	for _, s := range tree(t) {
		if isWithin(s.folder(), "test") {
			continue
		}
		for spec, imported := range s.imports {
			isTestLibrary := matchesAny(imported, testLibraries())
			assert.False(t, isTestLibrary, "%simports %s, a test library", s.at(spec), imported)
		}
	}
}

// impureCalls lists the functions that a pure area must not call: it gets the time as an argument and returns
// results instead of printing them.
func impureCalls() map[string][]string {
	return map[string][]string{
		"time": {"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"},
		"fmt":  {"Print", "Printf", "Println", "Scan", "Scanf", "Scanln"},
	}
}

// TestPureAreas: a pure area starts no goroutine, reads no clock and prints nothing.
func TestPureAreas(t *testing.T) {
	for _, s := range tree(t) {
		own, _ := areaOf(s.folder())
		if !own.isPure() {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if fault := impurity(n); fault != "" {
				t.Errorf("%spure %s %s", s.at(n), own.name, fault)
			}
			return true
		})
	}
}

// impurity says what a node of a pure area does wrong; "" if nothing. Calls of the global random source look
// like calls of a generator named rand here; forbidigo, which knows types, finds them.
func impurity(n ast.Node) string {
	switch n := n.(type) {
	case *ast.GoStmt:
		return "starts a goroutine"
	case *ast.FuncDecl:
		if n.Recv == nil && n.Name.Name == "init" {
			return "has an init function"
		}
	case *ast.CallExpr:
		sel, ok := n.Fun.(*ast.SelectorExpr)
		if !ok {
			return ""
		}
		pkg, ok := sel.X.(*ast.Ident)
		if ok && slices.Contains(impureCalls()[pkg.Name], sel.Sel.Name) {
			return "calls " + pkg.Name + "." + sel.Sel.Name
		}
	}
	return ""
}

// TestLayerFault: each kind of fault is found, and no allowed import is reported.
func TestLayerFault(t *testing.T) {
	cases := []struct {
		folder, imported string
		fault            string
	}{
		{"routing", module + "internal/steptime", ""},
		{"routing", module + "internal/problem", ""},
		{"routing", "math/rand/v2", ""},
		{"routing", "net/netip", ""},
		{"routing", "net/http", "routing must not import net/http"},
		{"routing", "os", "routing must not import os"},
		{"routing", module + "placement", "routing (layer 0) must not import placement (layer 0)"},
		{"routing", module + "internal/inbox", "pure routing must not import internal/inbox"},
		{
			"internal/state", "github.com/hashicorp/raft",
			"internal/state must not import github.com/hashicorp/raft",
		},
		{
			"internal/state", "github.com/tidwall/gjson",
			"pure internal/state must not link github.com/tidwall/gjson",
		},
		{"internal/engine/sim", module + "internal/engine/openai", ""},
		{
			"internal/engine/sim", module + "actors/msg",
			"internal/engine (layer 1) must not import actors/msg (layer 1)",
		},
		{
			"actors/node", module + "actors/dpserver",
			"actors/node (layer 2) must not import actors/dpserver (layer 2)",
		},
		{"actors/node", module + "actors/msg", ""},
		{"actors/node", gin + "gin", "actors/node must not import github.com/gin-gonic/gin"},
		{"actors/ingress", gin + "gin", ""},
		{
			"actors/ingress", "github.com/hashicorp/raft-wal",
			"actors/ingress must not import github.com/hashicorp/raft-wal",
		},
		{"cmd/dpserve", module + "internal/server", ""},
		{
			"internal/server", module + "cmd/dpserve",
			"internal/server (layer 3) must not import cmd/dpserve (layer 3)",
		},
		{"internal/api", module + "nowhere", "imports " + module + "nowhere, which is in no area"},
	}
	for _, c := range cases {
		own, ok := areaOf(c.folder)
		require.True(t, ok, c.folder)
		assert.Equal(t, c.fault, layerFault(own, c.imported), "%s imports %s", c.folder, c.imported)
	}
	_, ok := areaOf("utils")
	assert.False(t, ok, "an unknown folder has no area")
}

// TestImpurity checks a small file that does everything that a pure area must not do.
func TestImpurity(t *testing.T) {
	const text = `package p
func init() {}
func f(r *rand.Rand) {
	go f(nil)
	_ = time.Now()
	fmt.Println(r.IntN(3), time.Duration(1), fmt.Sprintf("x"))
}`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, parser.SkipObjectResolution)
	require.NoError(t, err)
	var faults []string
	ast.Inspect(file, func(n ast.Node) bool {
		if fault := impurity(n); fault != "" {
			faults = append(faults, fault)
		}
		return true
	})
	want := []string{"has an init function", "starts a goroutine", "calls time.Now", "calls fmt.Println"}
	assert.Equal(t, want, faults)
}

// TestNoPathsOfOneMachine: the tree must not name folders that exist on one machine only.
func TestNoPathsOfOneMachine(t *testing.T) {
	for _, s := range tree(t) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if ok && lit.Kind == token.STRING {
				path := strings.Split(strings.Trim(lit.Value, "\"`"), "/")
				homes := []string{"home", "root", "Users"}
				rooted := len(path) > 2 && path[0] == "" && slices.Contains(homes, path[1])
				assert.False(t, rooted, "%sholds %s", s.at(n), lit.Value)
			}
			return true
		})
	}
}
