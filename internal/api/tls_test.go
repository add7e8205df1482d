package api_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
)

// serverCertificate is a certificate for 127.0.0.1, and those who trust it.
func serverCertificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	return s.TLS.Certificates[0], roots
}

// SP2: the admin port speaks TLS. A new certificate is for new connections, and an open one goes on. A client
// that speaks the wrong of the two protocols, or trusts nobody, is told what to do.
func TestTLSOfTheAdminPort(t *testing.T) {
	first, roots := serverCertificate(t)
	second := first
	second.Certificate = [][]byte{first.Certificate[0], first.Certificate[0]} // twice, to be told apart
	var current atomic.Pointer[tls.Certificate]
	current.Store(&first)
	s := api.NewServer(api.Config{Backend: newBackend(), TLS: &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return current.Load(), nil
		},
	}})
	ask := func(addr string, pool *x509.CertPool, seen *tls.ConnectionState) (reused bool, err error) {
		t.Helper()
		trust := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
		transport := &http.Transport{TLSClientConfig: trust}
		c, err := client.New(addr, client.WithTransport(transport))
		require.NoError(t, err)
		defer transport.CloseIdleConnections()
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			TLSHandshakeDone: func(state tls.ConnectionState, _ error) { *seen = state },
			GotConn:          func(info httptrace.GotConnInfo) { reused = info.Reused },
		})
		_, err = c.Apps(ctx)
		if err == nil {
			current.Store(&second)
			_, err = c.Apps(ctx)
		}
		return reused, err
	}
	addr := serveOutside(t, s)
	var a, b tls.ConnectionState
	reused, err := ask("https://"+addr, roots, &a)
	require.NoError(t, err)
	assert.True(t, reused, "the connection goes on")
	_, err = ask("https://"+addr, roots, &b)
	require.NoError(t, err)
	assert.Equal(t, []int{1, 2}, []int{len(a.PeerCertificates), len(b.PeerCertificates)})

	plain := serveOutside(t, api.NewServer(api.Config{Backend: newBackend()}))
	for name, c := range map[string]struct {
		addr, text, hint string
		roots            *x509.CertPool
	}{
		"HTTP":       {"http://" + addr, "wants TLS", "--addr or DPSERVE_ADDR https://" + addr, roots},
		"no scheme":  {addr, "wants TLS", "--addr or DPSERVE_ADDR https://" + addr, roots},
		"TLS":        {"https://" + plain, "speaks HTTP without TLS", "DPSERVE_ADDR http://" + plain, roots},
		"a stranger": {"https://" + addr, "is not trusted", "SSL_CERT_FILE", x509.NewCertPool()},
	} {
		_, err := ask(c.addr, c.roots, &a)
		var p *client.Error
		require.ErrorAs(t, err, &p, name)
		assert.Contains(t, p.Message, c.text, name)
		assert.Contains(t, p.Hint, c.hint, name)
	}
}
