package node

import (
	"os"
	"path/filepath"
	"time"
)

// logFileSize is where a rank's log file is turned over; one older file is kept beside it.
const logFileSize = 10 << 20

// logFile is the file of one rank's log, opened with its first line. A nil logFile writes nothing. The log store's lock
// guards it.
type logFile struct {
	path string
	f    *os.File
	size int64
	dead bool // an error was returned once; nothing is tried again until the node restarts
}

// write appends a line. Only the first error is returned.
func (l *logFile) write(line *LogLine) error {
	if l == nil || l.dead {
		return nil
	}
	err := l.append(line)
	l.dead = err != nil
	return err
}

func (l *logFile) append(line *LogLine) error {
	if l.size >= logFileSize {
		if err := l.turn(); err != nil {
			return err
		}
	}
	if l.f == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	n, err := l.f.WriteString(line.At.UTC().Format(time.RFC3339Nano) + " " + line.Stream + " " + line.Text + "\n")
	l.size += int64(n)
	return err
}

func (l *logFile) open() error {
	if err := os.MkdirAll(filepath.Dir(l.path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return err
	}
	l.f, l.size = f, info.Size()
	return nil
}

func (l *logFile) turn() error {
	l.close()
	l.size = 0
	return os.Rename(l.path, l.path+".1")
}

func (l *logFile) close() {
	if l != nil && l.f != nil {
		_ = l.f.Close()
		l.f = nil
	}
}
