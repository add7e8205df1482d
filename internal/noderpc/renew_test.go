package noderpc

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// serveRenewals serves the renewal of expired certificates on a node port of its own; leads says whether the
// node leads.
func (g *joinRig) serveRenewals(leads func() bool) (port string) {
	const address = "10.0.0.1:8947"
	credentials := g.credentials(g.t, "a", time.Now(), state.RoleControl)
	p := nodeport.New(nodeport.Config{
		Credentials: func() *pki.Credentials { return credentials },
		Bind:        func(_ context.Context, addr string) (net.Listener, error) { return g.net.Listen(addr) },
	})
	require.NoError(g.t, p.Listen(g.t.Context(), address))
	server := grpc.NewServer(append(nodeport.ServerOptions(), EnrollOptions()...)...)
	NewRenewServer(RenewConfig{
		Store: g.store, Peer: nodeport.PeerFromContext, Hint: func() (string, bool) { return "uid-l", true },
		Log: slog.New(slog.DiscardHandler),
		Confirm: func(context.Context) error {
			if !leads() {
				return problem.New(problem.Unavailable, "confirm: %w", cluster.ErrNotLeader)
			}
			return nil
		},
	}).Register(server)
	var served sync.WaitGroup
	l := p.Listener(nodeport.Renew)
	served.Go(func() { _ = p.Serve() })
	served.Go(func() { _ = server.Serve(l) })
	g.t.Cleanup(func() {
		server.Stop()
		require.NoError(g.t, p.Close())
		served.Wait()
	})
	return address
}

// credentials are a node's credentials, for 30 days from a time on.
func (g *joinRig) credentials(t *testing.T, node string, at time.Time, roles ...state.Role) *pki.Credentials {
	t.Helper()
	key, csr := newCertificateRequest(t)
	cert, err := g.authority.Sign(csr, pki.Identity{
		Cluster: "c", Node: node, UID: "uid-" + node,
		Roles: state.ConvertRoles[string](roles),
	}, at, pki.DefaultLife)
	require.NoError(t, err)
	ca, _ := g.authority.PEM()
	c, err := pki.NewCredentials(ca, cert, key)
	require.NoError(t, err)
	return c
}

// HF20: An expired certificate gives the next one to a node that is still a member, with the roles of its
// record, at the leader only: another node's copy of the state may lack a removal. No other method is served
// there.
func TestAnExpiredCertificateIsRenewedByTheLeader(t *testing.T) {
	g := newJoinRig(t)
	leads := true
	address := g.serveRenewals(func() bool { return leads })
	var own *pki.Credentials
	p := nodeport.New(nodeport.Config{
		Credentials: func() *pki.Credentials { return own },
		Connect:     g.net.DialContext,
	})
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	nodes := func() map[string]*state.Node {
		return map[string]*state.Node{"a": {
			ID: "a", UID: "uid-a", Address: address,
			Roles: []state.Role{state.RoleControl},
		}}
	}
	conns := NewConns(ConnsConfig{Dial: func(string, string) (*grpc.ClientConn, error) {
		return nil,
			net.ErrClosed
	}, Nodes: nodes})
	client := NewLeaderClient(LeaderConfig{
		Self: "b", Conns: conns, Store: follower{g.store}, Log: slog.New(slog.DiscardHandler),
		Hint:    func() (string, bool) { return "", false },
		Leading: func() (msg.Leader, msg.Assigner, bool) { return nil, nil, false },
	})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	key, csr := newCertificateRequest(t)
	ask := func() (*pki.Credentials, error) {
		cert, ca, err := client.CertifyExpired(t.Context(), csr, p.RenewGRPC)
		if err != nil {
			return nil, err
		}
		return pki.NewCredentials(ca, cert, key)
	}
	member := &state.Node{
		ID: "b", UID: "uid-b", Address: "10.0.0.2:7947",
		Roles: []state.Role{state.RoleWorker},
	}
	own = g.credentials(t, "b", time.Now().Add(-300*24*time.Hour), state.RoleWorker)

	_, err := ask()
	assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
	require.ErrorContains(t, err, "node b (uid-b) is not a member", "it was removed")
	g.store.put(member)
	next, err := ask()
	require.NoError(t, err)
	assert.Equal(t, own.Identity, next.Identity)
	assert.False(t, next.Expired(time.Now()))

	leads = false
	_, err = ask()
	require.ErrorIs(t, err, cluster.ErrNotLeader)
	leads = true
	promoted := *member
	promoted.Roles = []state.Role{state.RoleControl}
	g.store.put(&promoted)
	_, err = ask()
	require.ErrorIs(t, err, state.ErrRolesFixed)
	bound := *member
	bound.Key = "another"
	g.store.put(&bound)
	_, err = ask()
	require.ErrorContains(t, err, "has joined with another key")

	conn, err := p.RenewGRPC(address, "uid-a")
	require.NoError(t, err)
	defer conn.Close()
	err = invoke(t.Context(), conn, string(proposeCall), "{}")
	require.ErrorContains(t, err, "Unimplemented")
}
