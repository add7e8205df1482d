package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/engine/enginelog"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of the logs of one rank.
const (
	ringLines   = 4096
	ringBytes   = 1 << 20 // of all lines together: 4096 long lines would be 256 MiB
	tailLines   = 20      // in events and errors
	logsKept    = 1024    // ranks with logs; the one silent for longest is dropped first
	streamOut   = "stdout"
	streamError = "stderr"
)

// LogLine is one line of an engine, and LogQuery selects lines. A zero field of a query selects everything;
// for Rank -1 does.
type (
	LogLine  = msg.LogLine
	LogQuery = msg.LogQuery
)

// logStore holds the logs of a node's ranks, in memory and, by one writer per rank, in files.
// They outlive units and restarts, because the lines before a crash are needed after it.
type logStore struct {
	dir string // "" = no files
	log *slog.Logger

	done    chan struct{} // closed with the store
	writers sync.WaitGroup

	mu      sync.Mutex // never held during disk access
	rings   map[logKey]*ring
	changed chan struct{} // closed and replaced at every line
	closed  bool
}

type logKey struct {
	unit string
	rank int
}

func newLogStore(dir string, log *slog.Logger) *logStore {
	return &logStore{
		dir: dir, log: log, rings: map[logKey]*ring{}, changed: make(chan struct{}),
		done: make(chan struct{}),
	}
}

// ring holds the last lines of one rank.
type ring struct {
	key   logKey
	app   string
	lines []LogLine // oldest first
	first uint64    // number of lines[0] since the ring began
	bytes int
	last  time.Time

	file    *diskfile.Log // used by the writer only; nil = none
	written uint64        // number of the first line that is not in the file
	writing bool          // the ring has a writer
	failing bool          // the last write has failed
	dropped bool          // no line follows
}

// open returns the two writers for a rank's engine at an epoch.
func (s *logStore) open(appName, unit string, rank int, epoch uint64) (stdout, stderr *lineWriter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := logKey{unit, rank}
	r := s.rings[key]
	if r == nil {
		s.makeRoom()
		r = &ring{key: key, app: appName, last: time.Now()}
		if s.dir != "" {
			name := strings.ReplaceAll(unit, "/", ".") + "." + strconv.Itoa(rank) + ".log"
			r.file = &diskfile.Log{Path: filepath.Join(s.dir, name), Limit: logFileSize}
		}
		s.rings[key] = r
	}
	return newLineWriter(s, r, epoch, streamOut), newLineWriter(s, r, epoch, streamError)
}

func (s *logStore) makeRoom() {
	for len(s.rings) >= logsKept {
		var oldest *ring
		for _, r := range s.rings {
			if oldest == nil || r.last.Before(oldest.last) {
				oldest = r
			}
		}
		s.drop(oldest.key)
	}
}

// drop forgets a rank's lines. The caller holds mu.
func (s *logStore) drop(key logKey) {
	r := s.rings[key]
	r.dropped = true
	delete(s.rings, key)
	if !s.closed {
		s.keep(r)
	}
}

// add appends a line. It takes the time under mu, so that lines are ordered by time.
func (s *logStore) add(w *lineWriter, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := w.ring
	line := LogLine{
		At: time.Now(), Unit: r.key.unit, Rank: r.key.rank, Epoch: w.epoch, Stream: w.stream,
		Text: text,
	}
	r.lines, r.bytes, r.last = append(r.lines, line), r.bytes+len(text), line.At
	drop := 0
	for len(r.lines)-drop > ringLines || r.bytes > ringBytes && len(r.lines)-drop > 1 {
		r.bytes -= len(r.lines[drop].Text)
		drop++
	}
	r.lines, r.first = r.lines[drop:], r.first+uint64(drop)
	if !s.closed {
		s.keep(r)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// last returns a rank's last lines at an epoch, at most so many.
func (s *logStore) last(unit string, rank int, epoch uint64, most int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rings[logKey{unit, rank}]
	if r == nil {
		return nil
	}
	var out []string
	for _, l := range slices.Backward(r.lines) {
		if l.Epoch != epoch || len(out) == most {
			break
		}
		out = append(out, l.Text)
	}
	slices.Reverse(out)
	return out
}

// read returns the lines of q after seen (a line number per ring), ordered by time, and updates seen.
func (s *logStore) read(q *LogQuery, seen map[*ring]uint64) ([]LogLine, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []LogLine
	for _, r := range s.rings {
		user, _ := app.SplitPool(r.app)
		if q.App != "" && q.App != r.app && q.App != user || q.Unit != "" && r.key.unit != q.Unit ||
			q.Rank >= 0 && r.key.rank != q.Rank {
			continue
		}
		from := max(seen[r], r.first) - r.first
		for _, l := range r.lines[from:] {
			if !l.At.Before(q.Since) {
				out = append(out, l)
			}
		}
		seen[r] = r.first + uint64(len(r.lines))
	}
	slices.SortStableFunc(out, func(a, b LogLine) int { return a.At.Compare(b.At) })
	return out, s.changed
}

// Logs passes the lines of q to emit, merged by time; an error of emit ends it. With Follow it continues
// until ctx is done. A slow reader misses lines that leave the ring before it reads them.
func (n *Node) Logs(ctx context.Context, q LogQuery, emit func(LogLine) error) error {
	seen := map[*ring]uint64{}
	lines, changed := n.logs.read(&q, seen)
	if q.Tail > 0 && len(lines) > q.Tail {
		lines = lines[len(lines)-q.Tail:]
	}
	for {
		for _, l := range lines {
			if err := emit(l); err != nil {
				return err
			}
		}
		if !q.Follow {
			return nil
		}
		select {
		case <-changed:
			lines, changed = n.logs.read(&q, seen)
		case <-ctx.Done():
			return nil
		}
	}
}

// lineWriter takes one stream of an engine's output. One goroutine writes to it.
type lineWriter struct {
	process.LineWriter
	ring   *ring
	epoch  uint64
	stream string
	start  *enginelog.Stream // reads what the engine says of its start; nil = nothing does
}

func newLineWriter(s *logStore, r *ring, epoch uint64, stream string) *lineWriter {
	w := &lineWriter{ring: r, epoch: epoch, stream: stream}
	w.Take = func(line string) { s.add(w, line) }
	return w
}

// Write implements io.Writer. It never fails.
func (w *lineWriter) Write(p []byte) (int, error) {
	if w.start != nil {
		_, _ = w.start.Write(p) // never fails
	}
	return w.LineWriter.Write(p)
}

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
			if s.rest(r) {
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

// logName matches the file of a rank: application (of two pools, the name of its pool), group, for
// independent ranks the rank as unit, and the rank; .1 is the older file.
var logName = regexp.MustCompile(`^([^.]+(?:\.[a-z]+)?)(\.[0-9]+){2,3}\.log(\.1)?$`)

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
