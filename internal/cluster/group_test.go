package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/memnet"
)

// onFakeTime runs a test of several nodes on fake time: a leader stays however busy the machine is.
func onFakeTime(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Minute) }) // the last one: connections see that both ends are gone
		test(t)
	})
}

// fastTimers are raft's timers of these tests: short enough for many elections.
func fastTimers() cluster.Timers {
	return cluster.Timers{
		Heartbeat: 500 * time.Millisecond, Election: 500 * time.Millisecond,
		Lease: 250 * time.Millisecond,
	}
}

// testNetwork connects the nodes of a test in memory and can isolate one.
type testNetwork struct {
	net   memnet.Network
	mu    sync.Mutex
	hosts int
	cut   map[string]bool // by address
	conns map[net.Conn][2]string
}

var errCut = errors.New("cut off by the test")

func newWires() *testNetwork {
	return &testNetwork{cut: map[string]bool{}, conns: map[net.Conn][2]string{}}
}

// listen binds a port on a host of its own.
func (w *testNetwork) listen() (net.Listener, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts++
	return w.net.Listen(fmt.Sprintf("127.0.0.%d:9000", w.hosts))
}

func (w *testNetwork) dial(from, to string, timeout time.Duration) (net.Conn, error) {
	host, _, err := net.SplitHostPort(from)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	conn, err := w.net.Host(host).DialContext(ctx, "tcp", to)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut[from] || w.cut[to] {
		_ = conn.Close()
		return nil, errCut
	}
	w.conns[conn] = [2]string{from, to}
	return conn, nil
}

// isolate disconnects a node, or connects it again.
func (w *testNetwork) isolate(address string, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[address] = cut
	for conn, ends := range w.conns {
		if cut && (ends[0] == address || ends[1] == address) {
			_ = conn.Close()
			delete(w.conns, conn)
		}
	}
}

// tcpLayer is one node's end.
type tcpLayer struct {
	net.Listener
	testNetwork *testNetwork
}

func (l *tcpLayer) Dial(_, to string, timeout time.Duration) (net.Conn, error) {
	return l.testNetwork.dial(l.Addr().String(), to, timeout)
}

// door is a port that a member keeps over its restarts. While the member is down, connections are refused.
type door struct {
	net.Listener
	mu sync.Mutex
	in *doorListener
}

// doorListener is the listener of the door for one run of the member.
type doorListener struct {
	*door
	conns chan net.Conn
	gone  chan struct{}
	once  sync.Once
}

func newDoor(t testing.TB, w *testNetwork) *door {
	t.Helper()
	l, err := w.listen()
	require.NoError(t, err)
	d := &door{Listener: l}
	served := make(chan struct{})
	go func() { defer close(served); d.serve() }()
	t.Cleanup(func() { require.NoError(t, l.Close()); <-served })
	return d
}

func (d *door) serve() {
	for {
		conn, err := d.Accept()
		if err != nil {
			return
		}
		d.mu.Lock()
		in := d.in
		d.mu.Unlock()
		if in == nil {
			_ = conn.Close()
			continue
		}
		select {
		case in.conns <- conn:
		case <-in.gone:
			_ = conn.Close()
		}
	}
}

func (d *door) open() net.Listener {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.in = &doorListener{door: d, conns: make(chan net.Conn), gone: make(chan struct{})}
	return d.in
}

func (l *doorListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.gone:
		return nil, net.ErrClosed
	}
}

func (l *doorListener) Close() error {
	l.once.Do(func() { close(l.gone) })
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.in == l {
		l.in = nil
	}
	return nil
}

// member is one node of a group.
type member struct {
	*cluster.Cluster
	cfg     cluster.Config
	address string
	door    *door
	up      bool
}

// group is several nodes in one process.
type group struct {
	t           testing.TB
	testNetwork *testNetwork
	mu          sync.Mutex
	members     []*member
}

func newGroup(t testing.TB) *group { return &group{t: t, testNetwork: newWires()} }

// start opens a member on the port that it had before.
func (g *group) start(m *member) {
	g.t.Helper()
	cfg := m.cfg
	cfg.Layer, cfg.Timers, cfg.Forward = &tcpLayer{m.door.open(), g.testNetwork}, fastTimers(), g.forward
	c, err := cluster.Open(cfg)
	require.NoError(g.t, err)
	g.mu.Lock()
	defer g.mu.Unlock()
	m.Cluster, m.up = c, true
}

