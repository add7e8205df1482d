package ingress

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// selfSigned is a TLS config of a server as a node makes it, with a new certificate for 127.0.0.1.
func selfSigned(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	require.NoError(t, err)
	return &tls.Config{
		NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12,
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}
}

// newTLSRig is a rig whose clients speak TLS.
func newTLSRig(t *testing.T, o options) *rig {
	t.Helper()
	o.tls = selfSigned(t)
	g := newRig(t, o)
	leaf, err := x509.ParseCertificate(o.tls.Certificates[0].Certificate[0])
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	tr, _ := g.client.Transport.(*http.Transport)
	tr.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	tr.ForceAttemptHTTP2 = true // it offers HTTP/2, and gets HTTP/1.1
	g.url = "https" + strings.TrimPrefix(g.url, "http")
	return g
}

// Over TLS an endpoint streams, keeps its connections, and closes them after their request while it drains.
func TestTLS(t *testing.T) {
	more := make(chan struct{})
	g := newTLSRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Kind") == "" {
			replies(200, wholeAnswer)(w, r)
			return
		}
		sse(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
		<-more
		sse(w, `{"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}`, "[DONE]")
	}}})
	for range 3 {
		assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
	}
	assert.Equal(t, 1, g.in.Usage().Connections, "it is used again")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+"/v1/chat/completions",
		strings.NewReader(streamBody))
	require.NoError(t, err)
	req.Header.Set("X-Kind", "stream")
	res, err := g.client.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	assert.Equal(t, 1, res.ProtoMajor)
	line, err := bufio.NewReader(res.Body).ReadString('\n')
	require.NoError(t, err)
	assert.Contains(t, line, `"a"`, "before the engine has written more")
	g.in.Drain()
	close(more)
	rest, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	assert.Contains(t, string(rest), "[DONE]")
	eventually(t, func() bool { return g.in.Usage().Connections == 0 }, "the drain closes it")
}

// A client that leaves ends its request at the engine, over TLS too.
func TestTLSClientLeaves(t *testing.T) {
	gone := make(chan struct{})
	g := newTLSRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		sse(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
		<-r.Context().Done()
		close(gone)
	}}})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+"/v1/chat/completions",
		strings.NewReader(streamBody))
	require.NoError(t, err)
	res, err := g.client.Do(req)
	require.NoError(t, err)
	_, err = res.Body.Read(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	<-gone
}

// What is no TLS, no HTTP/1.1, or an ambiguous request is refused, as without TLS.
func TestTLSRefuses(t *testing.T) {
	g := newTLSRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	tr, _ := g.client.Transport.(*http.Transport)
	at := strings.TrimPrefix(g.url, "https://")
	talk := func(c net.Conn, text string) string {
		_, err := io.WriteString(c, text)
		require.NoError(t, err)
		answer, _ := io.ReadAll(c) // the end of the connection may be a reset
		require.NoError(t, c.Close())
		return string(answer)
	}
	plain, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
	require.NoError(t, err)
	assert.Contains(t, talk(plain, "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"), "use https://")
	dial := func(protocols ...string) (net.Conn, error) {
		config := tr.TLSClientConfig.Clone()
		config.NextProtos = protocols
		return (&tls.Dialer{Config: config}).DialContext(t.Context(), "tcp", at)
	}
	_, err = dial("h2")
	require.ErrorContains(t, err, "no application protocol")
	c, err := dial()
	require.NoError(t, err)
	assert.Contains(t, talk(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"+
		"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), "400 Bad Request")
}
