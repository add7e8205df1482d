package noderpc

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// DataConfig is the configuration of a data port. Feed, Caller and Log are required.
type DataConfig struct {
	Feed msg.Feed // the ranks of this node
	// the node that sent a request, if it has role ingress
	Caller func(ctx context.Context) (ingress string, ok bool)
	Serves func() bool    // false: this node may not serve, because its lease has expired; nil: always
	Dial   rankleg.Dialer // to the engines; nil = TCP
	Log    *slog.Logger
	Admit  time.Duration // for a DPServer's answer, after which it counts as overloaded; 0: 5 s
	Body   time.Duration // for a request's body to arrive, and one second more for each MiB; 0: 30 s
	// bytes of a request's body with its hashes; more is 413. 0: maxDataBody
	MaxBody int64
	// bytes of all bodies of more than 4 MiB together; a request beyond it is refused as overloaded. 0:
	// 2 GiB, or a quarter of the process's memory limit if that is less
	LargeBodies int64
}

// DataServer serves the ranks of its node to the ingresses of other nodes: admission and data in one HTTP
// request. It is the http.Handler of a server that belongs to the node port. Safe for concurrent use.
type DataServer struct {
	caller func(ctx context.Context) (string, bool)
	log    *slog.Logger
	body   time.Duration // see DataConfig
	table  *dataTable
	near   *rankleg.Near

	large      atomic.Int64 // bytes of large bodies
	largeLimit int64        // see DataConfig.LargeBodies

	uploads sync.Pool // of *requestBody
	buffers sync.Pool // *[]byte

	mu      sync.Mutex
	closed  bool
	open    map[*dataRequest]struct{} // running requests; Close cuts them
	streams map[string]int            // of the ranks, by the ingress that reads them
	running sync.WaitGroup            // the same
	cancel  func()
}

// NewDataServer makes a data port and subscribes to Feed at once.
func NewDataServer(c DataConfig) *DataServer {
	s := &DataServer{
		caller: c.Caller, log: c.Log.With(slog.String("component", "remote")),
		body: cmp.Or(c.Body, defaultBody),
		near: rankleg.NewNear(rankleg.Timers{
			Admit: cmp.Or(c.Admit, defaultAdmit), LateTicket: lateTicket, Dial: engineDial,
			IdleOwned: idleOwned, IdleAttached: idleAttached,
		}, c.Dial, c.Serves),
	}
	s.largeLimit = cmp.Or(c.LargeBodies, min(largeBodies, debug.SetMemoryLimit(-1)/4))
	s.table, s.open, s.streams = newDataTable(s.log), map[*dataRequest]struct{}{}, map[string]int{}
	s.uploads.New = func() any { return &requestBody{most: cmp.Or(c.MaxBody, maxDataBody)} }
	s.buffers.New = func() any { b := make([]byte, relayBuffer); return &b }
	s.cancel = c.Feed.Subscribe(s.table)
	return s
}

// Close cuts the running requests and waits for them. It is idempotent.
func (s *DataServer) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	for p := range s.open {
		p.cut(errClosing)
	}
	s.mu.Unlock()
	if first {
		s.cancel()
	}
	s.running.Wait()
	s.near.Close()
	return nil
}

// beginRequest counts a request in; false after Close.
func (s *DataServer) beginRequest(p *dataRequest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Add(1)
		s.open[p] = struct{}{}
	}
	return !s.closed
}

func (s *DataServer) endRequest(p *dataRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, p)
	s.running.Done()
}

// Causes of the end of a running request.
var (
	errClosing     = errors.New("the data port is closing")
	errIngressGone = errors.New("the ingress reads the ranks' stream no more")
)

// CountStream notes that a stream of the ranks' records to an ingress begins (1) or ends (-1), by which the
// port knows that the ingress lives: HTTP/1.1 has no pings. Requests of an ingress that has had no stream for
// ingressGone are cut.
func (s *DataServer) CountStream(ingress string, change int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[ingress] += change; s.streams[ingress] > 0 {
		return
	}
	delete(s.streams, ingress)
	time.AfterFunc(ingressGone, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for p := range s.open {
			if p.ingress == ingress && s.streams[ingress] == 0 {
				p.cut(errIngressGone)
			}
		}
	})
}

