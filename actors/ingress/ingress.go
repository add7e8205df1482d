// Package ingress is the OpenAI surface of a node: it reads a request, picks a rank with the application's
// Router, asks the rank's DPServer for a ticket, and relays the engine's answer byte for byte. When every
// rank is full, requests wait in one queue per application. A failure before the first byte is retried on
// another rank; a failure after it ends the stream with an error event and a cut connection. See DESIGN.md
// for the state machine of a request.
package ingress

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/internal/tracefile"
	"github.com/dpserve/dpserve/internal/tracing"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// errDrained is the cause with which Close ends what is still running when its context is over.
var errDrained = errors.New("the ingress is shutting down")

// Dialer opens a connection to an engine.
type Dialer = rankleg.Dialer

// Config is what an ingress needs. Store, Feed, Metrics and Log are required.
type Config struct {
	Node string // id of this ingress in tickets and records; unique per cluster
	// of the cluster, in the header Via: a request that has it already goes in a circle; "" = dpserve-NODE
	Pseudonym string
	Version   string    // for GET /version
	Store     msg.Store // applications and units
	Feed      msg.Feed  // the ranks' streams
	Metrics   *telemetry.Metrics
	Tracer    *tracing.Tracer // of requests, which Close closes; nil = traces are off
	Log       *slog.Logger
	Limits    Limits
	Timers    Timers
	Seed      uint64        // of the Routers' random generators and the request ids; random per process
	Dial      Dialer        // to the engines; nil = TCP
	Remote    rankleg.Asker // to the ranks of other nodes; nil = every rank's mailbox is in this process
	Note      func() string // for those who ask /health, "" = nothing; nil = never
	Serves    func() bool   // false: this node's lease is over, so its ranks may not serve; nil = always
	// the API keys of clients, read for each request; nil: the endpoint has none
	Keys   func() *apikeys.Set
	TLS    *tls.Config       // of clients' connections, for HTTP/1.1 alone; nil = none
	Access *telemetry.Access // counts by key; required with Keys
	// who answers a path that steers the ranks and is asked of the admin port otherwise; nil, as its answer:
	// nobody
	Steers func(path string) http.Handler
	// to the ingresses of other nodes, for lockstep groups; nil: there are none
	Groups msg.GroupLinks
	// of the node, for the proxies of applications with a prefill pool; nil = one of its own
	Actors *actor.ActorSystem
	// the file for a trace of the requests; "" = none is recorded
	RecordTrace string
}

// Ingress serves the OpenAI surface. Safe for concurrent use. New starts one goroutine, which Close ends.
type Ingress struct {
	node      string
	version   string
	store     msg.Store
	feed      msg.Feed
	metrics   *telemetry.Metrics
	tracer    *tracing.Tracer
	keys      func() *apikeys.Set // nil: the endpoint has none
	access    *telemetry.Access   // counts by key; nil without keys
	tls       *tls.Config         // as Config.TLS
	steers    func(path string) http.Handler
	recorder  *tracefile.Recorder // nil: requests are not recorded
	log       *slog.Logger
	limits    Limits
	timers    Timers
	seed      uint64
	clockBase time.Time // zero of clock

	handler http.Handler
	server  *http.Server
	hasher  atomic.Pointer[kvindex.Hasher] // keyed by the cluster's secret
	outbound
	appTable
	pairs pairSystem
	requestMemory
	traffic
	lifeCycle
}

// outbound is how requests go to ranks and their engines.
type outbound struct {
	near       *rankleg.Near
	remote     rankleg.Asker  // nil: every rank is near
	groupLinks msg.GroupLinks // as Config.Groups
	pseudonym  string         // of the cluster, in the header Via
	via        []string       // what is added to that header
}

// appTable has the applications of an ingress.
type appTable struct {
	table        atomic.Pointer[routeTable]
	unplaced     unplacedApps
	appRoutersMu sync.RWMutex
	appRouters   map[string]*appRouter
}

