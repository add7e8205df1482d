package house_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A row of a table says with a comment which constants its quantities are, in the order of the row. So may a
// paragraph or an item of a list:
//
//	| probe; pause | 1 s; 100 ms | <!-- const: node.probe, node.pause/2 -->
//
// node is the last element of a package's path. node.Timers.Probe is the value that a method of Timers, or
// the function Timers, gives a field first. a == b says that both are this quantity.
var (
	constComment = regexp.MustCompile(`<!-- const: (.*?) -->`)
	quantity     = regexp.MustCompile(`(?:(\d[\d.]*) to )?(\d[\d.]*)\s` +
		`(ms|s|min|minutes|h|d|%|KiB|MiB|GiB)(?:\W|$)`)
)

// unitOf are the units of documents. A size is an untyped number of bytes in the code.
var unitOf = map[string]int64{
	"ms": int64(time.Millisecond), "s": int64(time.Second), "min": int64(time.Minute),
	"minutes": int64(time.Minute), "h": int64(time.Hour), "d": int64(24 * time.Hour),
	"%": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}

// TestTablesNameTheirConstants: each time in docs/internals.md#times is the value of the constants that its
// row names. So is each quantity of another table in which a row names constants, and of each paragraph that
// names some.
func TestTablesNameTheirConstants(t *testing.T) {
	all := declared(tree(t))
	compared := map[string]int{}
	for _, file := range texts(t) {
		if path.Ext(file) != ".md" {
			continue
		}
		page, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(file)))
		require.NoError(t, err)
		for _, block := range blocks(string(page)) {
			if !constComment.MatchString(strings.Join(block, "")) {
				continue
			}
			for _, text := range block {
				compared[file]++
				if fault := all.fault(text); fault != "" {
					t.Errorf("%s: %s: %s", file, label(text), fault)
				}
			}
		}
	}
	assert.Greater(t, compared["docs/internals.md"], 25, "this test no longer finds the table of times")
}

// blocks are the tables of a page, as their rows, and its paragraphs and items of lists, each as one text.
func blocks(page string) (out [][]string) {
	inTable, inText := false, false
	for line := range strings.Lines(page) {
		isRow, isBlank := strings.HasPrefix(line, "|"), strings.TrimSpace(line) == ""
		isItem := strings.HasPrefix(strings.TrimSpace(line), "- ")
		switch last := len(out) - 1; {
		case isBlank:
		case isRow && inTable:
			out[last] = append(out[last], line)
		case inText && !isRow && !isItem:
			out[last][0] += line
		default:
			out = append(out, []string{line})
		}
		inTable, inText = isRow, !isRow && !isBlank
	}
	return out
}

// label is the first cell of a row, or the first line of other texts.
func label(text string) string {
	if strings.HasPrefix(text, "|") {
		return strings.TrimSpace(strings.Split(text, "|")[1])
	}
	first, _, _ := strings.Cut(text, "\n")
	return first
}

// constants are what the code says by package.name: expressions of constants, and functions, those of a type
// by the type's name. More than one with a name are of two packages, or of two systems.
type constants struct {
	values map[string][]ast.Expr
	funcs  map[string][]*ast.FuncDecl
}

func declared(sources []source) constants {
	out := constants{map[string][]ast.Expr{}, map[string][]*ast.FuncDecl{}}
	for _, s := range sources {
		if !isWithin(s.folder(), "test") {
			out.add(path.Base(s.folder()), s.file)
		}
	}
	return out
}

func (c constants) add(pkg string, file *ast.File) {
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			for _, name := range []string{d.Name.Name, receiver(d)} {
				c.funcs[pkg+"."+name] = append(c.funcs[pkg+"."+name], d)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				v, ok := spec.(*ast.ValueSpec)
				if !ok || d.Tok != token.CONST || len(v.Values) != len(v.Names) {
					continue
				}
				for i, name := range v.Names {
					c.values[pkg+"."+name.Name] = append(c.values[pkg+"."+name.Name], v.Values[i])
				}
			}
		}
	}
}

