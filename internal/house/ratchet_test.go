package house_test

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
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
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// lower writes the present numbers into ratchet.txt where they are smaller:
// go test ./internal/house -run Ratchet -lower
var lower = flag.Bool("lower", false, "write smaller numbers into ratchet.txt")

const (
	ratchetFile = "ratchet.txt"

	maxColumns   = 110 // of a line, a tab counts as four
	maxTypeFiles = 2   // that hold a type's methods
	maxFields    = 20  // of a struct
	// of a product file; doc.go, files of one operating system and a package's only file may be shorter
	minLines     = 60
	maxLines     = 600 // of a product file
	maxTestLines = 800 // of a test file
)

// rule is something that is counted per folder. Every folder keeps it, unless it is a column of ratchet.txt.
type rule int

// The rules; those before ratcheted are the columns of ratchet.txt, in this order.
const (
	spread rule = iota
	fields
	ratcheted
)

const (
	citations rule = ratcheted + iota
	columns
	short
	long
	rowIDs
	ruleCount
)

// ruleNames are the heads of the columns, and what a person is told.
var ruleNames = [ruleCount]struct{ name, what string }{
	citations: {"citations", "citations of papers outside of the repository (say the reason instead)"},
	columns:   {"columns", fmt.Sprintf("lines of more than %d columns", maxColumns)},
	spread:    {"spread", fmt.Sprintf("files that hold methods of a type beyond its first %d", maxTypeFiles)},
	fields:    {"fields", fmt.Sprintf("structs of more than %d fields", maxFields)},
	short:     {"short", fmt.Sprintf("product files of less than %d lines", minLines)},
	long:      {"long", fmt.Sprintf("files of more than %d lines, tests of %d", maxLines, maxTestLines)},
	rowIDs:    {"rowids", "tests named by an acceptance row that test/acceptance.md does not name"},
}

// counts are the findings of one folder, as "file:line: text".
type counts [ruleCount][]string

// TestRatchet: every folder keeps the rules, and no number of ratchet.txt grows. A folder without a line has
// 0 in each column. With -v it prints the numbers that may be lowered; -lower writes them. A folder that
// moves takes its line along.
func TestRatchet(t *testing.T) {
	allowed, found := readRatchet(t), measure(t)
	for _, folder := range slices.Sorted(maps.Keys(found)) {
		for r, at := range found[folder] {
			most := 0
			if rule(r) < ratcheted {
				most = allowed[folder][r]
			}
			if len(at) > most {
				t.Errorf("%s: %d %s; at most %d are allowed:\n\t%s",
					folder, len(at), ruleNames[r].what, most, strings.Join(at, "\n\t"))
			}
		}
	}
	for _, folder := range slices.Sorted(maps.Keys(allowed)) {
		for r, most := range allowed[folder] {
			n := 0
			if c := found[folder]; c != nil {
				n = len(c[r])
			}
			if n < most {
				t.Logf("may be lowered: %s %s from %d to %d", folder, ruleNames[r].name, most, n)
			}
		}
	}
	if *lower {
		writeRatchet(t, allowed, found)
	}
}

// readRatchet reads the numbers by folder.
func readRatchet(t *testing.T) map[string][ratcheted]int {
	t.Helper()
	text, err := os.ReadFile(ratchetFile)
	require.NoError(t, err)
	out := map[string][ratcheted]int{}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		require.Len(t, words, 1+int(ratcheted), "ratchet.txt: %s", line)
		var row [ratcheted]int
		for r := range row {
			row[r], err = strconv.Atoi(words[1+r])
			require.NoError(t, err, line)
		}
		require.NotContains(t, out, words[0], "ratchet.txt has the folder twice")
		out[words[0]] = row
	}
	return out
}

// writeRatchet keeps the head of the file and the smaller one of each pair of numbers.
func writeRatchet(t *testing.T, allowed map[string][ratcheted]int, found map[string]*counts) {
	t.Helper()
	var out bytes.Buffer
	text, err := os.ReadFile(ratchetFile)
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			out.WriteString(line)
		}
	}
	for _, folder := range slices.Sorted(maps.Keys(allowed)) {
		row, sum := allowed[folder], 0
		for r := range row {
			n := 0
			if c := found[folder]; c != nil {
				n = len(c[r])
			}
			row[r] = min(row[r], n)
			sum += row[r]
		}
		if sum == 0 {
			continue
		}
		fmt.Fprintf(&out, "%-24s", folder)
		for _, n := range row {
			fmt.Fprintf(&out, "%10d", n)
		}
		out.WriteByte('\n')
	}
	require.NoError(t, os.WriteFile(ratchetFile, out.Bytes(), 0o644))
}

