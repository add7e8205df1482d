package ingress

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
)

// sinks delivers to several ingresses.
type sinks struct {
	mu   sync.Mutex
	list []msg.Sink
}

func (s *sinks) Deliver(rec *msg.Record) {
	s.mu.Lock()
	list := s.list
	s.mu.Unlock()
	for _, sink := range list {
		sink.Deliver(rec)
	}
}

// fanFeed is one feed for several ingresses.
type fanFeed struct {
	*feed
	sinks *sinks
}

func (f fanFeed) Subscribe(s msg.Sink) func() {
	f.sinks.mu.Lock()
	f.sinks.list = append(f.sinks.list[:len(f.sinks.list):len(f.sinks.list)], s)
	f.sinks.mu.Unlock()
	for _, r := range f.replicas {
		r.publish()
	}
	return func() {}
}

func (f fanFeed) List(msg.Sink) {
	for _, r := range f.replicas {
		r.publish()
	}
}

// groupRig is a lockstep group of ranks, and ingresses before it, in fake time. Each ingress has a node of
// its own, n1, n2 … The group's first rank is on n1.
type groupRig struct {
	*rig
	links  *links
	nodes  []*Ingress
	engine *stepEngine
}

// stepEngine is the engine of all ranks: a prompt takes prefill, then tokens come one after each gap.
type stepEngine struct {
	prefill, gap time.Duration
	tokens       int

	mu      sync.Mutex
	arrived []arrival
}

// arrival is a request that has reached its rank.
type arrival struct {
	rank int
	id   string
	at   time.Time
}

func (e *stepEngine) serve(rank int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		e.mu.Lock()
		e.arrived = append(e.arrived, arrival{rank, r.Header.Get("X-Request-Id"), time.Now()})
		wait := e.prefill
		e.mu.Unlock()
		pause := time.NewTimer(wait)
		defer pause.Stop()
		for range e.tokens {
			select {
			case <-pause.C:
			case <-r.Context().Done():
				return
			}
			sse(w, textChunk)
			pause.Reset(e.gap)
		}
		sse(w, stopChunk, doneEvent)
	}
}

// arrivals are the requests that have reached a rank, in their order.
func (e *stepEngine) arrivals() []arrival {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]arrival(nil), e.arrived...)
}

type groupOptions struct {
	ranks, ingresses, max int
	app                   func(a *app.Application)
}

// inGroupRig runs a test in fake time. At its end no request may be in flight, waiting or counted anywhere.
func inGroupRig(t *testing.T, o groupOptions, test func(t *testing.T, g *groupRig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		g := newGroupRig(t, o)
		test(t, g)
		g.close()
	})
}

func newGroupRig(t *testing.T, o groupOptions) *groupRig {
	t.Helper()
	g := &groupRig{
		rig: newFrame(t, &options{network: &memnet.Network{}}), links: newLinks(),
		engine: &stepEngine{prefill: 100 * time.Millisecond, gap: 50 * time.Millisecond, tokens: 10},
	}
	a := demoApp()
	a.DataParallel, a.NumReplicas = app.DataParallel{DPSize: o.ranks, Coupling: app.Lockstep}, o.ranks
	a.Timeouts.FirstTokenS = 600
	a.Routing.Policy = app.DefaultPolicy(app.Lockstep)
	if o.app != nil {
		o.app(a)
	}
	for i := range a.NumReplicas {
		group, url := i/o.ranks, g.serve(g.engine.serve(i))
		unit := fmt.Sprintf("%s/%d", a.Name, group)
		g.feed.add(a.Name, unit, routing.ID(group, i%o.ranks), url, o.max).node = "n1"
	}
	g.replicas = g.feed.replicas
	g.deploy(a, 1)
	g.store.set(func(st *state.State) {
		for i := range o.ingresses {
			name := fmt.Sprintf("n%d", i+1)
			st.Nodes[name] = &state.Node{ID: name, Roles: []state.Role{state.RoleIngress}}
		}
	})
	fan := fanFeed{g.feed, &sinks{}}
	g.feed.sink = fan.sinks
	for i := range o.ingresses {
		name := fmt.Sprintf("n%d", i+1)
		c := Config{
			Node: name, Store: g.store, Feed: fan, Metrics: telemetry.New(), Seed: uint64(7 + i),
			Log: slog.New(slog.DiscardHandler), Dial: g.network.DialContext,
		}
		if o.ingresses > 1 {
			c.Groups = g.links.of(name)
		}
		in, err := New(c)
		require.NoError(t, err)
		l, err := g.network.Listen(name + ":80")
		require.NoError(t, err)
		require.NoError(t, in.Attach(l))
		go func() { assert.NoError(t, in.Serve()) }()
		g.nodes = append(g.nodes, in)
	}
	tr := &http.Transport{DialContext: g.network.DialContext, MaxIdleConnsPerHost: 100}
	g.client = &http.Client{Transport: tr}
	t.Cleanup(tr.CloseIdleConnections)
	time.Sleep(time.Second) // links are up
	synctest.Wait()
	return g
}

