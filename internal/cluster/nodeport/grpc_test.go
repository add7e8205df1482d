package nodeport_test

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
)

// serveGRPC answers health checks on a protocol and reports the caller.
func serveGRPC(t *testing.T, l net.Listener) <-chan pki.Identity {
	t.Helper()
	callers := make(chan pki.Identity, 10)
	s := grpc.NewServer(append(nodeport.ServerOptions(), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			id, _ := nodeport.PeerFromContext(ctx)
			callers <- id
			return h(ctx, req)
		}))...)
	healthpb.RegisterHealthServer(s, health.NewServer())
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return callers
}

func check(ctx context.Context, cc *grpc.ClientConn) error {
	_, err := healthpb.NewHealthClient(cc).Check(ctx, &healthpb.HealthCheckRequest{})
	return err
}

func TestGRPCKnowsItsPeer(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	callers := serveGRPC(t, a.Listener(nodeport.GRPC))
	b := newNode(t, w.member(t, "b", "worker"), nil)
	cc, err := b.GRPC(a.addr(), "uid-a")
	require.NoError(t, err)
	defer cc.Close()
	require.NoError(t, check(t.Context(), cc))
	assert.Equal(t, pki.Identity{Cluster: "c1", Node: "b", UID: "uid-b", Roles: []string{"worker"}},
		<-callers)

	wrong, err := b.GRPC(a.addr(), "uid-x")
	require.NoError(t, err)
	defer wrong.Close()
	err = check(t.Context(), wrong)
	assert.Equal(t, codes.Unavailable, status.Code(err))
	assert.ErrorContains(t, err, "not the node with uid uid-x")
}

func TestGRPCForNewcomers(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	callers := serveGRPC(t, a.Listener(nodeport.Join))
	token, err := pki.NewToken(w.ca())
	require.NoError(t, err)
	cc, err := nodeport.JoinGRPC(t.Context(), nil, a.addr(), token.Fingerprint)
	require.NoError(t, err)
	defer cc.Close()
	require.NoError(t, check(t.Context(), cc))
	assert.Equal(t, pki.Identity{}, <-callers)
	_, err = nodeport.JoinGRPC(t.Context(), nil, a.addr(), [32]byte{1})
	require.ErrorIs(t, err, nodeport.ErrOtherCluster)
}

// TestGRPCBesideThePort: a server with the port's credentials refuses a connection that did not come through
// the port.
func TestGRPCBesideThePort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	serveGRPC(t, l)
	cc, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer cc.Close()
	require.Error(t, check(t.Context(), cc))
}
