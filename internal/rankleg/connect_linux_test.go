package rankleg

import (
	"context"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RC3: a connection to an engine on this machine is complete before package net waits for it, over IPv4 and
// IPv6; connections to other machines are left alone.
func TestConnectNow(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
			if err != nil {
				t.Skip(err) // a machine without IPv6
			}
			defer l.Close()
			connected := false
			d := net.Dialer{Control: func(network, address string, c syscall.RawConn) error {
				require.NoError(t, connectNow(network, address, c))
				return c.Control(func(fd uintptr) {
					_, err := syscall.Getpeername(int(fd))
					connected = err == nil
				})
			}}
			c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
			require.NoError(t, err)
			assert.True(t, connected)
			assert.Equal(t, l.Addr().String(), c.RemoteAddr().String())
			require.NoError(t, c.Close())
		})
	}
	require.NoError(t, connectNow("tcp4", "192.0.2.1:80", nil))
	require.NoError(t, connectNow("tcp6", "[fe80::1%eth0]:80", nil))
}

// BenchmarkDial prints what a dial takes with connectNow and without it, in turn, while other goroutines are
// ready to run, as those of a burst of requests are.
func BenchmarkDial(b *testing.B) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(b, err)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	defer l.Close()
	var stop atomic.Bool
	var others sync.WaitGroup
	for range 16 {
		others.Go(func() {
			for !stop.Load() {
				for begun := time.Now(); time.Since(begun) < 20*time.Microsecond; {
				}
				runtime.Gosched()
			}
		})
	}
	defer others.Wait()
	defer stop.Store(true)
	ways := []net.Dialer{{Control: connectNow}, {}}
	var took [2]time.Duration
	for b.Loop() {
		for i := range ways {
			begun := time.Now()
			c, err := ways[i].DialContext(b.Context(), "tcp", l.Addr().String())
			took[i] += time.Since(begun)
			require.NoError(b, err)
			_ = c.Close()
		}
	}
	b.ReportMetric(float64(took[0].Microseconds())/float64(b.N), "us/now")
	b.ReportMetric(float64(took[1].Microseconds())/float64(b.N), "us/net")
}
