// Package lines splits a stream of text into lines, and keeps the last entries of a sequence.
package lines

import (
	"bytes"
	"strings"
)

// Limit is the longest line in bytes. The rest of a longer one is dropped.
const Limit = 64 << 10

// Writer splits a stream of output into lines. One goroutine writes to it.
type Writer struct {
	Take func(line string) // gets each line: valid UTF-8, without its end
	// Bar gets what is shown of a line that is written over, like a progress bar. Take gets the last text of
	// such a line. nil = Take gets all texts in one line.
	Bar  func(text string)
	half []byte // the line that has not ended
	cut  bool   // half was passed on already: the rest of its line is dropped
}

// Write implements io.Writer. It never fails, because a failing log must not stop an engine.
func (w *Writer) Write(p []byte) (int, error) {
	n := len(p)
	for {
		at := bytes.IndexByte(p, '\n')
		if at < 0 {
			w.add(p)
			w.overwrite()
			return n, nil
		}
		w.add(p[:at])
		w.flush()
		w.cut = false
		p = p[at+1:]
	}
}

// End passes on a last line without its newline.
func (w *Writer) End() {
	if len(w.half) > 0 {
		w.flush()
	}
}

func (w *Writer) add(p []byte) {
	if w.cut {
		return
	}
	w.half = append(w.half, p[:min(len(p), Limit-len(w.half))]...)
	if len(w.half) == Limit {
		w.flush()
		w.cut = true
	}
}

// overwrite passes on the last text of half that a carriage return has ended, and forgets the texts before
// it. A carriage return at the end may belong to the end of the line, so its text stays.
func (w *Writer) overwrite() {
	at := bytes.LastIndexByte(w.half, '\r')
	if at < 0 || w.Bar == nil {
		return
	}
	from := bytes.LastIndexByte(w.half[:at], '\r') + 1
	if text := w.half[from:at]; len(text) > 0 {
		w.Bar(strings.ToValidUTF8(string(text), "\uFFFD"))
	}
	if at+1 < len(w.half) {
		from = at + 1
	}
	w.half = append(w.half[:0], w.half[from:]...)
}

func (w *Writer) flush() {
	if w.cut {
		return
	}
	text := bytes.TrimSuffix(w.half, []byte("\r"))
	if w.Bar != nil {
		text = text[bytes.LastIndexByte(text, '\r')+1:]
	}
	w.Take(strings.ToValidUTF8(string(text), "\uFFFD"))
	w.half = w.half[:0]
}