// fault says which quantity of a text differs from its constant; "" if none does.
func (c constants) fault(text string) string {
	list := ""
	if comment := constComment.FindStringSubmatch(text); comment != nil {
		list = comment[1]
	}
	call, err := parser.ParseExpr("f(" + list + ")")
	if err != nil {
		return fmt.Sprintf("%q is no list of constants: %v", list, err)
	}
	names := call.(*ast.CallExpr).Args
	said := quantities(constComment.ReplaceAllString(text, ""))
	if len(said) != len(names) {
		return fmt.Sprintf("it has %d quantities and names %d constants", len(said), len(names))
	}
	for i, q := range said {
		value, err := c.value("", names[i])
		if err != nil {
			return err.Error()
		}
		unit := constant.MakeInt64(unitOf[q.unit])
		if !constant.Compare(constant.BinaryOp(q.number, token.MUL, unit), token.EQL, value) {
			is := constant.BinaryOp(constant.ToFloat(value), token.QUO, unit)
			return fmt.Sprintf("it says %s %s, and %s is %s %s", q.number, q.unit,
				types.ExprString(names[i]), is, q.unit)
		}
	}
	return ""
}

// said is a quantity of a text.
type said struct {
	number constant.Value
	unit   string
}

func quantities(text string) (out []said) {
	for _, q := range quantity.FindAllStringSubmatch(text, -1) {
		for _, number := range q[1:3] {
			if number != "" {
				out = append(out, said{constant.MakeFromLiteral(number, token.FLOAT, 0), q[3]})
			}
		}
	}
	return out
}

// value evaluates an expression of package pkg; "" is a document, which names a package before each constant.
func (c constants) value(pkg string, expr ast.Expr) (constant.Value, error) {
	switch e := expr.(type) {
	case *ast.BasicLit:
		return constant.MakeFromLiteral(e.Value, e.Kind, 0), nil
	case *ast.ParenExpr:
		return c.value(pkg, e.X)
	case *ast.Ident:
		return c.named(pkg, e.Name)
	case *ast.BinaryExpr:
		return c.binary(pkg, e)
	case *ast.SelectorExpr:
		switch x := e.X.(type) {
		case *ast.Ident:
			return c.named(x.Name, e.Sel.Name)
		case *ast.SelectorExpr:
			if of, ok := x.X.(*ast.Ident); ok {
				return c.field(of.Name, x.Sel.Name, e.Sel.Name)
			}
		}
	}
	return nil, errors.New("this test cannot evaluate an expression that the text names")
}

func (c constants) named(pkg, name string) (constant.Value, error) {
	if pkg == "time" {
		units := map[string]time.Duration{
			"Microsecond": time.Microsecond, "Millisecond": time.Millisecond, "Second": time.Second,
			"Minute": time.Minute, "Hour": time.Hour,
		}
		if unit, ok := units[name]; ok {
			return constant.MakeInt64(int64(unit)), nil
		}
	}
	found := c.values[pkg+"."+name]
	if len(found) != 1 {
		return nil, fmt.Errorf("the code has %d constants %s.%s", len(found), pkg, name)
	}
	return c.value(pkg, found[0])
}

func (c constants) binary(pkg string, e *ast.BinaryExpr) (constant.Value, error) {
	x, err := c.value(pkg, e.X)
	if err != nil {
		return nil, err
	}
	y, err := c.value(pkg, e.Y)
	if err != nil {
		return nil, err
	}
	switch op := e.Op; {
	case op == token.EQL && constant.Compare(x, token.EQL, y):
		return x, nil
	case op == token.EQL:
		return nil, fmt.Errorf("it names constants that differ: %s", types.ExprString(e))
	case op == token.SHL:
		by, _ := constant.Uint64Val(y)
		return constant.Shift(x, op, uint(by)), nil
	case op == token.QUO && x.Kind() == constant.Int && y.Kind() == constant.Int:
		return constant.BinaryOp(x, token.QUO_ASSIGN, y), nil // as Go divides integers
	default:
		return constant.BinaryOp(x, op, y), nil
	}
}