// requestMemory is the memory that requests use again, and its limits.
type requestMemory struct {
	requestPool sync.Pool // *request
	promptPool  sync.Pool // *promptMemory
	bodies      bodyMemory
	responses   responseHomes
	keptMemory  keptMemory
	memory      memoryGuard
}

// traffic counts requests.
type traffic struct {
	nextID   atomic.Uint64
	answered atomic.Uint64
	tokens   atomic.Uint64
	inflight atomic.Int64
	draining atomic.Bool
}

// lifeCycle is what Close ends.
type lifeCycle struct {
	mu          sync.Mutex
	listener    *clientConns
	unsubscribe func()
	closeOnce   sync.Once
	closeErr    error
	note        func() string           // as in Config
	stop        context.CancelFunc      // ends follow
	followDone  chan struct{}           // closed: follow has ended
	cutRequests context.CancelCauseFunc // ends every request
	baseContext func(net.Listener) context.Context
	background  sync.WaitGroup // indexes
}

// New makes an ingress and follows Store and Feed at once. It serves requests once Serve is called.
func New(c Config) (*Ingress, error) {
	if c.Store == nil || c.Feed == nil || c.Metrics == nil || c.Log == nil {
		return nil, errors.New("ingress: Store, Feed, Metrics and Log must be set")
	}
	recorder, err := createRecorder(c.RecordTrace, c.Log)
	if err != nil {
		return nil, err
	}
	in := &Ingress{
		node: c.Node, version: c.Version, store: c.Store, feed: c.Feed, metrics: c.Metrics,
		tracer: c.Tracer,
		log:    slog.New(telemetry.LimitLines(c.Log.Handler())).With(slog.String("component", "ingress")),
		limits: c.Limits.withDefaults(),
		timers: c.Timers.withDefaults(),
		keys:   c.Keys, access: c.Access, tls: c.TLS, steers: c.Steers, recorder: recorder,
		seed: c.Seed, clockBase: time.Now(),
		appTable: appTable{
			appRouters: map[string]*appRouter{}, unplaced: unplacedApps{changed: make(chan struct{}, 1)},
		},
		lifeCycle: lifeCycle{followDone: make(chan struct{}), note: c.Note},
	}
	in.pseudonym = cmp.Or(c.Pseudonym, "dpserve-"+c.Node)
	in.via = []string{"1.1 " + in.pseudonym}
	in.pairs.actors, in.pairs.bootstrap = c.Actors, transfer.NewBootstrapClient(c.Dial)
	in.nextID.Store(mix(c.Seed))
	in.requestPool.New = func() any { return newRequest(in) }
	in.memory.limit, in.memory.read, in.memory.log, in.memory.base = memoryLimit(), readMemory, in.log,
		in.clockBase
	in.memory.collect = func() { in.background.Go(runtime.GC) }
	in.bodies.budget = in.limits.bodyBudget(in.memory.limit)
	in.bodies.most = in.limits.heldBody(in.bodies.budget)
	in.remote, in.groupLinks = c.Remote, c.Groups
	in.near = rankleg.NewNear(rankleg.Timers{
		Admit: in.timers.Admit, LateTicket: in.timers.LateTicket, Dial: in.timers.Dial,
		IdleOwned: in.timers.IdleOwned, IdleAttached: in.timers.IdleAttached,
	}, c.Dial, c.Serves)
	ctx, stop := context.WithCancel(context.Background())
	cutCtx, cut := context.WithCancelCause(context.Background())
	in.stop, in.cutRequests, in.baseContext = stop, cut, func(net.Listener) context.Context { return cutCtx }
	in.handler = surface{in}.routes()
	in.server = in.newServer()
	in.table.Store(newRouteTable())
	in.setSecret(nil)
	changed := in.store.Changed() // before State, so that no change is missed
	follower := &appFollower{in}
	follower.rebuild(in.store.State())
	in.listRanks()
	go follower.follow(ctx, changed)
	if c.Groups != nil {
		c.Groups.Bind(groupPeer{in})
	}
	return in, nil
}

