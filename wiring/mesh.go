package wiring

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
	"github.com/dpserve/dpserve/actors/remote"
	"github.com/dpserve/dpserve/api"
	"github.com/dpserve/dpserve/cluster/membership"
	"github.com/dpserve/dpserve/cluster/nodeport"
	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
	"github.com/dpserve/dpserve/state"
	"github.com/dpserve/dpserve/telemetry"
)

// mesh is a node's way to the others: the node port, what it serves there, and the connections to other nodes. A node that stands
// alone has none (nil), and its methods say so.
type mesh struct {
	n             *Node
	address       string // HOST:PORT of the node port
	gossipAddress string
	dir           string // of the certificate files; "" = in memory
	files         pki.Files
	keyring       [][]byte                   // gossip keys, the first is sent with
	held          sync.Mutex                 // guards files and keyring once the node renews its lease
	seeds         []state.Node               // where the others were when this node joined
	rejoin        string                     // where a member was told to join again; "" = nowhere
	met           atomic.Pointer[state.Node] // the control node there, with no more than UID and address; nil = not known, or not needed any more
	member        bool                       // it joined; else the cluster began here
	founding      bool                       // it begins here and now
	secrets       state.Secrets              // of founding
	credentials   atomic.Pointer[pki.Credentials]
	port          *nodeport.Port
	gossip        *membership.Gossip // nil on a network in memory

	ways   *ways
	grpc   *grpc.Server
	enroll *grpc.Server
	renew  *grpc.Server
	data   *remote.DataServer
	stream *remote.StreamServer
	feed   *remote.Feed
	http   []*nodeport.HTTP2Server

	loops    sync.WaitGroup
	stop     context.CancelFunc
	stopping context.Context //nolint:containedctx // ends the loops
}

// open binds the node port and begins to accept; nothing is served on it yet.
func (m *mesh) open(ctx context.Context) error {
	n := m.n
	m.stopping, m.stop = context.WithCancel(context.Background())
	m.port = nodeport.New(nodeport.Config{
		Credentials: m.credentials.Load, Revoked: n.removed, Bind: n.cfg.bind(), Connect: n.cfg.connect(), Log: n.log.With(slog.String("room", "nodeport")),
		Refused: func(r nodeport.Reason) { n.here.Refused(string(r)) },
	})
	if err := m.port.Listen(ctx, hostPort(n.cfg.Advertise, n.cfg.NodePort)); err != nil {
		return err
	}
	m.address = hostPort(n.cfg.Advertise, n.cfg.NodePort)
	if bound, ok := m.port.Addr().(*net.TCPAddr); ok { // of port 0
		m.address = hostPort(n.cfg.Advertise, bound.Port)
	}
	m.ways = newWays(m.port, n.peer)
	m.loops.Go(func() { //nolint:contextcheck // the port lives until it is closed
		if err := m.port.Serve(); err != nil {
			n.log.Error("the node port is gone", slog.Any("err", err))
		}
	})
	return nil
}

// serve opens the services: this node can answer now.
func (m *mesh) serve() error {
	n := m.n
	m.grpc = grpc.NewServer(append(nodeport.ServerOptions(), remote.ServerOptions(n.here.Unknown)...)...)
	dpservev1.RegisterNodeServer(m.grpc, remote.NewNodeServer(remote.NodeConfig{Agent: n.ranksHere(), View: localView{n}, Peer: nodeport.PeerFromContext}))
	if n.has(state.RoleControl) {
		m.serveControl()
	}
	if n.has(state.RoleWorker) {
		if err := m.serveRanks(); err != nil {
			return err
		}
	}
	n.metrics.Streams(n.cfg.NodeID, m.streamCounts)
	m.http = append(m.http, m.port.ServeHTTP2(nodeport.Admin, n.admin.Handler()))
	m.runRPC(m.grpc, nodeport.GRPC)
	for _, s := range m.http {
		m.run(s.Serve)
	}
	return nil
}

// runRPC serves a protocol. Connections are taken from now on, not when the goroutine begins: a node that has begun may be joined at once.
func (m *mesh) runRPC(s *grpc.Server, protocol string) {
	l := m.port.Listener(protocol)
	m.run(func() error { return s.Serve(l) })
}

func (m *mesh) run(serve func() error) {
	m.loops.Go(func() {
		if err := serve(); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, grpc.ErrServerStopped) && m.stopping.Err() == nil {
			m.n.log.Error("a service between nodes has ended", slog.Any("err", err))
		}
	})
}

