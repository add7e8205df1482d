package nodeport_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/parallel"
	"github.com/dpserve/dpserve/test/ports"
)

func TestMembersKnowEachOther(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control", "worker"), nil).serve(t)
	b := newNode(t, w.member(t, "b", "ingress"), nil)
	l := a.Listener(nodeport.Data)
	c, err := b.Dial(t.Context(), nodeport.Data, a.addr(), "uid-a")
	require.NoError(t, err)
	defer c.Close()
	assert.Equal(t, pki.Identity{
		Cluster: "c1", Node: "a", UID: "uid-a",
		Roles: []string{"control", "worker"},
	}, c.Peer)
	there, err := l.Accept()
	require.NoError(t, err)
	defer there.Close()
	who, ok := nodeport.PeerOf(there)
	require.True(t, ok)
	assert.Equal(t, "b", who.Node)
	assert.Equal(t, []string{"ingress"}, who.Roles)

	_, err = b.Dial(t.Context(), nodeport.Data, a.addr(), "uid-x")
	require.ErrorIs(t, err, nodeport.ErrWrongPeer)
	assert.Contains(t, err.Error(), "is node a (uid uid-a), not the node with uid uid-x")
}

// MB10: the clock of the signing node is an hour ahead of or behind the others'. Every node's certificate and
// the authority's own are valid for all from the first moment.
func TestMembersWithClocksAnHourApart(t *testing.T) {
	for name, ahead := range map[string]time.Duration{"ahead": time.Hour, "behind": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			signer := time.Now().Add(ahead)
			authority, err := pki.NewAuthority("c1", signer)
			require.NoError(t, err)
			w := world{authority}
			a := newNode(t, w.credentials(t, "a", signer, pki.DefaultLife, "control"), nil).serve(t)
			b := newNode(t, w.credentials(t, "b", signer, pki.DefaultLife, "control"), nil).serve(t)
			right := newNode(t, w.member(t, "c", "worker"), nil)
			for _, to := range []*node{a, b} {
				to.echo(t, nodeport.GRPC)
			}
			for _, way := range []struct {
				from, to *node
				uid      string
			}{{a, b, "uid-b"}, {b, a, "uid-a"}, {right, a, "uid-a"}} {
				c, err := way.from.Dial(t.Context(), nodeport.GRPC, way.to.addr(), way.uid)
				require.NoError(t, err)
				defer c.Close()
				ping(t, c)
			}
			assert.Empty(t, a.refused)
			assert.Empty(t, b.refused)
		})
	}
}

// SP10: every kind of client that is no member: what it sees, and what is counted.
func TestStrangersAreRefused(t *testing.T) {
	w, other := newWorld(t, "c1"), newWorld(t, "c2")
	twin := newWorld(t, "c1") // same name, another authority
	now := time.Now()
	tls12 := stranger(nodeport.GRPC, w.member(t, "b", "control").Certificate)
	tls12.MaxVersion = tls.VersionTLS12

	for name, test := range map[string]struct {
		client *tls.Config
		want   nodeport.Reason
		alert  string
	}{
		"other cluster": {
			stranger(nodeport.GRPC, other.member(t, "b", "control").Certificate),
			nodeport.BadCluster, "unknown certificate authority",
		},
		"twin cluster": {
			stranger(nodeport.GRPC, twin.member(t, "b", "control").Certificate),
			nodeport.BadCluster, "unknown certificate authority",
		},
		"no certificate": {
			stranger(nodeport.GRPC), nodeport.BadCertificate,
			"certificate required",
		},
		"expired": {
			stranger(nodeport.GRPC,
				w.credentials(t, "b", now.Add(-48*time.Hour), 24*time.Hour, "control").Certificate),
			nodeport.Expired, "expired certificate",
		},
		"not yet valid": {
			stranger(nodeport.GRPC,
				w.credentials(t, "b", now.Add(48*time.Hour), 24*time.Hour, "control").Certificate),
			nodeport.Expired, "expired certificate",
		},
		"TLS 1.2": {tls12, nodeport.BadTLS, "protocol version not supported"},
		"unknown protocol": {
			stranger("h2", w.member(t, "b", "control").Certificate),
			nodeport.BadALPN, "no application protocol",
		},
		"protocol that nobody serves": {
			stranger(nodeport.Admin, w.member(t, "b", "control").Certificate),
			nodeport.BadALPN, "no application protocol",
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
			l := a.Listener(nodeport.GRPC)
			_, err := knock(t, a.addr(), test.client)
			require.ErrorContains(t, err, test.alert)
			a.eventually(t, test.want, 1)
			assert.Len(t, a.refused, 1)
			noneAccepted(t, l)
		})
	}
}

