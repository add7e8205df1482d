package enginehttp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// echo answers every request of a connection with its body, chunked and with a length in turn.
func echo(_ int, c *net.TCPConn, r *bufio.Reader) {
	for i := 0; ; i++ {
		body, err := take(r)
		if err != nil {
			return
		}
		resp := &http.Response{
			StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(body)),
			Body: io.NopCloser(strings.NewReader(body)),
		}
		if i%2 == 0 {
			resp.ContentLength, resp.TransferEncoding = -1, []string{"chunked"}
		}
		if resp.Write(c) != nil {
			return
		}
	}
}

// TestReuse: one connection serves requests in a row, with bodies of every size class.
func TestReuse(t *testing.T) {
	var conns atomic.Int32
	c := server(t, func(n int, c *net.TCPConn, r *bufio.Reader) { conns.Add(1); echo(n, c, r) })
	for _, size := range []int{0, 1, 100, packed - 200, packed, packed + 1, 1 << 20} {
		for range 3 {
			body := strings.Repeat("x", size)
			resp, err := post(t, c, body)
			require.NoError(t, err)
			got, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Equal(t, []byte(body), got)
			require.NoError(t, resp.Body.Close())
		}
	}
	assert.EqualValues(t, 1, conns.Load())
	assert.False(t, c.Unused())
	c.pool.drop()
	assert.True(t, c.Unused())
}

// RP49: one connection serves requests with bodies of every size class; not one whose peer speaks unasked, be
// it in the same segment as its answer, or closes while it waits.
func TestReuseOverTLS(t *testing.T) {
	unasked, closes := make(chan bool, 1), make(chan bool, 1)
	c, conns := overTLS(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			body, err := take(r)
			if err != nil {
				return
			}
			// read before the answer: behind it the test may already speak of the next request
			speaks, ends := len(unasked) > 0, len(closes) > 0
			say(c, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
			if speaks {
				<-unasked
				say(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
			}
			if ends {
				<-closes
				_ = c.Close()
				return
			}
		}
	})
	send := func(size int) {
		t.Helper()
		body := strings.Repeat("x", size)
		resp, err := post(t, c, body)
		require.NoError(t, err)
		got, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Len(t, got, len(body))
	}
	for _, size := range []int{1, 100, packed - 200, packed + 1, 1 << 20, 1} {
		send(size)
	}
	assert.EqualValues(t, 1, conns.Load())
	isOver := func() bool { return c.pool.empty() || !c.pool.free[0].isQuiet() }
	for i, what := range []chan bool{unasked, closes} {
		what <- true
		send(1)
		require.Eventually(t, isOver, 30*time.Second, time.Millisecond)
		send(1)
		assert.EqualValues(t, 2+i, conns.Load())
	}
}

