package house_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	maxColumns   = 110 // of a line, a tab counts as four
	maxLines     = 600 // of a product file
	maxTestLines = 800 // of a test file
)

var (
	// papers are the names by which papers outside of the repository were cited.
	papers = regexp.MustCompile(`\b(CONTRACTS|TRAPS|STYLE|ENGINES|HOTPATH|ARCHITECTURE|PEERS|ADOPT)\b|` +
		`\b(ROUTING|APP|PD|MEX) [0-9]|\b(MEX|HOUSE)\.md|\b[Ss]ections? [0-9]`)
	// standards are published: they may be cited by section.
	standards = regexp.MustCompile(`\bRFC ?[0-9]|\bW3C\b|\bWHATWG\b|\bISO\b`)
)

// TestTexts: files and lines are not too long, and nothing cites a paper that is not in the repository.
func TestTexts(t *testing.T) {
	for _, file := range texts(t) {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(file)))
		require.NoError(t, err)
		var faults []string
		switch path.Ext(file) {
		case ".go":
			faults = goFaults(t, file, text)
		case ".md":
			faults = pageFaults(file, string(text))
		default:
			faults = lineFaults(string(text), func(string) bool { return false })
		}
		for _, f := range faults {
			t.Errorf("%s:%s", file, f)
		}
	}
}

// goFaults looks at a Go file that people write. Citations count in comments only.
func goFaults(t *testing.T, file string, text []byte) []string {
	t.Helper()
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution|parser.ParseComments)
	require.NoError(t, err)
	if ast.IsGenerated(parsed) {
		return nil
	}
	var out []string
	isTest := strings.HasSuffix(file, "_test.go")
	lines, shown := 0, map[int]bool{}
	if isTest {
		shown = screens(fset, parsed)
	}
	for line := range strings.Lines(string(text)) {
		if lines++; !shown[lines] {
			out = append(out, wideFault(lines, line)...)
		}
	}
	if most := map[bool]int{false: maxLines, true: maxTestLines}[isTest]; lines > most {
		out = append(out, fmt.Sprintf("1: %d lines, at most %d", lines, most))
	}
	var s scanner.Scanner
	s.Init(token.NewFileSet().AddFile(file, -1, len(text)), text, nil, scanner.ScanComments)
	for _, tok, lit := s.Scan(); tok != token.EOF; _, tok, lit = s.Scan() {
		if tok == token.COMMENT && cites(lit) {
			out = append(out, " cites: "+lit)
		}
	}
	return out
}

// screens returns the lines of raw strings of several lines: a screen that a test compares is as wide as it
// is.
func screens(fset *token.FileSet, parsed *ast.File) map[int]bool {
	out := map[int]bool{}
	ast.Inspect(parsed, func(n ast.Node) bool {
		if s, ok := n.(*ast.BasicLit); ok && strings.HasPrefix(s.Value, "`") {
			first, last := fset.Position(s.Pos()).Line, fset.Position(s.End()).Line
			for line := first; first < last && line <= last; line++ {
				out[line] = true
			}
		}
		return true
	})
	return out
}

// pageFaults looks at prose: a table, a drawing and a command are as wide as they are.
func pageFaults(file, text string) []string {
	isFree := map[string]bool{ // generated, or one line an entry
		"docs/cli.md": true, "CHANGELOG.md": true, "test/acceptance.md": true, "test/open.md": true,
	}[file]
	code := false
	return lineFaults(text, func(line string) bool {
		trimmed := strings.TrimSpace(line)
		if strings.HasPrefix(trimmed, "```") {
			code = !code
		}
		return !isFree && !code && !strings.HasPrefix(trimmed, "|") && !strings.HasPrefix(line, "    ")
	})
}

// lineFaults finds citations in all lines, and too many columns in lines of prose.
func lineFaults(text string, isProse func(string) bool) []string {
	var out []string
	number := 0
	for line := range strings.Lines(text) {
		number++
		if cites(line) {
			out = append(out, fmt.Sprintf("%d: cites: %s", number, strings.TrimSpace(line)))
		}
		if isProse(line) {
			out = append(out, wideFault(number, line)...)
		}
	}
	return out
}

// cites says that a line cites a paper that is not in the repository.
func cites(line string) bool { return papers.MatchString(line) && !standards.MatchString(line) }

// width is how many columns a line takes.
func width(line string) int {
	return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t")
}

func wideFault(number int, line string) []string {
	if w := width(strings.TrimRight(line, "\r\n")); w > maxColumns {
		return []string{fmt.Sprintf("%d: %d columns, at most %d", number, w, maxColumns)}
	}
	return nil
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
	assert.Equal(t, 9, width("\tprüfe"))
}
