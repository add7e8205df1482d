package ingress

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// probed is the mailbox of a rank whose DPServer answers every Probe.
type probed struct {
	replica
	asked []time.Duration // since the gap began
	now   time.Duration
	heard func(n int) // the n-th Probe, from 1
}

func (p *probed) TrySend(any) error {
	p.asked = append(p.asked, p.now)
	if p.heard != nil {
		p.heard(len(p.asked))
	}
	return nil
}

// TestAGapIsCutWhenItsRankMakesNoProgress: a gap with a limit of 8 s and a first token's time of 60 s,
// checked as the phase timer does.
func TestAGapIsCutWhenItsRankMakesNoProgress(t *testing.T) {
	const limit, most, answer = 8 * time.Second, 60 * time.Second, time.Second
	never := time.Duration(-1)
	cases := map[string]struct {
		others time.Duration // when another stream of the rank shows output; never: it does not
		every  bool          // and as long after each stretch's beginning
		counts func(n int) bool
		cut    time.Duration
		cause  error
		asked  []time.Duration
	}{
		"nothing moves": {
			others: never, cut: limit, cause: errStalled, asked: []time.Duration{limit / 2, limit - answer},
		},
		"another stream moved long ago": {
			others: time.Second, cut: limit, cause: errStalled,
		},
		"another stream moved just now": {
			others: 7 * time.Second, cut: 2 * limit, cause: errStalled,
		},
		"other streams move on": {
			others: 7 * time.Second, every: true, cut: most, cause: errSilent,
		},
		"the first look is held against what was before": {
			others: never, counts: func(n int) bool { return n == 1 }, cut: limit, cause: errStalled,
		},
		"the counters move once": {
			others: never, counts: func(n int) bool { return n == 2 }, cut: 2 * limit, cause: errStalled,
		},
		"the counters move on": {
			others: never, counts: func(n int) bool { return n > 1 }, cut: most, cause: errSilent,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			box := &probed{}
			g := gapWatch{
				router: &appRouter{}, rank: &rank{Rank: &rankleg.Rank{Mailbox: box}}, ticket: 7, limit: limit,
				maxGap: most,
			}
			box.heard = func(n int) {
				if c.counts != nil && c.counts(n) {
					g.rank.progress++
				}
			}
			start := time.Now()
			g.start(start)
			for at := time.Duration(0); ; {
				next := g.nextCheck().Sub(start)
				require.GreaterOrEqual(t, next, at, "it goes forward")
				for ; at < next; at += time.Second / 2 {
					if at == c.others || c.every && at%limit == c.others {
						g.rank.progress++
					}
				}
				at, box.now = next, next
				cause := g.check(start.Add(next))
				if cause == nil {
					continue
				}
				assert.Equal(t, c.cause, cause)
				assert.Equal(t, c.cut, next)
				if c.asked != nil {
					assert.Equal(t, c.asked, box.asked)
				}
				return
			}
		})
	}
}

// TestALateGuardStillWaitsForTheAnswer: a process that was suspended asks the rank and waits before it cuts.
func TestALateGuardStillWaitsForTheAnswer(t *testing.T) {
	g := gapWatch{
		router: &appRouter{}, rank: &rank{Rank: &rankleg.Rank{Mailbox: &probed{}}}, limit: 8 * time.Second,
		maxGap: time.Minute,
	}
	start := time.Now()
	g.start(start)
	late := start.Add(20 * time.Second)
	for range 3 {
		require.NoError(t, g.check(late))
	}
	assert.Equal(t, late.Add(time.Second), g.nextCheck())
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

func TestASilentStreamWaitsForARankThatMakesProgress(t *testing.T) {
	t.Parallel()
	g := newRig(t, options{
		engines: []http.HandlerFunc{pauses(time.Second)},
		app:     func(a *app.Application) { a.Timeouts.BetweenTokensS = 0.2 },
	})
	g.replicas[0].moves()
	var clients sync.WaitGroup
	for range 6 { // more than trip a rank
		clients.Go(func() {
			a := g.post("/v1/chat/completions", streamBody)
			assert.NoError(t, a.err) //nolint:testifylint // require must not run outside the test's goroutine
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
}

func TestAStreamThatStaysSilentIsCutInTheEndAndTripsNothing(t *testing.T) {
	t.Parallel()
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}, app: func(a *app.Application) {
		a.Timeouts.FirstTokenS, a.Timeouts.BetweenTokensS = 1, 0.2
	}})
	g.replicas[0].moves()
	a := g.post("/v1/chat/completions", streamBody)
	require.Error(t, a.err)
	assert.Contains(t, a.body, `"code":"stalled"`)
	done := g.replicas[0].lastDone(t)
	assert.Equal(t, "silent_stream", done.Cause)
	assert.False(t, done.Trip)
}

// TestALongWholeAnswerWaitsForItsRankToo: an answer that is too long to be held is relayed as it arrives, and
// may pause in the same way.
func TestALongWholeAnswerWaitsForItsRankToo(t *testing.T) {
	t.Parallel()
	g := newRig(t, options{
		app: func(a *app.Application) { a.Timeouts.BetweenTokensS = 0.2 },
		engines: []http.HandlerFunc{
			func(w http.ResponseWriter, r *http.Request) {
				drain(r)
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, strings.Repeat(" ", maxWhole+1))
				w.(http.Flusher).Flush()
				time.Sleep(time.Second)
				_, _ = io.WriteString(w, wholeAnswer)
			},
		},
	})
	g.replicas[0].moves()
	a := g.post("/v1/chat/completions", chatBody)
	require.NoError(t, a.err)
	assert.True(t, strings.HasSuffix(a.body, wholeAnswer))
}
