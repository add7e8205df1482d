package memnet

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPackets(t *testing.T) {
	var n Network
	a, err := n.ListenPacket("10.0.0.1:0")
	require.NoError(t, err)
	b, err := n.ListenPacket("10.0.0.2:7946")
	require.NoError(t, err)
	_, err = n.ListenPacket("10.0.0.2:7946")
	require.ErrorContains(t, err, "in use")
	_, err = a.WriteTo([]byte("hello"), b.LocalAddr())
	require.NoError(t, err)
	buf := make([]byte, 10)
	size, from, err := b.ReadFrom(buf)
	require.NoError(t, err)
	require.Equal(t, "hello", string(buf[:size]))
	require.Equal(t, a.LocalAddr().String(), from.String())

	for range 1000 { // nobody reads: what does not fit is lost
		_, err = a.WriteTo([]byte("flood"), b.LocalAddr())
		require.NoError(t, err)
	}
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	_, err = a.WriteTo([]byte("into the void"), b.LocalAddr())
	require.NoError(t, err)
	_, err = b.WriteTo([]byte("x"), a.LocalAddr())
	require.ErrorIs(t, err, net.ErrClosed)
	again, err := n.ListenPacket("10.0.0.2:7946")
	require.NoError(t, err)
	require.NoError(t, again.Close())
	_, _, err = again.ReadFrom(buf)
	require.ErrorIs(t, err, net.ErrClosed)
}
