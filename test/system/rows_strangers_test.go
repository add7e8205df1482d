package system

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/test/harness"
)

// junkSender sends junk to a cluster until its time is over. All of it may fail; junkSender counts what it
// sent.
type junkSender struct {
	t    *testing.T
	ctx  context.Context //nolint:containedctx // the stranger's life
	wg   sync.WaitGroup
	mu   sync.Mutex
	done map[string]*atomic.Int64
}

// every repeats f until the end.
func (s *junkSender) every(what string, f func(ctx context.Context)) {
	n := new(atomic.Int64)
	s.mu.Lock()
	s.done[what] = n
	s.mu.Unlock()
	s.wg.Go(func() {
		for s.ctx.Err() == nil {
			ctx, cancel := context.WithTimeout(s.ctx, 2*time.Second)
			f(ctx)
			cancel()
			n.Add(1)
			select { // the machine has other tests to run
			case <-time.After(5 * time.Millisecond):
			case <-s.ctx.Done():
			}
		}
	})
}

// says connects, says something and hears the answer out.
func says(ctx context.Context, network, address string, text []byte) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
	_, _ = conn.Write(text)
	if network == "udp" {
		return // nobody answers
	}
	_, _ = io.CopyN(io.Discard, conn, 4096)
}

// junk are random bytes, some of them behind the beginning of something that makes sense.
func junk() []byte {
	begins := []string{
		"", "", "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x16\x03\x01\xff\xff", "\x16\x03\x03\x00\x05",
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
		"\x00\x00\x00", "\x06\x00", "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f",
	}
	b := make([]byte, 512)
	_, _ = rand.Read(b)
	return append([]byte(begins[int(b[0])%len(begins)]), b[2:2+int(b[1])]...)
}

// forged is the certificate of a member of a cluster of the stranger's own making, which has the same id.
func forged(t *testing.T, cluster string) tls.Certificate {
	t.Helper()
	now := time.Now()
	authority, err := pki.NewAuthority(cluster, now)
	require.NoError(t, err)
	key, err := pki.NewKey()
	require.NoError(t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	cert, err := authority.Sign(csr, pki.Identity{
		Cluster: cluster, Node: "a", UID: "stranger",
		Roles: []string{"control", "worker", "ingress"},
	}, now, pki.DefaultLife)
	require.NoError(t, err)
	ca, _ := authority.PEM()
	creds, err := pki.NewCredentials(ca, cert, key)
	require.NoError(t, err)
	return creds.Certificate
}

// shake connects to a node port for a protocol, with any certificate or none.
func shake(ctx context.Context, address, alpn string, show ...tls.Certificate) (*tls.Conn, error) {
	d := tls.Dialer{Config: &tls.Config{
		Certificates: show, NextProtos: []string{alpn},
		InsecureSkipVerify: true,
	}}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	secure := conn.(*tls.Conn)
	_ = secure.SetDeadline(time.Now().Add(time.Second))
	_, err = secure.Read(make([]byte, 1)) // the greeting
	return secure, err
}

// clusterOf is the id of a cluster, which everybody may see.
func clusterOf(t *testing.T, m *harness.Member) string {
	t.Helper()
	conn, err := shake(t.Context(), m.NodePort(), nodeport.Join)
	require.NoError(t, err)
	defer conn.Close()
	id, err := pki.IdentityOf(conn.ConnectionState().PeerCertificates[0])
	require.NoError(t, err)
	return id.Cluster
}

// SP11: junk, and frames that are well formed, from one who is no member, on every port of a node and of its
// engines: seconds of it here, 10 minutes in an acceptance run, an hour with nothing else to do. The parsers
// have fuzz targets in their packages.
func TestSP11Strangers(t *testing.T) {
	t.Parallel()
	long := 3 * time.Second
	if accepting() {
		long = 10 * time.Minute
	}
	c := harness.StartMembers(t, harness.Each(2), harness.MemberSlots(4), harness.Calm)
	c.Expect(harness.GossipRefused, harness.JoinRefused)
	a, b := c.All[0], c.All[1]
	a.Want(spread("wide", 4))
	st := c.Running("wide")
	before := seats(&st)
	load := harness.StartLoad(t, "wide", 2, 20, a.HTTP, b.HTTP)
	load.Reaches(10)

	ctx, stop := context.WithTimeout(t.Context(), long)
	defer stop()
	s := &junkSender{t: t, ctx: ctx, done: map[string]*atomic.Int64{}}
	var all []string
	for _, m := range c.All {
		all = append(all, m.NodePort(), m.Gossip(), m.Admin, m.HTTP)
	}
	for seat := range before {
		all = append(all, hostOf(before[seat].URL))
	}
	for _, address := range all {
		s.every("junk at tcp "+address, func(ctx context.Context) { says(ctx, "tcp", address, junk()) })
	}
	for _, m := range c.All {
		s.every("junk at udp "+m.Gossip(), func(ctx context.Context) { says(ctx, "udp", m.Gossip(), junk()) })
	}
	s.forges(forged(t, clusterOf(t, a)), a, b)
	s.enrolls(a)
	s.gossips(c, a)
	s.browses(a)
	s.wg.Wait()

	for what, n := range s.done {
		assert.NotZero(t, n.Load(), what)
		t.Logf("%6d × %s", n.Load(), what)
	}
	load.Reaches(10)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)
	st = c.Running("wide")
	assert.Equal(t, before, seats(&st), "nothing was stopped or started")
	c.Settled()
	list, err := b.Nodes()
	require.NoError(t, err)
	assert.Len(t, list, len(c.All), "nobody else is in")
	for _, reason := range []string{"tls", "cluster", "certificate", "gossip_key"} {
		n := counted(t, a, "dpserve_nodeport_refused_total", `reason="`+reason+`"`)
		assert.NotZero(t, n, "refusals for %s", reason)
		t.Logf("refused at a for %s: %.0f", reason, n)
	}
	assert.NotContains(t, a.Log()+b.Log(), "panic")
	c.AllQuiet()
}

