package nodeport_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a cluster's authority.
type world struct {
	*pki.Authority
}

func newWorld(t testing.TB, cluster string) world {
	t.Helper()
	a, err := pki.NewAuthority(cluster, time.Now().Add(-100*24*time.Hour))
	require.NoError(t, err)
	return world{a}
}

func (w world) ca() []byte { ca, _ := w.PEM(); return ca }

// credentials are those of a node whose certificate is valid from an hour before signed, for a life.
func (w world) credentials(t testing.TB, node string, signed time.Time, life time.Duration,
	roles ...string,
) *pki.Credentials {
	t.Helper()
	key, err := pki.NewKey()
	require.NoError(t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	cert, err := w.Sign(csr, pki.Identity{Cluster: w.Cluster(), Node: node, UID: "uid-" + node, Roles: roles},
		signed, life)
	require.NoError(t, err)
	c, err := pki.NewCredentials(w.ca(), cert, key)
	require.NoError(t, err)
	return c
}

func (w world) member(t testing.TB, node string, roles ...string) *pki.Credentials {
	t.Helper()
	return w.credentials(t, node, time.Now(), pki.DefaultLife, roles...)
}

// node is a port with what it counted.
type node struct {
	*nodeport.Port
	creds   atomic.Pointer[pki.Credentials]
	mu      sync.Mutex
	refused map[nodeport.Reason]int
	revoked map[string]bool
	removed []error // what RemovedHere was told
}

// newNode makes a port that dials; change may be nil.
func newNode(t testing.TB, creds *pki.Credentials, change func(*nodeport.Config)) *node {
	t.Helper()
	n := &node{refused: map[nodeport.Reason]int{}, revoked: map[string]bool{}}
	n.creds.Store(creds)
	cfg := nodeport.Config{
		Credentials: n.creds.Load,
		Revoked:     func(uid string) bool { n.mu.Lock(); defer n.mu.Unlock(); return n.revoked[uid] },
		RemovedHere: func(err error) { n.mu.Lock(); defer n.mu.Unlock(); n.removed = append(n.removed, err) },
		Refused:     func(r nodeport.Reason) { n.mu.Lock(); defer n.mu.Unlock(); n.refused[r]++ },
	}
	if change != nil {
		change(&cfg)
	}
	n.Port = nodeport.New(cfg)
	t.Cleanup(func() { assert.NoError(t, n.Close()) })
	return n
}

// serve lets it listen on loopback.
func (n *node) serve(t testing.TB) *node {
	t.Helper()
	require.NoError(t, n.Listen(context.Background(), "127.0.0.1:0"))
	done := make(chan error, 1)
	go func() { done <- n.Serve() }()
	t.Cleanup(func() {
		assert.NoError(t, n.Close())
		assert.NoError(t, <-done)
	})
	return n
}

func (n *node) addr() string { return n.Addr().String() }

func (n *node) count(r nodeport.Reason) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.refused[r]
}

// eventually waits for a count that another goroutine makes.
func (n *node) eventually(t testing.TB, r nodeport.Reason, want int) {
	t.Helper()
	require.Eventually(t, func() bool { return n.count(r) >= want }, 30*time.Second, time.Millisecond,
		"refused for %s", r)
}

// echo sends back what comes on a protocol.
func (n *node) echo(t testing.TB, alpn string) {
	t.Helper()
	l := n.Listener(alpn)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() {
		_ = n.Close()
		wg.Wait()
	})
}

// ping sends a word over an echoed connection.
func ping(t testing.TB, c net.Conn) {
	t.Helper()
	_, err := c.Write([]byte("hello"))
	require.NoError(t, err)
	var b [5]byte
	_, err = io.ReadFull(c, b[:])
	require.NoError(t, err)
	require.Equal(t, "hello", string(b[:]))
}

// stranger is a TLS client that checks nothing.
func stranger(alpn string, certs ...tls.Certificate) *tls.Config {
	cfg := &tls.Config{
		InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if len(certs) == 0 {
				return &tls.Certificate{}, nil
			}
			return &certs[0], nil
		},
	}
	if alpn != "" {
		cfg.NextProtos = []string{alpn}
	}
	return cfg
}

// knock dials as a stranger and returns the first bytes that it reads.
func knock(t testing.TB, addr string, cfg *tls.Config) (byte, error) {
	t.Helper()
	raw, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer raw.Close()
	_ = raw.SetDeadline(time.Now().Add(20 * time.Second))
	c := tls.Client(raw, cfg)
	var b [1]byte
	_, err = c.Read(b[:])
	return b[0], err
}
