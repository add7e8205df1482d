package dpserver

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// TestKV2TheStreamIsTheLedger: after any history of prompts, corrections, events, losses, incarnations,
// panics and requests for a snapshot, three readers hold the same blocks: one from the start, one that asked
// for a snapshot on the way, and one that subscribes now. Every snapshot on the way was complete.
func TestKV2TheStreamIsTheLedger(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var failed any
		synctest.Test(t, func(t *testing.T) {
			defer func() { failed = recover() }() // a failed draw must not end the goroutine of the test
			r := newRig(t, rapid.Bool().Draw(rt, "owned"))
			facts := msg.Facts{
				Incarnation: 7, MaxOngoing: 6, BlockSize: 4,
				Blocks: rapid.IntRange(0, 40).Draw(rt, "blocks"),
			}
			in := newEventQueue(1, testHasher, "demo", r.notifyRecorder)
			h := &randomHistory{rt: rt, t: t, r: r, in: in, facts: facts}
			old := newReader(rt)
			for range rapid.IntRange(0, 60).Draw(rt, "steps") {
				h.step()
				old.follow(r)
			}
			assert.Equal(rt, r.newSubscriber(rt).blockSums(), old.blockSums())
			r.hub.List(r.tape)
			old.follow(r)
			assert.Equal(rt, r.newSubscriber(rt).blockSums(), old.blockSums())
		})
		if failed != nil {
			panic(failed)
		}
	})
}

// randomHistory applies random steps to a rank.
type randomHistory struct {
	rt      *rapid.T
	t       *testing.T
	r       *testRig
	in      *eventQueue
	facts   msg.Facts
	ready   bool
	tickets uint64
}

func (h *randomHistory) draw(n int) int { return rapid.IntRange(0, n-1).Draw(h.rt, "n") }

// tokens are a prompt of one of three families with shared prefixes.
func (h *randomHistory) tokens() []uint32 {
	out := ids(0, 4*(1+h.draw(8)))
	fork := h.draw(len(out))
	for i := fork; i < len(out); i++ {
		out[i] += uint32(1000 * (1 + h.draw(2)))
	}
	return out
}

func (h *randomHistory) step() {
	switch h.draw(12) {
	case 0, 1, 2:
		blocks := prompt(h.tokens()...)
		a := &msg.Admit{
			ReqID: 1, Epoch: 3, Tokens: 5 * len(blocks), Blocks: blocks, Hit: h.draw(30),
			HitBlocks: h.draw(9), Reply: make(chan msg.AdmitReply, 1),
		}
		h.r.box.Send(a)
		if rep := <-a.Reply; rep.Refusal == msg.Granted {
			h.tickets = rep.Ticket.ID
			clear(blocks) // they are ours again
		}
	case 3, 4:
		h.r.box.Send(&msg.Done{
			TicketID: h.tickets, Outcome: msg.Outcome(h.draw(4)), HasCached: h.draw(2) == 0,
			PromptTokens: h.draw(60), CachedTokens: h.draw(40),
		})
		h.tickets -= min(h.tickets, 1)
	case 5, 6, 7:
		h.event()
	case 8:
		time.Sleep(time.Duration(h.draw(100_000)) * time.Millisecond)
	case 9:
		if h.draw(3) > 0 || !h.ready {
			h.facts.Incarnation++
			h.ready = true
			require.NoError(h.rt, h.r.Ready(h.t.Context(), h.facts))
			synctest.Wait()
			h.in = newEventQueue(h.in.subscriptionID, testHasher, "demo", h.in.rewake(h.r))
		}
	case 10:
		h.r.hub.List(h.r.tape)
	case 11:
		if h.draw(4) == 0 {
			h.r.box.Send(&msg.Admit{Epoch: 3, Ctx: brokenContext{}})
		}
	}
}

// rewake is the notify of the next subscription, which a second Ready began.
func (in *eventQueue) rewake(r *testRig) func(in *eventQueue) {
	in.subscriptionID = r.state.subscriptionID
	return r.notifyRecorder
}

func (h *randomHistory) event() {
	media := []string{"GPU", "CPU", "STORAGE", "elsewhere"}
	medium := media[min(h.draw(8)/2, 3)]
	name := func(tokens []uint32, i int) kvevents.Hash {
		return kvevents.UintHash(prompt(tokens...)[i])
	}
	tokens := h.tokens()
	n := len(tokens) / 4
	from := h.draw(n)
	switch h.draw(12) {
	case 0:
		h.in.Cleared()
	case 1:
		h.in.Reset(h.draw(2) == 0)
	case 2, 3, 4, 5:
		ev := &kvevents.Removed{Medium: medium}
		for i := from; i < n; i++ {
			ev.Hashes = append(ev.Hashes, name(tokens, i))
		}
		h.in.Removed(ev)
	default:
		ev := &kvevents.Stored{Medium: medium, BlockSize: 4, Tokens: tokens[4*from:]}
		for i := from; i < n; i++ {
			ev.Hashes = append(ev.Hashes, name(tokens, i))
		}
		if from > 0 {
			ev.Parent = name(tokens, from-1)
		}
		h.in.Stored(ev)
	}
}

