package diskfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// HF72: a data dir of another user, one of mode 0777 or 0775, the same behind a symbolic link, a folder of
// another user or for a group in it; by consensus, by the identity that `join` takes, by `doctor`; neither
// HOME nor XDG_STATE_HOME: Refused with the owner or the mode, and `chown -R` or `chmod go-w` of the folder
// behind the link as hint; root's own folders are accepted; `doctor` fails with the same text and hint; the
// default lies below XDG_STATE_HOME, else HOME; without both `start`, `join` and `doctor` ask for
// `--data-dir`.
func TestOwners(t *testing.T) {
	const me, other, dir = 1000, 65534, fs.ModeDir
	for name, tc := range map[string]struct {
		owner       owner
		found, hint string // "" = accepted
	}{
		"mine":               {owner{me, dir | 0o700}, "", ""},
		"readable by others": {owner{me, dir | 0o755}, "", ""},
		"root's":             {owner{0, dir | 0o755}, "", ""},
		"a symbolic link":    {owner{me, fs.ModeSymlink | 0o777}, "", ""},
		"of another user":    {owner{other, dir | 0o700}, "belongs to user 65534", "`chown -R 1000 /d`"},
		"a link of another":  {owner{other, fs.ModeSymlink | 0o777}, "belongs to user 65534", "chown"},
		"for everybody":      {owner{me, dir | 0o777}, "has mode 0777", "`chmod go-w /d`"},
		"of the kind of /tmp": {
			owner{0, dir | fs.ModeSticky | 0o777}, "has mode 0777", "a new folder on it",
		},
		"root's, for a group": {
			owner{0, dir | fs.ModeSetgid | 0o775}, "has mode 0775", "a new folder on it",
		},
	} {
		t.Run(name, func(t *testing.T) {
			assertRefused(t, tc.owner.check("/d", me), tc.found, tc.hint)
		})
	}
	assert.Error(t, owner{other, dir | 0o700}.check("/d", 0), "root does not trust a folder of others")
}

func assertRefused(t *testing.T, err error, found, hint string) {
	t.Helper()
	if found == "" {
		require.NoError(t, err)
		return
	}
	p, ok := errors.AsType[*problem.Error](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, problem.InvalidArgument, p.Code)
	assert.Contains(t, p.Message, found)
	assert.Contains(t, p.Hint, hint)
}

// HF72: TestPrivateFolders checks real folders: by their mode, behind a symbolic link, and by what lies in
// them.
func TestPrivateFolders(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.Mkdir(dir, 0o700))
	raft := filepath.Join(dir, "raft")
	require.NoError(t, os.Mkdir(raft, 0o700))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	check := func(found, hint string) {
		t.Helper()
		assertRefused(t, CheckPrivate(dir), found, hint)
		assertRefused(t, CheckPrivate(link), found, "")
	}
	check("", "")
	require.NoError(t, os.Chmod(dir, 0o777))
	check(" has mode 0777", "`chmod go-w "+dir+"`")
	require.NoError(t, os.Chmod(dir, 0o700))
	require.NoError(t, os.Chmod(raft, 0o770))
	check("raft has mode 0770", "`chmod go-w "+raft+"`")
	if os.Geteuid() == 0 {
		const nobody = 65534
		require.NoError(t, os.Chmod(raft, 0o700))
		require.NoError(t, os.Lchown(raft, nobody, -1))
		check("raft belongs to user 65534", "`chown -R 0 "+raft+"`")
		require.NoError(t, os.Lchown(dir, nobody, -1))
		check(" belongs to user 65534, and dpserve runs as user 0", "`chown -R 0 "+dir+"`")
	}
	assertRefused(t, CheckPrivate(filepath.Join(dir, "missing")), "look at the data dir", "choose")
}
