package diskfile_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/diskfile"
)

// TestReplace: the file is replaced, only its owner may read it, and nothing is left beside it.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	for _, text := range []string{"a longer first text", "second", ""} {
		require.NoError(t, diskfile.Replace(path, []byte(text)))
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, text, string(got))
	}
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, names, 1)
}

// TestReplaceFails: the old file stays, the error names the file, and what a crash left does no harm.
func TestReplaceFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	require.NoError(t, os.WriteFile(path+".tmp", []byte("half of what an ear"), 0o600))
	require.NoError(t, diskfile.Replace(path, []byte("old")))

	require.NoError(t, os.Mkdir(path+".tmp", 0o700))
	require.ErrorContains(t, diskfile.Replace(path, []byte("new")), "create state.json")
	require.NoError(t, os.Remove(path+".tmp"))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "old", string(got))

	folder := filepath.Join(dir, "folder")
	require.NoError(t, os.MkdirAll(filepath.Join(folder, "file"), 0o700))
	require.ErrorContains(t, diskfile.Replace(folder, []byte("new")), "put folder in place")
	assert.NoFileExists(t, folder+".tmp")
	require.Error(t, diskfile.Replace(filepath.Join(dir, "none", "state.json"), nil))
}
