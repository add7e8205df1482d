package diskfile

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/dpserve/dpserve/internal/problem"
)

// CheckPrivate refuses a data dir that another user could change, because dpserve starts programs that its
// files name. The folder and what lies directly in it must belong to this user or to root, and neither group
// nor others may write there. Folders above it need no check: a user who can rename the data dir away cannot
// put one in its place that belongs to this user.
func CheckPrivate(dir string) error {
	if _, err := os.Readlink(dir); err == nil { // the hints are about the folder that the link leads to
		if to, err := filepath.EvalSymlinks(dir); err == nil {
			dir = to
		}
	}
	info, err := os.Stat(dir)
	if err != nil {
		return problem.New(problem.InvalidArgument, "look at the data dir: %w", err).
			WithHint("choose a --data-dir that you may read")
	}
	if err := ownerOf(info).check(dir, os.Geteuid()); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return problem.New(problem.InvalidArgument, "read the data dir: %w", err).
			WithHint("choose a --data-dir that you may read")
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // it was removed meanwhile
		}
		if err := ownerOf(info).check(filepath.Join(dir, e.Name()), os.Geteuid()); err != nil {
			return err
		}
	}
	return nil
}

// owner says who may change a file or folder.
type owner struct {
	uid  int
	mode fs.FileMode
}

func ownerOf(info fs.FileInfo) owner {
	o := owner{mode: info.Mode()}
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		o.uid = int(s.Uid)
	}
	return o
}

const writableByOthers = 0o022

// check refuses a path that a user other than root and the one who runs dpserve may change. The mode of a
// symbolic link says nothing.
func (o owner) check(path string, user int) error {
	var what, hint string
	switch {
	case o.uid != user && o.uid != 0:
		what = fmt.Sprintf("belongs to user %d", o.uid)
		hint = fmt.Sprintf("`chown -R %d %s` if you trust what is in it; where chown is refused, as on many "+
			"network file systems, choose a --data-dir on a local disk", user, path)
	case o.mode.Type() != fs.ModeSymlink && o.mode.Perm()&writableByOthers != 0:
		what = fmt.Sprintf("has mode %04o, so that other users may write there", o.mode.Perm())
		hint = fmt.Sprintf("`chmod go-w %s` if you trust what is in it; on a volume whose mode is fixed, "+
			"let --data-dir name a new folder on it, which dpserve makes", path)
	default:
		return nil
	}
	return problem.New(problem.InvalidArgument, "data dir: %s %s, and dpserve runs as user %d", path, what,
		user).WithHint("%s", hint)
}
