package node

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/enginelog"
	"github.com/dpserve/dpserve/internal/lines"
)

// Bounds of the logs in memory.
const (
	ringLines   = 4096      // of a rank
	ringBytes   = 1 << 20   // of the text of a rank: 4096 long lines would be 256 MiB
	ringsBytes  = 64 << 20  // of all ranks of a node, with what a line and a ring need beside the text
	goneLines   = 100       // of a rank that was told to end
	goneKept    = time.Hour // of a rank whose application has gone; its file has all lines for logKept
	lineBytes   = 128       // what a line needs beside its text
	ownBytes    = 1 << 10   // what a ring needs without lines
	tailLines   = 20        // in events and errors
	streamOut   = "stdout"
	streamError = "stderr"
)

// LogLine is one line of an engine, and LogQuery selects lines. A zero field of a query selects everything;
// for Rank -1 does.
type (
	LogLine  = msg.LogLine
	LogQuery = msg.LogQuery
)

// logStore holds the last lines of a node's ranks in memory. They outlive units and restarts, because the
// lines before a crash are needed after it. The engines' shims write the files.
type logStore struct {
	dir string // of the files; "" = there are none
	log *slog.Logger

	mu      sync.Mutex // never held during disk access
	rings   map[logKey]*ring
	bytes   int           // of rings
	changed chan struct{} // closed and replaced at every line
}

type logKey struct {
	unit string
	rank int
}

func newLogStore(dir string, log *slog.Logger) *logStore {
	return &logStore{dir: dir, log: log, rings: map[logKey]*ring{}, changed: make(chan struct{})}
}

// ring holds the last lines of one rank.
type ring struct {
	key   logKey
	app   string
	lines lines.Ring[LogLine]
	last  time.Time
	gone  time.Time // when the last engine had ended; zero: one runs, or starts
}

// open returns the two writers for a rank's engine at an epoch.
func (s *logStore) open(appName, unit string, rank int, epoch uint64) (stdout, stderr *lineWriter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := logKey{unit, rank}
	r := s.rings[key]
	if r == nil {
		size := func(l *LogLine) int { return len(l.Text) }
		r = &ring{
			key: key, app: appName, last: time.Now(),
			lines: lines.Ring[LogLine]{Most: ringLines, MostBytes: ringBytes, Size: size},
		}
		s.rings[key] = r
		s.bytes += ownBytes
		s.makeRoom()
	}
	r.gone = time.Time{}
	return newLineWriter(s, r, epoch, streamOut), newLineWriter(s, r, epoch, streamError)
}

// makeRoom keeps all rings together within ringsBytes: of the ranks whose engines have ended, the one that
// was silent for longest is dropped first. Without such ranks the largest ring loses the older half of its
// lines. The caller holds mu.
func (s *logStore) makeRoom() {
	for s.bytes > ringsBytes {
		var quietest, largest *ring
		for _, r := range s.rings {
			if !r.gone.IsZero() && (quietest == nil || r.last.Before(quietest.last)) {
				quietest = r
			}
			if largest == nil || r.size() > largest.size() {
				largest = r
			}
		}
		switch {
		case quietest != nil:
			s.drop(quietest.key)
		case largest.lines.Len() > 1:
			s.keep(largest, (largest.lines.Len()+1)/2)
		default:
			return
		}
	}
}

// size is what a ring needs in memory.
func (r *ring) size() int { return ownBytes + r.lines.Bytes() + lineBytes*r.lines.Len() }

// keep drops all but the newest lines of a ring. The caller holds mu.
func (s *logStore) keep(r *ring, lines int) {
	before := r.size()
	r.lines.Keep(lines)
	s.bytes -= before - r.size()
}

// drop forgets a rank's lines. The caller holds mu.
func (s *logStore) drop(key logKey) {
	s.bytes -= s.rings[key].size()
	delete(s.rings, key)
}

// retire notes that the engines of a unit have ended. If they were told to end, only their last lines stay.
// After a crash all stay.
func (s *logStore) retire(unit string, asked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, r := range s.rings {
		if key.unit != unit || !r.gone.IsZero() {
			continue
		}
		r.gone = time.Now()
		if asked {
			s.keep(r, goneLines)
		}
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
	before := r.size()
	r.lines.Add(line)
	r.last = line.At
	if s.rings[r.key] == r {
		s.bytes += r.size() - before
		s.makeRoom()
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
	held, _ := r.lines.From(0)
	for _, l := range slices.Backward(held) {
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
		isOf := q.App == "" || q.App == r.app || strings.HasPrefix(r.key.unit, q.App+"/") // or of its pool
		if !isOf || q.Unit != "" && r.key.unit != q.Unit ||
			q.Rank >= 0 && r.key.rank != q.Rank {
			continue
		}
		held, _ := r.lines.From(seen[r])
		for _, l := range held {
			if !l.At.Before(q.Since) {
				out = append(out, l)
			}
		}
		seen[r] = r.lines.Next()
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
	lines.Writer
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
	return w.Writer.Write(p)
}