// field returns the first value that a function, or a method of a type, gives a field: by Field: value, or in
// a call or a literal with the field and the value, such as cmp.Or(t.Field, value).
func (c constants) field(pkg, of, field string) (constant.Value, error) {
	var out constant.Value
	try := func(key ast.Expr, value ast.Expr) {
		if ref, ok := key.(*ast.UnaryExpr); ok {
			key = ref.X
		}
		if sel, ok := key.(*ast.SelectorExpr); ok {
			key = sel.Sel
		}
		if id, ok := key.(*ast.Ident); out == nil && ok && id.Name == field {
			if v, err := c.value(pkg, value); err == nil {
				out = v
			}
		}
	}
	for _, f := range c.funcs[pkg+"."+of] {
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.KeyValueExpr:
				try(n.Key, n.Value)
			case *ast.CallExpr:
				if len(n.Args) == 2 {
					try(n.Args[0], n.Args[1])
				}
			case *ast.CompositeLit:
				if len(n.Elts) == 2 {
					try(n.Elts[0], n.Elts[1])
				}
			}
			return true
		})
	}
	if out == nil {
		return nil, fmt.Errorf("the code gives %s.%s.%s no constant", pkg, of, field)
	}
	return out, nil
}

// TestConstantsFault checks the checker on a small package.
func TestConstantsFault(t *testing.T) {
	const text = `package p
const (
	wait = 2 * time.Second
	part = 20
	share = 0.25
	most = 16 << 20
)
func (t Timers) withDefaults() Timers {
	return Timers{Probe: cmp.Or(t.Probe, 250*time.Millisecond), Out: wait + time.Second}
}
func (t *Others) set() { orDefault(&t.Admit, 5*time.Second) }`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, parser.SkipObjectResolution)
	require.NoError(t, err)
	c := declared(nil)
	c.add("p", file)
	for _, row := range []struct{ text, fault string }{
		{"| wait | 2 s | <!-- const: p.wait -->", ""},
		{"| wait | 3 s | <!-- const: p.wait -->", "it says 3 s, and p.wait is 2 s"},
		{"| waits | 0.1 to 2 s | <!-- const: p.wait/p.part, p.wait == 2*p.Timers.Out/3 -->", ""},
		{
			"| differ | 2 s | <!-- const: p.wait == p.Timers.Out -->",
			"it names constants that differ: p.wait == p.Timers.Out",
		},
		{"| fields | 250 ms; 3 s; 5 s | <!-- const: p.Timers.Probe, p.Timers.Out, p.Others.Admit -->", ""},
		{"| chance, size | 25 %, 16 MiB | <!-- const: 100*p.share, p.most -->", ""},
		{"| two | 2 s · 3 s | <!-- const: p.wait -->", "it has 2 quantities and names 1 constants"},
		{"| none | 2 s |", "it has 1 quantities and names 0 constants"},
		{"| words only | often |", ""},
		{"| gone | 2 s | <!-- const: p.gone -->", "the code has 0 constants p.gone"},
		{"| gone | 2 s | <!-- const: p.Timers.Gone -->", "the code gives p.Timers.Gone no constant"},
	} {
		assert.Equal(t, row.fault, c.fault(row.text), row.text)
	}
}

// TestBlocks: rows stay together, items and paragraphs are apart.
func TestBlocks(t *testing.T) {
	const page = "A\nb\n\n| x |\n| y |\n\n- i\n  j\n- k\n"
	assert.Equal(t, [][]string{{"A\nb\n"}, {"| x |\n", "| y |\n"}, {"- i\n  j\n"}, {"- k\n"}}, blocks(page))
}
