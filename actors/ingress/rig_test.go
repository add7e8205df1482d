package ingress

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/internal/tracing"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/parallel"
)

func TestMain(m *testing.M) {
	parallel.AtLeast(8) // most of them wait for engines that hang
	goleak.VerifyTestMain(m)
}

// store is a msg.Store that a test changes by hand.
type store struct {
	mu      sync.Mutex
	st      *state.State
	changed chan struct{}
}

func newStore() *store {
	return &store{st: emptyState(), changed: make(chan struct{})}
}

func emptyState() *state.State {
	return &state.State{
		Apps: map[string]*state.App{}, Units: map[string]*state.Unit{},
		Epochs: map[string]uint64{}, Nodes: map[string]*state.Node{},
	}
}

func (s *store) State() *state.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.st
}

func (s *store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *store) set(change func(st *state.State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := emptyState()
	for k, v := range s.st.Apps {
		a := *v
		next.Apps[k] = &a
	}
	for k, v := range s.st.Units {
		u := *v
		next.Units[k] = &u
	}
	for k, v := range s.st.Epochs {
		next.Epochs[k] = v
	}
	for k, v := range s.st.Nodes {
		n := *v
		next.Nodes[k] = &n
	}
	change(next)
	s.st = next
	close(s.changed)
	s.changed = make(chan struct{})
}

// feed is a msg.Feed over fake replicas.
type feed struct {
	mu       sync.Mutex
	sink     msg.Sink
	port     msg.Sink // of a data port; nil: none
	replicas []*replica
	late     bool // a subscription is not answered: the test publishes
}

func (f *feed) Subscribe(s msg.Sink) func() {
	f.mu.Lock()
	f.sink = s
	all := append([]*replica(nil), f.replicas...)
	if f.late {
		all = nil
	}
	f.mu.Unlock()
	for _, r := range all {
		r.publish()
	}
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.sink = nil
	}
}

func (f *feed) List(s msg.Sink) { f.Subscribe(s) }

func (f *feed) deliver(rec *msg.Record) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sink != nil {
		f.sink.Deliver(rec)
	}
	if f.port != nil {
		f.port.Deliver(rec)
	}
}

// portFeed is the same feed to a data port.
type portFeed struct{ *feed }

func (f portFeed) Subscribe(s msg.Sink) func() {
	f.mu.Lock()
	f.port = s
	f.mu.Unlock()
	for _, r := range f.replicas {
		r.publish()
	}
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.port = nil
	}
}

// replica is a fake DPServer: admission, an account, a stream.
type replica struct {
	feed    *feed
	app     string
	unit    string
	id      routing.RankID
	url     string
	max     int
	length  int // max_model_len of its engine; 0: it does not tell
	owned   bool
	address msg.Target // its Addressing, Selector and Model; zero: by URL
	node    string     // "": that of the ingress
	stopped chan struct{}

	mu          sync.Mutex
	epoch       uint64
	incarnation uint64
	accepting   bool
	seq         uint64
	next        uint64
	open        map[uint64]msg.Admit
	dones       []msg.Done
	firsts      int
	admits      int
	refuse      func(m *msg.Admit) msg.Refusal
	mute        bool // answers nobody
	ejects      bool // five failures in a row eject it, for good
	failures    int  // in a row
	ejected     bool
	busy        bool // its engine said so, and for how long
	adapters    []string
	demands     []bool // what it was told of waiting requests
	held        []*msg.Admit
}

// add makes a rank that accepts, at its first epoch.
func (f *feed) add(owner, unit string, id routing.RankID, url string, max int) *replica {
	r := &replica{
		feed: f, app: owner, unit: unit, id: id, url: url, max: max, owned: true,
		stopped: make(chan struct{}), epoch: 1, incarnation: uint64(1000 + len(f.replicas)), accepting: true,
		open: map[uint64]msg.Admit{},
	}
	f.replicas = append(f.replicas, r)
	return r
}

// maxDones is how many Dones a replica keeps.
const maxDones = 1000

func (r *replica) TrySend(m any) error {
	r.Send(m)
	return nil
}

func (r *replica) Stopped() <-chan struct{} { return r.stopped }