// TestALongKVRecordTravelsInParts: a late subscriber gets many thousand blocks in records of bounded size,
// all with the number of the snapshot.
func TestALongKVRecordTravelsInParts(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		in := newEventQueue(1, testHasher, "demo", r.notifyRecorder)
		old := newReader(t)
		const n = 3*listBlocks + 17
		all := ids(0, 4*n)
		ev := &kvevents.Stored{BlockSize: 4, Tokens: all}
		for i := range n {
			ev.Hashes = append(ev.Hashes, kvevents.UintHash(uint64(i+1)))
		}
		in.Stored(ev)
		old.follow(r)
		assert.Equal(t, n, old.hit(kvindex.GPU, prompt(all...)), "one event of many blocks is one chain")
		assert.Equal(t, 4, old.size[kvindex.GPU])
		late := &recordingSink{}
		defer r.hub.Subscribe(late)()
		synctest.Wait()
		got := late.take()
		assert.Equal(t, []msg.RecordKind{
			msg.RecSnapshot, msg.RecKVBegin, msg.RecKV, msg.RecKV, msg.RecKV,
			msg.RecKV, msg.RecKVEnd,
		}, kinds(got))
		for _, rec := range got {
			assert.Equal(t, got[0].Seq, rec.Seq)
		}
		in.Removed(&kvevents.Removed{Hashes: ev.Hashes})
		old.follow(r)
		assert.Empty(t, old.blockSums())
	})
}

// TestAListAnswersItsSinkOnly: other sinks get no snapshot, and one that asks once gets nothing more.
func TestAListAnswersItsSinkOnly(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		other := &recordingSink{}
		defer r.hub.Subscribe(other)()
		r.sendPrompt(prompt(ids(0, 16)...), 0)
		other.take()
		once, done := &recordingSink{}, make(chan struct{})
		r.send(msg.List{Sink: once, Done: done})
		<-done
		r.hub.List(other)
		r.send(&msg.Progress{})
		for _, s := range []*recordingSink{other, once} {
			assert.Equal(t, []msg.RecordKind{msg.RecSnapshot, msg.RecKVBegin, msg.RecKV, msg.RecKVEnd},
				kinds(s.take()))
		}
		for _, rec := range r.tape.take() {
			assert.NotEqual(t, msg.RecSnapshot, rec.Kind)
		}
	})
}

// TestThePanicOfAnActorLosesItsLedger: unknown blocks are not claimed, the events go on, and status says
// partial.
func TestThePanicOfAnActorLosesItsLedger(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		first, second := ids(0, 8), ids(100, 8)
		p.publish(storedBlocks(1, nil, first))
		old.follow(r)
		require.Equal(t, 2, old.hit(kvindex.GPU, prompt(first...)))
		r.send(&msg.Admit{Epoch: 3, Ctx: brokenContext{}})
		old.follow(r)
		assert.Empty(t, old.blockSums())
		p.publish(storedBlocks(1, nil, second), removedBlocks(1000))
		old.follow(r)
		assert.Equal(t, 2, old.hit(kvindex.GPU, prompt(second...)))
		assert.Equal(t, client.EventsPartial, r.Status().KV.Events.State)
		p.publish(list{"AllBlocksCleared"}, storedBlocks(1, nil, first))
		old.follow(r)
		assert.Equal(t, map[kvindex.Tier][2]uint64{kvindex.GPU: {2, sum(prompt(first...))}}, old.blockSums())
		assert.Equal(t, client.EventsLive, r.Status().KV.Events.State)
	})
}

