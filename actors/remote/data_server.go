package remote

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engineleg"
)

// DataConfig is the configuration of a data port. Feed, Caller and Log are required.
type DataConfig struct {
	Feed msg.Feed // the ranks of this node
	// the node that sent a request, if it has role ingress
	Caller func(ctx context.Context) (ingress string, ok bool)
	Serves func() bool      // false: this node may not serve, because its lease has expired; nil: always
	Dial   engineleg.Dialer // to the engines; nil = TCP
	Log    *slog.Logger
	Timers DataTimers
}

// DataServer serves the ranks of its node to the ingresses of other nodes: admission and data in one HTTP/2
// request. It is the http.Handler of a server that belongs to the node port. Safe for concurrent use.
type DataServer struct {
	caller func(ctx context.Context) (string, bool)
	serves func() bool
	log    *slog.Logger
	timers DataTimers
	table  *dataTable
	legs   *engineleg.Legs

	uploads sync.Pool // of *requestBody
	buffers sync.Pool // *[]byte
	replies sync.Pool // chan msg.AdmitReply

	closing context.Context //nolint:containedctx // ends every request
	stop    context.CancelFunc
	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup // requests, and waits for late tickets
	cancel  func()
}

// NewDataServer makes a data port and subscribes to Feed at once.
func NewDataServer(c DataConfig) (*DataServer, error) {
	if c.Feed == nil || c.Caller == nil || c.Log == nil {
		return nil, errors.New("a data port needs Feed, Caller and Log")
	}
	if c.Serves == nil {
		c.Serves = func() bool { return true }
	}
	t := c.Timers.withDefaults()
	s := &DataServer{
		caller: c.Caller, serves: c.Serves, log: c.Log.With(slog.String("room", "remote")), timers: t,
		legs: engineleg.New(engineleg.Timers{Dial: t.Dial, IdleOwned: t.IdleOwned,
			IdleAttached: t.IdleAttached}, c.Dial),
	}
	s.table = newDataTable(s.log)
	s.uploads.New = func() any { return &requestBody{} }
	s.buffers.New = func() any { b := make([]byte, relayBuffer); return &b }
	s.replies.New = func() any { return make(chan msg.AdmitReply, 1) }
	s.closing, s.stop = context.WithCancel(context.Background())
	s.cancel = c.Feed.Subscribe(s.table)
	return s, nil
}

// Close cuts the running requests and waits for them. It is idempotent.
func (s *DataServer) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if first {
		s.cancel()
		s.stop()
	}
	s.running.Wait()
	s.legs.Close()
	return nil
}

// beginRequest counts a request in; false after Close.
func (s *DataServer) beginRequest() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Add(1)
	}
	return !s.closed
}

// errClosing is the cause with which Close ends running requests.
var errClosing = errors.New("the data port is closing")

// ServeHTTP implements http.Handler.
func (s *DataServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.beginRequest() {
		panic(http.ErrAbortHandler)
	}
	defer s.running.Done()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	rc := http.NewResponseController(w)
	defer s.onClose(func() {
		cancel(errClosing)
		_ = rc.SetWriteDeadline(time.Now()) // it also ends a write to a stalled reader
	})()
	in, _ := s.uploads.Get().(*requestBody)
	p := &dataRequest{server: s, w: w, rc: rc, r: r, cancel: cancel, upload: in, isBodyFree: true}
	whole := false
	defer func() {
		p.isBodyFree = p.isBodyFree && whole // after a panic another goroutine may still read it
		p.releaseBody()
	}()
	clean := p.run(ctx)
	whole = true
	if !clean { // without the panic net/http would end a broken answer like a complete one
		panic(http.ErrAbortHandler)
	}
}

// onClose calls cut when Close runs, until the returned function, which waits for a running cut.
func (s *DataServer) onClose(cut func()) (over func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(s.closing, func() {
		defer close(done)
		cut()
	})
	return func() {
		if !stop() {
			<-done
		}
	}
}

// recycle keeps a body's memory, unless it is large, or much larger than its last body.
func (s *DataServer) recycle(in *requestBody) {
	if cap(in.b) <= maxKeptBody && cap(in.b) <= max(smallBody, 4*len(in.b)) &&
		cap(in.blocks) <= maxKeptBlocks {
		s.uploads.Put(in)
	}
}