// measure looks at every text of the repository that people write.
func measure(t *testing.T) map[string]*counts {
	t.Helper()
	rows, err := os.ReadFile(filepath.Join("..", "..", "test", "acceptance.md"))
	require.NoError(t, err)
	m := measuring{
		folders: map[string]*counts{}, rows: string(rows), methods: map[string]map[string]bool{},
		products: map[string]int{}, small: map[string]int{},
	}
	for _, file := range texts(t) {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(file)))
		require.NoError(t, err)
		switch path.Ext(file) {
		case ".go":
			require.NoError(t, m.goFile(file, text))
		case ".md":
			m.markdown(file, string(text))
		default:
			m.comments(file, string(text))
		}
	}
	m.types()
	m.shortFiles()
	return m.folders
}

// measuring is what measure has seen so far.
type measuring struct {
	folders map[string]*counts
	rows    string                     // test/acceptance.md
	methods map[string]map[string]bool // files that hold methods, by "folder Type"

	products map[string]int // product files by folder, without doc.go and files of one operating system
	small    map[string]int // lines by file: those of less than minLines
}

func (m *measuring) add(r rule, file string, line int, format string, args ...any) {
	folder := path.Dir(file)
	if m.folders[folder] == nil {
		m.folders[folder] = &counts{}
	}
	at := fmt.Sprintf("%s:%d: ", file, line) + fmt.Sprintf(format, args...)
	m.folders[folder][r] = append(m.folders[folder][r], at)
}

var (
	// papers are the names by which papers outside of the repository were cited.
	papers = regexp.MustCompile(`\b(CONTRACTS|TRAPS|STYLE|ENGINES|HOTPATH|ARCHITECTURE|PEERS|ADOPT)\b|` +
		`\b(ROUTING|APP|PD|MEX) [0-9]|\b(MEX|HOUSE)\.md|\b[Ss]ections? [0-9]`)
	// standards are published: they may be cited by section.
	standards = regexp.MustCompile(`\bRFC ?[0-9]|\bW3C\b|\bWHATWG\b|\bISO\b`)
	rowID     = regexp.MustCompile(`^Test[A-Z]{2}[0-9]+`)
)

// cites says that a line cites a paper that is not in the repository.
func cites(line string) bool { return papers.MatchString(line) && !standards.MatchString(line) }

// width is how many columns a line takes.
func width(line string) int {
	return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t")
}

func (m *measuring) wide(file string, number int, line string) {
	if w := width(strings.TrimRight(line, "\r\n")); w > maxColumns {
		m.add(columns, file, number, "%d columns", w)
	}
}

// goFile counts what a Go file holds. Generated ones are left out.
func (m *measuring) goFile(file string, text []byte) error {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution|parser.ParseComments)
	if err != nil {
		return err
	}
	if ast.IsGenerated(parsed) {
		return nil
	}
	lines, shown := 0, screens(file, fset, parsed)
	for line := range strings.Lines(string(text)) {
		lines++
		if !shown[lines] {
			m.wide(file, lines, line)
		}
	}
	m.length(file, lines, parsed)
	m.goComments(file, text)
	for _, decl := range parsed.Decls {
		m.declaration(file, fset, decl)
	}
	return nil
}

// screens returns the lines of a test in raw strings of several lines: a screen that a test compares is as
// wide as it is.
func screens(file string, fset *token.FileSet, parsed *ast.File) map[int]bool {
	out := map[int]bool{}
	if !strings.HasSuffix(file, "_test.go") {
		return out
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		s, ok := n.(*ast.BasicLit)
		if !ok || !strings.HasPrefix(s.Value, "`") {
			return true
		}
		first, last := fset.Position(s.Pos()).Line, fset.Position(s.End()).Line
		for line := first; first < last && line <= last; line++ {
			out[line] = true
		}
		return true
	})
	return out
}

func (m *measuring) length(file string, lines int, parsed *ast.File) {
	test := strings.HasSuffix(file, "_test.go")
	if most := map[bool]int{false: maxLines, true: maxTestLines}[test]; lines > most {
		m.add(long, file, 1, "%d lines", lines)
	}
	if test || path.Base(file) == "doc.go" || constrained(file, parsed) {
		return
	}
	m.products[path.Dir(file)]++
	if lines < minLines {
		m.small[file] = lines
	}
}

