package api_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
)

// outside is a listener whose address is not loopback.
type outside struct{ net.Listener }

func (outside) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 8265} }

// serveOutside runs a server whose address is not loopback and returns the real address.
func serveOutside(t *testing.T, s *api.Server) string {
	t.Helper()
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, s.Attach(outside{ln}))
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
	})
	return ln.Addr().String()
}

// askAt sends one request over its own connection.
func askAt(t *testing.T, addr, method, path string, header map[string]string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+addr+path, http.NoBody)
	require.NoError(t, err)
	req.Close = true
	for k, v := range header {
		req.Header.Set(k, v)
	}
	req.Host = req.Header.Get("Host")
	req.Header.Del("Host")
	res, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	require.NoError(t, err)
	defer func() { require.NoError(t, res.Body.Close()) }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(text)
}

// RP16: A web page whose name resolves to the node (DNS rebinding) is refused on an admin port that other
// machines reach, whatever its Origin. The node's names and IP addresses pass.
func TestHostIsCheckedOnEveryBind(t *testing.T) {
	b := newBackend()
	addr := serveOutside(t,
		api.NewServer(api.Config{Backend: b, Hosts: []string{"gpu-1", "Head.Example.com"}}))
	for _, method := range []string{http.MethodGet, http.MethodPut} {
		for _, header := range []map[string]string{
			{"Host": "evil.example:8265"},
			{"Host": "evil.example:8265", "Origin": "http://evil.example:8265"},
			{
				"Host": "evil.example:8265", "Origin": "http://evil.example:8265",
				"Sec-Fetch-Site": "same-origin",
			},
			{"Host": "gpu-1.evil.example"},
			{"Host": "10.0.0.1.evil.example"},
			{"Host": "xgpu-1"},
		} {
			status, body := askAt(t, addr, method, "/api/v1/apps", header)
			assert.Equal(t, http.StatusForbidden, status, "%s %v", method, header)
			assert.Contains(t, body, "--admin-host NAME")
		}
	}
	for _, host := range []string{
		"10.0.0.1:8265", "192.0.2.7", "[2001:db8::1]:8265", "localhost:8265", "gpu-1:8265", "GPU-1",
		"head.example.com", "head.example.com.:8265",
	} {
		status, body := askAt(t, addr, http.MethodGet, "/api/v1/healthz", map[string]string{"Host": host})
		assert.Equal(t, http.StatusOK, status, "%s: %s", host, body)
	}
	assert.Empty(t, b.deployed)
}

// RP16: A changing request is refused if a browser marks it as sent by another page than one of this port.
func TestAWriteComesFromNoOtherPage(t *testing.T) {
	h := api.NewServer(api.Config{Backend: newBackend()}).Handler()
	for _, header := range []map[string]string{
		{"Sec-Fetch-Site": "none"},
		{"Sec-Fetch-Mode": "cors"},
		{"Sec-Fetch-Site": "same-site"},
		{"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"},
		{"Origin": "null"},
		{"Origin": ""},
		{"Origin": "http://127.0.0.1:1"},
	} {
		header["Host"] = "127.0.0.1:8265"
		put := request{method: "PUT", target: "/api/v1/apps", body: "x", header: header}
		assert.Equal(t, http.StatusForbidden, put.send(t, h).Code, header)
	}
	typed := request{
		method: "GET", target: "/api/v1/apps",
		header: map[string]string{"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
	}
	assert.Equal(t, http.StatusOK, typed.send(t, h).Code, "an address that a person typed")
}

// RP16: The port of --metrics-bind serves pages of metrics for any Host and changes nothing.
func TestMetricsAlone(t *testing.T) {
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("dpserve_up 1\n"))
	})
	engines := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("vllm:up 1\n"))
	})
	addr := serveOutside(t, api.NewMetricsServer(page, engines, nil))
	_, body := askAt(t, addr, http.MethodGet, "/metrics/engines", nil)
	assert.Equal(t, "vllm:up 1\n", body)
	status, body := askAt(t, addr, http.MethodGet, "/metrics",
		map[string]string{"Host": "prometheus.example"})
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, "dpserve_up 1\n", body)
	status, body = askAt(t, addr, http.MethodHead, "/metrics", nil)
	assert.Equal(t, http.StatusOK, status)
	assert.Empty(t, body)
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		status, _ = askAt(t, addr, method, "/metrics", nil)
		assert.Equal(t, http.StatusMethodNotAllowed, status, method)
	}
	for _, path := range []string{
		"/", "/api/v1/apps", "/api/v1/version", "/api/v1/healthz", "/metrics/", "/metrics/x", "/add_worker",
	} {
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodPost} {
			status, _ = askAt(t, addr, method, path, nil)
			assert.Equal(t, http.StatusNotFound, status, "%s %s", method, path)
		}
	}
}

// A command line that uses another name of the node gets a hint with the flag that allows the name.
func TestRefusedHostNamesTheFlag(t *testing.T) {
	for name, hosts := range map[string][]string{"refused": nil, "allowed": {"head.example.com"}} {
		addr := serveOutside(t, api.NewServer(api.Config{Backend: newBackend(), Hosts: hosts}))
		dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
		c, err := client.New("head.example.com:8265",
			client.WithTransport(&http.Transport{DialContext: dial, DisableKeepAlives: true}))
		require.NoError(t, err)
		_, err = c.Apps(t.Context())
		c.Close()
		if hosts != nil {
			require.NoError(t, err, name)
			continue
		}
		var p *client.Error
		require.ErrorAs(t, err, &p)
		assert.Equal(t, client.CodePermissionDenied, p.Code)
		assert.Contains(t, p.Hint, "--admin-host NAME")
	}
}
