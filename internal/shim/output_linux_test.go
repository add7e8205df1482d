package shim

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// EN3: An engine that prints 64 MiB leaves two files of 10 MiB.
func TestALotOfOutput(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(t.TempDir(), "go")
	r := begin(t, dir, nil, "await="+file, "flood=64", "say=done", "exit=0")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	r.exit()
	eventually(t, "last line", func() bool {
		last := LastLines(filepath.Join(dir, outputFile), r.info.State.Began, 1)
		return len(last) == 1 && last[0].Text == "done"
	})
	for _, name := range []string{outputFile, outputFile + ".1"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil {
			assert.LessOrEqual(t, info.Size(), int64(outputSize+2048), name)
		}
	}
	assert.NoFileExists(t, filepath.Join(dir, outputFile+".2"))
	out := r.lines(0, 1<<30)
	assert.Equal(t, "stdout done", out[len(out)-1])
	assert.LessOrEqual(t, len(out), ringLines)
}

// EN3, HF43: A disk that is full or hangs delays neither the engine nor the lines that a node reads. The disk
// that hangs is a pipe without a reader: opening it does not return.
func TestABadDiskStopsTheFileOnly(t *testing.T) {
	for what, make := range map[string]func(path string) error{
		"full":  func(path string) error { return os.Symlink("/dev/full", path) },
		"hangs": func(path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, make(filepath.Join(dir, outputFile)))
			r := begin(t, dir, nil, "flood=1", "say=done", "exit=0")
			assert.Equal(t, 0, r.exit().Code)
			out := r.lines(0, 1<<30)
			assert.Equal(t, "stdout done", out[len(out)-1])
		})
	}
}