// noneAccepted closes a listener and says that it had nothing.
func noneAccepted(t *testing.T, l net.Listener) {
	t.Helper()
	got := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			got <- c
		}
		close(got)
	}()
	require.NoError(t, l.Close())
	c, ok := <-got
	require.False(t, ok, "accepted %v", c)
}

// TestDialSaysWhy: a member that is refused gets the reason.
func TestDialSaysWhy(t *testing.T) {
	w, other := newWorld(t, "c1"), newWorld(t, "c2")
	now := time.Now()
	for name, test := range map[string]struct {
		server, client *pki.Credentials
		alpn           string
		revoked        bool
		err            error
		code           problem.Code
		text           string
		counted        nodeport.Reason
	}{
		"other cluster": {
			client: other.member(t, "b", "control"), err: nodeport.ErrOtherCluster,
			code: problem.PermissionDenied, text: "belongs to another cluster",
			counted: nodeport.BadCertificate,
		},
		"own certificate expired": {
			client: w.credentials(t, "b", now.Add(-48*time.Hour), 24*time.Hour, "control"),
			err:    nodeport.ErrExpired, code: problem.Unauthenticated,
			text: "says that this node's certificate has expired", counted: nodeport.Expired,
		},
		"server's certificate expired": {
			server: w.credentials(t, "a", now.Add(-48*time.Hour), 24*time.Hour, "control"),
			client: w.member(t, "b", "control"),
			err:    nodeport.ErrExpired, code: problem.Unauthenticated, text: "its certificate has expired",
			counted: nodeport.BadCertificate,
		},
		"removed": {
			client: w.member(t, "b", "control"), revoked: true,
			err: nodeport.ErrRemoved, code: problem.PermissionDenied,
			text: "this node was removed from the cluster", counted: nodeport.Revoked,
		},
		"role": {
			client: w.member(t, "b", "worker", "ingress"), alpn: nodeport.Raft,
			err: nodeport.ErrRole, code: problem.PermissionDenied, text: "dpserve-raft/1",
			counted: nodeport.BadRole,
		},
		"data by a worker": {
			client: w.member(t, "b", "worker"), alpn: nodeport.Data,
			err: nodeport.ErrRole, code: problem.PermissionDenied, text: "dpserve-data/1",
			counted: nodeport.BadRole,
		},
		"ranks' streams by a control node": {
			client: w.member(t, "b", "control", "worker"), alpn: nodeport.Ranks,
			err: nodeport.ErrRole, code: problem.PermissionDenied, text: "dpserve-ranks/1",
			counted: nodeport.BadRole,
		},
		"not served": {
			client: w.member(t, "b", "control"), alpn: nodeport.Admin,
			err: nodeport.ErrNotServed, code: problem.Unavailable, text: "is not served there",
			counted: nodeport.BadALPN,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if test.server == nil {
				test.server = w.member(t, "a", "control")
			}
			if test.alpn == "" {
				test.alpn = nodeport.GRPC
			}
			a := newNode(t, test.server, nil).serve(t)
			for _, alpn := range []string{nodeport.GRPC, nodeport.Raft, nodeport.Ranks, nodeport.Data} {
				a.echo(t, alpn)
			}
			a.mu.Lock()
			a.revoked["uid-b"] = test.revoked
			a.mu.Unlock()
			_, err := newNode(t, test.client, nil).Dial(t.Context(), test.alpn, a.addr(), "")
			require.ErrorIs(t, err, test.err)
			assert.Equal(t, test.code, problem.CodeOf(err))
			assert.Contains(t, err.Error(), test.text)
			assert.Contains(t, err.Error(), a.addr())
			a.eventually(t, test.counted, 1)
		})
	}
}