// ServeHTTP implements http.Handler.
func (s *DataServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	p := &dataRequest{
		server: s, w: w, rc: http.NewResponseController(w), r: r, cancel: cancel, isBodyFree: true,
	}
	p.ingress, p.isIngress = s.caller(ctx)
	if !s.beginRequest(p) {
		panic(http.ErrAbortHandler)
	}
	defer s.endRequest(p)
	p.upload, _ = s.uploads.Get().(*requestBody)
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

// takeLarge counts the memory of a body of n bytes, if it is large. false: there is none left.
func (s *DataServer) takeLarge(n int64) bool {
	if n <= largeBody || s.large.Add(n) <= s.largeLimit {
		return true
	}
	s.large.Add(-n)
	return false
}

func (s *DataServer) giveLarge(n int64) {
	if n > largeBody {
		s.large.Add(-n)
	}
}

// recycle keeps a body's memory, unless it is large, or much larger than its last body.
func (s *DataServer) recycle(in *requestBody) {
	if cap(in.b) <= maxKeptBody && cap(in.b) <= max(smallBody, 4*len(in.b)) &&
		cap(in.blocks) <= maxKeptBlocks {
		s.uploads.Put(in)
	}
}

// Times of a data port.
const (
	defaultAdmit = 5 * time.Second
	defaultBody  = 30 * time.Second
	ingressGone  = 5 * time.Second
	lateTicket   = 10 * time.Second // for the ticket of a request that has ended, to give it back
	// for one write; longer than an ingress gives its clients, so that the ingress names the cause
	stuckWrite = 90 * time.Second
	engineDial = 5 * time.Second   // for a connection to an engine
	idleOwned  = 100 * time.Second // idle connections to engines that dpserve started
	// idle connections to other engines: vLLM's HTTP server closes them after 5 s
	idleAttached = 4 * time.Second
)

// Limits of a data port that cannot be configured.
const (
	maxDataBody     = 1<<30 + 256<<20 // bytes of a body, of which an ingress takes 1 GiB, with its hashes
	largeBody       = 4 << 20         // bytes; larger bodies count
	largeBodies     = 2 << 30         // bytes of them together
	maxKeptBody     = 1 << 20         // bytes of a buffer; larger ones are left to the garbage collector
	smallBody       = 16 << 10        // bytes; smaller buffers are always kept
	maxKeptBlocks   = 1 << 14         // entries
	relayBuffer     = 32 << 10        // bytes of a relay's buffer: one read of the engine is one write
	firstBodyBuffer = 4 << 10         // bytes of the buffer for a body whose length is not announced
)

// dataTable is a msg.Sink that keeps the ranks of its node. Safe for concurrent use.
type dataTable struct {
	log *slog.Logger

	mu    sync.RWMutex
	ranks map[unitRank]*rankleg.Rank
}

var _ msg.Sink = (*dataTable)(nil)

func newDataTable(log *slog.Logger) *dataTable {
	return &dataTable{log: log, ranks: map[unitRank]*rankleg.Rank{}}
}

// find returns the incarnation of a rank that runs now; nil if there is none.
func (t *dataTable) find(app, unit string, rank routing.RankID) *rankleg.Rank {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r := t.ranks[unitRank{unit, rank}]; r != nil && r.App == app {
		return r
	}
	return nil
}

// Deliver implements msg.Sink.
func (t *dataTable) Deliver(rec *msg.Record) {
	switch rec.Kind {
	case msg.RecSnapshot:
		t.addRank(rec)
	case msg.RecGone:
		t.removeRank(rec)
	default:
	}
}

func (t *dataTable) addRank(rec *msg.Record) {
	key := unitRank{rec.Unit, rec.Rank}
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.ranks[key]
	if old != nil && (old.Epoch > rec.Epoch || old.Epoch == rec.Epoch && old.Incarnation == rec.Incarnation) {
		return // of an older epoch, or known
	}
	fresh, err := rankleg.NewRank(rec)
	if err != nil {
		t.log.Error("rank cannot be served to other nodes", slog.String("app", rec.App),
			slog.String("unit", rec.Unit), slog.Any("err", err))
		return
	}
	t.ranks[key] = fresh
}

func (t *dataTable) removeRank(rec *msg.Record) {
	key := unitRank{rec.Unit, rec.Rank}
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.ranks[key]; r != nil && r.Epoch == rec.Epoch && r.Incarnation == rec.Incarnation {
		delete(t.ranks, key)
	}
}