// TestConcurrent: answers find their requests, under load, cancels and early closes.
func TestConcurrent(t *testing.T) {
	c := server(t, echo)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for k := range 60 {
				body := strings.Repeat(string(rune('a'+i)), 100*k+1)
				ctx, cancel := context.WithCancel(t.Context())
				if k%7 == 3 {
					go cancel()
				}
				resp, err := c.Send(ctx, http.MethodPost, "/", nil, []byte(body))
				if err == nil {
					if k%5 != 4 {
						got, err := io.ReadAll(resp.Body)
						assert.True(t, err != nil && k%7 == 3 || string(got) == body)
					}
					_ = resp.Body.Close()
				} else {
					assert.Equal(t, 3, k%7, "%v", err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	assert.Zero(t, c.busy.Load())
}

func TestNobodyListens(t *testing.T) {
	c := New(Config{Host: "127.0.0.1:1", Idle: time.Minute, MaxIdle: 1, Dial: (&net.Dialer{}).DialContext})
	defer c.Close()
	_, err := post(t, c, "{}")
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	assert.Equal(t, "dial", op.Op)
	var e *SendError
	require.ErrorAs(t, err, &e)
	assert.False(t, e.Reused || e.Begun)
	assert.True(t, c.Unused())
}

// TestKeepAliveRace: a connection that is closed when the request reaches it tells so, and the second Send
// dials.
func TestKeepAliveRace(t *testing.T) {
	c := server(t, func(n int, c *net.TCPConn, r *bufio.Reader) {
		for i := 0; ; i++ {
			if _, err := take(r); err != nil || n < 2 && i == 1 {
				return // closes without a word
			}
			say(c, okAnswer)
		}
	})
	first, err := post(t, c, "{}")
	require.NoError(t, err)
	second, err := post(t, c, "{}") // while the first is open: another connection
	require.NoError(t, err)
	for _, resp := range []*http.Response{first, second} {
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
	}
	_, err = post(t, c, "{}")
	var e *SendError
	require.ErrorAs(t, err, &e)
	assert.True(t, e.Reused)
	assert.False(t, e.Begun)
	require.ErrorIs(t, err, io.EOF)
	got := outcome(t, c)
	require.NoError(t, got.err)
	assert.Equal(t, "ok", got.body)
}

// TestClosedWhileIdle is seen before a request is wasted, as is a peer that speaks unasked.
func TestClosedWhileIdle(t *testing.T) {
	for name, last := range map[string]string{
		"closed":  "",
		"unasked": "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
	} {
		t.Run(name, func(t *testing.T) {
			said := make(chan struct{})
			c := server(t, func(n int, c *net.TCPConn, r *bufio.Reader) {
				for {
					if _, err := take(r); err != nil {
						return
					}
					say(c, okAnswer)
					if n > 0 {
						continue
					}
					<-said
					say(c, last)
					_ = c.CloseWrite()
					said <- struct{}{}
				}
			})
			require.Equal(t, "ok", outcome(t, c).body)
			said <- struct{}{}
			<-said
			require.Eventually(t, func() bool {
				return c.pool.free[0].probe == nil ||
					!c.pool.free[0].probe.quiet()
			}, 30*time.Second, time.Millisecond)
			got := outcome(t, c)
			require.NoError(t, got.err)
			assert.Equal(t, "ok", got.body)
		})
	}
}

// TestEnds tells an end of file from a reset, with and without a byte of an answer.
func TestEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		said  string
		reset bool
		want  error
	}{
		"closed":           {"", false, io.EOF},
		"closed in a head": {"HTTP/1.1 2", false, io.ErrUnexpectedEOF},
		"reset":            {"", true, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			c := server(t, func(_ int, c *net.TCPConn, r *bufio.Reader) {
				_, _ = take(r)
				say(c, tc.said)
				if tc.reset {
					_ = c.SetLinger(0)
				}
			})
			_, err := post(t, c, "{}")
			require.ErrorIs(t, err, tc.want)
			var e *SendError
			require.ErrorAs(t, err, &e)
			assert.Equal(t, tc.said != "", e.Begun)
			assert.False(t, e.Reused)
			assert.True(t, c.Unused())
		})
	}
}

