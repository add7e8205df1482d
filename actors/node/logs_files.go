package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of the log files.
const (
	logFileSize  = 10 << 20           // size at which a rank's file is rotated; one older file is kept
	logBatch     = 256                // lines of one write
	logRetry     = 30 * time.Second   // pause after an error, such as a full disk
	logCloseWait = time.Second        // for the last lines, at the end of the node
	logKept      = 7 * 24 * time.Hour // a removed application's file is deleted this long after its last line
	logSweep     = 10 * time.Minute   // between two checks for such files, and for rings
	streamSelf   = "dpserve"          // stream of lines that dpserve wrote
)

// appendLines writes lines to a rank's file and returns how many are written.
func appendLines(file *diskfile.Log, lines []LogLine) (written uint64, err error) {
	for i := range lines {
		line := &lines[i]
		err := file.Append(line.At.UTC().Format(time.RFC3339Nano) + " " + line.Stream + " " + line.Text)
		if err != nil {
			return written, err
		}
		written++
	}
	return written, nil
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
				r.file.Close()
			}
			if s.rest(r, ends) {
				return
			}
			continue
		}
		n, err := appendLines(r.file, lines)
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
	return from, append(lines, rest[:min(len(rest), logBatch)]...), s.ends(r)
}

// ends reports whether the ring's file is not needed any more once it has all lines. The caller holds mu.
func (s *logStore) ends(r *ring) bool { return r.dropped || s.closed || !r.gone.IsZero() }

// rest ends the writer, unless lines arrived meanwhile, or the ring has ended and its file is still open.
func (s *logStore) rest(r *ring, closedFile bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.writing = r.written < r.first+uint64(len(r.lines)) || s.ends(r) && !closedFile
	if !r.writing {
		s.shorten(r)
	}
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

// logName matches the file of a rank: application, pool if it has two, group, for independent ranks the rank
// as unit, and the rank; .1 is the older file.
var logName = regexp.MustCompile(`^([^.]+)(?:\.[a-z]+)?(\.[0-9]+){2,3}\.log(\.1)?$`)

// forget drops what is left of applications that do not exist any more: rings goneKept after the end of the
// engine, and files logKept after the last line.
func (s *logStore) forget(isThere func(app string) bool) {
	s.mu.Lock()
	for key, r := range s.rings {
		switch {
		case r.gone.IsZero() || isThere(r.app):
		case time.Since(r.gone) >= goneKept:
			s.drop(key)
		default: // it crashed before its application was deleted
			r.short = true
			s.finish(r)
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
		if m == nil || err != nil || isThere(m[1]) || time.Since(info.ModTime()) <= logKept {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, f.Name())); err != nil {
			s.log.Warn("cannot delete an old log file", slog.String("err", err.Error()))
		}
	}
}

// sweep forgets the logs of applications that have gone. Close does not wait for it, because a disk may hang.
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
			s.forget(func(app string) bool { return now.Apps[app] != nil })
		}
	}
}
