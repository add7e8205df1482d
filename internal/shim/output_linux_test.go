package shim

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// EN3: An engine that prints 64 MiB leaves two files of 10 MiB; a disk that is full stops neither it nor the
// lines that a node reads.
func TestALotOfOutput(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(t.TempDir(), "go")
	r := begin(t, dir, nil, "await="+file, "flood=64", "say=done", "exit=0")
	folder := filepath.Join(dir, r.info.Spec.ID)
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	r.exit()
	eventually(t, "last line", func() bool {
		last := LastLines(folder, 1)
		return len(last) == 1 && last[0].Text == "done"
	})
	for _, name := range []string{outputFile, outputFile + ".1"} {
		if info, err := os.Stat(filepath.Join(folder, name)); err == nil {
			assert.LessOrEqual(t, info.Size(), int64(outputSize+2048), name)
		}
	}
	assert.NoFileExists(t, filepath.Join(folder, outputFile+".2"))
	out := r.lines(0, 1<<30)
	assert.Equal(t, "stdout done", out[len(out)-1])
	assert.LessOrEqual(t, len(out), ringLines)

	r = begin(t, t.TempDir(), nil, "await="+file+"2", "flood=1", "say=done", "exit=0")
	folder = filepath.Join(r.dir, r.info.Spec.ID)
	require.NoError(t, os.Symlink("/dev/full", filepath.Join(folder, outputFile)))
	require.NoError(t, os.WriteFile(file+"2", nil, 0o600))
	assert.Equal(t, 0, r.exit().Code)
	out = r.lines(0, 1<<30)
	assert.Equal(t, "stdout done", out[len(out)-1])
}
