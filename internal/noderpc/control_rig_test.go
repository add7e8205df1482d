package noderpc

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/promtext"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/memnet"
)

// testCluster is several nodes over a network in memory.
type testCluster struct {
	t     *testing.T
	net   memnet.Network
	store *fakeStore
	nodes map[string]*testNode
}

// testNode is one node: its servers and its clients.
type testNode struct {
	town   *testCluster
	name   string
	server *grpc.Server
	conns  *Conns
	client *LeaderClient
	agent  *fakeAgent
	view   *fakeView

	leads   atomic.Pointer[fakeLeader]
	hint    atomic.Value // string
	unknown atomic.Int64
	follow  func(ctx context.Context, from uint64, send func(*cluster.Update) error) error
}

func newTestCluster(t *testing.T, names ...string) *testCluster {
	t.Helper()
	w := &testCluster{t: t, store: newFakeStore(), nodes: map[string]*testNode{}}
	for _, name := range names {
		w.store.put(&state.Node{
			ID: name, UID: "uid-" + name, Address: net.JoinHostPort(name, "7947"),
			Roles: rolesNamed(name),
		})
	}
	for _, name := range names {
		w.nodes[name] = w.addNode(name)
	}
	return w
}

func (w *testCluster) addNode(name string) *testNode {
	m := &testNode{town: w, name: name, agent: &fakeAgent{}, view: &fakeView{}}
	m.hint.Store("")
	m.conns = NewConns(ConnsConfig{Dial: func(address, _ string) (*grpc.ClientConn,
		error,
	) {
		return w.dial(name, address)
	}, Nodes: w.store.nodes})
	var store msg.Store = w.store
	if !slices.Contains(rolesNamed(name), state.RoleControl) {
		store = follower{w.store}
	}
	m.client = NewLeaderClient(LeaderConfig{
		Self: name, Conns: m.conns, Store: store, Log: slog.New(slog.DiscardHandler), Leading: m.leading,
		Hint: m.leaderHint,
	})
	m.serve()
	return m
}

func (m *testNode) leading() (msg.Leader, msg.Assigner, bool) {
	if l := m.leads.Load(); l != nil {
		return l, l, true
	}
	return nil, nil, false
}

func (m *testNode) leaderHint() (string, bool) {
	h, _ := m.hint.Load().(string)
	return "uid-" + h, h != ""
}

func (m *testNode) proposeHere(ctx context.Context, c state.Command) (state.Result, error) {
	if m.leads.Load() == nil {
		return state.Result{}, problem.New(problem.Unavailable, "propose: %w", cluster.ErrNotLeader)
	}
	return m.town.store.Propose(ctx, c)
}

// serve starts the server; stop ends it with every connection.
func (m *testNode) serve() {
	ln, err := m.town.net.Listen(net.JoinHostPort(m.name, "7947"))
	require.NoError(m.town.t, err)
	m.server = grpc.NewServer(ServerOptions(func(string) { m.unknown.Add(1) })...)
	NewControlServer(ControlConfig{
		Leading: m.leading, Hint: m.leaderHint, Store: m.town.store, Propose: m.proposeHere,
		Follow: func(ctx context.Context, from uint64, send func(*cluster.Update) error) error {
			return m.follow(ctx, from, send)
		},
		Peer: peerOf, Unknown: func(string) { m.unknown.Add(1) },
	}).Register(m.server)
	NewNodeServer(NodeConfig{Agent: m.agent, View: m.view, Peer: peerOf}).Register(m.server)
	go func() { _ = m.server.Serve(ln) }()
}

func (w *testCluster) close() {
	for _, m := range w.nodes {
		require.NoError(w.t, m.client.Close())
		require.NoError(w.t, m.conns.Close())
		require.NoError(w.t, m.conns.Close())
		m.server.Stop()
	}
}

// setLeader makes one node the leader and tells the others.
func (w *testCluster) setLeader(name string) *fakeLeader {
	l := &fakeLeader{
		name: name, store: w.store, lost: make(chan struct{}),
		published: make(chan msg.Publish, 64),
	}
	for _, m := range w.nodes {
		if old := m.leads.Swap(nil); old != nil {
			close(old.lost)
		}
		m.hint.Store(name)
	}
	if m := w.nodes[name]; m != nil {
		m.leads.Store(l)
	}
	return l
}

// dial connects in memory, and names the caller in the metadata.
func (w *testCluster) dial(from, address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{
			BaseDelay:  10 * time.Millisecond,
			Multiplier: 1.6, MaxDelay: 100 * time.Millisecond,
		}, MinConnectTimeout: time.Second}),
		grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn,
			error,
		) {
			return w.net.DialContext(ctx, "tcp", a)
		}),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any,
			cc *grpc.ClientConn, do grpc.UnaryInvoker, opts ...grpc.CallOption,
		) error {
			return do(metadata.AppendToOutgoingContext(ctx, "from", from), method, req, reply, cc, opts...)
		}))
}

// peerOf replaces the certificate.
func peerOf(ctx context.Context) (pki.Identity, bool) {
	md, _ := metadata.FromIncomingContext(ctx)
	from := slices.Concat(md.Get("from"), []string{""})[0]
	if from == "" {
		return pki.Identity{}, false
	}
	return identityNamed(from), true
}

// identityNamed is the content of a node's certificate.
func identityNamed(name string) pki.Identity {
	return pki.Identity{
		Cluster: "c", Node: name, UID: "uid-" + name,
		Roles: state.ConvertRoles[string](rolesNamed(name)),
	}
}

// rolesNamed are the roles of a node: its name, or those of a control node.
func rolesNamed(name string) []state.Role {
	switch role := state.Role(name); role {
	case state.RoleWorker, state.RoleIngress:
		return []state.Role{role}
	default:
		return []state.Role{state.RoleControl, state.RoleWorker}
	}
}

