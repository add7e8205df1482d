package access

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/dpserve/dpserve/internal/problem"
)

// largestWatched bounds the bytes of a watched file that are read: larger than every parser accepts.
const largestWatched = 1<<20 + 1

// watched holds the value of files that an operator may change while the node runs. A change that cannot
// be used leaves the value before it in use, so that a mistake in a file shuts no client out. A change counts
// when two reads in a row find the same bytes, so a file that is being written is not used half-way.
type watched[T any] struct {
	what   string   // in errors and logs: the flag
	paths  []string // all are read for one value
	parse  func(texts [][]byte) (*T, error)
	report func(failed bool)    // for metrics: the files on disk cannot be used
	use    func(before, now *T) // a value is new; before is nil at the start; nil = nothing
	log    *slog.Logger
	value  atomic.Pointer[T]
	used   [sha256.Size]byte // of the bytes of value
	seen   [sha256.Size]byte // of the bytes at the last look
	warned [sha256.Size]byte // of the bytes that a line of the log was about
}

// current returns the value in use.
func (w *watched[T]) current() *T { return w.value.Load() }

// open reads the files for the first time. An error ends the start of the node.
func (w *watched[T]) open() error {
	texts, sum, err := w.read()
	var v *T
	if err == nil {
		v, err = w.parse(texts)
	}
	if err != nil {
		fault := problem.New(problem.InvalidArgument, "%s: %w", w.what, err)
		if p, ok := errors.AsType[*problem.Error](err); ok && p.Hint != "" {
			return fault.WithHint("%s", p.Hint)
		}
		return fault.WithHint("name a file that this user may read")
	}
	w.take(v, sum)
	return nil
}

// look reads the files again.
func (w *watched[T]) look() {
	texts, sum, err := w.read()
	if sum == w.used {
		w.seen = sum
		w.report(false)
		return
	}
	if sum != w.seen {
		w.seen = sum
		return
	}
	var v *T
	if err == nil {
		v, err = w.parse(texts)
	}
	if err != nil {
		w.report(true)
		if w.warned != sum {
			w.warned = sum
			w.log.Warn("a changed file cannot be used; what it held before stays in use",
				slog.String("flag", w.what), slog.Any("err", err))
		}
		return
	}
	w.take(v, sum)
	w.log.Info("a changed file is in use", slog.String("flag", w.what))
}

// take uses a value.
func (w *watched[T]) take(v *T, sum [sha256.Size]byte) {
	before := w.value.Swap(v)
	w.used, w.seen = sum, sum
	w.report(false)
	if w.use != nil {
		w.use(before, v)
	}
}

// read returns the contents of the files and a digest of them. An error has a digest too, so that the log has
// one line for as long as it stays the same.
func (w *watched[T]) read() (texts [][]byte, sum [sha256.Size]byte, err error) {
	h := sha256.New()
	for _, path := range w.paths {
		text, e := readWatched(path)
		err = errors.Join(err, e)
		texts = append(texts, text)
		_, _ = fmt.Fprintf(h, "%d ", len(text)) // a hash never fails
		_, _ = h.Write(text)
	}
	if err != nil {
		_, _ = io.WriteString(h, err.Error())
	}
	return texts, [sha256.Size]byte(h.Sum(nil)), err
}

func readWatched(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, largestWatched))
	return text, errors.Join(err, f.Close())
}
