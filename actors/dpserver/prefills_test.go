package dpserver

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
)

// whole is an admission of a request that is not streamed.
func whole(a *msg.Admit) { a.Whole = true }

// perToken predicts 10 ms a token.
func perToken(tokens int) time.Duration { return time.Duration(tokens) * 10 * time.Millisecond }

// firsts is the requests whose prefill the stream has called done since it was read last, with the cause.
func (r *rig) firsts() (ids []uint64, causes []string) {
	for _, rec := range r.tape.take() {
		if rec.Kind == msg.RecFirstToken {
			ids, causes = append(ids, rec.ReqID), append(causes, rec.Cause)
		}
	}
	return ids, causes
}

func (r *rig) assertFirsts(want ...uint64) {
	r.t.Helper()
	ids, _ := r.firsts()
	assert.Equal(r.t, want, ids)
}

// TestAnAnswerThatIsNotStreamedLeavesPrefillWhenItIsPredictedToBeDone: behind the prefill in front of it, and
// never before.
func TestAnAnswerThatIsNotStreamedLeavesPrefillWhenItIsPredictedToBeDone(t *testing.T) {
	bubble(t, 9, true, func(t *testing.T, r *rig) {
		r.prefillTime = perToken
		r.ask(whole)                                    // 1: 100 tokens, done after 1 s
		r.ask()                                         // 2: a stream of 100 tokens
		r.ask(whole, func(a *msg.Admit) { a.Hit = 50 }) // 3: behind both, after 2.5 s
		time.Sleep(999 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirsts()
		time.Sleep(2 * time.Millisecond)
		r.send(lapseTimer{})
		ids, causes := r.firsts()
		assert.Equal(t, []uint64{1}, ids)
		assert.Equal(t, []string{msg.CausePredicted}, causes)
		open := r.open(t)
		assert.True(t, open[1].Decoding)
		assert.False(t, open[2].Decoding, "of a stream the first token is seen, or it has none")
		assert.False(t, open[3].Decoding)

		time.Sleep(1600 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirsts(3)
		time.Sleep(time.Minute)
		r.send(lapseTimer{})
		r.assertFirsts()
	})
}

// TestPredictionsGoByTheSpeedThatStreamsHaveShown: a rank on which first tokens take three times as long as
// predicted.
func TestPredictionsGoByTheSpeedThatStreamsHaveShown(t *testing.T) {
	bubble(t, 9, true, func(t *testing.T, r *rig) {
		r.prefillTime = perToken
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
		r.assertFirsts()
		time.Sleep(200 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirsts(31)
	})
}

// open is the account as a new subscriber is given it, by request.
func (r *rig) open(t *testing.T) map[uint64]msg.OpenRequest {
	t.Helper()
	var s tape
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

// TestAPredictionEndsWithItsTicket: an answer before the predicted time leaves nothing behind, and a new
// incarnation neither.
func TestAPredictionEndsWithItsTicket(t *testing.T) {
	bubble(t, 9, true, func(t *testing.T, r *rig) {
		r.prefillTime = perToken
		ticket := r.ask(whole).Ticket
		r.send(&msg.Done{TicketID: ticket.ID, Outcome: msg.OK, PromptTokens: 100, CompletionTokens: 2})
		r.ask(whole)
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 9}))
		time.Sleep(time.Minute)
		r.send(lapseTimer{})
		r.assertFirsts()
	})
}

// TestAPredictedFirstTokenSaysNothingOfTheEngine: one that hangs with a request that is not streamed is found
// as before.
func TestAPredictedFirstTokenSaysNothingOfTheEngine(t *testing.T) {
	bubble(t, 9, true, func(t *testing.T, r *rig) {
		r.prefillTime = perToken
		r.engine.set(func(f *fakeEngine) { f.canary, f.counters.Seen = assert.AnError, true })
		r.ask(whole, func(a *msg.Admit) { a.Tokens = 1500 }) // 15 s; it has 45 s
		time.Sleep(44 * time.Second)
		assert.Empty(t, r.tape.told())
		time.Sleep(3 * time.Second)
		assert.Len(t, r.tape.told(), 1)
	})
}

// TestKVEventsCorrectAPrediction: the engine says when it has written a prompt down, earlier or later than
// predicted.
func TestKVEventsCorrectAPrediction(t *testing.T) {
	listener(t, true, false, func(t *testing.T, r *rig, p *publisher) {
		r.prefillTime = perToken
		ask := func(tokens []uint32) {
			r.ask(whole, func(a *msg.Admit) { a.Blocks = prompt(tokens...) }) // predicted: 1 s
		}
		p.publish(storedBlocks(1, nil, ids(1, 8))) // the events are live
		time.Sleep(time.Second)
		early := ids(1000, 8)
		ask(early)
		r.firsts()
		p.publish(storedBlocks(1, nil, early[:4]))
		r.send(lapseTimer{})
		r.assertFirsts()
		p.publish(storedBlocks(1, 2000, early[4:]))
		r.send(lapseTimer{})
		r.assertFirsts(1)

		// never written down: three times the predicted time, with what is left of it in front
		ask(ids(2000, 8))
		time.Sleep(2900 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirsts()
		time.Sleep(200 * time.Millisecond)
		r.send(lapseTimer{})
		r.assertFirsts(2)
	})
}
