package dpserver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// withSentRecord runs a test with a rank whose KV cache holds that many blocks of 4 tokens, and a reader of
// its stream.
func withSentRecord(t *testing.T, blocks int, f func(t *testing.T, r *testRig, old *reader)) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true)
		require.NoError(t, r.Ready(t.Context(),
			msg.Facts{Incarnation: 7, MaxOngoing: 99, BlockSize: 4, Blocks: blocks}))
		f(t, r, newReader(t))
	})
}

func TestAPromptIsRecordedAndTravels(t *testing.T) {
	withSentRecord(t, 0, func(t *testing.T, r *testRig, old *reader) {
		p := prompt(ids(0, 32)...)
		id := r.sendPrompt(p, 3)
		synctest.Wait()
		got := r.tape.take()[2:] // behind the snapshots of New and Ready
		assert.Equal(t, []msg.RecordKind{msg.RecAdmitted, msg.RecKVBegin, msg.RecKVEnd, msg.RecKV},
			kinds(got))
		for i, rec := range got {
			assert.Equal(t, uint64(i+1), rec.Seq, "one order")
			old.apply(&rec)
		}
		assert.Equal(t, 12, got[0].Hit)
		assert.Equal(t, 8, old.hit(kvindex.Sent, p))
		r.sendPrompt(p[:6], 0)
		assert.Equal(t, []msg.RecordKind{msg.RecAdmitted}, kinds(r.tape.take()),
			"what is recorded is renewed in silence")
		late := &recordingSink{}
		defer r.hub.Subscribe(late)()
		synctest.Wait()
		snap := late.take()[0].Snapshot
		assert.Equal(t, [...]any{int64(0), 4, false},
			[...]any{snap.Capacity, snap.BlockSize, snap.CachingOff})
		assert.ElementsMatch(t, []int{12, 0}, []int{snap.Open[0].Hit, snap.Open[1].Hit})
		r.send(&msg.Done{TicketID: id, FirstToken: time.Millisecond})
		old.follow(r)
		assert.Equal(t, 8, old.hit(kvindex.Sent, p))
	})
}

// TestARequestThatWasNotServedIsTakenBack: but not blocks that other requests share, or that the sender
// expected in the cache.
func TestARequestThatWasNotServedIsTakenBack(t *testing.T) {
	withSentRecord(t, 0, func(t *testing.T, r *testRig, old *reader) {
		common, one, two := ids(0, 16), append(ids(0, 16), ids(100, 16)...),
			append(ids(0, 24), ids(200, 16)...)
		r.sendPrompt(prompt(common...), 0)
		id := r.sendPrompt(prompt(one...), 6)
		r.send(&msg.Done{TicketID: id, Outcome: msg.Cancelled})
		old.follow(r)
		assert.Equal(t, 6, old.hit(kvindex.Sent, prompt(one...)), "the sender knew 6 blocks to be there")

		id = r.sendPrompt(prompt(two...), 0)
		time.Sleep(time.Millisecond)
		r.sendPrompt(prompt(ids(0, 28)...), 0)
		r.send(&msg.Done{TicketID: id, Outcome: msg.FailedOutcome})
		old.follow(r)
		assert.Equal(t, 6, old.hit(kvindex.Sent, prompt(two...)),
			"its own blocks are gone, those of its successor stay")
		assert.Equal(t, 7, old.hit(kvindex.Sent, prompt(ids(0, 28)...)))

		for _, d := range []msg.Done{
			{Outcome: msg.OK},
			{Outcome: msg.FailedOutcome, FirstToken: 1},
			{Outcome: msg.Cancelled, FirstToken: 1},
		} {
			p := prompt(ids(uint32(1000+1000*int(d.Outcome)), 16)...)
			d.TicketID = r.sendPrompt(p, 0)
			r.send(&d)
			old.follow(r)
			assert.Equal(t, 4, old.hit(kvindex.Sent, p), "it was computed")
		}
		ctx, cancel := context.WithCancel(t.Context())
		p := prompt(ids(9000, 16)...)
		r.ask(func(a *msg.Admit) { a.Ctx, a.Blocks = ctx, p })
		cancel()
		time.Sleep(6 * time.Second)
		old.follow(r)
		assert.Zero(t, old.hit(kvindex.Sent, p), "a ticket that lapsed was never served")
	})
}

// TestFewerCachedTokensTrimTheRecord: the engine evicts faster than the record assumes; the oldest blocks are
// dropped.
func TestFewerCachedTokensTrimTheRecord(t *testing.T) {
	cases := map[string]struct {
		done msg.Done
		left int
	}{
		"as expected":           {msg.Done{HasCached: true, PromptTokens: 40, CachedTokens: 32}, 10},
		"within a block":        {msg.Done{HasCached: true, PromptTokens: 40, CachedTokens: 28}, 10},
		"not reported":          {msg.Done{PromptTokens: 40}, 10},
		"two blocks fewer":      {msg.Done{HasCached: true, PromptTokens: 40, CachedTokens: 24}, 8},
		"none":                  {msg.Done{HasCached: true, PromptTokens: 40, CachedTokens: 0}, 2},
		"the prompt was longer": {msg.Done{HasCached: true, PromptTokens: 80, CachedTokens: 64}, 10},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			withSentRecord(t, 0, func(t *testing.T, r *testRig, old *reader) {
				first, second := prompt(ids(0, 40)...), prompt(ids(1000, 40)...)
				r.sendPrompt(first, 0)
				time.Sleep(time.Second)
				c.done.TicketID, c.done.FirstToken = r.sendPrompt(second, 8), 1
				r.send(&c.done)
				old.follow(r)
				assert.Equal(t, 10, old.hit(kvindex.Sent, second))
				assert.Equal(t, c.left, old.hit(kvindex.Sent, first))
			})
		})
	}
}

