package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// errDrained is the cause with which Close ends what is still running when its context is over.
var errDrained = errors.New("the ingress is shutting down")

// Metrics gives and forgets the counters of an application. *telemetry.Metrics implements it.
type Metrics interface {
	App(app, policy string) *telemetry.App
	ForgetApp(app string)
	KeepRanks(app string, exists func(group, rank int) bool)
	RequestRefused(route string, code int)
}

// Dialer opens a connection to an engine.
type Dialer = rankleg.Dialer

// Config is what an ingress needs. Store, Feed, Metrics and Log are required.
type Config struct {
	Node    string    // id of this ingress in tickets and records; unique per cluster
	Version string    // for GET /version
	Store   msg.Store // applications and units
	Feed    msg.Feed  // the ranks' streams
	Metrics Metrics
	Log     *slog.Logger
	Limits  Limits
	Timers  Timers
	Seed    uint64        // of the Routers' random generators and the request ids; random per process
	Dial    Dialer        // to the engines; nil = TCP
	Remote  rankleg.Asker // to the ranks of other nodes; nil = every rank's mailbox is in this process
	Serves  func() bool   // false: this node's lease is over, so its ranks may not serve; nil = always
}

// Ingress serves the OpenAI surface. Safe for concurrent use. New starts one goroutine, which Close ends.
type Ingress struct {
	node      string
	version   string
	store     msg.Store
	feed      msg.Feed
	metrics   Metrics
	log       *slog.Logger
	limits    Limits
	timers    Timers
	seed      uint64
	clockBase time.Time // zero of clock

	handler http.Handler
	server  *http.Server
	near    *rankleg.Near
	remote  rankleg.Asker                  // nil: every rank is near
	hasher  atomic.Pointer[kvindex.Hasher] // keyed by the cluster's secret
	appTable
	requestMemory
	traffic
	lifeCycle
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
	in := &Ingress{
		node: c.Node, version: c.Version, store: c.Store, feed: c.Feed, metrics: c.Metrics,
		log: c.Log.With(slog.String("room", "ingress")), limits: c.Limits.withDefaults(),
		timers: c.Timers.withDefaults(),
		seed:   c.Seed, clockBase: time.Now(),
		appTable: appTable{
			appRouters: map[string]*appRouter{}, unplaced: unplacedApps{changed: make(chan struct{}, 1)},
		},
		lifeCycle: lifeCycle{followDone: make(chan struct{})},
	}
	in.nextID.Store(mix(c.Seed))
	in.requestPool.New = func() any { return newRequest(in) }
	in.memory.limit, in.memory.read, in.memory.log, in.memory.base = memoryLimit(), readMemory, in.log,
		in.clockBase
	in.memory.collect = func() { in.background.Go(runtime.GC) }
	in.bodies.budget = in.limits.bodyBudget(in.memory.limit)
	in.remote = c.Remote
	in.near = rankleg.NewNear(rankleg.Timers{
		Admit: in.timers.Admit, LateTicket: in.timers.LateTicket, Dial: in.timers.Dial,
		IdleOwned: in.timers.IdleOwned, IdleAttached: in.timers.IdleAttached,
	}, c.Dial, c.Serves)
	ctx, stop := context.WithCancel(context.Background())
	cutCtx, cut := context.WithCancelCause(context.Background())
	in.stop, in.cutRequests, in.baseContext = stop, cut, func(net.Listener) context.Context { return cutCtx }
	in.handler = in.routes()
	in.server = in.newServer()
	in.table.Store(newRouteTable())
	in.setSecret(nil)
	changed := in.store.Changed() // before State, so that no change is missed
	in.rebuild(in.store.State())
	in.resubscribe()
	go in.follow(ctx, changed)
	return in, nil
}

// follow rebuilds the route table whenever the replicated state or the leader's list of unplaced units
// changes.
func (in *Ingress) follow(ctx context.Context, changed <-chan struct{}) {
	defer close(in.followDone)
	lapse := time.NewTimer(time.Hour)
	defer lapse.Stop()
	for {
		lapse.Stop()
		if _, left := in.unplaced.current(); left > 0 {
			lapse.Reset(left)
		}
		select {
		case <-ctx.Done():
			return
		case <-in.unplaced.changed:
		case <-lapse.C:
		case <-changed:
			changed = in.store.Changed()
		}
		if in.rebuild(in.store.State()) {
			in.resubscribe()
		}
	}
}

// rebuild makes a route table of the state. fresh says that a Router or an index is new and needs the ranks'
// snapshots.
func (in *Ingress) rebuild(st *state.State) (fresh bool) {
	t := newRouteTable()
	in.setSecret(st.Secret)
	waiting, _ := in.unplaced.current()
	for name, a := range st.Apps {
		ar := in.ensureAppRouter(name)
		spec, isNew, err := in.applyRevision(ar, a)
		if err != nil {
			spec = in.keepOldRevision(ar, a, err)
		}
		if spec == nil {
			continue
		}
		fresh = fresh || isNew
		ar.setUnits(unitProgress(st, spec.app, a.Deleting, waiting[name]))
		if !a.Deleting {
			t.add(&appRoute{appRevision: spec, router: ar})
		}
	}
	t.seal()
	in.table.Store(t)
	in.removeDeleted(st)
	return fresh
}

