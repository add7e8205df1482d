package access

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// SP2: a node makes its admin token once, readable for its user alone, and refuses one that others have read.
func TestTheAdminTokenOfADataDir(t *testing.T) {
	dir := t.TempDir()
	first, err := OpenAdminToken("", dir)
	require.NoError(t, err)
	path := filepath.Join(dir, "admin.token")
	assert.Equal(t, path, first.File)
	assert.Regexp(t, `^dpa1\.[0-9a-f]{64}$`, first.Text)
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
	again, err := OpenAdminToken("", dir)
	require.NoError(t, err)
	assert.Equal(t, first.Text, again.Text)

	require.NoError(t, os.Chmod(path, 0o644))
	_, err = OpenAdminToken("", dir)
	require.ErrorContains(t, err, "can be read by others")
	for _, text := range []string{"", "short", "0123456789abcdef 0123456789abcdef", "0123456789abcdéf"} {
		other := filepath.Join(t.TempDir(), "token")
		require.NoError(t, os.WriteFile(other, []byte(text), 0o600))
		_, err = OpenAdminToken(other, dir)
		require.ErrorContains(t, err, "holds no admin token")
	}
	_, err = OpenAdminToken(filepath.Join(dir, "none"), "")
	require.ErrorContains(t, err, "no such file")
	alone, err := OpenAdminToken("", "")
	require.NoError(t, err)
	assert.NotEmpty(t, alone.Text)
	assert.Empty(t, alone.File)
}
