package rawconn_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/rawconn"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a quiet connection and the plain end of it.
func pair(tb testing.TB) (quiet net.Conn, plain *net.TCPConn) {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	defer l.Close()
	c, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", l.Addr().String())
	require.NoError(tb, err)
	plain, _ = c.(*net.TCPConn)
	accepted, err := l.Accept()
	require.NoError(tb, err)
	quiet = rawconn.Conn(accepted)
	tb.Cleanup(func() { _, _ = quiet.Close(), plain.Close() })
	return quiet, plain
}

func random(tb testing.TB, n int) []byte {
	tb.Helper()
	b := make([]byte, n)
	_, err := rand.Read(b)
	require.NoError(tb, err)
	return b
}

// TestBytesArriveWhole: large transfers in both directions at once, in many partial writes because the
// kernel's buffers are small.
func TestBytesArriveWhole(t *testing.T) {
	quiet, plain := pair(t)
	require.NoError(t, plain.SetReadBuffer(64<<10))
	require.NoError(t, plain.SetWriteBuffer(64<<10))
	there, back := random(t, 3<<20), random(t, 2<<20)
	var wg sync.WaitGroup
	var gotThere, gotBack []byte
	wg.Go(func() {
		if n, err := quiet.Write(there); err != nil || n != len(there) {
			t.Error(n, err)
		}
	})
	wg.Go(func() {
		if _, err := plain.Write(back); err != nil {
			t.Error(err)
		}
	})
	wg.Go(func() { gotThere = readN(t, plain, len(there)) })
	wg.Go(func() { gotBack = readN(t, quiet, len(back)) })
	wg.Wait()
	assert.True(t, bytes.Equal(there, gotThere))
	assert.True(t, bytes.Equal(back, gotBack))
}

func readN(t *testing.T, r io.Reader, n int) []byte {
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		t.Error(err)
	}
	return b
}

// TestEndOfFileComesBehindTheLastBytes: nothing that arrived with the end is lost, and the end stays.
func TestEndOfFileComesBehindTheLastBytes(t *testing.T) {
	quiet, plain := pair(t)
	_, err := plain.Write([]byte("last words"))
	require.NoError(t, err)
	require.NoError(t, plain.CloseWrite())
	all, err := io.ReadAll(quiet)
	require.NoError(t, err)
	assert.Equal(t, "last words", string(all))
	n, err := quiet.Read(make([]byte, 1))
	assert.Zero(t, n)
	assert.Equal(t, io.EOF, err, "readers compare with ==")
}

// TestHalfClose: a side that has ended its writing still reads.
func TestHalfClose(t *testing.T) {
	quiet, plain := pair(t)
	half, ok := quiet.(interface{ CloseWrite() error })
	require.True(t, ok)
	require.NoError(t, half.CloseWrite())
	all, err := io.ReadAll(plain)
	require.NoError(t, err)
	assert.Empty(t, all)
	_, err = plain.Write([]byte("an answer"))
	require.NoError(t, err)
	assert.Equal(t, "an answer", string(readN(t, quiet, len("an answer"))))
	_, err = quiet.Write([]byte("x"))
	require.ErrorIs(t, err, syscall.EPIPE)
}

func TestEmptyReadsAndWritesDoNothing(t *testing.T) {
	quiet, _ := pair(t)
	n, err := quiet.Read(nil)
	assert.Zero(t, n)
	require.NoError(t, err)
	n, err = quiet.Write(nil)
	assert.Zero(t, n)
	require.NoError(t, err)
}

