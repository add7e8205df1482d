package inprocess

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// RP61: a request waits for room for at most queue_s. A client of a stream gets 200 and comments meanwhile,
// and the same error as an event.
func TestQueueTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.RequestRefused)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 1000", "max_ongoing_requests: 1"))
		c.WaitStatus("a", "RUNNING")
		first := make(chan *harness.Stream, 1)
		go func() { first <- c.StreamChat(t.Context(), "a", 90) }()
		time.Sleep(time.Second)

		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Second)
				began := time.Now()
				isStream, comments := i == 1, strings.Repeat(": keepalive\n\n", 3)
				resp, err := c.Post(t.Context(), "/v1/chat/completions",
					harness.Chat("a", "hello", 1, isStream))
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				assert.Equal(t, isStream, err != nil, "%v", err) // the connection is cut
				assert.Contains(t, string(b), `"queue_timeout"`)
				assert.Equal(t, 60*time.Second, time.Since(began))
				if isStream {
					assert.Equal(t, http.StatusOK, resp.StatusCode)
					assert.True(t, strings.HasPrefix(string(b), comments), string(b))
					return
				}
				assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
				after, err := strconv.Atoi(resp.Header.Get("Retry-After"))
				if err != nil {
					t.Error(err)
				}
				assert.LessOrEqual(t, 1, after)
				assert.LessOrEqual(t, after, 60)
			})
		}
		time.Sleep(30 * time.Second)
		st, _ := c.App("a")
		assert.Equal(t, 3, st.Queued)
		wg.Wait()
		s := <-first
		assert.True(t, s.OK(), s)
		c.Quiet()
	})
}

// RT3: Requests that wait are served in the order in which they came, whichever are given up in between.
func TestQueueKeepsItsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(simApp("a", 2, "independent", "sim_step_ms: 50", "max_ongoing_requests: 1"))
		c.WaitStatus("a", "RUNNING")
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 24 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if i%5 == 4 {
					time.AfterFunc(70*time.Millisecond, cancel) // these leave the queue by themselves
				}
				s := c.StreamChat(ctx, "a", 4)
				if i%5 == 4 {
					assert.ErrorIs(t, s.Err, context.Canceled)
					return
				}
				assert.True(t, s.OK(), s)
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
		}
		wg.Wait()
		require.Len(t, order, 20)
		// two ranks serve two at a time: neighbours may change places, nobody else
		for at := range order {
			assert.Greater(t, order[at]+3, slices.Max(order[:at+1]), "%v", order)
		}
		c.Quiet()
	})
}

// A rank that gives no first token costs first_token_s; then another one is tried, or the client is told.
func TestFirstTokenDeadline(t *testing.T) {
	for ranks, want := range map[int]string{1: "first_token_timeout", 2: ""} {
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Expect(harness.RequestRefused)
				c.Deploy(simApp("a", ranks, "independent", "sim_step_ms: 10",
					"routing: {policy: round-robin}", "timeouts: {first_token_s: 5}"))
				c.WaitStatus("a", "RUNNING")
				c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeHang})
				for range ranks {
					s := c.StreamChat(t.Context(), "a", 1)
					if s.Attempts == "1" && s.Rank == "0/1" {
						assert.True(t, s.OK(), "the rank that lives: %v", s)
						continue
					}
					assert.Equal(t, want, s.Error, s)
					if want == "" {
						assert.Equal(t, "2", s.Attempts)
						assert.True(t, s.OK(), s)
						assert.GreaterOrEqual(t, s.First, 5*time.Second)
						assert.Less(t, s.First, 5100*time.Millisecond)
						continue
					}
					assert.Equal(t, http.StatusGatewayTimeout, s.Status)
					assert.Equal(t, 5*time.Second, s.Total)
				}
				c.Recover("a", 0, 0)
				c.Quiet()
			})
		})
	}
}

