package memnet

import (
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHTTPOverMemory(t *testing.T) {
	var n Network
	l, err := n.Listen("127.0.0.1:0")
	require.NoError(t, err)
	_, err = n.Listen(l.Addr().String())
	require.ErrorContains(t, err, "already in use")

	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hi")
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	tr := &http.Transport{DialContext: n.DialContext}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+"/", nil)
	require.NoError(t, err)
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, "hi", string(b))
	tr.CloseIdleConnections()
	require.NoError(t, srv.Close())
	<-done

	_, err = n.DialContext(t.Context(), "tcp", l.Addr().String())
	require.ErrorIs(t, err, ErrRefused)
}