// TestDeadlines: a passed deadline ends a call that waits, fails those that follow, and a later deadline
// heals it.
func TestDeadlines(t *testing.T) {
	quiet, plain := pair(t)
	require.NoError(t, quiet.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	for range 2 {
		n, err := quiet.Read(make([]byte, 1))
		assert.Zero(t, n)
		timedOut(t, err, "read")
	}
	require.NoError(t, quiet.SetReadDeadline(time.Time{}))
	_, err := plain.Write([]byte("x"))
	require.NoError(t, err)
	assert.Equal(t, "x", string(readN(t, quiet, 1)))

	sent, ended := 0, make(chan error)
	go func() {
		var err error
		sent, err = quiet.Write(make([]byte, 32<<20)) // nobody reads more than the first
		ended <- err
	}()
	readN(t, plain, 1)
	require.NoError(t, quiet.SetWriteDeadline(time.Now().Add(10*time.Millisecond)))
	timedOut(t, <-ended, "write")
	assert.Positive(t, sent, "what went before the deadline is told")
	require.NoError(t, quiet.SetWriteDeadline(time.Time{}))
	got := make(chan int)
	go func() { got <- len(readN(t, plain, sent)) }()
	_, err = quiet.Write([]byte("y"))
	require.NoError(t, err)
	assert.Equal(t, sent, <-got, "exactly the bytes that were told, and the last one")
}

func timedOut(t *testing.T, err error, op string) {
	t.Helper()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var e *net.OpError
	require.ErrorAs(t, err, &e)
	assert.Equal(t, op, e.Op)
	assert.True(t, e.Timeout())
}

// TestDeadlineThatIsSetWhileACallWaits ends it: net/http does so to get its background reader back.
func TestDeadlineThatIsSetWhileACallWaits(t *testing.T) {
	quiet, _ := pair(t)
	ended := make(chan error)
	go func() {
		_, err := quiet.Read(make([]byte, 1))
		ended <- err
	}()
	require.NoError(t, quiet.SetReadDeadline(time.Unix(1, 0)))
	timedOut(t, <-ended, "read")
}

// TestCloseEndsCallsThatWait in both directions.
func TestCloseEndsCallsThatWait(t *testing.T) {
	quiet, _ := pair(t)
	ended := make(chan error, 2)
	go func() {
		_, err := quiet.Read(make([]byte, 1))
		ended <- err
	}()
	go func() {
		_, err := quiet.Write(make([]byte, 32<<20))
		ended <- err
	}()
	require.NoError(t, quiet.SetDeadline(time.Now().Add(time.Minute)))
	require.NoError(t, quiet.Close())
	for range 2 {
		require.ErrorIs(t, <-ended, net.ErrClosed)
	}
	_, err := quiet.Read(make([]byte, 1))
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = quiet.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
}

// TestReset: a peer that goes away with unread bytes shows as the errors that callers look for.
func TestReset(t *testing.T) {
	quiet, plain := pair(t)
	_, err := quiet.Write([]byte("unread"))
	require.NoError(t, err)
	require.NoError(t, plain.SetLinger(0))
	require.NoError(t, plain.Close())
	_, err = quiet.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET)
	var e *net.OpError
	require.ErrorAs(t, err, &e)
	assert.Equal(t, "read", e.Op)
	assert.NotNil(t, e.Addr)
}

// TestTwoCallersOfOneDirection keep their bytes apart.
func TestTwoCallersOfOneDirection(t *testing.T) {
	quiet, plain := pair(t)
	const callers, lines = 8, 200
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			line := bytes.Repeat([]byte{'a' + byte(i)}, 99)
			for range lines {
				_, err := quiet.Write(append(line, '\n'))
				assert.NoError(t, err)
			}
		})
	}
	got := readN(t, plain, callers*lines*100)
	wg.Wait()
	for line := range bytes.Lines(got) {
		require.Len(t, line, 100)
		require.Equal(t, bytes.Repeat(line[:1], 99), line[:99])
	}
}

func TestOtherConnectionsStayAsTheyAre(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	assert.Same(t, a, rawconn.Conn(a))
}

func TestNoAllocations(t *testing.T) {
	quiet, plain := pair(t)
	in, out := make([]byte, 64), make([]byte, 64)
	n := testing.AllocsPerRun(100, func() {
		_, _ = plain.Write(out)
		_, _ = quiet.Read(in)
		_, _ = quiet.Write(out)
		_, _ = plain.Read(in)
	})
	assert.Zero(t, n)
}

func BenchmarkPingPong(b *testing.B) {
	quiet, plain := pair(b)
	p := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		_, _ = plain.Write(p)
		_, _ = quiet.Read(p)
		_, _ = quiet.Write(p)
		_, _ = plain.Read(p)
	}
}