// TestWhoseWordEndsANode: only a control node of this cluster, which is not removed itself and whose state
// holds the caller as removed, tells a node that it is no member any more.
func TestWhoseWordEndsANode(t *testing.T) {
	w, other := newWorld(t, "c1"), newWorld(t, "c2")
	for name, test := range map[string]struct {
		server  *pki.Credentials
		revoked bool   // the server's state holds the caller as removed
		knows   string // whom the caller's state holds as removed
		told    bool
	}{
		"a control node":                       {w.member(t, "a", "control"), true, "", true},
		"a control node without the caller":    {w.member(t, "a", "control"), false, "", false},
		"a worker":                             {w.member(t, "a", "worker", "ingress"), true, "", false},
		"a control node that is removed":       {w.member(t, "a", "control"), true, "uid-a", false},
		"a control node that the caller ended": {w.member(t, "a", "control"), false, "uid-a", false},
		"a stranger":                           {other.member(t, "a", "control"), true, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newNode(t, test.server, nil).serve(t), newNode(t, w.member(t, "b", "control"), nil)
			a.echo(t, nodeport.GRPC)
			a.revoked["uid-b"], b.revoked[test.knows] = test.revoked, true
			c, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
			if err == nil {
				c.Close()
			}
			if !test.told {
				assert.Empty(t, b.removed)
				return
			}
			require.ErrorIs(t, err, nodeport.ErrRemoved)
			assert.Equal(t, []error{err}, b.removed)
		})
	}
}

func TestDialOfWhatIsNoPort(t *testing.T) {
	w := newWorld(t, "c1")
	b := newNode(t, w.member(t, "b", "control"), nil)
	listen := func(serve func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				serve(c)
				_ = c.Close()
			}
		}()
		return l.Addr().String()
	}
	old := w.member(t, "a", "control").Certificate

	_, err := b.Dial(t.Context(), nodeport.GRPC, listen(func(c net.Conn) {
		_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
		_, _ = io.CopyN(io.Discard, c, 100)
	}), "")
	require.ErrorIs(t, err, nodeport.ErrNotTLS)
	_, err = b.Dial(t.Context(), nodeport.GRPC, listen(func(c net.Conn) {
		_ = tls.Server(c, &tls.Config{
			Certificates: []tls.Certificate{old},
			MaxVersion:   tls.VersionTLS12,
		}).Handshake()
	}), "")
	require.ErrorIs(t, err, nodeport.ErrNotTLS)
	_, err = b.Dial(t.Context(), nodeport.GRPC, listen(func(net.Conn) {}), "")
	assert.Equal(t, problem.Unavailable, problem.CodeOf(err))

	closed := fmt.Sprintf("127.0.0.1:%d", ports.Take(t, 1))
	_, err = b.Dial(t.Context(), nodeport.GRPC, closed, "")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)

	ctx, cancel := context.WithCancel(t.Context())
	_, err = b.Dial(ctx, nodeport.GRPC, listen(func(c net.Conn) {
		cancel()
		_, _ = io.Copy(io.Discard, c)
	}), "")
	require.ErrorIs(t, err, context.Canceled)

	require.NoError(t, b.Close())
	_, err = b.Dial(t.Context(), nodeport.GRPC, closed, "")
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = newNode(t, nil, nil).Dial(t.Context(), nodeport.GRPC, closed, "")
	require.ErrorContains(t, err, "no certificate yet")
}

func TestNewcomersFindTheClusterOfTheirToken(t *testing.T) {
	w, other := newWorld(t, "c1"), newWorld(t, "c2")
	token, err := pki.NewToken(w.ca())
	require.NoError(t, err)
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	l := a.Listener(nodeport.Join)
	c, err := nodeport.DialJoin(t.Context(), nil, a.addr(), token.Fingerprint)
	require.NoError(t, err)
	defer c.Close()
	there, err := l.Accept()
	require.NoError(t, err)
	defer there.Close()
	_, known := nodeport.PeerOf(there)
	assert.False(t, known)
	who, known := nodeport.PeerOf(c)
	assert.True(t, known)
	assert.Equal(t, "a", who.Node)

	foreign, err := pki.NewToken(other.ca())
	require.NoError(t, err)
	_, err = nodeport.DialJoin(t.Context(), nil, a.addr(), foreign.Fingerprint)
	require.ErrorIs(t, err, nodeport.ErrOtherCluster)

	worker := newNode(t, w.member(t, "w", "worker"), nil).serve(t)
	worker.Listener(nodeport.Join)
	_, err = nodeport.DialJoin(t.Context(), nil, worker.addr(), token.Fingerprint)
	require.ErrorIs(t, err, nodeport.ErrRole, "only a control node may see the token")

	late := newNode(t, w.credentials(t, "l", time.Now().Add(-48*time.Hour), time.Hour, "control"),
		nil).serve(t)
	late.Listener(nodeport.Join)
	_, err = nodeport.DialJoin(t.Context(), nil, late.addr(), token.Fingerprint)
	require.ErrorIs(t, err, nodeport.ErrExpired)

	// Without a certificate a client gets only Join, whatever else it offers.
	cfg := stranger(nodeport.Join)
	cfg.NextProtos = []string{nodeport.Join, nodeport.GRPC}
	first, err := knock(t, a.addr(), cfg)
	require.NoError(t, err)
	assert.Zero(t, first)
	there, err = l.Accept()
	require.NoError(t, err)
	defer there.Close()
	assert.Equal(t, nodeport.Join, there.(*nodeport.Conn).ALPN)
}

