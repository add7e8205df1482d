package house_test

import (
	"flag"
	"fmt"
	"go/ast"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// write writes what the tests of this package derive from the tree: test/acceptance.md, and smaller caps.
//
//	go test ./internal/house -write
var write = flag.Bool("write", false, "write test/acceptance.md, and smaller caps into caps.txt")

const (
	capsFile = "caps.txt"
	capStep  = 250 // a cap is the number of lines, rounded up to this
)

// TestCaps: no package has more product lines (no tests, nothing generated) than its cap. Whoever adds a
// feature raises the cap in the same commit, or finds as many lines to delete.
func TestCaps(t *testing.T) {
	lines := map[string]int{}
	for _, s := range tree(t) {
		if !strings.HasPrefix(s.path, "test/") && !ast.IsGenerated(s.file) {
			lines[s.folder()] += s.fset.File(s.file.Pos()).LineCount()
		}
	}
	caps := readCaps(t)
	for _, folder := range slices.Sorted(maps.Keys(lines)) {
		if n := lines[folder]; n > caps[folder] {
			t.Errorf("%s has %d lines, its cap is %d: delete some, or raise the cap in internal/house/%s",
				folder, n, caps[folder], capsFile)
		}
	}
	if *write {
		writeCaps(t, caps, lines)
	}
}

// readCaps reads the caps by folder.
func readCaps(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile(capsFile)
	require.NoError(t, err)
	caps := map[string]int{}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		require.Len(t, words, 2, line)
		caps[words[0]], err = strconv.Atoi(words[1])
		require.NoError(t, err, line)
	}
	return caps
}

// writeCaps lowers caps to what the lines need; it raises none.
func writeCaps(t *testing.T, caps, lines map[string]int) {
	t.Helper()
	var out strings.Builder
	out.WriteString("# The most product lines of each package (caps_test.go). A feature raises its cap.\n")
	for _, folder := range slices.Sorted(maps.Keys(lines)) {
		rounded := (lines[folder] + capStep - 1) / capStep * capStep
		if old, ok := caps[folder]; ok {
			rounded = min(rounded, old)
		}
		fmt.Fprintf(&out, "%-36s%6d\n", folder, rounded)
	}
	require.NoError(t, os.WriteFile(capsFile, []byte(out.String()), 0o600))
}
