package ingress

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/test/memnet"
)

// RP50: a gap whose rank is looked at each 8 s, checked as the phase timer does.
func TestWhenAGapIsCut(t *testing.T) {
	const every, never = 8 * time.Second, time.Duration(-1)
	for name, c := range map[string]struct {
		lost, most, cut time.Duration
		cause           error
	}{
		"nobody knows anything against the engine": {never, time.Minute, time.Minute, errSilent},
		"its rank was lost before":                 {0, time.Minute, every, errStalled},
		"its rank is lost later":                   {9 * time.Second, time.Minute, 2 * every, errStalled},
		"its rank is lost at the end":              {59 * time.Second, time.Minute, time.Minute, errStalled},
		"a short first_token_s":                    {never, time.Second, every, errSilent},
	} {
		g := gapWatch{router: &appRouter{}, rank: &rank{}, every: every, most: c.most}
		start := time.Now()
		g.start(start)
		for {
			at := g.nextCheck()
			g.rank.lost = c.lost != never && at.Sub(start) >= c.lost
			if cause := g.check(at); cause != nil {
				assert.Equal(t, c.cause, cause, name)
				assert.Equal(t, c.cut, at.Sub(start), name)
				break
			}
			require.True(t, g.nextCheck().After(at), "%s: it goes forward", name)
		}
	}
}

// pauses is an engine that is silent for a while in the middle of its answer.
func pauses(silence time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		sse(w, roleChunk, textChunk)
		select {
		case <-time.After(silence):
			sse(w, textChunk, stopChunk, doneEvent)
		case <-r.Context().Done():
		}
	}
}

// RP50: TestASilentStreamGoesOn, though nothing shows whether its engine works.
func TestASilentStreamGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, options{
			network: &memnet.Network{}, engines: []http.HandlerFunc{pauses(20 * time.Second)},
			app: func(a *app.Application) { a.Timeouts.FirstTokenS, a.Timeouts.BetweenTokensS = 30, 5 },
		})
		var clients sync.WaitGroup
		for range 6 { // more than eject a rank
			clients.Go(func() {
				a := g.post("/v1/chat/completions", streamBody)
				assert.NoError(t, a.err) //nolint:testifylint // not the test's goroutine
				assert.True(t, strings.HasSuffix(a.body, "data: [DONE]\n\n"), a.body)
			})
		}
		clients.Wait()
		r := g.replicas[0]
		eventually(t, func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return len(r.dones) == 6
		}, "every ticket is returned")
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, done := range r.dones {
			assert.Equal(t, msg.OK, done.Outcome)
		}
	})
}

// RP50: a stream that is silent for `first_token_s` ends with `stalled`, and its rank is not ejected for it.
func TestAStreamThatStaysSilentIsCutInTheEndAndEjectsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h hangingEngine
		o := options{network: &memnet.Network{}, engines: []http.HandlerFunc{h.sends(textChunk)}}
		o.app = func(a *app.Application) { a.Timeouts.FirstTokenS, a.Timeouts.BetweenTokensS = 30, 5 }
		g := newRig(t, o)
		a := g.post("/v1/chat/completions", streamBody)
		require.Error(t, a.err)
		assert.Contains(t, a.body, `"code":"stalled"`)
		done := g.replicas[0].lastDone(t)
		assert.Equal(t, "silent_stream", done.Cause)
		assert.False(t, done.Charge)
	})
}

// TestALongWholeAnswerGoesOnToo: an answer that is too long to be held is relayed as it arrives, and
// may pause in the same way.
func TestALongWholeAnswerGoesOnToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, options{
			network: &memnet.Network{},
			app:     func(a *app.Application) { a.Timeouts.FirstTokenS, a.Timeouts.BetweenTokensS = 30, 5 },
			engines: []http.HandlerFunc{
				func(w http.ResponseWriter, r *http.Request) {
					drain(r)
					w.Header().Set("Content-Type", "application/json")
					_, _ = io.WriteString(w, strings.Repeat(" ", maxWhole+1))
					w.(http.Flusher).Flush()
					time.Sleep(20 * time.Second)
					_, _ = io.WriteString(w, wholeAnswer)
				},
			},
		})
		a := g.post("/v1/chat/completions", chatBody)
		require.NoError(t, a.err)
		assert.True(t, strings.HasSuffix(a.body, wholeAnswer))
	})
}
