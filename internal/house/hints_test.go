package house_test

import (
	"go/ast"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestErrorsAtTheEdgeHaveHints: an error of the commands, of a node's configuration and of the admin API says
// what to do next. One that is kept in a variable gets its hint later.
func TestErrorsAtTheEdgeHaveHints(t *testing.T) {
	for _, s := range tree(t) {
		if !strings.HasPrefix(s.path, "cmd/dpserve/") && !strings.HasPrefix(s.path, "internal/server/") &&
			!strings.HasPrefix(s.path, "internal/api/") {
			continue
		}
		var parents []ast.Node
		ast.Inspect(s.file, func(n ast.Node) bool {
			if n == nil {
				parents = parents[:len(parents)-1]
				return true
			}
			if len(parents) > 0 && isCallOf(n, "problem", "New") {
				switch parents[len(parents)-1].(type) {
				case *ast.SelectorExpr, *ast.AssignStmt:
				default:
					t.Errorf("%san error has no hint", s.at(n))
				}
			}
			parents = append(parents, n)
			return true
		})
		assert.Empty(t, parents)
	}
}

func isCallOf(n ast.Node, pkg, name string) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && x.Name == pkg
}