// TestCancel at each phase: the call ends with the context's cause, the peer sees it, and nothing is kept.
func TestCancel(t *testing.T) {
	cause := errors.New("for a reason")
	for name, tc := range map[string]struct {
		answer string // before the peer falls silent
		deaf   bool   // the peer does not read the body
	}{
		"while writing":         {deaf: true},
		"before the answer":     {},
		"in the head":           {answer: "HTTP/1.1 200 OK\r\nContent-"},
		"in a sized body":       {answer: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"},
		"in a chunked body":     {answer: chunkTop + "5\r\nab"},
		"in a body until close": {answer: "HTTP/1.1 200 OK\r\n\r\nab"},
	} {
		t.Run(name, func(t *testing.T) {
			silent, left := make(chan struct{}), make(chan struct{})
			c := server(t, func(_ int, c *net.TCPConn, r *bufio.Reader) {
				if !tc.deaf {
					_, _ = take(r)
				}
				say(c, tc.answer)
				silent <- struct{}{}
				if tc.deaf {
					<-left
				}
				_, _ = io.Copy(io.Discard, r)
				left <- struct{}{}
			})
			ctx, cancel := context.WithCancelCause(t.Context())
			go func() { <-silent; cancel(cause) }()
			body := []byte("{}")
			if tc.deaf {
				body = make([]byte, 16<<20)
			}
			resp, err := c.Send(ctx, http.MethodPost, "/", nil, body)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				require.ErrorIs(t, err, ErrAborted)
				_, err = resp.Body.Read(make([]byte, 1))
				require.ErrorIs(t, err, ErrAborted, "it stays")
				require.NoError(t, resp.Body.Close())
			} else {
				require.ErrorIs(t, err, cause)
			}
			if tc.deaf {
				left <- struct{}{}
			}
			<-left
			assert.True(t, c.Unused())
		})
	}
	t.Run("before", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		c := New(Config{Host: "127.0.0.1:1", Idle: time.Minute, MaxIdle: 1})
		_, err := c.Send(ctx, http.MethodPost, "/", nil, nil)
		require.ErrorIs(t, err, cause)
	})
	t.Run("while dialling", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		c := New(Config{
			Host: "h", Idle: time.Minute, MaxIdle: 1,
			Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
				cancel(cause)
				<-ctx.Done()
				return nil, ctx.Err()
			},
		})
		_, err := c.Send(ctx, http.MethodPost, "/", nil, nil)
		require.ErrorIs(t, err, cause)
		assert.True(t, c.Unused())
	})
}

// TestCancelBehindTheEnd does no harm: the connection is somebody else's by then.
func TestCancelBehindTheEnd(t *testing.T) {
	c := server(t, echo)
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := c.Send(ctx, http.MethodPost, "/", nil, []byte("abc"))
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	cancel()
	assert.False(t, c.pool.empty())
	require.NoError(t, resp.Body.Close())
	got := outcome(t, c)
	require.NoError(t, got.err)
	assert.Equal(t, "{}", got.body)
}