// newServer sets every bound. No WriteTimeout: it would cut long streams.
func (in *Ingress) newServer() *http.Server {
	return &http.Server{
		Handler:           in.handler,
		ReadHeaderTimeout: in.timers.ReadHeader,
		IdleTimeout:       in.timers.Idle,
		MaxHeaderBytes:    in.limits.MaxHeaderBytes,
		BaseContext:       in.baseContext,
		ConnContext:       withConn,
		ErrorLog:          slog.NewLogLogger(in.log.Handler(), slog.LevelDebug),
		Protocols:         protocols(),
		ConnState:         trackConn,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerStream: streamWindow,
			MaxReceiveBufferPerConnection: connWindow,
			// A stream's write deadline cannot end a blocked write of its connection. These limits find a
			// client that does not read, or whose machine is gone.
			WriteByteTimeout: in.timers.SlowReader, SendPingTimeout: pingAfter, PingTimeout: pingAfter,
		},
	}
}

// Bounds of HTTP/2.
const (
	maxStreams = 250 // per connection
	// bytes of upload: with 64 KiB and 50 ms of round trip an upload would run at 1.3 MB/s
	streamWindow = 1 << 20
	connWindow   = 4 << 20 // bytes

	pingAfter = 15 * time.Second // of silence on a connection; the answer has the same time
)

// protocols are HTTP/1.1, and HTTP/2 without TLS for clients that know (h2c with prior knowledge).
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// Attach takes a listener that is already bound. The ingress closes it.
func (in *Ingress) Attach(inner net.Listener) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.listener != nil {
		return errors.Join(errors.New("the ingress listens already"), inner.Close())
	}
	in.listener = newClientConns(in, inner)
	return nil
}

// Serve answers requests until Close; call Attach before. It returns nil after Close.
func (in *Ingress) Serve() error {
	in.mu.Lock()
	l := in.listener
	in.mu.Unlock()
	if l == nil {
		return errors.New("the ingress does not listen: call Attach first")
	}
	err := in.server.Serve(l)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) && in.draining.Load() {
		return nil
	}
	return fmt.Errorf("serve inference requests: %w", err)
}

// Drain turns readiness off at once: /health answers 503, and connections close after their request. Requests
// are still served, so that a load balancer has time to notice.
func (in *Ingress) Drain() {
	in.draining.Store(true)
	in.server.SetKeepAlivesEnabled(false)
}

// Close drains: it accepts no new connection, lets running requests go on until ctx is over, and then cuts
// them with an error event (ErrDrained). It waits for all of them, is idempotent, and returns the first
// error.
func (in *Ingress) Close(ctx context.Context) error {
	in.closeOnce.Do(func() { in.closeErr = in.close(ctx) })
	return in.closeErr
}

func (in *Ingress) close(ctx context.Context) error {
	in.Drain()
	err := in.server.Shutdown(ctx)
	in.cutRequests(errDrained) // either no request is left, or their time is over
	if err != nil {
		err = in.finishCut(ctx)
	}
	in.awaitHandlers()
	in.stop()
	<-in.followDone // before closeAppRouters, because follow creates them
	in.mu.Lock()
	if in.listener != nil {
		if e := in.listener.Close(); !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	if in.unsubscribe != nil {
		in.unsubscribe()
		in.unsubscribe = nil
	}
	in.mu.Unlock()
	in.closeAppRouters()
	in.background.Wait()
	in.pairs.close()
	in.near.Close()
	if in.recorder != nil {
		in.recorder.Close()
	}
	if e := in.tracer.Close(ctx); e != nil {
		in.log.Warn("the last traces were not sent", slog.Any("err", e))
	}
	return err
}

// finishCut gives requests that were cut the time to write their error events, then closes the remaining
// connections.
func (in *Ingress) finishCut(ctx context.Context) error {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.timers.Tail)
	defer cancel()
	if in.server.Shutdown(last) == nil {
		return nil
	}
	return in.server.Close()
}