func (r *replica) Send(m any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch m := m.(type) {
	case *msg.Admit:
		r.admits++
		if r.mute {
			r.held = append(r.held, m)
			return
		}
		r.admit(m)
	case *msg.Pardon:
		r.failures = max(0, r.failures-1)
	case msg.Demand:
		r.demands = append(r.demands, m.Waits)
	case *msg.FirstToken:
		r.firsts++
		if a, ok := r.open[m.TicketID]; ok {
			r.record(msg.RecFirstToken, &a)
		}
	case *msg.Progress:
		if a, ok := r.open[m.TicketID]; ok {
			r.emit(&msg.Record{Kind: msg.RecProgress, ReqID: a.ReqID, Ingress: a.Ingress, Out: m.Out})
		}
	case *msg.Done:
		if len(r.dones) == maxDones {
			r.dones = r.dones[:0]
		}
		if m.Cause != "ticket_lapsed" {
			r.dones = append(r.dones, *m)
		}
		if a, ok := r.open[m.TicketID]; ok {
			delete(r.open, m.TicketID)
			r.emit(&msg.Record{
				Kind: msg.RecDone, ReqID: a.ReqID, Ingress: a.Ingress, Tokens: a.Tokens,
				Out: m.CompletionTokens, Cause: m.Cause,
			})
			r.judge(m)
		}
	}
}

func (r *replica) judge(m *msg.Done) {
	if m.BusyFor > 0 && r.accepting {
		r.accepting, r.busy = false, true
		r.emit(&msg.Record{Kind: msg.RecState, Cause: "engine_busy"})
		time.AfterFunc(m.BusyFor, r.endBusy)
	}
	switch {
	case m.Charge:
		r.failures++
	case m.Outcome == msg.OK && m.Cause != msg.CauseClientError:
		r.failures = 0
	}
	if r.ejects && r.failures == 5 && !r.ejected {
		r.accepting, r.ejected = false, true
		r.emit(&msg.Record{Kind: msg.RecState, RankState: msg.RankState{Ejected: true}, Cause: "ejected"})
	}
}

func (r *replica) endBusy() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy = false; !r.ejected {
		r.accepting = true
		r.emit(&msg.Record{Kind: msg.RecState, RankState: msg.RankState{Accepting: true}})
	}
}

func (r *replica) admit(m *msg.Admit) {
	refusal := msg.Granted
	if r.refuse != nil {
		refusal = r.refuse(m)
	}
	switch {
	case refusal != msg.Granted:
	case m.Epoch != r.epoch:
		refusal = msg.StaleEpoch
	case len(r.open) >= r.max, r.busy:
		refusal = msg.Full
	}
	if refusal != msg.Granted {
		m.Reply <- msg.AdmitReply{Refusal: refusal, Epoch: r.epoch, Seq: r.seq}
		return
	}
	r.next++
	r.open[r.next] = *m
	r.record(msg.RecAdmitted, m)
	if ticket := r.next; r.node != "" {
		context.AfterFunc(m.Ctx, func() {
			time.AfterFunc(lapse, func() {
				r.Send(
					&msg.Done{TicketID: ticket, Outcome: msg.Cancelled, Cause: "ticket_lapsed"})
			})
		})
	}
	m.Reply <- msg.AdmitReply{Epoch: r.epoch, Seq: r.seq, Ticket: msg.Ticket{
		ID: r.next, Epoch: r.epoch, Incarnation: r.incarnation, Seq: r.seq, Rank: r.id,
	}}
}

func (r *replica) target() msg.Target {
	return msg.Target{
		URL: r.url, Addressing: cmp.Or(r.address.Addressing, "url"), Selector: r.address.Selector,
		Owned: r.owned, Model: r.address.Model,
	}
}

func (r *replica) record(kind msg.RecordKind, m *msg.Admit) {
	r.emit(&msg.Record{Kind: kind, ReqID: m.ReqID, Ingress: m.Ingress, Tokens: m.Tokens})
}

func (r *replica) emit(rec *msg.Record) {
	r.seq++
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation, rec.Seq = r.app, r.unit, r.id, r.epoch,
		r.incarnation, r.seq
	r.feed.deliver(rec)
}

// publish sends the snapshot.
func (r *replica) publish() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.snapshot()
}

func (r *replica) snapshot() {
	s := &msg.Snapshot{
		Accepting: r.accepting, Ejected: r.ejected, MaxOngoing: r.max, MaxModelLen: r.length,
		Node: cmp.Or(r.node, "n1"), Target: r.target(), Mailbox: r, Adapters: r.adapters,
	}
	for _, m := range r.open {
		s.Open = append(s.Open, msg.OpenRequest{ReqID: m.ReqID, Ingress: m.Ingress, Tokens: m.Tokens})
	}
	r.feed.deliver(&msg.Record{
		App: r.app, Unit: r.unit, Rank: r.id, Epoch: r.epoch, Incarnation: r.incarnation, Seq: r.seq,
		Kind:      msg.RecSnapshot,
		RankState: msg.RankState{Accepting: r.accepting}, Snapshot: s,
	})
}

// say reports in the stream whether the rank accepts.
func (r *replica) say(accepting, fenced bool, cause string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepting = accepting
	r.emit(&msg.Record{
		Kind: msg.RecState, Cause: cause,
		RankState: msg.RankState{Accepting: accepting, Fenced: fenced, Draining: cause == "draining"},
	})
}

