package enginehttp

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestGuardRefusesTheWrite: a request whose guard refuses is not written, and its connection serves another.
func TestGuardRefusesTheWrite(t *testing.T) {
	var conns, requests atomic.Int32
	c := server(t, func(_ int, conn *net.TCPConn, r *bufio.Reader) {
		conns.Add(1)
		for {
			if _, err := take(r); err != nil {
				return
			}
			requests.Add(1)
			if _, err := io.WriteString(conn, okAnswer); err != nil {
				return
			}
		}
	})
	late := errors.New("too late")
	_, err := c.SendGuarded(t.Context(), http.MethodPost, "/", nil, []byte("x"), Guard{
		Before:  func() error { return late },
		Written: func() { t.Error("it was not written") },
	})
	require.ErrorIs(t, err, late)
	var e *SendError
	require.ErrorAs(t, err, &e)
	assert.False(t, e.Begun)

	written := 0
	resp, err := c.SendGuarded(t.Context(), http.MethodPost, "/", nil, []byte("x"), Guard{
		Before:  func() error { assert.Zero(t, written); return nil },
		Written: func() { written++ },
	})
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, 1, written)
	assert.EqualValues(t, 1, conns.Load(), "the connection was kept")
	assert.EqualValues(t, 1, requests.Load())
}