func TestJunkHurtsNobody(t *testing.T) {
	w := newWorld(t, "c1")
	var log parallel.Buffer
	a := newNode(t, w.member(t, "a", "control"),
		func(c *nodeport.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) }).serve(t)
	a.echo(t, nodeport.GRPC)
	b := newNode(t, w.member(t, "b", "control"), nil)
	before, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.NoError(t, err)
	defer before.Close()

	const junk = 1000
	var wg sync.WaitGroup
	for i := range junk {
		wg.Go(func() {
			c, err := net.Dial("tcp", a.addr())
			if err != nil {
				return
			}
			defer c.Close()
			switch i % 3 {
			case 0:
				_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
			case 1:
				_, _ = c.Write(bytes.Repeat([]byte{0x16, 3, 1, 0xff}, 100))
			}
		})
	}
	var after *nodeport.Conn
	for range 5 { // on a machine this busy its own handshake may be the one that took too long
		if after, err = b.Dial(t.Context(), nodeport.GRPC, a.addr(), ""); err == nil {
			break
		}
	}
	require.NoError(t, err, "a member comes in through the flood")
	defer after.Close()
	wg.Wait()
	require.Eventually(t, func() bool {
		return a.count(nodeport.BadTLS)+a.count(nodeport.Overload)+a.count(nodeport.CallerLeft) >= junk
	}, 30*time.Second, time.Millisecond)
	ping(t, before)
	ping(t, after)
	assert.Less(t, strings.Count(log.String(), "\n"), 60, "a flood of connections is no flood of lines")
	assert.Contains(t, log.String(), "reason=tls")
}

// TestACallerThatLeavesIsNoFault: a connection that its caller closes in mid-handshake is counted by itself
// and logged without a warning.
func TestACallerThatLeavesIsNoFault(t *testing.T) {
	var log parallel.Buffer
	a := newNode(t, newWorld(t, "c1").member(t, "a", "control"),
		func(c *nodeport.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) }).serve(t)
	for i, leave := range []func(c *net.TCPConn) error{
		(*net.TCPConn).Close,
		func(c *net.TCPConn) error {
			_, err := c.Write([]byte{0x16, 3, 1, 1, 0}) // the header of a message that does not come
			return errors.Join(err, c.Close())
		},
		func(c *net.TCPConn) error {
			return errors.Join(c.SetLinger(0), c.Close()) // a reset
		},
	} {
		c, err := net.Dial("tcp", a.addr())
		require.NoError(t, err)
		require.NoError(t, leave(c.(*net.TCPConn)))
		a.eventually(t, nodeport.CallerLeft, i+1)
	}
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "reason=left") },
		10*time.Second, time.Millisecond)
	assert.NotContains(t, log.String(), "level=WARN")
}

// TestHalfOpenHandshakes: 400 silent peers use all handshakes. A member still connects, and each peer is
// counted.
func TestHalfOpenHandshakes(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"),
		func(c *nodeport.Config) { c.HandshakeTimeout = 2 * time.Second }).serve(t)
	a.echo(t, nodeport.GRPC)
	for range 400 {
		c, err := net.Dial("tcp", a.addr())
		require.NoError(t, err)
		defer c.Close()
		_, _ = c.Write([]byte{0x16, 3, 1})
	}
	b := newNode(t, w.member(t, "b", "control"), nil)
	c, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.NoError(t, err)
	defer c.Close()
	ping(t, c)
	a.eventually(t, nodeport.Overload, 400-256+1)
	a.eventually(t, nodeport.TooSlow, 255)
	assert.Equal(t, 400, a.count(nodeport.Overload)+a.count(nodeport.TooSlow))
}