func (m *mesh) serveControl() {
	n := m.n
	dpservev1.RegisterControlServer(m.grpc, remote.NewControlServer(remote.ControlConfig{
		Leading: n.leadingNow, Hint: n.store.LeaderNode, Store: n.store, Propose: n.consensus.ProposeHere, Follow: n.consensus.Follow, Peer: nodeport.PeerFromContext,
		Version: n.cfg.Version, Unknown: n.here.Unknown, Log: n.log,
	}))
	m.enroll = grpc.NewServer(append(nodeport.ServerOptions(), remote.EnrollOptions()...)...)
	dpservev1.RegisterEnrollServer(m.enroll, remote.NewEnrollServer(remote.EnrollConfig{Store: n.store, Proposer: n.store, Version: n.cfg.Version, Log: n.log}))
	m.runRPC(m.enroll, nodeport.Join)
	m.renew = grpc.NewServer(append(nodeport.ServerOptions(), remote.EnrollOptions()...)...)
	dpservev1.RegisterControlServer(m.renew, remote.NewRenewServer(remote.RenewConfig{
		Store: n.store, Confirm: n.consensus.Confirm, Hint: n.store.LeaderNode, Peer: nodeport.PeerFromContext, Log: n.log,
	}))
	m.runRPC(m.renew, nodeport.Renew)
}

// serveRanks opens this node's ranks to the ingresses of other nodes.
func (m *mesh) serveRanks() error {
	n := m.n
	var err error
	m.stream, err = remote.NewStreamServer(remote.StreamServerConfig{Feed: n.hub, Peer: peerName, Unknown: n.here.Unknown, Timers: n.cfg.timers().stream, Log: n.log})
	if err != nil {
		return err
	}
	dpservev1.RegisterReplicaServer(m.grpc, m.stream)
	m.data, err = remote.NewDataServer(remote.DataConfig{Feed: n.hub, Caller: ingressName, Serves: n.node.Serves(), Dial: n.cfg.dialer(), Log: n.log})
	if err != nil {
		return err
	}
	m.http = append(m.http, m.port.ServeHTTP2(nodeport.Data, m.data))
	return nil
}

// peerName is the node behind a call.
func peerName(ctx context.Context) (string, bool) {
	id, ok := nodeport.PeerFromContext(ctx)
	return id.Node, ok
}

// ingressName is the node behind a request for a rank: only ingresses send those.
func ingressName(ctx context.Context) (string, bool) {
	id, ok := nodeport.PeerFromContext(ctx)
	return id.Node, ok && id.HasRole(string(state.RoleIngress))
}

// streamCounts are those of both ends.
func (m *mesh) streamCounts() telemetry.StreamCounts {
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

// follow is the streams of all nodes' ranks, for this node's ingress; local are its own.
func (m *mesh) follow(local msg.Feed, t remote.StreamTimers) (msg.Feed, error) {
	var err error
	m.feed, err = remote.NewFeed(remote.FeedConfig{Self: m.n.cfg.NodeID, Local: local, Store: m.n.store, Timers: t, Log: m.n.log, Open: m.subscribe})
	return m.feed, err
}

func (m *mesh) subscribe(ctx context.Context, node state.Node) (remote.StreamClient, error) {
	conn, err := m.n.conns.Get(node.ID)
	if err != nil {
		return nil, err
	}
	return dpservev1.NewReplicaClient(conn).Subscribe(ctx)
}

// view asks a node.
func (m *mesh) view(node string) msg.NodeView { return m.n.conns.Node(node) }

// agent tells a node; a node that stands alone knows no other.
func (m *mesh) agent(node string) (msg.NodeAgent, bool) {
	if m == nil {
		return nil, false
	}
	return m.n.conns.Node(node), true
}

// toData is the way to a node's data port.
func (m *mesh) toData(node string) (http.RoundTripper, error) { return m.ways.to(nodeport.Data, node) }

// toAdmin takes a request of the admin API to another node.
func (m *mesh) toAdmin(node string) http.Handler {
	way, err := m.ways.to(nodeport.Admin, node)
	if err != nil {
		return nil
	}
	return &httputil.ReverseProxy{
		Transport: way, FlushInterval: -1, ErrorLog: slog.NewLogLogger(m.n.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			api.WriteError(w, problem.New(problem.Unavailable, "the node that leads, %s, does not answer: %w", node, err).
				WithHint("it may have failed just now: try again in some seconds"))
		},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "127.0.0.1"})
			r.Out.Host = "127.0.0.1"
		},
	}
}

// unfollow ends the streams of other nodes' ranks. nil, without a feed, and again it does nothing.
func (m *mesh) unfollow() {
	if m != nil && m.feed != nil {
		m.feed.Close()
	}
}

// close ends services, connections and the port. nil and a mesh that was not opened are closed.
func (m *mesh) close() error {
	if m == nil || m.port == nil {
		return nil
	}
	m.stop()
	var errs []error
	if m.gossip != nil {
		errs = append(errs, m.gossip.Close())
	}
	m.unfollow()
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
	if m.ways != nil {
		m.ways.close()
	}
	errs = append(errs, m.port.Close())
	m.loops.Wait()
	return errors.Join(errs...)
}

// pkiDir is where a node keeps its certificate; "" in memory.
func pkiDir(dataDir string) string {
	if dataDir == "" {
		return ""
	}
	return filepath.Join(dataDir, "pki")
}

func hostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
