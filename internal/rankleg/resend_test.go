package rankleg

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/enginehttp"
)

// RP23, RP27, RP47: a request is sent a second time only if its connection had waited and ended so soon after
// the write that the engine cannot have worked on it. An engine that ends later, or that cannot be reached
// for the second time, may have died of the request: the first error says so, and not the refused dial that
// follows.
func TestResend(t *testing.T) {
	for name, c := range map[string]struct {
		warm  bool
		after time.Duration // from the request to the end of its connection
		dies  bool          // the engine takes no connection any more
		once  bool          // the request must not be sent twice
		asked int           // how often an engine got the request
		fails bool
		lives bool // it was not sent again, and the engine had only closed its connection
	}{
		"cold, ends at once": {after: 0, asked: 1, fails: true},
		"cold, dies":         {dies: true, asked: 1, fails: true},
		"warm, ends at once": {warm: true, asked: 2},
		"warm, ends late":    {warm: true, after: 200 * time.Millisecond, asked: 1, fails: true},
		"warm, dies at once": {warm: true, dies: true, asked: 1, fails: true},
		"warm, dies late": {
			warm: true, after: 200 * time.Millisecond, dies: true, asked: 1, fails: true,
		},
		"warm, once, ends at once": {warm: true, once: true, asked: 1, fails: true, lives: true},
		"warm, once, dies at once": {warm: true, once: true, dies: true, asked: 1, fails: true},
		"warm, once, ends late": {
			warm: true, once: true, after: 200 * time.Millisecond, asked: 1, fails: true,
		},
		"warm, once, dies late": {
			warm: true, once: true, after: 200 * time.Millisecond, dies: true, asked: 1, fails: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newFakeEngine(t)
				n := &Near{engines: e.legs}
				if c.warm {
					e.whole()
				}
				e.mu.Lock()
				e.asked, e.ends, e.after, e.dies = 0, true, c.after, c.dies
				e.mu.Unlock()
				q := &Request{Rank: e.rank(), Route: openai.Chat, Header: http.Header{}, Body: []byte("{}")}
				if c.once {
					q.Guard = &Guard{}
				}
				resp, err := n.askEngine(t.Context(), q)
				synctest.Wait()
				e.mu.Lock()
				assert.Equal(t, c.asked, e.asked)
				e.mu.Unlock()
				if !c.fails {
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					assert.True(t, q.Resent)
					return
				}
				require.Error(t, err)
				assert.False(t, IsRefused(err), "an engine had the request")
				require.ErrorIs(t, err, io.EOF)
				assert.Equal(t, c.lives, errors.Is(err, ErrNotResent))
			})
		})
	}
}

// RP27: a dial that fails for want of an open file is the fault of this process.
func TestNoFiles(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE} {
		synctest.Test(t, func(t *testing.T) {
			e := newFakeEngine(t)
			e.refusal = errno
			_, _, err := e.send("/")
			require.Error(t, err)
			assert.True(t, IsOutOfFiles(err))
			assert.False(t, IsRefused(err))
		})
	}
}

// RP27, RP49: whatever the size of the request, with the host that the URL names, and as strictly as without;
// an engine that shows no certificate that is trusted takes no connection.
func TestEnginesOverTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		switch r.URL.Path {
		case "/switch":
			_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n")
		case "/both":
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"+
				"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
		default:
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: text/odd\r\n\r\n%s %d", r.Host,
				len(body))
		}
	}))
	defer srv.Close()
	l := openEngines(t).attached
	send := func(path string, size int) (*http.Response, error) {
		return l.send(t.Context(), &engineRequest{
			URL: parsed(t, srv.URL+path), Header: http.Header{}, Body: bytes.Repeat([]byte(" "), size),
		})
	}
	_, err := send("/", 10)
	assert.True(t, IsRefused(err), "nobody trusts it: %v", err)

	l.clients, l.trust = map[engineKey]*enginehttp.Client{}, &tls.Config{RootCAs: x509.NewCertPool()}
	l.trust.RootCAs.AddCert(srv.Certificate())
	for _, size := range []int{10, 2 << 20} {
		resp, err := send("/", size)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Equal(t, fmt.Sprintf("%s %d", srv.Listener.Addr(), size), string(body))
		assert.Equal(t, "text/odd", resp.Header.Get("Content-Type"))
		for _, path := range []string{"/switch", "/both"} {
			_, err = send(path, size)
			assert.True(t, IsMalformed(err), "%s, %d bytes: %v", path, size, err)
		}
	}
}