func (r *replica) gone() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.emit(&msg.Record{Kind: msg.RecGone})
}

// reborn begins a new incarnation at the next epoch.
func (r *replica) reborn() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch++
	r.incarnation++
	r.seq = 0
	r.open = map[uint64]msg.Admit{}
	r.accepting = true
	r.snapshot()
}

func (r *replica) hasFirstTokens(n int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.firsts == n
}

func (r *replica) setRefuse(f func(m *msg.Admit) msg.Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = f
}

func (r *replica) inFlight() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.open)
}

func (r *replica) lastDone(t *testing.T) msg.Done {
	t.Helper()
	eventually(t, func() bool { // another node gives tickets back in its own time
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.dones) > 0
	}, "done")
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dones[len(r.dones)-1]
}

func (r *replica) granted() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return int(r.next)
}

// rig is an ingress with fake replicas and engines behind it.
type rig struct {
	t        testing.TB
	store    *store
	feed     *feed
	in       *Ingress
	url      string
	replicas []*replica
	logs     *parallel.Buffer
	client   *http.Client
	metrics  *telemetry.Metrics
	port     *dataPort       // far only
	network  *memnet.Network // of the ingress and its engines, in fake time; nil: the host's
	served   int             // engines so far
}

// options change the rig before it starts.
type options struct {
	engines []http.HandlerFunc // one rank each
	urls    []string           // ranks with given URLs, behind those of engines
	max     int
	app     func(a *app.Application)
	timers  Timers
	limits  Limits
	memory  func() memoryUse // of a process with a limit of 1,000 bytes
	noApp   bool
	level   slog.Level
	address msg.Target      // Addressing, Selector and Model of all ranks
	far     bool            // the ranks are those of another node …
	home    int             // … but this many at the end
	lease   func() bool     // of the node that has the ranks
	network *memnet.Network // of the ingress and its engines, in fake time; nil: the host's
	keys    func() *apikeys.Set
	tls     *tls.Config
	trace   string // a file
	tracer  *tracing.Tracer

	// of two pools
	prefills, decodes int
	transfer          string // of attached engines; "": sim, launched
	change            func(p, d *app.Application)
	cold              bool                             // do not wait until all pairs have met
	wrap              func(engine http.Handler) string // serves an engine, and returns its URL
}

const model1 = "demo"

func demoApp() *app.Application {
	return &app.Application{
		Name: "demo", RoutePrefix: "/", Model: app.Model{ID: model1, Source: "org/demo"},
		Engine:       app.Engine{Kind: app.KindSim},
		DataParallel: app.DataParallel{DPSize: 1, Coupling: app.Independent}, NumReplicas: 1, NumGroups: 1,
		Routing:     app.Routing{Policy: "round-robin", Preset: "documented"},
		QueueBounds: app.QueueBounds{MaxQueuedRequests: 1000},
		Timeouts:    app.Timeouts{QueueS: 10, FirstTokenS: 10, BetweenTokensS: 10},
		Retries:     app.Retries{Attempts: 3},
	}
}

// isFar reports whether the ranks of a test's rig are those of another node.
func isFar(t testing.TB) bool {
	return strings.HasPrefix(t.Name(), "TestFar/")
}

func newRig(t testing.TB, o options) *rig {
	t.Helper()
	g := newFrame(t, &o)
	var urls []string
	for _, e := range o.engines {
		urls = append(urls, g.serve(e))
	}
	urls = append(urls, o.urls...)
	a := demoApp()
	a.DataParallel.DPSize, a.NumReplicas = max(len(urls), 1), max(len(urls), 1)
	if o.app != nil {
		o.app(a)
	}
	for i, u := range urls {
		unit := fmt.Sprintf("%s/0/%d", a.Name, i)
		g.feed.add(a.Name, unit, routing.ID(0, i), u, o.max).address = o.address
	}
	if !o.noApp {
		g.deploy(a, 1)
	}
	g.start(&o)
	return g
}

// newFrame is a rig without ranks and ingress.
func newFrame(t testing.TB, o *options) *rig {
	o.max, o.far = cmp.Or(o.max, 8), o.far || isFar(t)
	return &rig{
		t: t, store: newStore(), feed: &feed{}, logs: &parallel.Buffer{}, metrics: telemetry.New(),
		network: o.network,
	}
}