// RP50: A stream that stops between two tokens while its engine answers probes is cut after first_token_s,
// with an event that says so.
func TestBetweenTokensDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.StreamBreaks)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 100", "timeouts: {first_token_s: 40}"))
		c.WaitStatus("a", "RUNNING")
		c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeStall, AfterTokens: 5, Count: 1})
		s := c.StreamChat(t.Context(), "a", 50)
		assert.Equal(t, http.StatusOK, s.Status)
		assert.Equal(t, 5, s.Chunks)
		assert.Equal(t, "stalled", s.Error)
		assert.Equal(t, 40*time.Second, s.Total-s.Last)
		require.Error(t, s.Err, "the connection is cut: nobody takes the stream for a whole one")
		assert.False(t, s.Done)
		assert.Empty(t, s.Finish)
		s = c.StreamChat(t.Context(), "a", 50)
		assert.True(t, s.OK(), "the others on the rank go on: %v", s)
		c.Quiet()
	})
}

// RP50: An engine that computes and shows nothing for 40 s is not cut, and its rank not ejected, whichever
// node is asked. The streams of one that stands still are cut when it has failed its probe, and go on when
// the rank is back.
func TestSilenceInsideAStreamIsProgressOrTheEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Roles(1, "ingress"))
		c.Expect(harness.StreamBreaks, harness.EngineFails)
		c.Net.Delay(c.Peer(0).Host, c.Peer(1).Host, 5*time.Millisecond)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 100"))
		c.WaitStatus("a", "RUNNING")
		c.Peer(1).WaitStatus("a", "RUNNING")
		body := `{"model":"a","stream":true,"messages":[{"role":"user","content":"hello"}],` +
			`"max_tokens":900,"ignore_eos":true,"stream_interval":400}`
		for _, p := range c.Peers() {
			for range 6 { // more than eject a rank
				resp, err := p.Post(t.Context(), "/v1/chat/completions", body)
				require.NoError(t, err)
				s := harness.ReadStream(resp)
				assert.True(t, s.OK(), "%s: gaps of 40 s: %s", p.ID, s)
			}
		}
		for _, p := range c.Peers() {
			s := make(chan *harness.Stream)
			go func() { s <- p.StreamChat(t.Context(), "a", 1000) }()
			time.Sleep(time.Second)
			c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeHang})
			cut := <-s
			assert.True(t, cut.OK(), "%s: %s", p.ID, cut)
			assert.InDelta(t, 30, cut.Gap.Seconds(), 3, "its end, and the next start")
			assert.True(t, p.StreamChat(t.Context(), "a", 10).OK())
		}
		assert.Len(t, c.Journal.Find("a stream broke and goes on from another rank", `"cause":"stalled"`), 2)
		c.Quiet()
	})
}

// RP14: While a request that is not streamed decodes, it is no prefill in front of others: at no ingress,
// whichever one has it.
func TestARequestThatIsNotStreamedLeavesPrefill(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Roles(1, "ingress", "control"))
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 100"))
		c.WaitStatus("a", "RUNNING")
		c.Peer(1).WaitStatus("a", "RUNNING")
		prefill := func(p *harness.Peer) int64 {
			loads, err := p.Router("a").PotentialLoads(t.Context(), nil)
			require.NoError(t, err)
			require.Len(t, loads, 1)
			assert.Positive(t, loads[0].DecodeBlocks, "it is in hand")
			return loads[0].PrefillTokens
		}
		for _, asked := range c.Peers() {
			s := make(chan *harness.Stream)
			go func() { s <- asked.Chat(t.Context(), "a", 50, false) }()
			time.Sleep(time.Second)
			for _, p := range c.Peers() {
				assert.Zero(t, prefill(p), "at %s of a request at %s", p.ID, asked.ID)
			}
			answer := <-s
			assert.Equal(t, http.StatusOK, answer.Status, answer)
			assert.Greater(t, answer.Total, 4*time.Second, "it decoded all the while")
		}
		c.Quiet()
	})
}

// mailboxes collects the ranks' mailboxes for admission, as an ingress does.
type mailboxes struct {
	mu   sync.Mutex
	box  msg.Mailbox
	done []string // causes of ended tickets
}

func (m *mailboxes) Deliver(rec *msg.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch rec.Kind { //nolint:exhaustive // two kinds are of interest
	case msg.RecSnapshot:
		m.box = rec.Snapshot.Mailbox
	case msg.RecDone:
		m.done = append(m.done, rec.Cause)
	}
}