// TestCancelBeforeTheEndIsRead keeps a whole answer and drops its connection.
func TestCancelBeforeTheEndIsRead(t *testing.T) {
	s := &script{pieces: split(okAnswer, 1000)}
	c := scripted(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := c.Send(ctx, http.MethodPost, "/", nil, nil)
	require.NoError(t, err)
	cn := resp.Body.(*exchange).conn
	cancel()
	require.Eventually(t, cn.aborted.Load, 30*time.Second, time.Millisecond)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Equal(t, "ok", string(b))
	assert.True(t, c.Unused())
}

// RP49: an answer that comes while the body is still being written is not lost, whether the peer then waits,
// closes or resets. The connection is not used again.
func TestEarlyAnswer(t *testing.T) {
	const refusal = "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"
	type conn interface{ CloseWrite() error }
	for _, size := range []int{100 << 10, 1 << 20, 16 << 20} {
		for name, then := range map[string]func(c conn, done chan struct{}){
			"waits":            func(_ conn, done chan struct{}) { <-done },
			"waits, over TLS":  func(_ conn, done chan struct{}) { <-done },
			"closes":           func(c conn, _ chan struct{}) { _ = c.CloseWrite() },
			"closes, over TLS": func(c conn, _ chan struct{}) { _ = c.CloseWrite() },
		} {
			t.Run(name, func(t *testing.T) {
				done := make(chan struct{})
				serve := func(_ int, c net.Conn, r *bufio.Reader) {
					if _, err := r.Peek(1); err != nil {
						return
					}
					say(c, "HTTP/1.1 100 Continue\r\n\r\n"+refusal)
					then(c.(conn), done) //nolint:forcetypeassert // both kinds have it
					<-done
				}
				c := server(t, func(n int, c *net.TCPConn, r *bufio.Reader) { serve(n, c, r) })
				if strings.HasSuffix(name, "TLS") {
					c, _ = overTLS(t, serve)
				}
				resp, err := post(t, c, string(make([]byte, size)))
				require.NoError(t, err)
				b, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				assert.Equal(t, "big", string(b))
				assert.Equal(t, 413, resp.StatusCode)
				require.NoError(t, resp.Body.Close())
				close(done)
			})
		}
	}
}

// refuser is a connection whose writes fail while an answer waits.
type refuser struct {
	script
	took int
}

func (r *refuser) Write(p []byte) (int, error) { return min(r.took, len(p)), syscall.EPIPE }

// TestAnswerBehindAFailedWrite: a failed write is no reason not to listen.
func TestAnswerBehindAFailedWrite(t *testing.T) {
	for _, size := range []int{10, 1 << 20} {
		for name, tc := range map[string]struct {
			said  string
			want  error
			begun bool
		}{
			"answer": {said: okAnswer},
			"cut":    {said: "HTTP/1.1 2", want: io.ErrUnexpectedEOF, begun: true},
			"none":   {want: syscall.EPIPE},
		} {
			t.Run(name, func(t *testing.T) {
				s := &refuser{script: script{pieces: split(tc.said, 1000), end: io.EOF}, took: 3}
				c := New(Config{
					Host: "h", Idle: time.Minute, MaxIdle: 1,
					Dial: func(context.Context, string, string) (net.Conn, error) { return s, nil },
				})
				resp, err := post(t, c, string(make([]byte, size)))
				require.ErrorIs(t, err, tc.want)
				if tc.want == nil {
					b, err := io.ReadAll(resp.Body)
					require.NoError(t, err)
					assert.Equal(t, "ok", string(b))
				} else {
					var e *SendError
					require.ErrorAs(t, err, &e)
					assert.Equal(t, tc.begun, e.Begun)
				}
				assert.True(t, s.closed.Load())
				assert.True(t, c.Unused())
			})
		}
	}
}

// TestSlowPeer: a body that outlasts many looks arrives whole.
func TestSlowPeer(t *testing.T) {
	want := bytes.Repeat([]byte("0123456789"), 50<<10)
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		c := New(Config{
			Host: "h", Idle: time.Minute, MaxIdle: 1,
			Dial: func(context.Context, string, string) (net.Conn, error) { return here, nil },
		})
		go func() {
			r := bufio.NewReader(there)
			_, _ = r.Peek(1)
			time.Sleep(10 * time.Second)
			got, err := take(r)
			if err == nil && got == string(want) {
				say(there, okAnswer)
			}
		}()
		resp, err := c.Send(t.Context(), http.MethodPost, "/", nil, want)
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.False(t, c.pool.empty(), "written whole")
		c.Close()
	})
}

// TestPipes: over pipes nothing is buffered, so an early answer would stand still for ever without the look.
func TestPipes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		c := New(Config{
			Host: "h", Idle: time.Minute, MaxIdle: 1,
			Dial: func(context.Context, string, string) (net.Conn, error) { return here, nil },
		})
		go func() {
			_, _ = there.Read(make([]byte, 10))
			say(there, okAnswer)
		}()
		got := outcome(t, c)
		require.NoError(t, got.err)
		assert.Equal(t, "ok", got.body)
		assert.False(t, got.pooled)
		c.Close()
	})
}

