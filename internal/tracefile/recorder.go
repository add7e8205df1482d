// Package tracefile records which requests come: when, how long, and which of them share a beginning. It
// keeps hashes and lengths, and never a text. `dpserve simulate` reads the file.
package tracefile

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/dpserve/dpserve/routing/kvindex"
)

const (
	// maxBytes is the size at which a recording ends.
	maxBytes = 1 << 30

	blockTokens   = 512             // as in Mooncake's traces
	blockBytes    = 4 * blockTokens // of a text
	queueLines    = 4096            // that wait for the disk; more are dropped
	flushEvery    = 5 * time.Second // at most so much of the file is lost with the process
	maxNames      = 1000            // FILE, FILE.1, FILE.2 …
	hashBits      = 53              // that every reader of JSON takes
	secretBytes   = 32              // random per file, and in no file
	fileMode      = 0o600           // lengths and times are nobody else's business
	bufferedBytes = 64 << 10        // of lines before they are written
)

// Request is one line of a trace.
type Request struct {
	At     time.Time // when it came
	Input  int       // tokens of the prompt
	Output int       // tokens of the answer; 0: there was none
	Blocks []uint64  // of Hashes
}

// Recorder writes a trace. Its methods are safe for concurrent use, never block and never fail: at a full
// disk, an error or the size limit it says so once in the log, and the recording is over. Close ends it.
type Recorder struct {
	hasher kvindex.Hasher
	log    *slog.Logger
	path   string
	begin  time.Time

	mu      sync.Mutex
	queue   chan Request
	closed  bool
	dropped int

	limit   int64
	done    chan struct{} // closed when the file is
	written int           // lines; read after done
}

// Create begins a file. If path exists, path.1 or the next free name is taken, so that a restart loses
// nothing.
func Create(path string, log *slog.Logger) (*Recorder, error) {
	r := &Recorder{
		log: log, begin: time.Now(), queue: make(chan Request, queueLines), limit: maxBytes,
		done: make(chan struct{}),
	}
	var secret [secretBytes]byte
	_, _ = rand.Read(secret[:]) // it never fails
	r.hasher = kvindex.NewHasher(secret[:])
	var file *os.File
	for n := 0; file == nil; n++ {
		r.path = path
		if n > 0 {
			r.path = fmt.Sprintf("%s.%d", path, n)
		}
		var err error
		file, err = os.OpenFile(r.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
		if err != nil && (!errors.Is(err, fs.ErrExist) || n == maxNames) {
			return nil, fmt.Errorf("record a trace: %w", err)
		}
	}
	go r.write(file)
	return r, nil
}

// Path is the name of the file.
func (r *Recorder) Path() string { return r.path }

// Hashes identifies the blocks of 512 tokens of a prompt: its token ids, or if they are not known its text in
// blocks of 2,048 bytes. Prompts with an equal beginning have equal first hashes within one file, if their
// salt is equal too: model, adapter, tools.
func (r *Recorder) Hashes(salt string, ids []uint32, text []byte) []uint64 {
	root := r.hasher.Root(kvindex.Salt{Unit: kvindex.Text, BlockSize: blockBytes, CacheSalt: salt})
	var out []uint64
	if len(ids) > 0 {
		root = r.hasher.Root(kvindex.Salt{Unit: kvindex.Tokens, BlockSize: blockTokens, CacheSalt: salt})
		out = r.hasher.Tokens(make([]uint64, 0, len(ids)/blockTokens), root, ids, blockTokens, nil)
	} else {
		out = r.hasher.Bytes(make([]uint64, 0, len(text)/blockBytes), root, text, blockBytes)
	}
	for i, h := range out {
		out[i] = h >> (64 - hashBits)
	}
	return out
}

// Add records a request. It drops it if the disk is too slow.
func (r *Recorder) Add(q Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || q.Input < 1 {
		return
	}
	select {
	case r.queue <- q:
	default:
		if r.dropped++; r.dropped == 1 {
			r.log.Warn("the trace drops requests: its disk is too slow", slog.String("file", r.path))
		}
	}
}

// Close writes what waits and closes the file.
func (r *Recorder) Close() {
	r.mu.Lock()
	wasClosed := r.closed
	r.closed = true
	if !wasClosed {
		close(r.queue)
	}
	r.mu.Unlock()
	<-r.done
	if !wasClosed {
		r.log.Info("the trace is closed", slog.String("file", r.path), slog.Int("requests", r.written),
			slog.Int("dropped", r.dropped))
	}
}

// write writes lines until the queue is closed, or until a line cannot be written.
func (r *Recorder) write(file *os.File) {
	defer close(r.done)
	out, size := bufio.NewWriterSize(file, bufferedBytes), int64(0)
	flush := time.NewTicker(flushEvery)
	defer flush.Stop()
	var err error
	for open := true; open && err == nil; {
		select {
		case q, isOpen := <-r.queue:
			if open = isOpen; !open {
				break
			}
			line := r.line(&q)
			if size += int64(len(line)); size > r.limit {
				err = fmt.Errorf("it has %d bytes", r.limit)
				break
			}
			if _, err = out.Write(line); err == nil {
				r.written++
			}
		case <-flush.C:
			err = out.Flush()
		}
	}
	if failure := errors.Join(out.Flush(), file.Close()); err == nil {
		err = failure
	}
	if err != nil {
		r.log.Warn("the trace ends early", slog.String("file", r.path), slog.String("err", err.Error()))
	}
	for range r.queue { // until Close
	}
}

// line returns a request in Mooncake's form.
func (r *Recorder) line(q *Request) []byte {
	row := struct {
		Timestamp int64    `json:"timestamp"` // ms
		Input     int      `json:"input_length"`
		Output    int      `json:"output_length"`
		Hashes    []uint64 `json:"hash_ids"`
	}{max(0, q.At.Sub(r.begin).Milliseconds()), q.Input, q.Output, q.Blocks}
	if row.Hashes == nil {
		row.Hashes = []uint64{}
	}
	text, _ := json.Marshal(row) // numbers only
	return append(text, '\n')
}
