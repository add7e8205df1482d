package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// peering connects a node to the other nodes: the node port, the services on it, and the connections to other
// nodes. A node that stands alone has a nil *peering, which the methods that can be called then accept.
type peering struct {
	n             *Node
	address       string // HOST:PORT of the node port
	gossipAddress string
	dir           string // directory of the certificate files; "" = in memory
	files         pki.Files
	keyring       [][]byte     // gossip keys; the first one encrypts
	mu            sync.Mutex   // guards files and keyring once the node renews its lease
	seeds         []state.Node // the other nodes at the time of the join
	rejoinAddress string       // address of a join with a member's data dir; "" = none
	// the control node at rejoinAddress, with UID and address only; nil = unknown, or no longer needed
	rejoinPeer  atomic.Pointer[state.Node]
	member      bool          // it joined; false: it founded the cluster
	founding    bool          // it founds the cluster in this process
	secrets     state.Secrets // of a founding node
	credentials atomic.Pointer[pki.Credentials]
	port        *nodeport.Port
	gossip      *membership.Gossip // nil on an in-memory network

	transports *peerTransports
	grpc       *grpc.Server
	enroll     *grpc.Server
	renew      *grpc.Server
	data       *noderpc.DataServer
	stream     *noderpc.StreamServer
	feed       *noderpc.Feed
	http       []*nodeport.HTTP2Server

	loops    sync.WaitGroup
	stop     context.CancelFunc
	stopping context.Context //nolint:containedctx // ends the loops
}

// listen binds the node port and begins to accept. Nothing is served on it yet.
func (m *peering) listen(ctx context.Context) error {
	n := m.n
	m.stopping, m.stop = context.WithCancel(context.Background())
	m.port = nodeport.New(nodeport.Config{
		Credentials: m.credentials.Load, Revoked: n.isRemoved, Bind: n.cfg.bind(), Connect: n.cfg.connect(),
		Log:     n.log.With(slog.String("room", "nodeport")),
		Refused: func(r nodeport.Reason) { n.nodeMetrics.Refused(string(r)) },
	})
	if err := m.port.Listen(ctx, hostPort(n.cfg.Advertise, n.cfg.NodePort)); err != nil {
		return err
	}
	m.address = hostPort(n.cfg.Advertise, n.cfg.NodePort)
	if bound, ok := m.port.Addr().(*net.TCPAddr); ok { // NodePort 0
		m.address = hostPort(n.cfg.Advertise, bound.Port)
	}
	m.transports = newPeerTransports(m.port, n.peerAtLastAddress)
	m.loops.Go(func() { //nolint:contextcheck // the port lives until it is closed
		if err := m.port.Serve(); err != nil {
			n.log.Error("the node port is gone", slog.Any("err", err))
		}
	})
	return nil
}

// serve starts the services of the node port. The node can answer from now on.
func (m *peering) serve() error {
	n := m.n
	m.grpc = grpc.NewServer(append(nodeport.ServerOptions(),
		noderpc.ServerOptions(n.nodeMetrics.Unknown)...)...)
	dpservev1.RegisterNodeServer(m.grpc, noderpc.NewNodeServer(noderpc.NodeConfig{
		Agent: n.localAgent(),
		View:  localView{n}, Peer: nodeport.PeerFromContext,
	}))
	if n.hasRole(state.RoleControl) {
		m.serveControl()
	}
	if n.hasRole(state.RoleWorker) {
		if err := m.serveRanks(); err != nil {
			return err
		}
	}
	n.metrics.Streams(n.cfg.NodeID, m.streamCounts)
	m.http = append(m.http, m.port.ServeHTTP2(nodeport.Admin, n.admin.Handler()))
	m.serveGRPC(m.grpc, nodeport.GRPC)
	for _, s := range m.http {
		m.runService(s.Serve)
	}
	return nil
}

// serveGRPC serves a protocol. The listener accepts at once, before the goroutine runs, because a node that
// has started may be joined at once.
func (m *peering) serveGRPC(s *grpc.Server, protocol string) {
	l := m.port.Listener(protocol)
	m.runService(func() error { return s.Serve(l) })
}

func (m *peering) runService(serve func() error) {
	m.loops.Go(func() {
		if err := serve(); err != nil && !errors.Is(err, net.ErrClosed) &&
			!errors.Is(err, grpc.ErrServerStopped) && m.stopping.Err() == nil {
			m.n.log.Error("a service between nodes has ended", slog.Any("err", err))
		}
	})
}