// follower is the copy of a node without role control.
type follower struct{ *fakeStore }

func (f follower) State() *state.State { return f.fakeStore.State().Public() }

// fakeLeader is a leader's controller and assigner.
type fakeLeader struct {
	name      string
	store     *fakeStore
	lost      chan struct{}
	published chan msg.Publish
	renewals  atomic.Int64
	awaits    atomic.Int64
	err       error
	silent    atomic.Bool // Renew never answers

	mu       sync.Mutex
	addr     string
	settings string
}

func (l *fakeLeader) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	l.renewals.Add(1)
	if l.silent.Load() {
		<-ctx.Done()
		return msg.Lease{}, ctx.Err()
	}
	if l.err != nil {
		return msg.Lease{}, l.err
	}
	taken := uint64(0)
	if n := len(r.Events); n > 0 {
		taken = r.Events[n-1].Number
	}
	return msg.Lease{TTL: state.LeaseTTL, Leader: l.name, Acked: taken, Index: r.Index}, nil
}

func (l *fakeLeader) Assign(context.Context, string, int, string) (msg.AssignReply, error) {
	return msg.AssignReply{Rank: 3, Epoch: 2, DPSize: 8}, l.err
}

func (l *fakeLeader) Publish(p msg.Publish) {
	l.mu.Lock()
	l.addr, l.settings = p.Addr, p.Settings
	l.mu.Unlock()
	l.published <- p
}

// Await polls: the fake clock makes it cheap.
func (l *fakeLeader) Await(ctx context.Context, _ string, _ uint64, _ int) (msg.AwaitReply, error) {
	l.awaits.Add(1)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		l.mu.Lock()
		said := msg.AwaitReply{Addr: l.addr, Port: 7, Settings: l.settings}
		l.mu.Unlock()
		if said.Addr != "" {
			return said, nil
		}
		select {
		case <-tick.C:
		case <-l.lost:
			return msg.AwaitReply{}, refuseNotLeader("")
		case <-ctx.Done():
			return msg.AwaitReply{}, context.Cause(ctx)
		}
	}
}

// fakeStore is the replicated state, which every node has at once.
type fakeStore struct {
	mu    sync.Mutex
	state *state.State
	err   error
}

func newFakeStore() *fakeStore {
	s := &fakeStore{state: state.New()}
	s.state.Cluster = "c"
	s.state.Nodes = map[string]*state.Node{}
	return s
}

func (s *fakeStore) put(n *state.Node) {
	s.change(func(st *state.State) {
		nodes := map[string]*state.Node{n.ID: n}
		for id, old := range st.Nodes {
			if id != n.ID {
				nodes[id] = old
			}
		}
		st.Nodes = nodes
	})
}

func (s *fakeStore) change(f func(*state.State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.state.Clone()
	f(next)
	s.state = next
}

func (s *fakeStore) nodes() map[string]*state.Node { return s.State().Nodes }

func (s *fakeStore) State() *state.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

func (s *fakeStore) Changed() <-chan struct{} { return nil }

func (s *fakeStore) Propose(_ context.Context, c state.Command) (state.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return state.Result{}, s.err
	}
	next := s.state.Clone()
	r, err := next.Apply(next.Index+1, &c)
	if err == nil {
		s.state = next
	}
	return r, err
}

// fakeAgent is a node's supervisor.
type fakeAgent struct {
	mu      sync.Mutex
	started []*msg.StartRank
	stopped []*msg.StopRank
	err     error
	hang    bool
}

func (a *fakeAgent) StartRank(ctx context.Context, m *msg.StartRank) error {
	if a.hang {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.started = append(a.started, m)
	return a.err
}

func (a *fakeAgent) StopRank(_ context.Context, m *msg.StopRank) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped = append(a.stopped, m)
	return a.err
}

// fakeView is a node's answers to the admin API.
type fakeView struct {
	lines int
	pages int
	err   error
	stall bool // it neither ends nor adds lines
	sent  atomic.Int64
	ended atomic.Bool
}

func (v *fakeView) Statuses(context.Context) (msg.NodeCounts, error) {
	return msg.NodeCounts{
		Ranks: map[string][]client.RankStatus{
			"chat/0": {{Rank: 1, Node: "b", Phase: "ready", TokensPerS: 2.5}},
		},
		Queued: map[string]int{"chat": 4},
		Pairs: map[string]client.PDStatus{
			"pd": {Transfer: "nixl", Pairs: client.PairsOn, Met: 2, Remote: 7},
		},
	}, v.err
}

func (v *fakeView) Logs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) error {
	defer v.ended.Store(true)
	for i := range v.lines {
		if err := give(msg.LogLine{Unit: q.Unit, Rank: i, Text: "line"}); err != nil {
			return err
		}
		v.sent.Add(1)
	}
	if v.stall {
		<-ctx.Done()
	}
	return v.err
}

func (v *fakeView) CallEngines(_ context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	return []client.RankAnswer{{Pool: q.App, Body: q.Method + " " + q.Path + " " + string(q.Body)}}, v.err
}

func (v *fakeView) EngineMetrics(_ context.Context, give func(*msg.EnginePage) error) error {
	for i := range v.pages {
		if err := give(&msg.EnginePage{Epoch: 3, Source: promtext.Source{
			App: "chat", Ranks: []promtext.Rank{{Number: i, Series: "0"}}, Text: "up 1\n",
		}}); err != nil {
			return err
		}
	}
	return v.err
}

func (v *fakeView) ResetRouter(context.Context, string) (int, error) { return 3, v.err }