// TestAPanicOfTheRecorderLosesTheRecordAlone: open requests stay counted, and new prompts and events are
// recorded.
func TestAPanicOfTheRecorderLosesTheRecordAlone(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		first, second := ids(0, 8), ids(100, 8)
		p.publish(storedBlocks(1, nil, first))
		r.sendPrompt(prompt(ids(500, 8)...), 0)
		old.follow(r)
		require.Equal(t, 2, old.hit(kvindex.GPU, prompt(first...)))
		r.recorder.box.Send(promptEnd{})
		old.follow(r)
		assert.Empty(t, old.blockSums())
		assert.Equal(t, 1, r.Status().InFlight)
		p.publish(storedBlocks(1, nil, second))
		r.sendPrompt(prompt(ids(600, 8)...), 0)
		old.follow(r)
		assert.Equal(t, 2, old.hit(kvindex.GPU, prompt(second...)))
		assert.Equal(t, 2, old.hit(kvindex.Sent, prompt(ids(600, 8)...)))
		assert.Equal(t, client.EventsPartial, r.Status().KV.Events.State)
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

func sum(hashes []uint64) (s uint64) {
	for _, h := range hashes {
		s += h
	}
	return s
}

// TestEventsBeyondTheBoundBeginAnew: the queue holds a bounded number of bytes.
func TestEventsBeyondTheBoundBeginAnew(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		woken := 0
		in := newEventQueue(1, testHasher, "demo", func(*eventQueue) { woken++ })
		old := newReader(t)
		ev := &kvevents.Stored{BlockSize: 4, Tokens: ids(0, 4), Hashes: []kvevents.Hash{kvevents.UintHash(9)}}
		in.Stored(ev)
		r.queued(in)
		old.follow(r)
		require.Equal(t, 1, old.hit(kvindex.GPU, prompt(ids(0, 4)...)))
		for i := range 8_000 {
			ev.Tokens, ev.Hashes = ids(0, 400), nil
			for k := range 100 {
				ev.Hashes = append(ev.Hashes, kvevents.UintHash(uint64(1000*i+k+10)))
			}
			in.Stored(ev)
			require.LessOrEqual(t, in.pending.bytes(), maxQueuedBytes)
		}
		dropped, _ := in.lossCounts()
		assert.Equal(t, uint64(2), dropped)
		assert.Equal(t, 2, woken, "one message, however many events")
		r.queued(in)
		old.follow(r)
		assert.LessOrEqual(t, old.blockSums()[kvindex.GPU][0], uint64(100))
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

// TestEventsHashAsPromptsDo is KV12 on the replica's side. Chain hashes equal those of an ingress; salt
// and adapter give other hashes, an image matches no text, and blocks on other machines are no hits.
func TestEventsHashAsPromptsDo(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		in := newEventQueue(1, testHasher, "demo", r.notifyRecorder)
		old := newReader(t)
		raw := func(i byte) kvevents.Hash {
			b := make([]byte, 32)
			b[0] = i
			h, ok := kvevents.BytesHash(b)
			require.True(t, ok)
			return h
		}
		tokens := ids(0, 12)
		salt := []byte{0x91, 0xa4, 's', 'a', 'l', 't'}
		lora := []byte{0x91, 0xa4, 'l', 'o', 'r', 'a'}
		image := []byte{0x91, 0x92, 0xa3, 'i', 'm', 'g', 0}
		events := []*kvevents.Stored{
			{Hashes: []kvevents.Hash{raw(1), raw(2), raw(3)}},
			{
				Hashes: []kvevents.Hash{
					kvevents.IntHash(-1), kvevents.IntHash(-2),
					kvevents.UintHash(1 << 63),
				},
				Extra: [][]byte{salt, nil, nil},
			},
			{
				Hashes: []kvevents.Hash{raw(4), raw(5), raw(6)}, LoraName: "lora",
				Extra: [][]byte{lora, lora, lora},
			},
			{Hashes: []kvevents.Hash{raw(1), raw(8), raw(9)}, Extra: [][]byte{nil, image, nil}},
		}
		for _, ev := range events {
			ev.BlockSize, ev.Tokens = 4, tokens
			in.Stored(ev)
		}
		old.follow(r)
		for i, salt := range []kvindex.Salt{{}, {CacheSalt: "salt"}, {Adapter: "lora"}} {
			assert.Equal(t, 3, old.hit(kvindex.GPU, salted(salt, tokens...)), strconv.Itoa(i))
		}
		assert.Zero(t, old.hit(kvindex.GPU, salted(kvindex.Salt{CacheSalt: "other"}, tokens...)))
		assert.Equal(t, uint64(3*3+2), old.blockSums()[kvindex.GPU][0],
			"the image's blocks are its own, the one in front of it is shared")
		in.Removed(&kvevents.Removed{Hashes: []kvevents.Hash{raw(9), raw(8)}})
		in.Removed(&kvevents.Removed{Hashes: []kvevents.Hash{raw(3), raw(2)}})
		old.follow(r)
		assert.Equal(t, 1, old.hit(kvindex.GPU, prompt(tokens...)))

		in.Stored(&kvevents.Stored{
			Hashes: []kvevents.Hash{raw(1)}, Tokens: ids(0, 4), BlockSize: 4,
			Medium: "CPU",
		})
		in.Stored(&kvevents.Stored{
			Hashes: []kvevents.Hash{raw(1)}, Tokens: ids(0, 4), BlockSize: 4,
			Medium: "STORAGE",
		})
		in.Stored(&kvevents.Stored{
			Hashes: []kvevents.Hash{raw(1)}, Tokens: ids(0, 4), BlockSize: 4,
			Medium: "CPU", Locality: "REMOTE",
		})
		in.Stored(&kvevents.Stored{
			Hashes: []kvevents.Hash{raw(1)}, Tokens: ids(0, 4), BlockSize: 4,
			Medium: "TAPE",
		})
		old.follow(r)
		assert.Equal(t, [...]uint64{1, 1},
			[...]uint64{old.blockSums()[kvindex.CPU][0], old.blockSums()[kvindex.Disk][0]})
		_, foreign := in.lossCounts()
		assert.Equal(t, uint64(2), foreign)
	})
}