func TestTheRecordEndsWithTimeAndRoom(t *testing.T) {
	withSentRecord(t, 10, func(t *testing.T, r *testRig, old *reader) {
		for i := range uint32(5) {
			id := r.sendPrompt(prompt(ids(1000*i, 16)...), 0)
			r.send(&msg.Done{TicketID: id, FirstToken: 1, PromptTokens: 16})
			time.Sleep(10 * time.Second)
		}
		old.follow(r)
		assert.Equal(t, uint64(10), old.blockSums()[kvindex.Sent][0], "the engine's room of 40 tokens")
		assert.Equal(t, 4, old.hit(kvindex.Sent, prompt(ids(4000, 16)...)))
		time.Sleep(kvindex.DefaultRecord - 10*time.Second - time.Millisecond)
		old.follow(r)
		assert.Equal(t, map[kvindex.Tier][2]uint64{kvindex.Sent: {4, sum(prompt(ids(4000, 16)...))}},
			old.blockSums())
		time.Sleep(2 * minExpiryInterval)
		old.follow(r)
		assert.Empty(t, old.blockSums(), "nobody asked, and it ended")
		r.tape.take()
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Empty(t, r.tape.take())
		assert.Zero(t, r.Status().KV.Blocks)
	})
}

// TestBlocksOfTheSenderAreItsOwnAgain: after the reply the sender may overwrite them.
func TestBlocksOfTheSenderAreItsOwnAgain(t *testing.T) {
	withSentRecord(t, 0, func(t *testing.T, r *testRig, old *reader) {
		p := prompt(ids(0, 400)...)
		a := &msg.Admit{
			Ctx: t.Context(), ReqID: 1, Epoch: 3, Tokens: 400,
			Blocks: append([]uint64(nil), p...), Reply: make(chan msg.AdmitReply, 1),
		}
		r.box.Send(a)
		rep := <-a.Reply
		clear(a.Blocks)
		old.follow(r)
		assert.Equal(t, 100, old.hit(kvindex.Sent, p))
		r.send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.Cancelled})
		old.follow(r)
		assert.Empty(t, old.blockSums())
	})
}

// TestARankWithoutPrefixCachingHasNoIndex: it records no block and raises no alarm, and status says why.
func TestARankWithoutPrefixCachingHasNoIndex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true)
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7, MaxOngoing: 99, CachingOff: true}))
		synctest.Wait()
		assert.True(t, r.tape.take()[1].Snapshot.CachingOff)
		id := r.sendPrompt(prompt(ids(0, 16)...), 0)
		r.send(&msg.Done{TicketID: id, Outcome: msg.Cancelled})
		assert.Equal(t, []msg.RecordKind{msg.RecAdmitted, msg.RecDone}, kinds(r.tape.take()))
		time.Sleep(1500 * time.Millisecond)
		assert.Equal(t, &client.KVStatus{Note: "the engine runs without prefix caching: no prompt hits"},
			r.Status().KV)
	})
}

func TestHitRate(t *testing.T) {
	withSentRecord(t, 0, func(t *testing.T, r *testRig, _ *reader) {
		done := func(d msg.Done) {
			d.TicketID = r.ask().Ticket.ID
			r.send(&d)
		}
		done(msg.Done{PromptTokens: 100})
		assert.Zero(t, r.Status().HitRate)
		done(msg.Done{PromptTokens: 100, CachedTokens: 50, HasCached: true})
		done(msg.Done{PromptTokens: 300, CachedTokens: 0, HasCached: true})
		done(msg.Done{PromptTokens: 100, CachedTokens: 700, HasCached: true})
		st := r.Status()
		assert.Equal(t, [...]any{uint64(500), uint64(150), 0.3},
			[...]any{st.PromptTokens, st.CachedTokens, st.HitRate})
		for range hitWindow {
			done(msg.Done{PromptTokens: 10, CachedTokens: 9, HasCached: true})
		}
		assert.InDelta(t, 0.9, r.Status().HitRate, 1e-9)
	})
}

// TestWhatWasThereBeforeStays: although only the withdrawn request had kept it from expiring.
func TestWhatWasThereBeforeStays(t *testing.T) {
	withSentRecord(t, 0, func(t *testing.T, r *testRig, old *reader) {
		r.sendPrompt(prompt(ids(0, 16)...), 0)
		time.Sleep(kvindex.DefaultRecord - time.Second)
		id := r.sendPrompt(prompt(ids(0, 32)...), 0)
		time.Sleep(2 * time.Second)
		r.send(&msg.Done{TicketID: id, Outcome: msg.Cancelled})
		old.follow(r)
		assert.Equal(t, 4, old.hit(kvindex.Sent, prompt(ids(0, 32)...)))
	})
}

// TestANewIncarnationWasSentNothing: the record of sent prompts ends with the incarnation.
func TestANewIncarnationWasSentNothing(t *testing.T) {
	withSentRecord(t, 0, func(t *testing.T, r *testRig, old *reader) {
		r.sendPrompt(prompt(ids(0, 16)...), 0)
		old.follow(r)
		require.Equal(t, 4, old.hit(kvindex.Sent, prompt(ids(0, 16)...)))
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 9}))
		old.follow(r)
		assert.Empty(t, old.blockSums())
		assert.Zero(t, r.Status().KV.Sent)
		r.sendPrompt(prompt(ids(0, 8)...), 0)
		old.follow(r)
		assert.Equal(t, 2, old.hit(kvindex.Sent, prompt(ids(0, 16)...)))
	})
}