// forges speaks the protocols of members with a certificate of another authority: it never gets a word in.
func (s *junkSender) forges(show tls.Certificate, at ...*harness.Member) {
	hello := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	for _, alpn := range []string{
		nodeport.Raft, nodeport.GRPC, nodeport.Ranks, nodeport.Data, nodeport.Admin,
		"dpserve-else/1",
	} {
		for _, certs := range [][]tls.Certificate{{show}, nil} {
			s.every(fmt.Sprintf("%s with %d forged certificates", alpn, len(certs)),
				func(ctx context.Context) {
					for _, m := range at {
						conn, err := shake(ctx, m.NodePort(), alpn, certs...)
						if conn != nil {
							_, _ = conn.Write(hello)
							_ = conn.Close()
						}
						if err == nil {
							s.t.Errorf("a stranger was welcome to %s", alpn)
						}
					}
				})
		}
	}
}

// enrolls uses the protocol that is open to strangers, correctly and incorrectly.
func (s *junkSender) enrolls(m *harness.Member) {
	cc, err := grpc.NewClient("passthrough:///"+m.NodePort(),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(
			func(ctx context.Context, address string) (net.Conn, error) {
				conn, err := shake(ctx, address, nodeport.Join)
				if err == nil {
					err = conn.SetDeadline(time.Time{})
				}
				return conn, err
			}))
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = cc.Close() })
	for what, call := range map[string][2]string{
		"joins without a token": {
			"/dpserve.v1.Enroll/Join", `{"Token":"sesame","CSR":"AAAA","Node":{"id":"a","uid":"stranger"}}`,
		},
		"renewals by a stranger": {
			"/dpserve.v1.Control/Renew", `{"Node":{"id":"a","uid":"stranger"}}`,
		},
		"orders of a stranger": {"/dpserve.v1.Node/StopRank", `{"Unit":"wide/0/0","Epoch":1}`},
	} {
		s.every(what, func(ctx context.Context) {
			if _, err := invoke(ctx, cc, call[0], call[1]); err == nil {
				s.t.Error(what + ": taken")
			}
		})
	}
}

// invoke calls a method of a node with a message in any form, and returns the answer.
func invoke(ctx context.Context, cc *grpc.ClientConn, method, text string) (reply []byte, err error) {
	err = cc.Invoke(ctx, method, []byte(text), &reply, grpc.CallContentSubtype(noderpc.CodecName))
	return reply, err
}

// gossips takes part in a gossip with a key of its own.
func (s *junkSender) gossips(c *harness.Members, m *harness.Member) {
	key := make([]byte, membership.KeySize)
	_, _ = rand.Read(key)
	g, err := membership.Start(s.t.Context(), membership.Config{
		Self: membership.Member{Cluster: clusterOf(s.t, m), UID: "stranger", Node: "b"},
		Host: c.NextIP(), Incarnation: 1, Key: key, Log: slog.New(slog.DiscardHandler),
		Seeds: func() []string { return []string{m.Gossip()} },
		Timers: membership.Timers{
			Probe: 30 * time.Millisecond, ProbeTimeout: 15 * time.Millisecond,
			Rejoin: 100 * time.Millisecond,
		},
	})
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = g.Close() })
	s.every("looks at a gossip with another key", func(context.Context) {
		if n := len(g.Members()); n > 1 {
			s.t.Errorf("a stranger gossips with %d", n)
		}
	})
}

// browses sends well-formed requests to the admin API as a foreign web page would make a browser send them.
func (s *junkSender) browses(m *harness.Member) {
	client := &http.Client{Transport: &http.Transport{}, Timeout: time.Second}
	s.t.Cleanup(client.CloseIdleConnections)
	for name, change := range map[string]func(r *http.Request){
		"foreign host":   func(r *http.Request) { r.Host = "evil.example" },
		"foreign origin": func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") },
	} {
		s.every("deletes from a "+name, func(ctx context.Context) {
			r, err := http.NewRequestWithContext(ctx, http.MethodDelete,
				"http://"+m.Admin+"/api/v1/apps/wide", nil)
			if err != nil {
				return
			}
			change(r)
			resp, err := client.Do(r)
			if err != nil {
				return
			}
			_ = resp.Body.Close()
			if resp.StatusCode < http.StatusBadRequest {
				s.t.Errorf("%s: %s", name, resp.Status)
			}
		})
	}
}

// hostOf is HOST:PORT of a URL.
func hostOf(u string) string { return strings.TrimPrefix(u, "http://") }
