package ingress

import (
	"context"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// hold takes a ticket of the rig's first rank, which lives until free is called.
func (g *rig) hold() (rk *rank, free func()) {
	g.t.Helper()
	life, end := context.WithCancel(g.t.Context())
	var ticket msg.Ticket
	rk = g.in.findAppRouter("demo").findRank(routing.ID(0, 0))
	require.NotNil(g.t, rk)
	reply, err := rk.asker.Reserve(g.t.Context(), &rankleg.Request{
		Rank:     rk.Rank,
		Admit:    &msg.Admit{Ctx: life, ReqID: 1, Epoch: rk.Epoch, Ingress: "n1", Tokens: 3},
		OnTicket: func(t *msg.Ticket) { ticket = *t },
	})
	require.NoError(g.t, err)
	require.Equal(g.t, msg.Granted, reply.Refusal)
	return rk, func() {
		rk.Mailbox.Send(&msg.Done{TicketID: ticket.ID, Outcome: msg.OK, Cause: "ok"})
		end()
	}
}

// leg sends a request whose ticket is held.
func (g *rig) leg(rk *rank, body string, guard *rankleg.Guard) (*http.Response, msg.AdmitReply, error) {
	return rk.asker.Ask(g.t.Context(), &rankleg.Request{
		Rank: rk.Rank, Route: openai.Chat, Header: http.Header{"Content-Type": {"application/json"}},
		Body: []byte(body), IsHeld: true, Guard: guard,
	})
}

// TestRankHeldTicket: a request whose ticket its caller holds asks for no second one, and its engine is told
// which rank is meant. The ticket lives on after the request.
func TestRankHeldTicket(t *testing.T) {
	t.Parallel()
	forEachTransport(t, func(t *testing.T, far bool) {
		seen := make(chan string, 2)
		g := newRig(t, options{
			far: far, address: msg.Target{Addressing: "body", Selector: 6},
			engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				seen <- string(b)
				replies(200, wholeAnswer)(w, r)
			}},
		})
		rk, free := g.hold()
		for range 2 {
			resp, reply, err := g.leg(rk, chatBody, nil)
			require.NoError(t, err)
			require.Equal(t, msg.Granted, reply.Refusal)
			raw, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			assert.JSONEq(t, wholeAnswer, string(raw))
			assert.Equal(t, chatBody[:len(chatBody)-1]+`,"routed_dp_rank":6}`, <-seen)
		}
		r := g.replicas[0]
		assert.Equal(t, 1, r.granted())
		assert.Equal(t, 1, r.inFlight())
		free()
		assert.Equal(t, "ok", r.oneDone(t).Cause)
	})
}

// TestRankHeldElsewhere: a request with a held ticket does not reach another incarnation of its rank.
func TestRankHeldElsewhere(t *testing.T) {
	g := newRig(t, options{far: true, engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	rk, free := g.hold()
	defer free()
	g.replicas[0].reborn()
	_, reply, err := g.leg(rk, chatBody, nil)
	require.NoError(t, err)
	assert.Equal(t, msg.Gone, reply.Refusal)
}

// TestRankGuard: a request that must not be written any more is not written, and OnWritten comes before the
// answer.
func TestRankGuard(t *testing.T) {
	t.Parallel()
	big := `{"model":"demo","x":"` + bigText(2<<20) + `"}`
	for name, body := range map[string]string{"small": chatBody, "big": big} {
		t.Run(name, func(t *testing.T) {
			forEachTransport(t, func(t *testing.T, far bool) {
				var asked atomic.Int32
				g := newRig(t, options{far: far, engines: []http.HandlerFunc{
					func(w http.ResponseWriter, r *http.Request) {
						if n, _ := io.Copy(io.Discard, r.Body); n == int64(len(body)) {
							asked.Add(1)
						}
						replies(200, wholeAnswer)(w, r)
					},
				}})
				rk, free := g.hold()
				defer free()
				_, _, err := g.leg(rk, body, &rankleg.Guard{IsUsable: func() bool { return false }})
				require.ErrorIs(t, err, rankleg.ErrTooLate)
				if far { // the other node has a clock of its own
					_, _, err = g.leg(rk, body, &rankleg.Guard{TimeLeft: func() time.Duration { return 1 }})
					if err == nil {
						t.Log("it was written within a millisecond")
					} else {
						require.ErrorIs(t, err, rankleg.ErrTooLate)
					}
				}
				before := asked.Load()
				var written atomic.Int32
				resp, _, err := g.leg(rk, body, &rankleg.Guard{
					IsUsable:  func() bool { return true },
					TimeLeft:  func() time.Duration { return time.Minute },
					OnWritten: func() { written.Add(1) },
				})
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				eventually(t, func() bool { return written.Load() == 1 }, "it is told") // by net/http later
				assert.Equal(t, before+1, asked.Load())
				assert.LessOrEqual(t, before, int32(1))
			})
		})
	}
}

func bigText(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = 'x'
	}
	return string(b)
}

// TestRankSentOnce: a guarded request is not sent again when the engine has closed the waiting connection.
func TestRankSentOnce(t *testing.T) {
	forEachTransport(t, func(t *testing.T, far bool) {
		var n atomic.Int32
		g := newRig(t, options{far: far, engines: []http.HandlerFunc{
			func(w http.ResponseWriter, r *http.Request) {
				if n.Add(1) > 1 {
					resets(w, r)
					return
				}
				replies(200, wholeAnswer)(w, r)
			},
		}})
		rk, free := g.hold()
		defer free()
		resp, _, err := g.leg(rk, chatBody, &rankleg.Guard{})
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		_, _, err = g.leg(rk, chatBody, &rankleg.Guard{})
		require.Error(t, err)
		assert.EqualValues(t, 2, n.Load(), "the second one came once")
	})
}