// An ingress that vanishes between its ticket and its request gives the place back 5 s after its connection
// broke.
func TestTicketOfAVanishedIngressLapses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 10", "max_ongoing_requests: 1"))
		c.WaitStatus("a", "RUNNING")
		m := &mailboxes{}
		defer c.Feed().Subscribe(m)()
		synctest.Wait()

		ctx, vanish := context.WithCancel(t.Context())
		reply := make(chan msg.AdmitReply, 1)
		require.NoError(t, m.box.TrySend(msg.Admit{
			Ctx: ctx, ReqID: 1, Epoch: 1, Tokens: 10,
			Ingress: "elsewhere", Reply: reply,
		}))
		require.Equal(t, msg.Granted, (<-reply).Refusal)
		synctest.Wait() // the answer comes before the rank has booked it
		assert.Equal(t, 1, c.Rank("a", 0, 0).InFlight)
		vanish()
		began := time.Now()
		s := c.StreamChat(t.Context(), "a", 1) // waits for the place
		assert.True(t, s.OK(), s)
		assert.GreaterOrEqual(t, s.First, 5*time.Second)
		assert.Less(t, time.Since(began), 5100*time.Millisecond)
		synctest.Wait() // the answer comes before the record
		m.mu.Lock()
		defer m.mu.Unlock()
		assert.Equal(t, []string{"ticket_lapsed", "ok"}, m.done)
	})
}

// Five failures in a row eject a rank: no request reaches it until a probe comes back, after 1, 2, 4 s.
func TestEjectionAndItsProbes(t *testing.T) {
	for _, recovers := range []bool{true, false} {
		t.Run(fmt.Sprintf("recovers %v", recovers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Expect(harness.EngineFails)
				c.Deploy(simApp("a", 2, "independent", "sim_step_ms: 10", "routing: {policy: round-robin}"))
				c.WaitStatus("a", "RUNNING")
				c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeHTTP500})
				served := func(n int) map[string]int {
					out := map[string]int{}
					for range n {
						s := c.StreamChat(t.Context(), "a", 1)
						assert.True(t, s.OK(), s)
						out[s.Attempts+" "+s.Rank]++
						synctest.Wait() // the answer comes before the rank has booked it
					}
					return out
				}
				assert.Equal(t, map[string]int{"1 0/1": 5, "2 0/1": 5}, served(10))
				ejected := c.Journal.Times("rank is ejected")
				require.Len(t, ejected, 1)
				assert.Equal(t, map[string]int{"1 0/1": 10}, served(10), "nothing reaches an ejected rank")
				time.Sleep(time.Until(ejected[0].Add(5 * time.Second)))
				if !recovers {
					fencedAfterProbes(t, c, ejected[0])
					return
				}
				c.Recover("a", 0, 0)
				assert.Equal(t, map[string]int{"1 0/1": 10}, served(10), "only a probe can end the ejection")
				time.Sleep(time.Until(ejected[0].Add(8 * time.Second)))
				assert.Equal(t, map[string]int{"1 0/0": 5, "1 0/1": 5}, served(10))
				cleared := c.Journal.Times("rank is no longer ejected")
				require.Len(t, cleared, 1)
				assert.InDelta(t, 7, cleared[0].Sub(ejected[0]).Seconds(), 0.02,
					"1 s, 2 s, 4 s, and the time of a token")
				assert.Equal(t, uint64(1), c.Unit("a/0/0").Epoch)
				c.Quiet()
			})
		})
	}
}

// fencedAfterProbes: the third failed probe gives an engine of our own up.
func fencedAfterProbes(t *testing.T, c *harness.Cluster, ejected time.Time) {
	t.Helper()
	c.WaitUnit("a/0/0", "ready", 2)
	for _, e := range c.Events("a") {
		if e.Phase == "fenced" {
			assert.Equal(t, 7*time.Second, e.Time.Sub(ejected))
			assert.Contains(t, e.Reason, "5 requests and 3 probes failed")
			c.Quiet()
			return
		}
	}
	t.Error("the rank was never fenced")
}
