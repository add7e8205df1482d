package rankleg

import (
	"bytes"
	"errors"
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
)

// TestResend: a request is sent a second time only if its connection had waited and ended so soon after the
// write that the engine cannot have worked on it. An engine that ends later, or that cannot be reached for
// the second time, may have died of the request: the first error says so, and not the refused dial that
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

// TestNoFiles: a dial that fails for want of an open file is the fault of this process.
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

// TestNoAnswerBelow200: a switch of protocols is no answer, whatever the size of the request, and over TLS as
// well.
func TestNoAnswerBelow200(t *testing.T) {
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n"+
				"Connection: Upgrade\r\n\r\n")
			t.Cleanup(func() { _ = conn.Close() })
		}
	})
	plain, secure := httptest.NewServer(answer), httptest.NewTLSServer(answer)
	defer plain.Close()
	defer secure.Close()
	l := openEngines(t)
	l.attached.transport.inner.TLSClientConfig = secure.Client().Transport.(*http.Transport).TLSClientConfig
	for _, base := range []string{plain.URL, secure.URL} {
		for _, size := range []int{10, 2 << 20} {
			o := &engineRequest{
				URL: parsed(t, base+"/x"), Header: http.Header{}, Body: bytes.Repeat([]byte(" "), size),
			}
			_, err := l.send(t.Context(), false, o)
			require.Error(t, err)
			assert.True(t, IsMalformed(err), "%s, %d bytes: %v", base, size, err)
		}
	}
}