// TestHandshakeTimeoutOnFakeTime: a peer that makes the handshake but never reads delays no other.
func TestHandshakeTimeoutOnFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "c1")
		var network memnet.Network
		use := func(c *nodeport.Config) {
			c.Bind = func(_ context.Context, addr string) (net.Listener,
				error,
			) {
				return network.Listen(addr)
			}
			c.Connect = network.DialContext
		}
		a := newNode(t, w.member(t, "a", "control"), use)
		require.NoError(t, a.Listen(t.Context(), "10.0.0.1:7947"))
		done := make(chan error, 1)
		go func() { done <- a.Serve() }()
		a.echo(t, nodeport.GRPC)
		b := newNode(t, w.member(t, "b", "control"), use)

		silent, err := network.DialContext(t.Context(), "tcp", "10.0.0.1:7947")
		require.NoError(t, err)
		began := time.Now()
		c, err := b.Dial(t.Context(), nodeport.GRPC, "10.0.0.1:7947", "uid-a")
		require.NoError(t, err)
		ping(t, c)
		assert.Zero(t, time.Since(began))
		assert.Zero(t, a.count(nodeport.TooSlow))
		_, err = silent.Read(make([]byte, 1))
		require.Error(t, err)
		assert.Equal(t, nodeport.HandshakeTimeout, time.Since(began))
		synctest.Wait()
		assert.Equal(t, 1, a.count(nodeport.TooSlow))

		// A server that never answers costs a dial its own time, no more.
		_, err = network.Listen("10.0.0.2:7947")
		require.NoError(t, err)
		began = time.Now()
		_, err = b.Dial(t.Context(), nodeport.GRPC, "10.0.0.2:7947", "")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, problem.Timeout, problem.CodeOf(err))
		assert.Equal(t, nodeport.DialTimeout, time.Since(began))

		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
		require.NoError(t, <-done)
	})
}

// HF20: a member whose certificate has expired can use only Renew, and only with the key of a certificate of
// this cluster. A removed member can use nothing.
func TestAnExpiredCertificateIsGoodForItsRenewal(t *testing.T) {
	w, other := newWorld(t, "c1"), newWorld(t, "c2")
	now := time.Now()
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	for _, alpn := range []string{nodeport.Renew, nodeport.GRPC} {
		a.echo(t, alpn)
	}
	old := w.credentials(t, "b", now.Add(-60*24*time.Hour), 30*24*time.Hour, "worker")
	b := newNode(t, old, nil)
	_, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "uid-a")
	require.ErrorIs(t, err, nodeport.ErrExpired)
	c, err := b.Dial(t.Context(), nodeport.Renew, a.addr(), "uid-a")
	require.NoError(t, err)
	defer c.Close()
	ping(t, c)

	a.mu.Lock()
	a.revoked["uid-b"] = true
	a.mu.Unlock()
	_, err = b.Dial(t.Context(), nodeport.Renew, a.addr(), "uid-a")
	require.ErrorIs(t, err, nodeport.ErrRemoved)

	_, err = newNode(t, other.member(t, "b", "worker"), nil).Dial(t.Context(), nodeport.Renew, a.addr(), "")
	require.ErrorIs(t, err, nodeport.ErrOtherCluster)
	for name, certs := range map[string][]tls.Certificate{
		"none":              nil,
		"another cluster's": {other.member(t, "b", "worker").Certificate},
	} {
		first, err := knock(t, a.addr(), stranger(nodeport.Renew, certs...))
		assert.True(t, err != nil || first != 0, name)
	}
	stolen := old.Certificate // it is shown to everybody; its key is not
	stolen.PrivateKey = w.member(t, "b", "worker").Certificate.PrivateKey
	_, err = knock(t, a.addr(), stranger(nodeport.Renew, stolen))
	require.Error(t, err)
	late := newNode(t, w.credentials(t, "l", now.Add(48*time.Hour), time.Hour, "worker"), nil)
	_, err = late.Dial(t.Context(), nodeport.Renew, a.addr(), "uid-a")
	require.ErrorIs(t, err, nodeport.ErrCertificate, "not valid yet")
}