// add opens a new member.
func (g *group) add(cfg cluster.Config) *member {
	g.t.Helper()
	m := &member{cfg: cfg, door: newDoor(g.t, g.testNetwork)}
	m.address = m.door.Addr().String()
	g.start(m)
	g.mu.Lock()
	g.members = append(g.members, m)
	g.mu.Unlock()
	g.t.Cleanup(func() { require.NoError(g.t, m.Close()) })
	return m
}

func (g *group) stop(m *member) {
	g.t.Helper()
	g.mu.Lock()
	m.up = false
	g.mu.Unlock()
	require.NoError(g.t, m.Close())
}

func (g *group) running() []*member {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []*member
	for _, m := range g.members {
		if m.up {
			all = append(all, m)
		}
	}
	return all
}

// clusters returns the Cluster of each member, running or not.
func (g *group) clusters() []*cluster.Cluster {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make([]*cluster.Cluster, len(g.members))
	for i, m := range g.members {
		all[i] = m.Cluster
	}
	return all
}

// forward sends a command to another node.
func (g *group) forward(ctx context.Context, leader state.Node, c state.Command) (state.Result, error) {
	for _, m := range g.clusters() {
		if m.UID() == leader.UID {
			return m.ProposeHere(ctx, c)
		}
	}
	return state.Result{}, errCut
}

// leader waits until one of the given members leads and is ready.
func (g *group) leader(of ...*member) *member {
	g.t.Helper()
	if len(of) == 0 {
		of = g.running()
	}
	var found *member
	require.Eventually(g.t, func() bool {
		for _, m := range of {
			if m.Leader() {
				found = m
				return true
			}
		}
		return false
	}, limit, 5*time.Millisecond, "nobody leads")
	return found
}

// others returns the running members except one.
func (g *group) others(but *member) []*member {
	var all []*member
	for _, m := range g.running() {
		if m != but {
			all = append(all, m)
		}
	}
	return all
}

// put makes a member's address known. It repeats the command until a member accepts it.
func (g *group) put(m *member) {
	g.t.Helper()
	g.propose(state.Command{PutNode: &state.PutNode{Node: state.Node{
		ID: m.NodeID(), UID: m.UID(), Address: m.address,
		Roles: []state.Role{state.RoleControl, state.RoleWorker},
	}}})
}

// propose asks the present leader until the command succeeds.
func (g *group) propose(cmd state.Command) state.Result {
	g.t.Helper()
	var res state.Result
	g.retry(func() error {
		var err error
		res, err = g.leader().Propose(g.t.Context(), cmd)
		return err
	})
	return res
}

// retry repeats an operation that a change of the leader may disturb.
func (g *group) retry(do func() error) {
	g.t.Helper()
	var err error
	require.Eventually(g.t, func() bool { err = do(); return err == nil }, limit, 20*time.Millisecond,
		"last error: %v", &err)
}

// join makes a new member a standby, or a voter.
func (g *group) join(cfg cluster.Config, voter bool) *member {
	g.t.Helper()
	cfg.Member, cfg.ClusterID = true, g.leader().ClusterID()
	m := g.add(cfg)
	g.put(m)
	g.retry(func() error { return g.leader().AddStandby(g.t.Context(), m.UID()) })
	g.ready(m)
	if voter {
		g.retry(func() error { return g.leader().Promote(g.t.Context(), m.UID()) })
		g.heard(cluster.Member{UID: m.UID(), Voter: true})
	}
	return m
}

// heard waits until every running member knows another member's part. A member that does not know of a new
// voter gives it no vote, so a leader that is cut off in that moment has no successor (docs/internals.md).
func (g *group) heard(part cluster.Member) {
	g.t.Helper()
	require.Eventually(g.t, func() bool {
		return !slices.ContainsFunc(g.running(), func(m *member) bool {
			return !slices.Contains(m.Members(),
				part)
		})
	}, limit, 5*time.Millisecond, "not all know of a new voter")
}

func (g *group) ready(m *member) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), limit)
	defer cancel()
	require.NoError(g.t, m.Ready(ctx))
}

// threeVoters returns a group of three voters. disk: with data dirs.
func threeVoters(t testing.TB, disk bool) *group {
	t.Helper()
	g := newGroup(t)
	for i, name := range []string{"node-1", "node-2", "node-3"} {
		cfg := cluster.Config{NodeID: name, SegmentSize: 64 << 10}
		if disk {
			cfg.DataDir = t.TempDir()
		}
		if i > 0 {
			g.join(cfg, true)
			continue
		}
		m := g.add(cfg)
		g.ready(m)
		g.put(m)
	}
	return g
}
