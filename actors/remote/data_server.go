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

// DataConfig is what a data port needs. Feed, Caller and Log are required.
type DataConfig struct {
	Feed   msg.Feed                                            // the ranks of this node
	Caller func(ctx context.Context) (ingress string, ok bool) // the node behind a request, if it has role ingress
	Serves func() bool                                         // false: this node may not serve (its lease is over); nil = always
	Dial   engineleg.Dialer                                    // to the engines; nil = TCP
	Log    *slog.Logger
	Timers DataTimers
}

// DataServer serves the ranks of its node to the ingresses of others: admission and data in one request of HTTP/2. It is an
// http.Handler for a server that is not its own. Safe for concurrent use.
type DataServer struct {
	caller func(ctx context.Context) (string, bool)
	serves func() bool
	log    *slog.Logger
	timers DataTimers
	table  *dataTable
	legs   *engineleg.Legs

	uploads sync.Pool // *arrival
	buffers sync.Pool // *[]byte
	replies sync.Pool // chan msg.AdmitReply

	closing context.Context //nolint:containedctx // ends every request
	stop    context.CancelFunc
	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup // requests, late tickets
	cancel  func()
}

// NewDataServer makes a data port and follows Feed at once.
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
		legs: engineleg.New(engineleg.Timers{Dial: t.Dial, IdleOwned: t.IdleOwned, IdleAttached: t.IdleAttached}, c.Dial),
	}
	s.table = newDataTable(s.log)
	s.uploads.New = func() any { return &arrival{} }
	s.buffers.New = func() any { b := make([]byte, dataRelay); return &b }
	s.replies.New = func() any { return make(chan msg.AdmitReply, 1) }
	s.closing, s.stop = context.WithCancel(context.Background())
	s.cancel = c.Feed.Subscribe(s.table)
	return s, nil
}

// Close cuts what runs and waits for it. Idempotent.
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

// enter counts a request in; false after Close.
func (s *DataServer) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Add(1)
	}
	return !s.closed
}

// errClosing is the cause with which Close ends what runs.
var errClosing = errors.New("the data port is closing")

// ServeHTTP implements http.Handler.
func (s *DataServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.enter() {
		panic(http.ErrAbortHandler)
	}
	defer s.running.Done()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	rc := http.NewResponseController(w)
	defer s.onClose(func() {
		cancel(errClosing)
		_ = rc.SetWriteDeadline(time.Now()) // a write to a reader that stands still ends too
	})()
	in, _ := s.uploads.Get().(*arrival)
	p := &passage{server: s, w: w, rc: rc, r: r, cancel: cancel, in: in, settled: true}
	whole := false
	defer func() {
		p.settled = p.settled && whole // after a panic nobody knows who still reads it
		p.letGo()
	}()
	clean := p.run(ctx)
	whole = true
	if !clean { // TRAPS 1: the ingress must not take a broken answer for a whole one
		panic(http.ErrAbortHandler)
	}
}

// onClose calls cut when Close does, until over, which waits for a cut under way.
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

// keep takes an arrival's memory back, unless it is large, or much larger than what it was used for.
func (s *DataServer) keep(in *arrival) {
	if cap(in.b) <= keptDataBody && cap(in.b) <= max(smallDataBody, 4*len(in.b)) && cap(in.blocks) <= keptBlocks {
		s.uploads.Put(in)
	}
}