// constrained says that a file belongs to some builds only.
func constrained(file string, parsed *ast.File) bool {
	for _, group := range parsed.Comments {
		if group.Pos() < parsed.Package && strings.HasPrefix(group.List[0].Text, "//go:build") {
			return true
		}
	}
	return strings.HasSuffix(file, "_linux.go")
}

// goComments looks for citations in comments; strings and names are free.
func (m *measuring) goComments(file string, text []byte) {
	var s scanner.Scanner
	fset := token.NewFileSet()
	s.Init(fset.AddFile(file, -1, len(text)), text, nil, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return
		}
		if tok == token.COMMENT && cites(lit) {
			m.add(citations, file, fset.Position(pos).Line, "%s", strings.SplitN(lit, "\n", 2)[0])
		}
	}
}

func (m *measuring) declaration(file string, fset *token.FileSet, decl ast.Decl) {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		switch name := receiver(d); {
		case strings.HasSuffix(file, "_test.go"):
			isNamed := strings.Contains(m.rows, "`"+d.Name.Name+"`")
			if rowID.MatchString(d.Name.Name) && d.Recv == nil && !isNamed {
				m.add(rowIDs, file, fset.Position(d.Pos()).Line, "%s", d.Name.Name)
			}
		case name != "":
			key := path.Dir(file) + " " + name
			if m.methods[key] == nil {
				m.methods[key] = map[string]bool{}
			}
			m.methods[key][file] = true
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			if ts, ok := spec.(*ast.TypeSpec); ok && !strings.HasSuffix(file, "_test.go") {
				m.structure(file, fset, ts)
			}
		}
	}
}

func (m *measuring) structure(file string, fset *token.FileSet, spec *ast.TypeSpec) {
	st, ok := spec.Type.(*ast.StructType)
	if !ok {
		return
	}
	n := 0
	for _, f := range st.Fields.List {
		n += max(1, len(f.Names))
	}
	if n > maxFields {
		m.add(fields, file, fset.Position(spec.Pos()).Line, "%s has %d fields", spec.Name.Name, n)
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

// shortFiles counts small files beside others of their package.
func (m *measuring) shortFiles() {
	for _, file := range slices.Sorted(maps.Keys(m.small)) {
		if m.products[path.Dir(file)] > 1 {
			m.add(short, file, 1, "%d lines", m.small[file])
		}
	}
}

// types counts the files over which types are spread.
func (m *measuring) types() {
	for key, files := range m.methods {
		_, name, _ := strings.Cut(key, " ")
		for _, file := range slices.Sorted(maps.Keys(files))[min(maxTypeFiles, len(files)):] {
			m.add(spread, file, 1, "methods of %s, which has them in %d files", name, len(files))
		}
	}
}

// markdown looks at prose: a table, a drawing and a command are as wide as they are.
func (m *measuring) markdown(file, text string) {
	number, code := 0, false
	for line := range strings.Lines(text) {
		number++
		if cites(line) {
			m.add(citations, file, number, "%s", strings.TrimSpace(line))
		}
		trimmed := strings.TrimSpace(line)
		if strings.HasPrefix(trimmed, "```") {
			code = !code
		}
		isProse := !code && !strings.HasPrefix(trimmed, "|") && !strings.HasPrefix(line, "    ")
		if isProse && file != "docs/cli.md" && file != "CHANGELOG.md" { // generated; one line per change
			m.wide(file, number, line)
		}
	}
}

// comments looks for citations in files of other kinds.
func (m *measuring) comments(file, text string) {
	number := 0
	for line := range strings.Lines(text) {
		number++
		if cites(line) {
			m.add(citations, file, number, "%s", strings.TrimSpace(line))
		}
	}
}

// TestCites checks the checker of citations.
func TestCites(t *testing.T) {
	for line, want := range map[string]bool{
		"// row says what follows (" + "CONTRACTS" + " 9).": true,
		"// as in " + "APP" + " 8":                          true,
		"// see " + "section" + " 4 of the paper":           true,
		"// folded lines, RFC 9112 " + "section" + " 5.2":   false,
		"// the reasons are in DESIGN.md":                   false,
		"// APP/GROUP/RANK":                                 false,
		"// a rank of application 3, in that section of it": false,
	} {
		assert.Equal(t, want, cites(line), line)
	}
}

// TestWidth: a tab counts as four columns, a letter of any language as one.
func TestWidth(t *testing.T) {
	assert.Equal(t, 9, width("\tprüfe"))
}
