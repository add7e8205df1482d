package server

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// RP13, RP54: --max-body is the limit of the endpoint, and the 413 answer names the flag.
func TestMaxBodyReachesTheEndpoint(t *testing.T) {
	for mib, want := range map[int]map[int]int{
		1: {1: 413, 0: 404}, DefaultMaxBody: {17: 413, 1: 404},
		LargestMaxBody: {17: 404},
	} {
		c := DefaultConfig()
		c.NodeID, c.DataDir = "n1", filepath.Join(t.TempDir(), "data")
		c.LogWriter, c.Ephemeral, c.MaxBody = io.Discard, true, mib
		c.HTTPBind, c.AdminBind = "127.0.0.1:0", "127.0.0.1:0"
		n, err := New(c)
		require.NoError(t, err)
		served := make(chan error, 1)
		go func() { served <- n.ingress.Serve() }()
		for size, status := range want {
			body := `{"model":"x","prompt":"` + strings.Repeat("x", size<<20) + `"}`
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
				"http://"+n.HTTPAddr()+"/v1/completions", strings.NewReader(body))
			require.NoError(t, err)
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			text, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			assert.Equal(t, status, resp.StatusCode, "%d MiB at --max-body %d", size, mib)
			assert.Equal(t, status == http.StatusRequestEntityTooLarge,
				strings.Contains(string(text), "--max-body"), string(text))
		}
		http.DefaultClient.CloseIdleConnections()
		require.NoError(t, n.Close())
		require.NoError(t, <-served)
	}
}

func TestBind(t *testing.T) {
	n := &Node{}
	l, err := n.bind(t.Context(), "127.0.0.1:0", "--http-bind")
	require.NoError(t, err)
	defer l.Close()
	_, err = n.bind(t.Context(), l.Addr().String(), "--http-bind")
	require.EqualError(t, err, fmt.Sprintf(
		"--http-bind %[1]s is taken: listen tcp %[1]s: bind: address already in use", l.Addr()))
	assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
	_, err = n.bind(t.Context(), "nonsense", "--admin-bind")
	require.ErrorContains(t, err, "--admin-bind nonsense: ")
	assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
	n.cfg.Ephemeral = true
	other, err := n.bind(t.Context(), l.Addr().String(), "--http-bind")
	require.NoError(t, err)
	require.NoError(t, other.Close())
}
