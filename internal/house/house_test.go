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
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// source is one Go file that is linked into the product: tests are not read.
type source struct {
	path string // slash separated, relative to the module
	file *ast.File
	fset *token.FileSet
}

func (s source) folder() string { return path.Dir(s.path) }

// at is "file:line: ", as compilers write it.
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

// skipped are folders that hold no Go code of ours.
func skipped(name string) bool {
	return name == "testdata" || name == "vendor" || name != "." && name != ".." && strings.HasPrefix(name, ".")
}

// tree reads every Go file of the repository but tests.
func tree(t *testing.T) []source {
	t.Helper()
	root := filepath.Join("..", "..")
	var out []source
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if file != root && skipped(d.Name()) {
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
		if linked(parsed) {
			out = append(out, source{path: filepath.ToSlash(rel), file: parsed, fset: fset})
		}
		return nil
	})
	require.NoError(t, err)
	require.NotEmpty(t, out, "no source found: is the test run from its own folder?")
	return out
}

// linked says whether a file can be part of a binary: files behind the tags "tools" and "ignore" never are.
func linked(file *ast.File) bool {
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

// TestFloors: a room imports only rooms below it; rooms of one floor meet through actors/msg, interfaces and wiring.
func TestFloors(t *testing.T) {
	for _, s := range tree(t) {
		own, ok := roomOf(s.folder())
		if !assert.True(t, ok, "%s: folder %s is in no room; add a row to the floor table", s.path, s.folder()) {
			continue
		}
		for spec, imported := range s.imports {
			if fault := floorFault(own, imported); fault != "" {
				t.Error(s.at(spec) + fault)
			}
		}
	}
}

// floorFault says why a room may not import a path, "" if it may.
func floorFault(own room, imported string) string {
	if matches(imported, own.deny) {
		return fmt.Sprintf("room %s must not import %s", own.name, imported)
	}
	folder, ours := strings.CutPrefix(imported, module)
	if !ours {
		if own.pure() && strings.Contains(imported, ".") && !matches(imported, pureLibraries()) {
			return fmt.Sprintf("pure room %s must not link %s", own.name, imported)
		}
		return ""
	}
	other, ok := roomOf(folder)
	switch {
	case !ok:
		return fmt.Sprintf("imports %s, which is in no room", imported)
	case other.name == own.name, slices.Contains(own.also, other.name):
		return ""
	case own.pure() && other.name == "internal" && folder != "internal/problem" && folder != "internal/nearest":
		return fmt.Sprintf("pure room %s must not import %s", own.name, folder)
	case other.floor >= own.floor:
		return fmt.Sprintf("room %s (floor %d) must not import %s (floor %d)", own.name, own.floor, other.name, other.floor)
	}
	return ""
}

// TestTestLibraries: what tests are made of is never linked into the binary.
func TestTestLibraries(t *testing.T) {
	for _, s := range tree(t) {
		if within(s.folder(), "test") {
			continue
		}
		for spec, imported := range s.imports {
			assert.False(t, matches(imported, testLibraries()), "%simports %s, a test library", s.at(spec), imported)
		}
	}
}

// clocks are functions a pure room must not call: what they give is an argument there, what they print a result.
func clocks() map[string][]string {
	return map[string][]string{
		"time": {"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"},
		"fmt":  {"Print", "Printf", "Println", "Scan", "Scanf", "Scanln"},
	}
}

// TestPureRooms: a pure room starts nothing, reads no clock and prints nothing.
func TestPureRooms(t *testing.T) {
	for _, s := range tree(t) {
		own, _ := roomOf(s.folder())
		if !own.pure() {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if fault := impure(n); fault != "" {
				t.Errorf("%spure room %s %s", s.at(n), own.name, fault)
			}
			return true
		})
	}
}

// impure says what a node of a pure room does wrong, "" if nothing. Calls of the global random source need types to tell them
// from those of a generator named rand; forbidigo finds them.
func impure(n ast.Node) string {
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
		if ok && slices.Contains(clocks()[pkg.Name], sel.Sel.Name) {
			return "calls " + pkg.Name + "." + sel.Sel.Name
		}
	}
	return ""
}

// TestFloorTable checks the checker: each kind of fault is found, and what is allowed is not.
func TestFloorTable(t *testing.T) {
	cases := []struct {
		folder, imported string
		fault            string
	}{
		{"routing", module + "steptime", ""},
		{"routing", module + "internal/problem", ""},
		{"routing", "math/rand/v2", ""},
		{"routing", "net/netip", ""},
		{"routing", "net/http", "room routing must not import net/http"},
		{"routing", "os", "room routing must not import os"},
		{"routing", module + "placement", "room routing (floor 0) must not import placement (floor 0)"},
		{"routing", module + "internal/inbox", "pure room routing must not import internal/inbox"},
		{"state", "github.com/hashicorp/raft", "room state must not import github.com/hashicorp/raft"},
		{"state", "github.com/tidwall/gjson", "pure room state must not link github.com/tidwall/gjson"},
		{"engine/sim", module + "engine/openai", ""},
		{"engine/sim", module + "actors/msg", "room engine (floor 1) must not import actors/msg (floor 1)"},
		{"actors/node", module + "actors/dpserver", "room actors/node (floor 2) must not import actors/dpserver (floor 2)"},
		{"actors/node", module + "actors/msg", ""},
		{"actors/node", gin + "gin", "room actors/node must not import github.com/gin-gonic/gin"},
		{"actors/ingress", gin + "gin", ""},
		{"actors/ingress", "github.com/hashicorp/raft-wal", "room actors/ingress must not import github.com/hashicorp/raft-wal"},
		{"cmd/dpserve", module + "wiring", ""},
		{"wiring", module + "cmd/dpserve", "room wiring (floor 3) must not import cmd/dpserve (floor 3)"},
		{"api", module + "nowhere", "imports " + module + "nowhere, which is in no room"},
	}
	for _, c := range cases {
		own, ok := roomOf(c.folder)
		require.True(t, ok, c.folder)
		assert.Equal(t, c.fault, floorFault(own, c.imported), "%s imports %s", c.folder, c.imported)
	}
	_, ok := roomOf("utils")
	assert.False(t, ok, "an unknown folder has no room")
}

// TestImpure checks the checker of pure rooms on a small file.
func TestImpure(t *testing.T) {
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
		if fault := impure(n); fault != "" {
			faults = append(faults, fault)
		}
		return true
	})
	assert.Equal(t, []string{"has an init function", "starts a goroutine", "calls time.Now", "calls fmt.Println"}, faults)
}

// TestNoPathsOfOneMachine: the tree must not name folders that exist on one machine only.
func TestNoPathsOfOneMachine(t *testing.T) {
	for _, s := range tree(t) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if ok && lit.Kind == token.STRING {
				path := strings.Split(strings.Trim(lit.Value, "\"`"), "/")
				rooted := len(path) > 2 && path[0] == "" && slices.Contains([]string{"home", "root", "Users"}, path[1])
				assert.False(t, rooted, "%sholds %s", s.at(n), lit.Value)
			}
			return true
		})
	}
}