func (g *groupRig) close() {
	time.Sleep(90 * time.Second) // the requests of fill have ended
	synctest.Wait()
	for _, in := range g.nodes {
		q := &in.findAppRouter("demo").groups
		for _, s := range q.state() {
			assert.Zero(g.t, s.Waiting+s.Held+s.Open, "%s: %+v", in.node, s)
		}
		q.mu.Lock()
		for _, l := range q.lines {
			assert.Empty(g.t, l.holders)
			assert.Empty(g.t, l.unseen)
		}
		q.mu.Unlock()
		assert.Zero(g.t, in.QueueLen("demo"))
		for _, rk := range in.findAppRouter("demo").router.Load().Snapshot().Ranks {
			assert.Zero(g.t, rk.Load.O(), "%s: open on %s", in.node, rk.ID)
		}
	}
	for _, r := range g.replicas {
		assert.Zero(g.t, r.inFlight(), "in flight on %s", r.id)
	}
	for _, in := range g.nodes {
		require.NoError(g.t, in.Close(context.Background()))
		_, _, inflight := in.Totals()
		assert.Zero(g.t, inflight)
	}
	g.links.close()
}

// reply is what a client has got.
type reply struct {
	status int
	rank   string
	body   string
	err    error
	took   time.Duration // until the answer began
}

// prompt is a chat of about that many tokens.
func promptOf(tokens int) string {
	return fmt.Sprintf(`{"model":"demo","stream":true,"messages":[{"role":"user","content":%q}]}`,
		strings.Repeat("abc ", tokens))
}

// ask sends a request to the ingress of a node, and waits for the whole answer.
func (g *groupRig) ask(ctx context.Context, node, body string, headers ...string) (r reply) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+node+":80/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	began := time.Now()
	resp, err := g.client.Do(req)
	if err != nil {
		return reply{err: err, took: time.Since(began)}
	}
	r = reply{
		status: resp.StatusCode, rank: resp.Header.Get("X-Dpserve-Rank"), took: time.Since(began),
	}
	raw, err := io.ReadAll(resp.Body)
	r.body, r.err = string(raw), err
	_ = resp.Body.Close()
	return r
}

// load has n clients ask, each after a pause, and returns their replies.
func (g *groupRig) load(n int, pause time.Duration, body func(i int) (node, text string)) []reply {
	replies := make([]reply, n)
	var clients sync.WaitGroup
	for i := range n {
		clients.Go(func() {
			node, text := body(i)
			replies[i] = g.ask(g.t.Context(), node, text, "X-Request-Id", fmt.Sprintf("r%d", i))
		})
		time.Sleep(pause)
	}
	clients.Wait()
	return replies
}

// links are the links between the ingresses of a groupRig. A message takes a millisecond.
type links struct {
	mu     sync.Mutex
	peers  map[string]msg.GroupPeer
	queues map[[2]string]chan msg.GroupMessage // from, to
	cut    map[[2]string]bool
	isDown map[[2]string]bool
	done   sync.WaitGroup
	ended  bool
}

func newLinks() *links {
	return &links{
		peers: map[string]msg.GroupPeer{}, queues: map[[2]string]chan msg.GroupMessage{},
		cut: map[[2]string]bool{}, isDown: map[[2]string]bool{},
	}
}

// linksOf are the links of one node.
type linksOf struct {
	*links
	node string
}

func (l *links) of(node string) msg.GroupLinks { return linksOf{l, node} }

func (l linksOf) Bind(p msg.GroupPeer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peers[l.node] = p
}

func (l linksOf) Reach(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peers[node] != nil && !l.isDown[[2]string{l.node, node}]
}

func (l linksOf) Send(node string, m *msg.GroupMessage) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	way := [2]string{l.node, node}
	if l.isDown[way] || l.isDown[[2]string{node, l.node}] || l.ended {
		return false
	}
	q := l.queues[way]
	if q == nil {
		q = make(chan msg.GroupMessage, 20_000)
		l.queues[way] = q
		l.done.Go(func() { l.carry(way, q) })
	}
	sent := *m
	sent.Hits = append([]routing.Hit(nil), m.Hits...)
	q <- sent
	return true
}

func (l *links) carry(way [2]string, q chan msg.GroupMessage) {
	for m := range q {
		time.Sleep(time.Millisecond)
		l.mu.Lock()
		lost, to := l.cut[way] || l.isDown[way], l.peers[way[1]]
		l.mu.Unlock()
		if !lost {
			to.ReceiveGroup(way[0], &m)
		}
	}
}

// fail loses what one node sends to another from now on. Both notice after a second.
func (l *links) fail(from, to string) {
	l.mu.Lock()
	l.cut[[2]string{from, to}] = true
	l.mu.Unlock()
	time.Sleep(time.Second)
	l.mu.Lock()
	l.isDown[[2]string{from, to}], l.isDown[[2]string{to, from}] = true, true
	a, b := l.peers[from], l.peers[to]
	l.mu.Unlock()
	a.OwnerChanged(to)
	b.OwnerChanged(from)
	a.HolderLost(to)
	b.HolderLost(from)
}

// mend ends fail.
func (l *links) mend(from, to string) {
	l.mu.Lock()
	clear(l.cut)
	clear(l.isDown)
	a, b := l.peers[from], l.peers[to]
	l.mu.Unlock()
	a.OwnerChanged(to)
	b.OwnerChanged(from)
}

func (l *links) close() {
	l.mu.Lock()
	l.ended = true
	for _, q := range l.queues {
		close(q)
	}
	l.mu.Unlock()
	l.done.Wait()
}