// TestIdleTimeout: the janitor closes what waits too long, each at its time, and ends with the pool.
func TestIdleTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all []*script
		c := New(Config{
			Host: "h", Idle: 4 * time.Second, MaxIdle: 2,
			Dial: func(context.Context, string, string) (net.Conn, error) {
				all = append(all, &script{
					pieces: split(strings.Repeat(okAnswer, 3), len(okAnswer)),
					end:    io.EOF,
				})
				return all[len(all)-1], nil
			},
		})
		var open []*http.Response
		for range 3 {
			resp, err := post(t, c, "{}")
			require.NoError(t, err)
			open = append(open, resp)
		}
		end := func(i int) { _, _ = io.ReadAll(open[i].Body) }
		end(0)
		time.Sleep(3 * time.Second)
		end(1)
		end(2)
		assert.True(t, all[2].closed.Load(), "two are kept")
		time.Sleep(1500 * time.Millisecond)
		assert.True(t, all[0].closed.Load())
		assert.False(t, all[1].closed.Load())
		require.NoError(t, outcome(t, c).err)
		time.Sleep(3900 * time.Millisecond)
		assert.False(t, all[1].closed.Load(), "its time runs from its last use")
		time.Sleep(200 * time.Millisecond)
		assert.True(t, all[1].closed.Load())
		assert.True(t, c.Unused())
		require.NoError(t, outcome(t, c).err)
		c.Close()
		c.Close()
		assert.True(t, all[3].closed.Load())
		require.NoError(t, outcome(t, c).err, "a closed client still sends …")
		assert.True(t, all[4].closed.Load(), "… and keeps nothing")
	})
}

func TestCloseBeforeTheEnd(t *testing.T) {
	s := &script{pieces: split(chunkTop+"1\r\na\r\n", 1000)}
	c := scripted(t, s)
	resp, err := post(t, c, "{}")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.NoError(t, resp.Body.Close())
	assert.True(t, s.closed.Load())
	_, err = resp.Body.Read(make([]byte, 1))
	require.Error(t, err)
	assert.True(t, c.Unused())
}

// TestAlikeHeads: answers whose heads are alike share them, others do not.
func TestAlikeHeads(t *testing.T) {
	c := server(t, func(_ int, c *net.TCPConn, r *bufio.Reader) {
		for _, id := range []string{"1", "1", "2", "1"} {
			if _, err := take(r); err == nil {
				say(c, "HTTP/1.1 200 OK\r\nX-Id: "+id+"\r\nContent-Length: 2\r\n\r\nok")
			}
		}
	})
	for _, id := range []string{"1", "1", "2", "1"} {
		got := outcome(t, c)
		require.NoError(t, got.err)
		assert.Equal(t, id, got.header.Get("X-Id"))
	}
}

// RP27: a request whose connection the peer had closed before it was written is known to be unseen, and one
// that the peer has read is not.
func TestUnseen(t *testing.T) {
	for name, reads := range map[string]bool{"closed before": false, "read, then closed": true} {
		t.Run(name, func(t *testing.T) {
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer func() { _ = l.Close() }()
			conns := make(chan net.Conn, 1)
			go func() {
				if c, err := l.Accept(); err == nil {
					conns <- c
				}
			}()
			c := New(Config{
				Host: l.Addr().String(), Dial: (&net.Dialer{}).DialContext, Idle: time.Minute, MaxIdle: 8,
			})
			defer c.Close()
			waiting, err := c.dial(t.Context(), "tcp", c.addr)
			require.NoError(t, err)
			c.Add(waiting)
			peer := <-conns
			closed := make(chan struct{})
			if reads {
				go func() {
					defer close(closed)
					_, _ = peer.Read(make([]byte, 1000))
					_ = peer.Close()
				}()
			}
			_, err = c.SendGuarded(t.Context(), http.MethodPost, "/", nil, []byte("{}"), Guard{
				Before: func() error {
					if !reads {
						return peer.Close() // after the look into the connection
					}
					return nil
				},
			})
			e, ok := errors.AsType[*SendError](err)
			require.True(t, ok)
			assert.True(t, e.Stale, "it ended at once")
			assert.Equal(t, !reads && runtime.GOOS == "linux", e.Unseen)
			if reads {
				<-closed
			}
		})
	}
}
