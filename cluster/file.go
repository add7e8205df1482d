package cluster

import (
	"fmt"
	"os"
	"path/filepath"
)

// writeFile writes a file that is complete or absent after a crash: new file, fsync, rename, fsync of the
// directory.
func writeFile(path string, data []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, fileMode) //nolint:gosec // the data dir
	if err != nil {
		return fmt.Errorf("create %s: %w", filepath.Base(path), err)
	}
	_, err = f.Write(data)
	if err = firstError(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("put %s in place: %w", filepath.Base(path), err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir) //nolint:gosec // the data dir
	if err != nil {
		return fmt.Errorf("open data dir: %w", err)
	}
	if err := firstError(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync data dir: %w", err)
	}
	return nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
