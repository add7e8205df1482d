package shim

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/lines"
)

// Bounds of the lines that a shim holds, and of one batch of them.
const (
	ringLines  = 1024
	ringBytes  = 256 << 10
	batchBytes = 64 << 10
)

// Line is one line of an engine's output.
type Line struct {
	Number uint64 `json:"n"`  // counted from 0
	At     int64  `json:"at"` // unix ms
	Stream string `json:"s"`  // Stdout or Stderr
	Text   string `json:"t"`
	Bar    bool   `json:"bar,omitempty"` // the engine writes over it; it is not in the file
}

// The streams.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// ring holds the last lines of an engine.
type ring struct {
	mu      sync.Mutex // never held during a write
	lines   lines.Ring[Line]
	read    uint64        // number of the first line that no owner has read
	changed chan struct{} // closed and replaced at every line
	ended   bool          // no line follows
}

func newRing() *ring {
	size := func(l *Line) int { return len(l.Text) }
	return &ring{
		lines:   lines.Ring[Line]{Most: ringLines, MostBytes: ringBytes, Size: size},
		changed: make(chan struct{}),
	}
}

func (r *ring) add(stream, text string, isBar bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines.Add(Line{
		Number: r.lines.Next(), At: time.Now().UnixMilli(), Stream: stream, Text: text, Bar: isBar,
	})
	r.notify()
}

// notify wakes the readers. The caller holds mu.
func (r *ring) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// end says that no line follows.
func (r *ring) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.notify()
}

// batch is some lines of a ring in sequence.
type batch struct {
	missed  uint64 // lines before them that are not held any more
	lines   []Line
	next    uint64          // where the following batch begins
	ended   bool            // nothing follows
	changed <-chan struct{} // closed when there may be more
}

// from returns the lines from a number on, as many as make a batch.
func (r *ring) from(number uint64) batch {
	r.mu.Lock()
	defer r.mu.Unlock()
	held, first := r.lines.From(number)
	b := batch{missed: first - min(number, first), next: first, changed: r.changed}
	size := 0
	for _, l := range held {
		if size += len(l.Text); size > batchBytes && len(b.lines) > 0 {
			break
		}
		b.lines = append(b.lines, l)
	}
	b.next += uint64(len(b.lines))
	b.ended = r.ended && b.next == r.lines.Next()
	return b
}

// took notes that an owner has read the lines before a number.
func (r *ring) took(before uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.read = max(r.read, before)
}

func (r *ring) unread() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.read
}

// barEach is the least time between two states of a progress bar in the ring.
const barEach = time.Second

// writer returns a writer of a stream, for one goroutine.
func (r *ring) writer(stream string) *lines.Writer {
	var last time.Time
	return &lines.Writer{
		Take: func(line string) { r.add(stream, line, false) },
		Bar: func(text string) {
			if now := time.Now(); now.Sub(last) >= barEach {
				last = now
				r.add(stream, text, true)
			}
		},
	}
}

// Bounds of an output file.
const (
	outputSize  = 10 << 20         // size at which it becomes the older file, NAME.1
	outputRetry = 30 * time.Second // pause after an error, such as a full disk
	outputTail  = 64 << 10         // how much of its end LastLines reads
)

// streamSelf is the stream of a line that the shim wrote.
const streamSelf = "dpserve"

// keepOutput writes the ring's lines to a file until they have ended or done is closed. A disk that is full
// or hangs delays the file and nothing else; lines that leave the ring meanwhile are counted in the file.
func keepOutput(r *ring, file *diskfile.Log, retry time.Duration, done <-chan struct{}) {
	defer file.Close()
	for next := uint64(0); ; {
		b := r.from(next)
		var err error
		if b.missed > 0 {
			err = file.Append(fileLine(time.Now(), streamSelf, fmt.Sprintf(
				"%d lines are missing here: the disk did not take them in time", b.missed)))
		}
		if err == nil {
			next += b.missed
		}
		for i := 0; i < len(b.lines) && err == nil; i++ {
			l := &b.lines[i]
			if l.Bar {
				next = l.Number + 1
				continue
			}
			if err = file.Append(fileLine(time.UnixMilli(l.At), l.Stream, l.Text)); err == nil {
				next = l.Number + 1
			}
		}
		switch {
		case err != nil:
			if !pause(retry, done) {
				return
			}
		case b.ended:
			return
		case len(b.lines) == 0:
			select {
			case <-b.changed:
			case <-done:
				return
			}
		}
	}
}

func fileLine(at time.Time, stream, text string) string {
	return at.UTC().Format(time.RFC3339Nano) + " " + stream + " " + text
}

// pause waits; false: done was closed.
func pause(d time.Duration, done <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-done:
		return false
	}
}

// LastLines reads the last lines, at most n, of an output file that an engine has written since it began.
func LastLines(file string, began time.Time, n int) []Line {
	f, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-outputTail), io.SeekStart)
	}
	text, err := io.ReadAll(io.LimitReader(f, outputTail))
	if err != nil {
		return nil
	}
	var out []Line
	for text := range bytes.Lines(text) {
		if l, ok := parseFileLine(string(text)); ok && l.At >= began.UnixMilli() {
			out = append(out, l)
		}
	}
	return out[max(0, len(out)-n):]
}

// parseFileLine reads a line of an output file; false for a part of one.
func parseFileLine(text string) (Line, bool) {
	when, rest, ok := strings.Cut(strings.TrimSuffix(text, "\n"), " ")
	stream, text, ok2 := strings.Cut(rest, " ")
	at, err := time.Parse(time.RFC3339Nano, when)
	if !ok || !ok2 || err != nil || stream != Stdout && stream != Stderr {
		return Line{}, false
	}
	return Line{At: at.UnixMilli(), Stream: stream, Text: text}, true
}
