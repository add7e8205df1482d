package dpserver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

// whole is an admission of a request that is not streamed.
func whole(a *msg.Admit) { a.Whole = true }

// perToken predicts 10 ms per token.
func perToken(tokens int) time.Duration { return time.Duration(tokens) * 10 * time.Millisecond }

// firstTokens is the requests with a RecFirstToken since the last call, with the causes.
func (r *testRig) firstTokens() (ids []uint64, causes []string) {
	for _, rec := range r.tape.take() {
		if rec.Kind == msg.RecFirstToken {
			ids, causes = append(ids, rec.ReqID), append(causes, rec.Cause)
		}
	}
	return ids, causes
}

func (r *testRig) assertFirstTokens(want ...uint64) {
	r.t.Helper()
	ids, _ := r.firstTokens()
	assert.Equal(r.t, want, ids)
}

// RP14: after all earlier prefill, and never before.
func TestAnAnswerThatIsNotStreamedLeavesPrefillWhenItIsPredictedToBeDone(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.node.PrefillTime = perToken
		r.ask(whole)                                    // 1: 100 tokens, done after 1 s
		r.ask()                                         // 2: a stream of 100 tokens
		r.ask(whole, func(a *msg.Admit) { a.Hit = 50 }) // 3: behind both, after 2.5 s
		time.Sleep(999 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirstTokens()
		time.Sleep(2 * time.Millisecond)
		r.send(lapseTimer{})
		ids, causes := r.firstTokens()
		assert.Equal(t, []uint64{1}, ids)
		assert.Equal(t, []string{msg.CausePredicted}, causes)
		open := r.openRequests(t)
		assert.True(t, open[1].Decoding)
		assert.False(t, open[2].Decoding, "of a stream the first token is seen, or it has none")
		assert.False(t, open[3].Decoding)

		time.Sleep(1600 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirstTokens(3)
		time.Sleep(time.Minute)
		r.send(lapseTimer{})
		r.assertFirstTokens()
	})
}

// TestPredictionsGoByTheSpeedThatStreamsHaveShown: here first tokens take three times as long as predicted.
func TestPredictionsGoByTheSpeedThatStreamsHaveShown(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.node.PrefillTime = perToken
		for range 30 {
			ticket := r.ask().Ticket // 1 s by the law
			time.Sleep(3 * time.Second)
			r.send(&msg.FirstToken{TicketID: ticket.ID, At: time.Now()})
			r.send(&msg.Done{TicketID: ticket.ID, Outcome: msg.OK})
		}
		r.tape.take()
		r.ask(whole)
		time.Sleep(2900 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirstTokens()
		time.Sleep(200 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirstTokens(31)
	})
}

// openRequests is the account of a new subscriber, by request.
func (r *testRig) openRequests(t *testing.T) map[uint64]msg.OpenRequest {
	t.Helper()
	var s recordingSink
	defer r.hub.Subscribe(&s)()
	r.send(lapseTimer{})
	list := s.take()
	require.NotEmpty(t, list)
	out := map[uint64]msg.OpenRequest{}
	for _, o := range list[0].Snapshot.Open {
		out[o.ReqID] = o
	}
	return out
}

// RP14: neither an answer before the predicted time nor a new incarnation leaves an entry.
func TestAPredictionEndsWithItsTicket(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.node.PrefillTime = perToken
		ticket := r.ask(whole).Ticket
		r.send(&msg.Done{TicketID: ticket.ID, Outcome: msg.OK, PromptTokens: 100, CompletionTokens: 2})
		r.ask(whole)
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 9}))
		time.Sleep(time.Minute)
		r.send(lapseTimer{})
		r.assertFirstTokens()
	})
}

// TestAPredictedFirstTokenSaysNothingOfTheEngine: an engine that hangs with a request that is not streamed is
// still detected.
func TestAPredictedFirstTokenSaysNothingOfTheEngine(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.node.PrefillTime = perToken
		r.engine.set(func(f *fakeEngine) { f.probe, f.counters.Seen = assert.AnError, true })
		r.ask(whole, func(a *msg.Admit) { a.Tokens = 1500 }) // 15 s; it has 45 s
		time.Sleep(44 * time.Second)
		assert.Empty(t, r.tape.nodeEvents())
		time.Sleep(3 * time.Second)
		assert.Len(t, r.tape.nodeEvents(), 1)
	})
}

// RP14: the engine's events show when the prompt is computed, earlier or later than predicted.
func TestKVEventsCorrectAPrediction(t *testing.T) {
	withPublisher(t, true, false, func(t *testing.T, r *testRig, p *publisher) {
		r.node.PrefillTime = perToken
		ask := func(tokens []uint32) {
			r.ask(whole, func(a *msg.Admit) { a.Blocks = prompt(tokens...) }) // predicted: 1 s
		}
		p.publish(storedBlocks(1, nil, ids(1, 8))) // the events are live
		time.Sleep(time.Second)
		early := ids(1000, 8)
		ask(early)
		r.firstTokens()
		p.publish(storedBlocks(1, nil, early[:4]))
		r.send(lapseTimer{})
		r.assertFirstTokens()
		p.publish(storedBlocks(1, 2000, early[4:]))
		r.send(lapseTimer{})
		r.assertFirstTokens(1)

		// no event comes: three times the predicted time, after the rest of the earlier prefill
		ask(ids(2000, 8))
		time.Sleep(2900 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirstTokens()
		time.Sleep(200 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirstTokens(2)
	})
}

// TestAPrefillRankHoldsAtMostHalfItsCache: prompts that are computed and that no decode rank has read yet
// count at admission, whatever ingress has sent them.
func TestAPrefillRankHoldsAtMostHalfItsCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true, func(_ *Factory, spec *msg.ReplicaSpec) { spec.App.Pool = app.PoolPrefill })
		require.NoError(t, r.Ready(t.Context(),
			msg.Facts{Incarnation: 7, MaxOngoing: 99, BlockSize: 16, Blocks: 40}))
		tokens := func(n int) func(a *msg.Admit) { return func(a *msg.Admit) { a.Tokens = n } }
		require.Equal(t, msg.Granted, r.ask(tokens(600)).Refusal, "a rank that holds nothing takes any")
		require.Equal(t, msg.Granted, r.ask(tokens(600)).Refusal, "it is not computed yet")
		r.send(&msg.Done{TicketID: 2})
		r.send(&msg.FirstToken{TicketID: 1})
		assert.Equal(t, msg.Full, r.ask(tokens(1)).Refusal)
		r.send(&msg.Done{TicketID: 1})
		require.Equal(t, msg.Granted, r.ask(tokens(300)).Refusal)
		r.send(&msg.FirstToken{TicketID: 3})
		assert.Equal(t, msg.Granted, r.ask(tokens(20)).Refusal)
		assert.Equal(t, msg.Full, r.ask(tokens(21)).Refusal)
	})
}
