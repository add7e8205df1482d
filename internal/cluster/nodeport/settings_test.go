package nodeport

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/memnet"
)

// TestSettingsThatAreThereAreNotWaitedFor: a connection whose server has said how many streams it accepts, as
// it often has when net/http hands the connection out, is used at once.
func TestSettingsThatAreThereAreNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network memnet.Network
		l, err := network.Listen("10.0.0.1:80")
		require.NoError(t, err)
		server := &http.Server{Protocols: onlyHTTP2(), HTTP2: serverHTTP2(), ReadHeaderTimeout: headerTimeout}
		served := make(chan error, 1)
		go func() { served <- server.Serve(l) }()
		tr := &http.Transport{Protocols: onlyHTTP2(), DialContext: network.DialContext}
		conn, err := tr.NewClientConn(t.Context(), "http", "10.0.0.1:80")
		require.NoError(t, err)
		began := time.Now()
		awaitSettings(conn)
		assert.Equal(t, maxStreams, conn.Available())
		awaitSettings(conn)
		assert.Zero(t, time.Since(began))
		require.NoError(t, conn.Close())
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
	})
}

// TestASilentServerIsWaitedForABoundedTime: one that never says how many streams it accepts.
func TestASilentServerIsWaitedForABoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		heard := make(chan struct{})
		go func() {
			defer close(heard)
			_, _ = io.Copy(io.Discard, there)
		}()
		tr := &http.Transport{
			Protocols:   onlyHTTP2(),
			DialContext: func(context.Context, string, string) (net.Conn, error) { return here, nil },
		}
		conn, err := tr.NewClientConn(t.Context(), "http", anyHost)
		require.NoError(t, err)
		assert.Equal(t, assumedStreams, conn.Available())
		began := time.Now()
		awaitSettings(conn)
		assert.Equal(t, settingsWait, time.Since(began))
		require.NoError(t, conn.Close())
		<-heard
	})
}
