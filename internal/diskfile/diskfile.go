// Package diskfile replaces files as a whole, writes files of lines that are bounded, and bounds the wait for
// a disk.
package diskfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
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

// ReplaceJSON is Replace with one line of JSON.
func ReplaceJSON(path string, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return Replace(path, append(line, '\n'))
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

// ErrHangs is in every error of Await about a disk that does not answer.
var ErrHangs = errors.New("its disk does not answer")

// Grace is how long each step of a node's end waits for a disk that hangs.
const Grace = 10 * time.Second

// Await makes calls of the disk that holds dir, and waits for them at most limit. Nothing can end a call of
// the kernel: after limit the error, a *problem.Error with ErrHangs, names dir, and calls goes on alone. What
// it uses must not be used again before it has returned.
func Await(dir string, limit time.Duration, calls func() error) error {
	returned := make(chan error, 1)
	go func() { returned <- calls() }()
	over := time.NewTimer(limit)
	defer over.Stop()
	select {
	case err := <-returned:
		return err
	case <-over.C:
	}
	return problem.New(problem.Unavailable, "data dir %s: %w", dir,
		fmt.Errorf("%w: a call has not returned for %s", ErrHangs, limit)).
		WithHint("look at that disk before you start dpserve there again")
}

// Log is a file of lines that is bounded: when it has Limit bytes it becomes the older file (its name and
// ".1"), and a new one begins. The file is opened at the first line, again after an error. One goroutine uses
// a Log.
type Log struct {
	Path  string
	Limit int64 // of each of the two files

	f    *os.File
	size int64
	torn bool // the last line was not written completely
}

// Append writes a line. After an error, such as a full disk, the caller may try again.
func (l *Log) Append(line string) error {
	err := l.append(line)
	if err != nil {
		l.Close()
	}
	return err
}

func (l *Log) append(line string) error {
	if l.f != nil && l.size >= l.Limit {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	if l.f == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	line += "\n"
	if l.torn {
		line = "\n" + line
	}
	n, err := l.f.WriteString(line)
	l.size += int64(n)
	l.torn = err != nil && (l.torn || n > 0)
	return err
}

func (l *Log) open() error {
	if err := os.MkdirAll(filepath.Dir(l.Path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(l.Path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return err
	}
	l.f, l.size = f, info.Size()
	if l.size < l.Limit {
		return nil
	}
	if err := l.rotate(); err != nil {
		return err
	}
	return l.open()
}

func (l *Log) rotate() error {
	l.Close()
	l.size = 0
	return os.Rename(l.Path, l.Path+".1")
}

// Close closes the file; a later line opens it again.
func (l *Log) Close() {
	if l.f != nil {
		_ = l.f.Close()
		l.f = nil
	}
}
