package node

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

// Bounds of the logs of one rank.
const (
	ringLines   = 4096
	ringBytes   = 1 << 20  // of all lines together: 4096 long lines would be 256 MiB
	lineLimit   = 64 << 10 // a longer line is cut
	tailLines   = 20       // in events and errors
	logsKept    = 1024     // ranks with logs; the one silent for longest is dropped first
	streamOut   = "stdout"
	streamError = "stderr"
)

// LogLine is one line of an engine, and LogQuery selects lines. A zero field of a query selects everything;
// for Rank -1 does.
type (
	LogLine  = msg.LogLine
	LogQuery = msg.LogQuery
)

// logStore holds the logs of a node's ranks, in memory and, by one writer per rank (logfile.go), in files.
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

	file    *logFile // used by the writer only; nil = none
	written uint64   // number of the first line that is not in the file
	writing bool     // the ring has a writer
	failing bool     // the last write has failed
	dropped bool     // no line follows
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
			r.file = &logFile{path: s.dir + "/" + strings.ReplaceAll(unit, "/", ".") + "." +
				strconv.Itoa(rank) + ".log"}
		}
		s.rings[key] = r
	}
	return &lineWriter{store: s, ring: r, epoch: epoch, stream: streamOut},
		&lineWriter{store: s, ring: r, epoch: epoch, stream: streamError}
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

// tail returns a rank's last lines at an epoch.
func (s *logStore) tail(unit string, rank int, epoch uint64) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rings[logKey{unit, rank}]
	if r == nil {
		return nil
	}
	var out []string
	for _, l := range slices.Backward(r.lines) {
		if l.Epoch != epoch || len(out) == tailLines {
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

// lineWriter splits an engine's output into lines. One goroutine writes to it.
type lineWriter struct {
	store  *logStore
	ring   *ring
	epoch  uint64
	stream string
	half   []byte // the line that has not ended
	cut    bool   // half was already passed on: the rest of its line is dropped
}

// Write implements io.Writer. It never fails, because a failing log must not stop an engine.
func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for {
		at := bytes.IndexByte(p, '\n')
		if at < 0 {
			w.take(p)
			return n, nil
		}
		w.take(p[:at])
		w.flush()
		w.cut = false
		p = p[at+1:]
	}
}

func (w *lineWriter) take(p []byte) {
	if w.cut {
		return
	}
	w.half = append(w.half, p[:min(len(p), lineLimit-len(w.half))]...)
	if len(w.half) == lineLimit {
		w.flush()
		w.cut = true
	}
}

// flush passes on an incomplete line; also at the end of the engine.
func (w *lineWriter) flush() {
	if w.cut {
		return
	}
	w.store.add(w, strings.ToValidUTF8(strings.TrimSuffix(string(w.half), "\r"), "�"))
	w.half = w.half[:0]
}

// end passes on a last line without its newline.
func (w *lineWriter) end() {
	if len(w.half) > 0 {
		w.flush()
	}
}
