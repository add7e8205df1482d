package house_test

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// written are the kinds of files that people write and read.
func written() []string { return []string{".go", ".md", ".proto", ".yaml", ".yml", ".sh"} }

// texts are the files of the repository that people write, slash separated and relative to the module.
func texts(t *testing.T) []string {
	t.Helper()
	root := filepath.Join("..", "..")
	var out []string
	require.NoError(t, filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if file != root && isSkipped(d.Name()) && d.Name() != ".ci" {
				return fs.SkipDir
			}
			return nil
		}
		rel, err := filepath.Rel(root, file)
		if err == nil && slices.Contains(written(), path.Ext(rel)) {
			out = append(out, filepath.ToSlash(rel))
		}
		return err
	}))
	return out
}

// folders are those at the top of the repository: what a visitor looks for first, and internal/ for all the
// rest.
func folders() []string {
	return []string{"actors", "client", "cmd", "docs", "examples", "internal", "placement", "routing", "test"}
}

// TestTopFolders: no folder is added at the top of the repository.
func TestTopFolders(t *testing.T) {
	entries, err := os.ReadDir(filepath.Join("..", ".."))
	require.NoError(t, err)
	files := texts(t)
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() && !strings.HasPrefix(name, ".") && holdsText(files, name) {
			assert.Contains(t, folders(), name, "%s: a new package belongs into internal/", name)
		}
	}
}

// holdsText says that a folder holds a file that people write. A build may leave folders without any.
func holdsText(files []string, folder string) bool {
	isWithin := func(file string) bool { return strings.HasPrefix(file, folder+"/") }
	return slices.ContainsFunc(files, isWithin)
}
