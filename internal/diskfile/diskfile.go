// Package diskfile replaces files as a whole.
package diskfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

const (
	mode      = 0o600 // only the owner has access
	temporary = ".tmp"
)

// Replace writes a file. A crash or a power cut leaves the old file or the new one: it writes a new file,
// syncs and renames it, and syncs the folder, without which a power cut could undo the rename. One caller at
// a time may replace a file.
func Replace(path string, data []byte) error {
	name, temp := filepath.Base(path), path+temporary
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode) //nolint:gosec // the data dir
	if err != nil {
		return fmt.Errorf("create %s: %w", name, err)
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, errors.Join(err, os.Remove(temp)))
	}
	if err := os.Rename(temp, path); err != nil {
		return fmt.Errorf("put %s in place: %w", name, errors.Join(err, os.Remove(temp)))
	}
	return syncFolder(filepath.Dir(path))
}

func syncFolder(path string) error {
	d, err := os.Open(path) //nolint:gosec // the data dir
	if err != nil {
		return fmt.Errorf("open the folder of a written file: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}