// applyRevision brings an application to its current revision. fresh: it has a new Router.
func (in *Ingress) applyRevision(ar *appRouter, a *state.App) (spec *appRevision, fresh bool, err error) {
	old := ar.revision.Load()
	if old != nil && old.revision == a.Revision {
		return old, false, nil
	}
	spec, err = in.newRevision(a, old)
	if err != nil {
		return nil, false, fmt.Errorf("read the specification of revision %d: %w", a.Revision, err)
	}
	policy, err := routing.New(spec.app.Routing.Policy, spec.app.Routing.Preset, spec.app.Routing.Params)
	if err != nil {
		return nil, false, fmt.Errorf("revision %d: %w", a.Revision, err)
	}
	if fresh, err = in.setPolicyInputs(ar, spec, policy); err != nil {
		return nil, false, fmt.Errorf("revision %d: %w", a.Revision, err)
	}
	ar.setRevision(spec)
	if sameRouting(old, spec) {
		return spec, fresh, nil
	}
	in.newRouter(ar, policy)
	return spec, true, nil
}

// newRevision decodes an application's specification; old is the revision before, nil for none.
func (in *Ingress) newRevision(a *state.App, old *appRevision) (*appRevision, error) {
	spec, err := a.Application()
	if err != nil {
		return nil, err
	}
	s := &appRevision{
		app: spec, revision: a.Revision, created: time.Now().Unix(), names: a.Names,
		attempts:   spec.Retries.Attempts,
		queue:      app.Seconds(spec.Timeouts.QueueS),
		firstToken: app.Seconds(spec.Timeouts.FirstTokenS),
		between:    app.Seconds(spec.Timeouts.BetweenTokensS),
	}
	if old != nil {
		s.created = old.created
	}
	if len(s.names) == 0 {
		s.names = spec.Model.ServedNames()
	}
	s.adapters = adaptersOf(&spec.Model)
	return s, nil
}

// adaptersOf maps the names under which adapters are served (Model.ServedNames) to the adapters; nil without
// adapters.
func adaptersOf(m *app.Model) map[string]string {
	if len(m.Adapters) == 0 {
		return nil
	}
	out := make(map[string]string, 2*len(m.Adapters))
	for _, a := range m.Adapters {
		out[a.ID], out[m.ID+":"+a.ID] = a.ID, a.ID
	}
	return out
}

// sameRouting reports whether the Router of old can be kept under s.
func sameRouting(old, s *appRevision) bool {
	return old != nil && reflect.DeepEqual(old.app.Routing, s.app.Routing)
}

// newRouter gives an application a new Router.
func (in *Ingress) newRouter(ar *appRouter, policy routing.Policy) {
	router := routing.NewRouter(policy, mix(in.seed^in.nextID.Load()))
	router.OnRoom = ar.queue.room
	ar.metrics.Store(in.metrics.App(ar.name, policy.Name()))
	ar.replaceRouter(router)
}

// setPolicyInputs provides what policy needs. It keeps the index if the policy still needs it and it is large
// enough. A new index needs snapshots, so fresh asks for a new subscription.
func (in *Ingress) setPolicyInputs(ar *appRouter, spec *appRevision, policy routing.Policy) (
	fresh bool, err error,
) {
	old := ar.inputs()
	r := &policyInputs{needs: routing.NeedsOf(policy), identity: spec.app.Routing.Identity}
	if r.chains() && r.identity == app.IdentityTokens {
		if r.tokens = old.tokens; r.tokens == nil {
			r.tokens = newTokenizer(ar)
		}
	}
	if r.needs.Hits {
		r.cache = old.cache
		if n := columnsFor(spec.app); r.cache == nil || r.cache.maxColumns < n {
			if r.cache, err = newCache(ar, n); err != nil {
				return false, err
			}
			fresh = true
		}
	}
	ar.policyInputs.Store(r)
	if old.cache != nil && old.cache != r.cache {
		old.cache.close()
	}
	return fresh, nil
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

// keepOldRevision keeps the previous revision when the current one cannot be read; nil if there is none. It
// writes one log line per revision.
func (in *Ingress) keepOldRevision(ar *appRouter, a *state.App, err error) *appRevision {
	if ar.unreadableRevision != a.Revision {
		ar.unreadableRevision = a.Revision
		in.log.Error("application cannot be served as deployed", slog.String("app", a.Name),
			slog.Any("err", err))
	}
	return ar.revision.Load()
}

// removeDeleted closes the applications that are no longer in the state.
func (in *Ingress) removeDeleted(st *state.State) {
	in.appRoutersMu.Lock()
	var gone []*appRouter
	for name, ar := range in.appRouters {
		if st.Apps[name] == nil && ar.revision.Load() != nil {
			gone = append(gone, ar)
			delete(in.appRouters, name)
		}
	}
	in.appRoutersMu.Unlock()
	for _, ar := range gone {
		ar.close()
		in.metrics.ForgetApp(ar.name)
	}
}

// resubscribe asks every rank for a snapshot, at the start and when a Router is new. Until the ranks answer,
// a new Router's account is incomplete.
func (in *Ingress) resubscribe() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.unsubscribe != nil {
		in.unsubscribe()
	}
	in.unsubscribe = in.feed.Subscribe(in)
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
