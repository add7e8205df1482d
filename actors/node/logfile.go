package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of the log files.
const (
	logFileSize  = 10 << 20           // size at which a rank's file is rotated; one older file is kept
	logBatch     = 256                // lines of one write
	logRetry     = 30 * time.Second   // pause after an error, such as a full disk
	logCloseWait = time.Second        // for the last lines, at the end of the node
	logKept      = 7 * 24 * time.Hour // a removed application's file is deleted this long after its last line
	logSweep     = time.Hour          // between two checks for such files
	streamSelf   = "dpserve"          // stream of lines that dpserve wrote
)

// logFile is the file of one rank's log, opened at its first line. Only the ring's writer uses it.
type logFile struct {
	path string
	f    *os.File
	size int64
	torn bool // the last line was not written completely
}

// write appends lines and returns how many are written.
func (l *logFile) write(lines []LogLine) (written uint64, err error) {
	for i := range lines {
		if err := l.append(&lines[i]); err != nil {
			l.close() // the next attempt opens the file again
			return written, err
		}
		written++
	}
	return written, nil
}

func (l *logFile) append(line *LogLine) error {
	if l.f != nil && l.size >= logFileSize {
		if err := l.turn(); err != nil {
			return err
		}
	}
	if l.f == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	text := line.At.UTC().Format(time.RFC3339Nano) + " " + line.Stream + " " + line.Text + "\n"
	if l.torn {
		text = "\n" + text
	}
	n, err := l.f.WriteString(text)
	l.size += int64(n)
	l.torn = err != nil && (l.torn || n > 0)
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
	if l.size >= logFileSize {
		return errors.Join(l.turn(), l.open())
	}
	return nil
}

func (l *logFile) turn() error {
	l.close()
	l.size = 0
	return os.Rename(l.path, l.path+".1")
}

func (l *logFile) close() {
	if l.f != nil {
		_ = l.f.Close()
		l.f = nil
	}
}

// keep starts a writer for a ring's new lines, if it has none. The caller holds mu. A ring has at most one
// writer, which holds no lock while it writes: a disk that hangs only delays files. Lines that leave the ring
// meanwhile are not in the file.
func (s *logStore) keep(r *ring) {
	if r.file == nil || r.writing {
		return
	}
	r.writing = true
	s.writers.Go(func() { s.writeOut(r) })
}

// writeOut is a ring's writer. It ends when all lines are written, or when the store is closed and the disk
// refuses them.
func (s *logStore) writeOut(r *ring) {
	for {
		from, lines, ends := s.unwritten(r)
		if len(lines) == 0 {
			if ends {
				r.file.close()
			}
			if s.rest(r) {
				return
			}
			continue
		}
		n, err := r.file.write(lines)
		s.wrote(r, from+n, err)
		if err != nil && !s.pause(logRetry) {
			return
		}
	}
}

// unwritten returns the next lines of a ring for its file and the number of the first one. ends says that no
// line will follow. A note replaces lines that have left the ring.
func (s *logStore) unwritten(r *ring) (from uint64, lines []LogLine, ends bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from = max(r.first, r.written)
	rest := r.lines[from-r.first:]
	if missed := from - r.written; missed > 0 {
		lines = append(lines, LogLine{
			At: time.Now(), Stream: streamSelf,
			Text: fmt.Sprintf("%d lines are missing here: the disk did not take them in time", missed),
		})
		from--
	}
	return from, append(lines, rest[:min(len(rest), logBatch)]...), r.dropped || s.closed
}

// rest ends the writer, unless lines arrived meanwhile.
func (s *logStore) rest(r *ring) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.writing = r.written < r.first+uint64(len(r.lines))
	return !r.writing
}

// wrote takes the result of a write up to the line with number next. It logs the first error and its end.
func (s *logStore) wrote(r *ring, next uint64, err error) {
	s.mu.Lock()
	r.written = max(r.written, next)
	was := r.failing
	r.failing = err != nil
	s.mu.Unlock()
	attrs := []any{slog.String("unit", r.key.unit), slog.Int("rank", r.key.rank)}
	switch {
	case err != nil && !was:
		s.log.Warn("cannot write an engine's log file, it goes on in memory",
			append(attrs, slog.String("err", err.Error()), slog.Duration("retry", logRetry))...)
	case err == nil && was:
		s.log.Info("an engine's log file is written again", attrs...)
	}
}

// pause waits; false: the store was closed, and the writer gives up.
func (s *logStore) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.done:
		return false
	}
}

// close waits for the last lines to be written, but not for a disk that hangs. Idempotent.
func (s *logStore) close() {
	s.mu.Lock()
	if !s.closed {
		close(s.done)
		for _, r := range s.rings {
			s.keep(r)
		}
	}
	s.closed = true
	s.mu.Unlock()
	written := make(chan struct{})
	go func() {
		s.writers.Wait()
		close(written)
	}()
	over := time.NewTimer(logCloseWait)
	defer over.Stop()
	select {
	case <-written:
	case <-over.C:
		s.log.Warn("the disk does not take the engines' last log lines")
	}
}

// logName matches the file of a rank: application, group, for independent ranks the rank as unit, and the
// rank; .1 is the older file.
var logName = regexp.MustCompile(`^([^.]+)(\.[0-9]+){2,3}\.log(\.1)?$`)

// forget drops rings and files of applications that do not exist any more, if their last line is older than
// before.
func (s *logStore) forget(isThere func(app string) bool, before time.Time) {
	s.mu.Lock()
	for key, r := range s.rings {
		if !isThere(r.app) && r.last.Before(before) {
			s.drop(key)
		}
	}
	s.mu.Unlock()
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return // the directory does not exist yet
	}
	for _, f := range files {
		m := logName.FindStringSubmatch(f.Name())
		info, err := f.Info()
		if m == nil || err != nil || isThere(m[1]) || !info.ModTime().Before(before) {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, f.Name())); err != nil {
			s.log.Warn("cannot delete an old log file", slog.String("err", err.Error()))
		}
	}
}

// sweep forgets, each hour, the logs of applications that have been gone for a week. Close does not wait
// for it, because a disk may hang.
func (s *logStore) sweep(ctx context.Context, current func() *state.State) {
	each := time.NewTicker(logSweep)
	defer each.Stop()
	for {
		select {
		case <-each.C:
		case <-ctx.Done():
			return
		}
		if now := current(); now.Index > 0 {
			s.forget(func(app string) bool { return now.Apps[app] != nil }, time.Now().Add(-logKept))
		}
	}
}
