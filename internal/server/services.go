package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// services are what this node serves to other nodes on its node port.
type services struct {
	n      *Node
	port   *nodeport.Port
	grpc   *grpc.Server
	enroll *grpc.Server           // nil without role control
	renew  *grpc.Server           // nil without role control
	data   *noderpc.DataServer    // nil without role worker
	stream *noderpc.StreamServer  // nil without role worker
	ranks  net.Listener           // of stream
	http   []*nodeport.HTTPServer // admin API, and the data port of a worker

	loops    sync.WaitGroup
	stop     context.CancelFunc
	stopping context.Context //nolint:containedctx // a service that ends before is reported
}

// serveNodes starts the services of the node port. The node can answer from now on.
func (n *Node) serveNodes() {
	s := &services{n: n, port: n.peering.Port}
	n.services = s
	s.stopping, s.stop = context.WithCancel(context.Background())
	s.grpc = grpc.NewServer(append(nodeport.ServerOptions(),
		noderpc.ServerOptions(n.nodeMetrics.Unknown)...)...)
	node := noderpc.NodeConfig{
		View: localView{n}, Peer: nodeport.PeerFromContext, Unknown: n.nodeMetrics.Unknown,
	}
	if n.hasRole(state.RoleWorker) {
		node.Agent = n.node
		s.serveRanks()
	}
	noderpc.NewNodeServer(node).Register(s.grpc)
	if n.groups != nil {
		n.groups.Register(s.grpc)
	}
	if n.hasRole(state.RoleControl) {
		s.serveControl()
	}
	n.metrics.Streams(n.cfg.NodeID, s.streamCounts)
	s.http = append(s.http, s.port.ServeHTTP(nodeport.Admin, n.admin.Handler()))
	s.serveGRPC(s.grpc, nodeport.GRPC)
	for _, h := range s.http {
		s.run(h.Serve)
	}
}

func (s *services) serveControl() {
	n := s.n
	noderpc.NewControlServer(noderpc.ControlConfig{
		Leading: n.currentLeader, Hint: n.store.LeaderNode, Store: n.store,
		Propose: n.consensus.ProposeHere, Follow: n.consensus.Follow, Peer: nodeport.PeerFromContext,
		Unknown: n.nodeMetrics.Unknown,
	}).Register(s.grpc)
	s.enroll = grpc.NewServer(append(nodeport.ServerOptions(), noderpc.EnrollOptions()...)...)
	noderpc.NewEnrollServer(noderpc.EnrollConfig{
		Store: n.store, Proposer: n.store, Log: n.log,
	}).Register(s.enroll)
	s.serveGRPC(s.enroll, nodeport.Join)
	s.renew = grpc.NewServer(append(nodeport.ServerOptions(), noderpc.EnrollOptions()...)...)
	noderpc.NewRenewServer(noderpc.RenewConfig{
		Store: n.store, Confirm: n.consensus.Confirm, Hint: n.store.LeaderNode,
		Peer: nodeport.PeerFromContext, Log: n.log,
	}).Register(s.renew)
	s.serveGRPC(s.renew, nodeport.Renew)
}

// serveRanks opens this node's ranks to the ingresses of other nodes.
func (s *services) serveRanks() {
	n := s.n
	s.data = noderpc.NewDataServer(noderpc.DataConfig{
		Feed: n.hub.Near(), Serves: n.node.Serves(), Dial: n.cfg.dialer(), Log: n.log,
		Caller: func(ctx context.Context) (string, bool) {
			id, ok := nodeport.PeerFromContext(ctx)
			return id.Node, ok && id.HasRole(string(state.RoleIngress))
		},
	})
	s.stream = noderpc.NewStreamServer(noderpc.StreamServerConfig{
		Feed: n.hub.Near(), Count: s.data.CountStream, Unknown: n.nodeMetrics.Unknown,
		Timers: n.cfg.timers().stream, Log: n.log,
		Peer: func(c net.Conn) string { id, _ := nodeport.PeerOf(c); return id.Node },
	})
	s.ranks = s.port.Listener(nodeport.Ranks)
	s.run(func() error { return s.stream.Serve(s.ranks) })
	s.http = append(s.http, s.port.ServeHTTP(nodeport.Data, s.data))
}

// serveGRPC serves a protocol. The listener accepts at once, before the goroutine runs, because a node that
// has started may be joined at once.
func (s *services) serveGRPC(server *grpc.Server, protocol string) {
	l := s.port.Listener(protocol)
	s.run(func() error { return server.Serve(l) })
}

func (s *services) run(serve func() error) {
	s.loops.Go(func() {
		if err := serve(); err != nil && !errors.Is(err, net.ErrClosed) &&
			!errors.Is(err, grpc.ErrServerStopped) && s.stopping.Err() == nil {
			s.n.log.Error("a service between nodes has ended", slog.Any("err", err))
		}
	})
}

// streamCounts adds up the counters of both ends.
func (s *services) streamCounts() telemetry.StreamCounts {
	var c telemetry.StreamCounts
	if s.stream != nil {
		c.Gaps = s.stream.Stats().Gaps
	}
	if links := s.n.rankLinks; links != nil {
		st := links.Stats()
		c.Dropped, c.Lost = st.Malformed+st.UnknownKinds, st.LostPosts
	}
	return c
}

// restart tells the readers of this node's ranks that its process is replaced. It may be called on nil.
func (s *services) restart() {
	if s != nil && s.stream != nil {
		s.stream.Restart()
	}
}

// close ends the services and waits. It may be called on nil.
func (s *services) close() error {
	if s == nil {
		return nil
	}
	s.stop()
	var errs []error
	for _, server := range []*grpc.Server{s.grpc, s.enroll, s.renew} {
		if server != nil {
			server.Stop()
		}
	}
	if s.stream != nil {
		errs = append(errs, s.ranks.Close())
		s.stream.Close()
	}
	for _, h := range s.http {
		errs = append(errs, h.Close())
	}
	if s.data != nil {
		errs = append(errs, s.data.Close())
	}
	s.loops.Wait()
	return errors.Join(errs...)
}

// leaderProxy forwards requests of the admin API to another node.
func (n *Node) leaderProxy(node string) http.Handler {
	transport, err := n.peering.Transports.Admin(node)
	if err != nil {
		return nil
	}
	return &httputil.ReverseProxy{
		Transport:     leaveTransport{transport, n.cfg.NodeID, &n.leaves},
		FlushInterval: -1, ErrorLog: slog.NewLogLogger(n.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			api.WriteError(w, problem.New(problem.Unavailable,
				"the node that leads, %s, does not answer: %w", node, err).
				WithHint("it may have failed just now: try again in some seconds"))
		},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "127.0.0.1"})
			r.Out.Host = "127.0.0.1"
			r.Out.Header.Del("Authorization") // the other node knows this one by its certificate
		},
	}
}

// leaveTransport notes whether this node was asked to leave its cluster. A node that is removed learns of it
// from its copy of the state, or because another node refuses it: that does not tell who asked.
type leaveTransport struct {
	http.RoundTripper
	self   string
	leaves *atomic.Bool
}

// RoundTrip sends a request to the leader. The note is there before the leader gets the request that removes
// this node. It goes when the leader refuses: somebody else may remove the node later.
func (t leaveTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodDelete || r.URL.Path != "/api/v1/nodes/"+t.self {
		return t.RoundTripper.RoundTrip(r)
	}
	t.leaves.Store(true)
	res, err := t.RoundTripper.RoundTrip(r)
	if err == nil && res.StatusCode == http.StatusConflict {
		t.leaves.Store(false)
	}
	return res, err
}