// handlersPoll is the interval of awaitHandlers, the same as in http.Server.Shutdown.
const handlersPoll = 2 * time.Millisecond

// awaitHandlers waits for requests whose connection is gone: net/http does not wait for the streams of a lost
// HTTP/2 connection. Their contexts are over, so they end soon; awaitHandlers waits at most Timers.Tail.
func (in *Ingress) awaitHandlers() {
	for last := time.Now().Add(in.timers.Tail); in.inflight.Load() > 0 && time.Now().Before(last); {
		time.Sleep(handlersPoll)
	}
}

func (in *Ingress) closeAppRouters() {
	for _, p := range in.table.Load().pairs {
		p.end()
	}
	in.appRoutersMu.Lock()
	defer in.appRoutersMu.Unlock()
	for _, ar := range in.appRouters {
		ar.close()
	}
}

// serveWith answers one inference request of a route scope. target is the path and query at the engine, of a
// route without a fixed path. demand sets what the router's own API asks for beyond headers; nil: nothing.
func (in *Ingress) serveWith(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route,
	target string, demand func(*request),
) {
	req, _ := in.requestPool.Get().(*request)
	in.inflight.Add(1)
	req.w, req.r, req.route, req.start, req.bodySettled = w, r, route, time.Now(), true
	req.target = target
	req.spans = in.tracer.Begin(r.Header, route.String(), req.start)
	req.rc = http.NewResponseController(w)
	req.flush = flusher(w)
	cut, whole, rc := false, false, req.rc
	defer func() {
		in.inflight.Add(-1)
		// after a panic an engine connection may still read the buffers
		req.bodySettled = req.bodySettled && whole
		req.release()
		if cut { // the client must not take a broken stream for a complete one
			if !r.ProtoAtLeast(1, 1) {
				_ = rc.SetWriteDeadline(resetAtClose) // only network connections have deadlines
			}
			panic(http.ErrAbortHandler)
		}
	}()
	if demand != nil {
		demand(req)
	}
	if f := req.handle(s); f != nil {
		req.answerFailure(f)
	}
	cut, whole = req.cutConn, true
}

// requestIDOf returns the client's x-request-id if it is valid, otherwise a new id.
func (in *Ingress) requestIDOf(r *http.Request) string {
	if ids := r.Header[headerRequestID]; len(ids) == 1 && validRequestID(ids[0]) {
		return ids[0]
	}
	return hex16(mix(in.requestID()))
}

// setSecret stores the cluster's secret. The cluster sets it once, before the first application.
func (in *Ingress) setSecret(secret []byte) {
	h := kvindex.NewHasher(secret)
	if old := in.hasher.Load(); old == nil || *old != h {
		in.hasher.Store(&h)
	}
}

// hash is the hasher of prompts, keyed by the cluster's secret.
func (in *Ingress) hash() kvindex.Hasher { return *in.hasher.Load() }

// clock is the time for Routers and indexes.
func (in *Ingress) clock() time.Duration { return time.Since(in.clockBase) }

// listRanks has every rank listed, at the start and when a Router or an index is new. Until the ranks answer,
// a new Router's account is incomplete.
func (in *Ingress) listRanks() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.unsubscribe == nil {
		in.unsubscribe = in.feed.Subscribe(in)
	} else {
		in.feed.List(in)
	}
}

var _ msg.Sink = (*Ingress)(nil)

// Deliver implements msg.Sink. Only a snapshot creates an appRouter; late records of a deleted application
// are dropped.
func (in *Ingress) Deliver(rec *msg.Record) {
	if rec.Kind == msg.RecSnapshot {
		in.ensureAppRouter(rec.App).deliver(rec)
	} else if ar := in.findAppRouter(rec.App); ar != nil {
		ar.deliver(rec)
	}
}