func (m *peering) serveControl() {
	n := m.n
	dpservev1.RegisterControlServer(m.grpc, noderpc.NewControlServer(noderpc.ControlConfig{
		Leading: n.currentLeader, Hint: n.store.LeaderNode, Store: n.store,
		Propose: n.consensus.ProposeHere, Follow: n.consensus.Follow, Peer: nodeport.PeerFromContext,
		Version: n.cfg.Version, Unknown: n.nodeMetrics.Unknown, Log: n.log,
	}))
	m.enroll = grpc.NewServer(append(nodeport.ServerOptions(), noderpc.EnrollOptions()...)...)
	dpservev1.RegisterEnrollServer(m.enroll,
		noderpc.NewEnrollServer(noderpc.EnrollConfig{
			Store: n.store, Proposer: n.store,
			Version: n.cfg.Version, Log: n.log,
		}))
	m.serveGRPC(m.enroll, nodeport.Join)
	m.renew = grpc.NewServer(append(nodeport.ServerOptions(), noderpc.EnrollOptions()...)...)
	dpservev1.RegisterControlServer(m.renew, noderpc.NewRenewServer(noderpc.RenewConfig{
		Store: n.store, Confirm: n.consensus.Confirm, Hint: n.store.LeaderNode,
		Peer: nodeport.PeerFromContext, Log: n.log,
	}))
	m.serveGRPC(m.renew, nodeport.Renew)
}

// serveRanks opens this node's ranks to the ingresses of other nodes.
func (m *peering) serveRanks() error {
	n := m.n
	var err error
	m.stream, err = noderpc.NewStreamServer(noderpc.StreamServerConfig{
		Feed: n.hub, Peer: peerName,
		Unknown: n.nodeMetrics.Unknown, Timers: n.cfg.timers().stream, Log: n.log,
	})
	if err != nil {
		return err
	}
	dpservev1.RegisterReplicaServer(m.grpc, m.stream)
	m.data, err = noderpc.NewDataServer(noderpc.DataConfig{
		Feed: n.hub, Caller: ingressName,
		Serves: n.node.Serves(), Dial: n.cfg.dialer(), Log: n.log,
	})
	if err != nil {
		return err
	}
	m.http = append(m.http, m.port.ServeHTTP2(nodeport.Data, m.data))
	return nil
}

// peerName returns the node that makes a call.
func peerName(ctx context.Context) (string, bool) {
	id, ok := nodeport.PeerFromContext(ctx)
	return id.Node, ok
}

// ingressName returns the node that sends a request for a rank, if it has role ingress.
func ingressName(ctx context.Context) (string, bool) {
	id, ok := nodeport.PeerFromContext(ctx)
	return id.Node, ok && id.HasRole(string(state.RoleIngress))
}

// streamCounts adds up the counters of both ends.
func (m *peering) streamCounts() telemetry.StreamCounts {
	var c telemetry.StreamCounts
	if m.stream != nil {
		c.Gaps = m.stream.Stats().Gaps
	}
	if m.feed != nil {
		s := m.feed.Stats()
		c.Dropped, c.Lost = s.Malformed+s.UnknownKinds, s.LostPosts
	}
	return c
}

// openFeed merges the streams of all nodes' ranks for this node's ingress. local is the feed of its own
// ranks.
func (m *peering) openFeed(local msg.Feed, t noderpc.StreamTimers) (msg.Feed, error) {
	var err error
	m.feed, err = noderpc.NewFeed(noderpc.FeedConfig{
		Self: m.n.cfg.NodeID, Local: local, Store: m.n.store,
		Timers: t, Log: m.n.log, Open: m.subscribe,
	})
	return m.feed, err
}

func (m *peering) subscribe(ctx context.Context, node state.Node) (noderpc.StreamClient, error) {
	conn, err := m.n.conns.Get(node.ID)
	if err != nil {
		return nil, err
	}
	return dpservev1.NewReplicaClient(conn).Subscribe(ctx)
}

// nodeView returns the client for questions to a node.
func (m *peering) nodeView(node string) msg.NodeView { return m.n.conns.Node(node) }

