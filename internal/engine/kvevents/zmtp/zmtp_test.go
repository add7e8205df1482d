package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

func serve(t testing.TB, role Role, conns int, handle func(*Conn)) *Server {
	t.Helper()
	s := NewServer(listen(t), role, DefaultLimits(), conns, nil, handle)
	s.Start()
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	return s
}

func TestMessagesCrossWhole(t *testing.T) {
	long := bytes.Repeat([]byte{7}, 100_000)
	echo := serve(t, Router, 4, func(c *Conn) {
		for {
			m, err := c.Recv()
			if err != nil || c.Send(m...) != nil {
				return
			}
		}
	})
	c, err := Dial(t.Context(), nil, echo.Addr().String(), Dealer, DefaultLimits())
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	for _, m := range [][][]byte{
		{{}},
		{{}, {1, 2}},
		{long, {}, long},
		{bytes.Repeat([]byte{1}, 255), bytes.Repeat([]byte{1}, 256)},
	} {
		require.NoError(t, c.Send(m...))
		got, err := c.Recv()
		require.NoError(t, err)
		require.Len(t, got, len(m))
		for i := range m {
			assert.True(t, bytes.Equal(m[i], got[i]))
		}
	}
}

// A pipe has no buffer, and both peers speak first.
func TestPeersMeetOnAPipe(t *testing.T) {
	here, there := net.Pipe()
	got := make(chan [][]byte, 1)
	go func() {
		defer close(got)
		c, err := Open(there, Router, true, DefaultLimits())
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		if m, err := c.Recv(); err == nil {
			got <- m
		}
	}()
	c, err := Open(here, Dealer, false, DefaultLimits())
	require.NoError(t, err)
	require.NoError(t, c.Send(nil, []byte("hello")))
	assert.Equal(t, [][]byte{{}, []byte("hello")}, <-got)
	require.NoError(t, c.Close())
	<-got
}

func TestRolesThatDoNotFitAreRefused(t *testing.T) {
	s := serve(t, Pub, 4, func(*Conn) { t.Error("no handler for a stranger") })
	_, err := Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
	assert.Error(t, err)
}

// A frame is refused when its length is announced: nothing of that size is ever allocated.
func TestAnnouncedSizesAreLimited(t *testing.T) {
	head := func(size uint64, flags byte) []byte {
		return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, size)
	}
	many := bytes.Repeat([]byte{flagMore, 1, 0}, defaultFrames+1)
	for name, raw := range map[string][]byte{
		"2^31": head(1<<31, 0), "2^63": head(1<<63, 0), "all ones": head(1<<64-1, flagMore),
		"limit+1":            head(defaultFrame+1, 0),
		"frames without end": many, "empty frames without end": bytes.Repeat([]byte{flagMore, 0},
			defaultFrames+1),
	} {
		t.Run(name, func(t *testing.T) {
			got := make(chan error, 1)
			s := serve(t, Router, 1, func(c *Conn) {
				_, err := c.Recv()
				got <- err
			})
			c, err := Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
			require.NoError(t, err)
			defer func() { _ = c.Close() }()
			_, err = c.stream.Conn.Write(raw)
			require.NoError(t, err)
			assert.ErrorIs(t, <-got, ErrTooLarge)
		})
	}
}

func TestSilentPeersHoldNobodyUp(t *testing.T) {
	var served atomic.Int32
	s := serve(t, Router, 8, func(*Conn) { served.Add(1) })
	for range 4 {
		raw, err := net.Dial("tcp", s.Addr().String())
		require.NoError(t, err)
		defer func() { _ = raw.Close() }()
	}
	c, err := Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
	require.NoError(t, err)
	_, err = c.Recv()
	require.Error(t, err, "the handler returned")
	assert.Equal(t, int32(1), served.Load())
}

func TestConnectionsAreCounted(t *testing.T) {
	s := serve(t, Router, 1, func(c *Conn) { _, _ = c.Recv() })
	first, err := Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
	require.NoError(t, err)
	_, err = Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
	require.Error(t, err, "one at a time")
	require.NoError(t, first.Close())
	require.Eventually(t, func() bool {
		c, err := Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
		return err == nil && c.Close() == nil
	}, 30*time.Second, 5*time.Millisecond, "the place is free again")
}

func TestPeersMayBeRefused(t *testing.T) {
	s := NewServer(listen(t), Router, DefaultLimits(), 4, func(net.Addr) bool { return false },
		func(*Conn) {})
	s.Start()
	_, err := Dial(t.Context(), nil, s.Addr().String(), Dealer, DefaultLimits())
	require.Error(t, err)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
}

func TestHandshakeEndsWithItsContext(t *testing.T) {
	l := listen(t)
	defer func() { _ = l.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer func() { _ = c.Close() }()
			_, _ = c.Read(make([]byte, 64)) // the greeting came, an answer never does
			cancel()
			_, _ = c.Read(make([]byte, 64))
		}
	}()
	_, err := Dial(ctx, nil, l.Addr().String(), Sub, DefaultLimits())
	require.Error(t, err)
}

// wire is a connection that reads fixed bytes and swallows what is written.
type wire struct {
	net.Conn
	in *bytes.Reader
}

func (w wire) Read(p []byte) (int, error)       { return w.in.Read(p) }
func (w wire) Write(p []byte) (int, error)      { return len(p), nil }
func (w wire) Close() error                     { return nil }
func (w wire) SetDeadline(time.Time) error      { return nil }
func (w wire) SetReadDeadline(time.Time) error  { return nil }
func (w wire) SetWriteDeadline(time.Time) error { return nil }

// peerBytes are what a well-behaved peer begins with.
func peerBytes(role Role, tail ...byte) []byte {
	b := append([]byte{}, make([]byte, greetingBytes)...)
	b[0], b[9], b[10] = 0xFF, 0x7F, 3
	copy(b[12:], "NULL")
	body := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(role)))
	body = append(body, role...)
	b = append(b, flagCommand, byte(len(body)))
	return append(append(b, body...), tail...)
}

func TestHostileMetadataIsAnError(t *testing.T) {
	b := append([]byte{}, make([]byte, greetingBytes)...)
	b[0], b[9], b[10] = 0xFF, 0x7F, 3
	copy(b[12:], "NULL")
	b = append(b, flagCommand, 8)
	// a name of two bytes of which one is there: the library slices past the end
	b = append(b, "\x05READY\x02\x00"...)
	_, err := Open(wire{in: bytes.NewReader(b)}, Sub, true, DefaultLimits())
	assert.ErrorIs(t, err, errHandshake)
}

func FuzzPeer(f *testing.F) {
	f.Add(peerBytes(Pub, 0, 1, 'x'))
	f.Add(peerBytes(Pub, flagMore, 1, 'x', 0, 0, flagCommand, 7, 4, 'P', 'I', 'N', 'G', 0, 1))
	f.Add(peerBytes(Pub, flagLong, 0, 0, 0, 0, 0x80, 0, 0, 0))
	f.Add(peerBytes("REQ"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Open(wire{in: bytes.NewReader(raw)}, Sub, true,
			Limits{Frame: 1000, Message: 3000, Frames: 5})
		if err != nil {
			return
		}
		for {
			m, err := c.Recv()
			if err != nil {
				return
			}
			total := 0
			for _, f := range m {
				assert.LessOrEqual(t, len(f), 1000)
				total += len(f)
			}
			assert.LessOrEqual(t, len(m), 5)
			assert.LessOrEqual(t, total, 3000)
		}
	})
}
