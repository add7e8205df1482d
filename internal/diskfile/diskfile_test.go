package diskfile_test

import (
	"os"
	"path/filepath"
	"strings"
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

// TestLog: two files of bounded size hold the last lines, also over a new Log of the same path.
func TestLog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	path := filepath.Join(dir, "out.log")
	l := &diskfile.Log{Path: path, Limit: 100}
	for range 50 {
		require.NoError(t, l.Append("123456789"))
	}
	l.Close()
	again := &diskfile.Log{Path: path, Limit: 100}
	for range 5 {
		require.NoError(t, again.Append("987654321"))
	}
	again.Close()
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, names, 2)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, strings.Repeat("987654321\n", 5), string(text))
	older, err := os.ReadFile(path + ".1")
	require.NoError(t, err)
	assert.Equal(t, strings.Repeat("123456789\n", 10), string(older))
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
}

// TestLogOnAFullDisk: an error is told, and lines follow once the disk takes them.
func TestLogOnAFullDisk(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("needs /dev/full")
	}
	path := filepath.Join(t.TempDir(), "out.log")
	require.NoError(t, os.Symlink("/dev/full", path))
	l := &diskfile.Log{Path: path, Limit: 100}
	require.Error(t, l.Append("lost"))
	require.NoError(t, os.Remove(path))
	require.NoError(t, l.Append("there"))
	l.Close()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "there\n", string(text))
}

// TestLogThatCannotRotate: while a full file cannot become the older one, each line is an error.
func TestLogThatCannotRotate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.log")
	require.NoError(t, os.MkdirAll(filepath.Join(path+".1", "full"), 0o700))
	l := &diskfile.Log{Path: path, Limit: 5}
	require.NoError(t, l.Append("12345"))
	require.Error(t, l.Append("lost"))
	require.Error(t, l.Append("lost too"), "the file is opened again")
	require.NoError(t, os.RemoveAll(path+".1"))
	require.NoError(t, l.Append("there"))
	l.Close()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "there\n", string(text))
}