// HF21: only nodes with role control serve consensus and renewals. The dialing node checks the certificate,
// whatever a record says.
func TestOnlyControlNodesAreDialedForConsensus(t *testing.T) {
	w := newWorld(t, "c1")
	edge := newNode(t, w.member(t, "edge", "ingress"), nil).serve(t)
	a := newNode(t, w.member(t, "a", "control"), nil)
	for _, alpn := range []string{nodeport.Raft, nodeport.Renew} {
		edge.echo(t, alpn)
		_, err := a.Dial(t.Context(), alpn, edge.addr(), "uid-edge")
		require.ErrorIs(t, err, nodeport.ErrRole)
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		assert.Contains(t, err.Error(), "has not role control in its certificate")
	}
}

// SP10: after a renewal the next connection shows the new certificate, and open ones go on.
func TestRenewalDropsNothing(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	a.echo(t, nodeport.GRPC)
	b := newNode(t, w.member(t, "b", "control"), nil)
	var open []*nodeport.Conn
	for range 10 {
		c, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "uid-a")
		require.NoError(t, err)
		defer c.Close()
		open = append(open, c)
		a.creds.Store(w.member(t, "a", "control"))
		b.creds.Store(w.member(t, "b", "control"))
		for _, c := range open {
			ping(t, c)
		}
	}
	serials := map[string]bool{}
	for _, c := range open {
		serials[c.ConnectionState().PeerCertificates[0].SerialNumber.String()] = true
	}
	assert.Len(t, serials, 10)
	assert.Empty(t, a.refused)
}

func TestARemovedNodeIsCutOff(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	a.echo(t, nodeport.GRPC)
	b, other := newNode(t, w.member(t, "b", "control"), nil), newNode(t, w.member(t, "c", "control"), nil)
	c, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.NoError(t, err)
	defer c.Close()
	stays, err := other.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.NoError(t, err)
	defer stays.Close()
	ping(t, c)
	a.mu.Lock()
	a.revoked["uid-b"] = true
	a.mu.Unlock()
	a.Disconnect("uid-b")
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err)
	ping(t, stays)
	_, err = b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.ErrorIs(t, err, nodeport.ErrRemoved)

	// The other direction: no member connects to a removed node.
	b.serve(t)
	b.echo(t, nodeport.GRPC)
	_, err = a.Dial(t.Context(), nodeport.GRPC, b.addr(), "")
	require.ErrorIs(t, err, nodeport.ErrRemoved)
}

// TestTheBacklogIsBounded: while no server accepts, connections over the bound are refused, and Close ends
// waiting ones.
func TestTheBacklogIsBounded(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	l := a.Listener(nodeport.GRPC)
	b := newNode(t, w.member(t, "b", "control"), nil)
	var waiting []*nodeport.Conn
	var err error
	for range 200 {
		var c *nodeport.Conn
		if c, err = b.Dial(t.Context(), nodeport.GRPC, a.addr(), ""); err != nil {
			break
		}
		waiting = append(waiting, c)
	}
	require.ErrorIs(t, err, nodeport.ErrOverloaded)
	assert.Equal(t, problem.Overloaded, problem.CodeOf(err))
	assert.InDelta(t, 128, len(waiting), 2,
		"one that is welcomed while the last place is taken hears of it afterwards")
	a.eventually(t, nodeport.Overload, 1)
	require.NoError(t, l.Close())
	for _, c := range waiting {
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		_ = c.Close()
	}
	_, err = b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.ErrorIs(t, err, nodeport.ErrNotServed)
}

func TestCloseIsTheEndOfAll(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	a.echo(t, nodeport.GRPC)
	b := newNode(t, w.member(t, "b", "control"), nil)
	c, err := b.Dial(t.Context(), nodeport.GRPC, a.addr(), "")
	require.NoError(t, err)
	ping(t, c)
	silent, err := net.Dial("tcp", a.addr())
	require.NoError(t, err)
	defer silent.Close()
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err)
	require.NoError(t, a.Close())
	_, err = a.Listener(nodeport.Data).Accept()
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = silent.Read(make([]byte, 1))
	require.Error(t, err)
	assert.Empty(t, a.refused, "the end is no refusal")

	taken := newNode(t, w.member(t, "a"), nil).serve(t)
	err = newNode(t, w.member(t, "a"), nil).Listen(t.Context(), taken.addr())
	assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	assert.Error(t, newNode(t, w.member(t, "a"), nil).Serve(), "not bound")
}
