package process

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/ports"
)

func TestBlocks(t *testing.T) {
	one := Socket{Host: netip.MustParseAddr("127.0.0.1"), Port: 8000}
	assert.True(t, one.Blocks("127.0.0.1:8000"))
	assert.True(t, one.Blocks("0.0.0.0:8000"))
	assert.False(t, one.Blocks("127.0.0.2:8000"))
	assert.False(t, one.Blocks("127.0.0.1:8001"))
	assert.False(t, one.Blocks("nonsense"))
	all := Socket{Host: netip.IPv4Unspecified(), Port: 8265}
	assert.True(t, all.Blocks("127.0.0.9:8265"))
}

// HF68: the process that holds a port is named, and nothing once the port is free.
func TestHolder(t *testing.T) {
	l, err := net.Listen("tcp", ports.TakeAddr(t))
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	if runtime.GOOS == "linux" {
		own := fmt.Sprintf("%s (process %d)", Name(os.Getpid()), os.Getpid())
		assert.Equal(t, own, Holder("127.0.0.1", port))
	}
	require.NoError(t, l.Close())
	assert.Empty(t, Holder("127.0.0.1", port))
}