// findAppRouter returns the state of an application, nil if there is none.
func (in *Ingress) findAppRouter(name string) *appRouter {
	in.appRoutersMu.RLock()
	defer in.appRoutersMu.RUnlock()
	return in.appRouters[name]
}

// findPair returns the pairs of an application, by its own name; nil if it has one pool.
func (in *Ingress) findPair(app string) *pairApp { return in.table.Load().pairs[app] }

// ensureAppRouter returns the state of an application and creates it if needed: its ranks' streams may begin
// before the replicated state contains it.
func (in *Ingress) ensureAppRouter(name string) *appRouter {
	if ar := in.findAppRouter(name); ar != nil {
		return ar
	}
	in.appRoutersMu.Lock()
	defer in.appRoutersMu.Unlock()
	ar := in.appRouters[name]
	if ar == nil {
		ar = newAppRouter(in, name)
		in.appRouters[name] = ar
	}
	return ar
}

// requestID is a new key of a dispatch: unique in this process, and random relative to other ingresses.
func (in *Ingress) requestID() uint64 { return in.nextID.Add(1) }

// routerKey is the Router's key of a request: an own id unchanged, an id of another ingress mixed with that
// ingress's name.
func (in *Ingress) routerKey(ingress string, reqID uint64) uint64 {
	if ingress == in.node {
		return reqID
	}
	h := uint64(14695981039346656037) // FNV-1a
	for i := range len(ingress) {
		h = (h ^ uint64(ingress[i])) * 1099511628211
	}
	return mix(h ^ reqID)
}

// observeUndo takes a request out of a rank's load in the Router.
func (in *Ingress) observeUndo(router *routing.Router, id routing.RankID, reqID uint64) {
	router.Observe(&routing.Event{Kind: routing.EvUndo, Rank: id, ReqID: reqID, Now: in.clock()})
}

// observeTicket tells the Router that a rank has admitted a request.
func (in *Ingress) observeTicket(router *routing.Router, id routing.RankID, reqID uint64, t *msg.Ticket) {
	router.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: id, ReqID: reqID, Seq: t.Seq, Incarnation: t.Incarnation,
		Now: in.clock(),
	})
}

// signal fills a channel of one slot. A signal that is pending already is enough.
func signal(slot chan<- struct{}) {
	select {
	case slot <- struct{}{}:
	default:
	}
}

// mix spreads the bits of v (the finalizer of splitmix64).
func mix(v uint64) uint64 {
	v += 0x9e3779b97f4a7c15
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	return v ^ v>>31
}

// Totals are the answered inference requests and generated tokens since New, and the number of requests in
// progress.
func (in *Ingress) Totals() (requests, tokens uint64, inflight int) {
	return in.answered.Load(), in.tokens.Load(), int(in.inflight.Load())
}

// Ready reports whether this ingress should get requests: it is not draining, and an application can serve or
// there is none.
func (in *Ingress) Ready() bool {
	if in.draining.Load() {
		return false
	}
	t := in.table.Load()
	for _, ar := range t.routers {
		if ar.canServe() {
			return true
		}
	}
	return len(t.routers) == 0
}

// TakeWaiting tells the ingress which applications have units that find no room. It replaces the list before,
// and holds for lasts. These units do not count as pending, so requests that no ready rank can take are
// refused with the reason.
func (in *Ingress) TakeWaiting(said []msg.Waiting, lasts time.Duration) {
	in.unplaced.replace(said, lasts)
}

// Usage is what the ingress holds now, for its metrics.
func (in *Ingress) Usage() telemetry.IngressUsage {
	in.memory.pressure(time.Now())
	u := telemetry.IngressUsage{
		BodyBytes: in.bodies.taken.Load(), BodyLimit: in.bodies.budget, MemoryBytes: in.memory.used.Load(),
		MemoryLimit: in.memory.limit,
	}
	in.mu.Lock()
	l := in.listener
	in.mu.Unlock()
	if l != nil {
		u.Connections = l.count()
	}
	return u
}
