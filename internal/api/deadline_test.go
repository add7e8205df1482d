package api_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/test/memnet"
)

// serveFake is serve inside a synctest bubble, with memory connections.
func serveFake(t *testing.T, b *backend) (*client.Client, *http.Transport, func()) {
	t.Helper()
	const addr = "127.0.0.1:8265"
	var net memnet.Network
	ln, err := net.Listen(addr)
	require.NoError(t, err)
	s := api.NewServer(api.Config{Backend: b})
	require.NoError(t, s.Attach(ln))
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	rt := &http.Transport{DialContext: net.DialContext, MaxConnsPerHost: 1}
	c, err := client.New(addr, client.WithTransport(rt))
	require.NoError(t, err)
	return c, rt, func() {
		c.Close()
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
	}
}

// The deadlines of one request do not affect the next one on its connection.
func TestIdleConnectionsStayUsable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, done := serveFake(t, newBackend())
		defer done()
		for range 3 {
			_, err := c.Deploy(t.Context(), client.DeployRequest{Text: []byte("fine")})
			require.NoError(t, err)
			time.Sleep(100 * time.Second) // above the write time limit, below the idle one
			_, err = c.App(t.Context(), "nobody")
			require.Equal(t, client.CodeNotFound, client.CodeOf(err))
			time.Sleep(100 * time.Second)
		}
	})
}

// No time limit cuts a stream without data for days.
func TestQuietStreamsStayOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend()
		c, _, done := serveFake(t, b)
		defer done()
		go func() {
			time.Sleep(48 * time.Hour)
			b.happen(client.Event{Kind: "deployed", App: "demo"})
		}()
		for e, err := range c.Events(t.Context(), "", 0) {
			require.NoError(t, err)
			assert.Equal(t, uint64(1), e.Number)
			break
		}
	})
}

// A backend that hangs is answered with 504, a body that does not arrive with 408.
func TestTimeLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, rt, done := serveFake(t, newBackend())
		defer done()
		_, err := c.App(t.Context(), "slow")
		require.Equal(t, client.CodeTimeout, client.CodeOf(err))

		for _, length := range []int64{-1, 100} { // chunked, announced
			for _, path := range []string{"/api/v1/apps", "/api/v1/apps?x=1"} { // read, refused unread
				stall(t, rt, c.Addr()+path, length)
			}
		}
	})
}

// stall sends half a body and waits for the answer, which must come without the other half.
func stall(t *testing.T, rt http.RoundTripper, url string, length int64) {
	t.Helper()
	body, hold := io.Pipe()
	defer func() { require.NoError(t, hold.Close()) }()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url,
		io.MultiReader(strings.NewReader("half"), body))
	require.NoError(t, err)
	req.ContentLength = length
	res, err := rt.RoundTrip(req)
	require.NoError(t, err)
	assert.Contains(t, []int{http.StatusRequestTimeout, http.StatusBadRequest}, res.StatusCode)
	require.NoError(t, res.Body.Close())
}