// serve serves an engine until the test ends, and returns its URL.
func (g *rig) serve(engine http.Handler) string {
	if g.network == nil {
		srv := httptest.NewServer(engine)
		g.t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
		return srv.URL
	}
	host := fmt.Sprintf("engine%d:80", g.served)
	g.served++
	l, err := g.network.Listen(host)
	require.NoError(g.t, err)
	srv := &http.Server{Handler: engine, ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	g.t.Cleanup(func() { require.NoError(g.t, srv.Close()) })
	return "http://" + host
}

// start begins to serve the ingress until the test ends, and then looks at what is left.
func (g *rig) start(o *options) {
	g.replicas = g.feed.replicas
	c := Config{
		Node: "n1", Version: "v-test", Store: g.store, Feed: g.feed, Metrics: g.metrics, Seed: 7,
		Limits: o.limits, Timers: o.timers, Serves: o.lease, TLS: o.tls, Tracer: o.tracer,
		RecordTrace: o.trace,
		Log:         slog.New(slog.NewTextHandler(g.logs, &slog.HandlerOptions{Level: o.level})),
	}
	if o.keys != nil {
		c.Keys, c.Access = o.keys, c.Metrics.Access()
	}
	if o.far {
		g.port = g.dataPort(o)
		c.Serves, c.Remote = nil, g.port.client
	}
	if g.network != nil {
		c.Dial = g.network.DialContext
	}
	in, err := New(c)
	require.NoError(g.t, err)
	g.in = in
	if o.memory != nil {
		in.memory.limit, in.memory.read = 1000, o.memory
	}
	if g.network == nil {
		addr, err := listen(g.t.Context(), in)
		require.NoError(g.t, err)
		g.url = "http://" + addr.String()
	} else {
		l, err := g.network.Listen("n1:80")
		require.NoError(g.t, err)
		require.NoError(g.t, in.Attach(l))
		g.url = "http://n1:80"
	}
	// what is deployed is known, so the next table is that of the next change
	eventually(g.t, func() bool { return len(in.table.Load().routers) >= len(g.store.State().Apps) }, "known")
	served := make(chan error, 1)
	go func() { served <- in.Serve() }()
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 512, DialContext: c.Dial}
	g.client = &http.Client{Transport: tr}
	g.t.Cleanup(func() {
		tr.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		require.NoError(g.t, in.Close(ctx))
		require.NoError(g.t, <-served)
		g.atRest()
	})
}

// atRest requires that nothing is in flight, nothing is queued, and no memory of bodies is held.
func (g *rig) atRest() {
	_, _, inflight := g.in.Totals()
	assert.Zero(g.t, inflight)
	assert.Zero(g.t, g.in.bodies.taken.Load())
	assert.Zero(g.t, g.in.QueueLen("demo"))
	for _, r := range g.replicas {
		if n := r.granted(); n < maxDones {
			assert.LessOrEqual(g.t, len(r.allDones()), n, "a ticket of %s came back twice", r.id)
		}
		if r.node == "" {
			assert.Zero(g.t, r.inFlight(), "in flight on %s", r.id)
		} else { // another node gives tickets back in its own time
			assert.Eventually(g.t, func() bool { return r.inFlight() == 0 }, soon, time.Millisecond,
				"in flight on %s", r.id)
		}
	}
}

// deploy puts a pool of an app into the state, in place of one of the same name, with all its units ready at
// epoch 1.
func (g *rig) deploy(a *app.Application, revision uint64) { deploy(g.t, g.store, a, revision) }

func deploy(tb testing.TB, s *store, a *app.Application, revision uint64) {
	tb.Helper()
	s.set(func(st *state.State) {
		var pools []*app.Application
		if old := st.Apps[a.Name]; old != nil {
			was, err := old.Pools()
			require.NoError(tb, err)
			pools = slices.DeleteFunc(slices.Clone(was),
				func(p *app.Application) bool { return p.Pool == a.Pool })
		}
		if pools = append(pools, a); a.Pool == app.PoolPrefill {
			slices.Reverse(pools)
		}
		raw, err := json.Marshal(pools)
		require.NoError(tb, err)
		st.Apps[a.Name] = &state.App{
			Name: a.Name, Revision: revision, Spec: raw,
			Names: a.Model.ServedNames(),
		}
		for _, u := range a.Units() {
			st.Units[u.ID] = &state.Unit{
				ID: u.ID, App: u.App, Pool: u.Pool, Group: u.Group, Epoch: 1, Phase: state.Ready,
			}
			st.Epochs[u.ID] = 1
		}
	})
}

// phase puts a unit's phase into the state; when it returns, the ingress has seen it.
func (g *rig) phase(unit string, p state.Phase, epoch uint64) {
	before := g.in.table.Load()
	g.store.set(func(st *state.State) {
		if st.Units[unit] == nil {
			st.Units[unit] = &state.Unit{ID: unit, App: "demo"}
		}
		st.Units[unit].Phase, st.Units[unit].Epoch, st.Epochs[unit] = p, epoch, epoch
	})
	assert.Eventually(g.t, func() bool { return g.in.table.Load() != before }, soon, time.Millisecond,
		"a change of the state is followed")
}