// nodeAgent returns the client for commands to a node. A node that stands alone knows no other node.
func (m *peering) nodeAgent(node string) (msg.NodeAgent, bool) {
	if m == nil {
		return nil, false
	}
	return m.n.conns.Node(node), true
}

// dataTransport returns the transport to a node's data port.
func (m *peering) dataTransport(node string) (http.RoundTripper,
	error,
) {
	return m.transports.transport(nodeport.Data, node)
}

// adminProxy forwards requests of the admin API to another node.
func (m *peering) adminProxy(node string) http.Handler {
	transport, err := m.transports.transport(nodeport.Admin, node)
	if err != nil {
		return nil
	}
	return &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1,
		ErrorLog: slog.NewLogLogger(m.n.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			api.WriteError(w, problem.New(problem.Unavailable,
				"the node that leads, %s, does not answer: %w", node, err).
				WithHint("it may have failed just now: try again in some seconds"))
		},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "127.0.0.1"})
			r.Out.Host = "127.0.0.1"
		},
	}
}

// closeFeed ends the streams of other nodes' ranks. It may be called on nil, without a feed, and twice.
func (m *peering) closeFeed() {
	if m != nil && m.feed != nil {
		m.feed.Close()
	}
}

// close ends services, connections and the port. It may be called on nil and before listen.
func (m *peering) close() error {
	if m == nil || m.port == nil {
		return nil
	}
	m.stop()
	var errs []error
	if m.gossip != nil {
		errs = append(errs, m.gossip.Close())
	}
	m.closeFeed()
	for _, s := range []*grpc.Server{m.grpc, m.enroll, m.renew} {
		if s != nil {
			s.Stop()
		}
	}
	for _, s := range m.http {
		errs = append(errs, s.Close())
	}
	if m.data != nil {
		errs = append(errs, m.data.Close())
	}
	if m.stream != nil {
		m.stream.Close()
	}
	if m.transports != nil {
		m.transports.close()
	}
	errs = append(errs, m.port.Close())
	m.loops.Wait()
	return errors.Join(errs...)
}

// pkiDir is the directory of a node's certificate; "" in memory.
func pkiDir(dataDir string) string {
	if dataDir == "" {
		return ""
	}
	return filepath.Join(dataDir, "pki")
}

func hostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// peerTransports holds the HTTP/2 connections to other nodes, one per protocol and node. A node that moved
// gets a new connection; a removed node gets none. Safe for concurrent use.
type peerTransports struct {
	port *nodeport.Port
	node func(id string) *state.Node

	mu   sync.Mutex
	open map[transportKey]*nodeport.Transport
}

// transportKey identifies a connection.
type transportKey struct{ alpn, node, address, uid string }

func newPeerTransports(port *nodeport.Port, node func(id string) *state.Node) *peerTransports {
	return &peerTransports{port: port, node: node, open: map[transportKey]*nodeport.Transport{}}
}

// transport returns the transport to a node and does not wait for the connection.
func (w *peerTransports) transport(alpn, id string) (http.RoundTripper, error) {
	n := w.node(id)
	if n == nil || n.Address == "" {
		return nil, problem.New(problem.Unavailable, "there is no way to node %s", id).
			WithHint("see `dpserve nodes`")
	}
	key := transportKey{alpn, id, n.Address, n.UID}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.open[key]; t != nil {
		return t, nil
	}
	for old, t := range w.open {
		if now := w.node(old.node); now == nil || now.Address != old.address || now.UID != old.uid {
			_ = t.Close() // the node has moved: requests on this connection have failed already
			delete(w.open, old)
		}
	}
	t := w.port.Transport(alpn, n.Address, n.UID)
	w.open[key] = t
	return t, nil
}

func (w *peerTransports) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, t := range w.open {
		_ = t.Close()
		delete(w.open, key)
	}
}

// dial connects remote.Conns. A node that stands alone reaches no other node.
func (m *peering) dial(address, uid string) (*grpc.ClientConn, error) {
	if m == nil {
		return nil, errors.New("this node stands alone")
	}
	return m.port.GRPC(address, uid)
}

// resolveAddress finds a node's address before the state is there: from gossip, or from the seeds of the
// join.
func (m *peering) resolveAddress(uid string) (string, bool) {
	if address, ok := m.lastAddress(uid); ok {
		return address, true
	}
	for i := range m.seeds {
		if m.seeds[i].UID == uid {
			return m.seeds[i].Address, true
		}
	}
	return "", false
}
