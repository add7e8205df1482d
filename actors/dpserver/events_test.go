package dpserver

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing/kvindex"
	"github.com/dpserve/dpserve/test/memnet"
)

func events(r *testRig) client.EventStatus { return *r.Status().KV.Events }

// TestKV3EventsReachTheStream: in order, over a gap that a replay fills, and each once.
func TestKV3EventsReachTheStream(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		long := ids(0, 40)
		p.publish(storedBlocks(1, nil, long[:16]))
		seq, lost := p.batch(storedBlocks(1, 1012, long[16:32]))
		p.publish(storedBlocks(1, 1028, long[32:]))
		old.follow(r)
		assert.Equal(t, 10, old.hit(kvindex.GPU, prompt(long...)))
		p.raw(seq, lost)
		p.publish(removedBlocks(1036, 1032))
		old.follow(r)
		assert.Equal(t, map[kvindex.Tier][2]uint64{kvindex.GPU: {8, sum(prompt(long[:32]...))}},
			old.blockSums())
		p.mu.Lock()
		asked := p.asked
		p.mu.Unlock()
		assert.Equal(t, []uint64{0, 1}, asked,
			"one replay of all there was, one from the first missing batch")
		time.Sleep(2 * healthPeriod(&standard)) // counters are a copy of some moments ago
		assert.Equal(t, client.EventStatus{State: client.EventsLive, Batches: 4, Gaps: 1}, events(r))
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

// TestAnEngineThatDialsFindsItsRank: the rank listens when New returns. Events before the first Ready belong
// to the engine that becomes ready.
func TestAnEngineThatDialsFindsItsRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		r := newRig(t, true, func(f *Factory, spec *msg.ReplicaSpec) {
			overNetwork(network)(f, spec)
			spec.Events = &msg.EventSource{Bind: "tcp://" + pubAddr}
		})
		dial := r.node.DialEvents
		c, err := zmtp.Dial(t.Context(), dial, pubAddr, zmtp.Pub, zmtp.DefaultLimits())
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		_, err = c.Recv()
		require.NoError(t, err)
		p := &publisher{t: t, net: network, subs: []*zmtp.Conn{c}}
		first, second := ids(0, 16), ids(100, 8)
		p.publish(storedBlocks(1, nil, first))
		old := newReader(t)
		old.follow(r)
		assert.Empty(t, old.blockSums(), "no incarnation, no records")
		assert.Equal(t, client.EventsLive, events(r).State)
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7, MaxOngoing: 9}))
		p.publish(storedBlocks(1, nil, second))
		old.follow(r)
		assert.Equal(t, [...]int{4, 2},
			[...]int{old.hit(kvindex.GPU, prompt(first...)), old.hit(kvindex.GPU, prompt(second...))})
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

func TestNewFailsWhereEventsCannotBeHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		taken, err := network.Listen(pubAddr)
		require.NoError(t, err)
		defer func() { _ = taken.Close() }()
		sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
		defer sys.Shutdown()
		for bind, want := range map[string]string{
			"tcp://" + pubAddr:    "kv events of rank 0/0: listen for kv events on " + pubAddr,
			"tcp://10.1.2.3:5557": "beyond loopback",
			"ipc:///kv.sock":      "is not tcp://HOST:PORT",
		} {
			f := &Factory{
				System: sys, Hub: msg.NewHub(),
				NewEngine: func(*msg.ReplicaSpec) Engine { return healthyEngine{} },
				Log:       slog.New(slog.DiscardHandler),
			}
			spec := msg.ReplicaSpec{
				App: demo(), Watcher: &recordingSink{},
				Events: &msg.EventSource{Bind: bind},
			}
			overNetwork(network)(f, &spec)
			_, err := f.New(spec)
			require.ErrorContains(t, err, want)
			if bind != "tcp://"+pubAddr {
				assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
			}
		}
	})
}

// TestEventsAreFoundWithReady: the node learned the sockets of an attached engine by asking it.
func TestEventsAreFoundWithReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		r := newRig(t, false, overNetwork(network))
		facts := msg.Facts{
			Incarnation: 7, MaxOngoing: 9,
			Events: &msg.EventSource{Connect: "tcp://" + pubAddr, Replay: "tcp://" + replayAddr},
		}
		require.NoError(t, r.Ready(t.Context(), facts))
		time.Sleep(1500 * time.Millisecond)
		assert.Equal(t, client.EventsConnecting, events(r).State)
		p := newPublisher(t, network)
		t.Cleanup(p.close)
		p.batch(storedBlocks(1, nil, ids(0, 16)))
		time.Sleep(2 * time.Second)
		old := newReader(t)
		old.follow(r)
		assert.Equal(t, 4, old.hit(kvindex.GPU, prompt(ids(0, 16)...)), "by replay")
		assert.Equal(t, client.EventsLive, events(r).State)
		facts.Incarnation, facts.Events = 8, nil
		require.NoError(t, r.Ready(t.Context(), facts))
		old.follow(r)
		assert.Empty(t, old.blockSums())
		assert.Nil(t, r.subscriptions.current.Load(), "the engine behind the URL publishes nothing any more")
	})
}

// TestAnAttachedEngineRestartsInPlace: its blocks are dropped at once, a new incarnation is drawn under
// the same epoch, and its requests are no longer counted. A restart of an engine that dpserve started is
// handled by its node.
func TestAnAttachedEngineRestartsInPlace(t *testing.T) {
	for _, owned := range []bool{false, true} {
		withPublisher(t, owned, false, func(t *testing.T, r *testRig, p *publisher) {
			old := newReader(t)
			before, after := ids(0, 16), ids(500, 8)
			p.publish(storedBlocks(1, nil, before))
			p.publish(storedBlocks(1, nil, ids(40, 4)))
			r.sendPrompt(prompt(ids(900, 16)...), 0)
			old.follow(r)
			require.Equal(t, 4, old.hit(kvindex.GPU, prompt(before...)))
			p.restart()
			old.follow(r)
			assert.Zero(t, old.hit(kvindex.GPU, prompt(before...)),
				"the connection is gone: nothing is known")
			time.Sleep(300 * time.Millisecond)
			p.publish(storedBlocks(1, nil, after))
			time.Sleep(time.Second)
			synctest.Wait()
			got := r.tape.take()
			for _, rec := range got {
				old.apply(&rec)
			}
			assert.Equal(t, 2, old.hit(kvindex.GPU, prompt(after...)))
			st := r.Status()
			assert.Equal(t, uint64(1), st.KV.Events.Restarts)
			assert.Equal(t, uint64(3), st.Epoch)
			assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
			if owned {
				assert.Equal(t, [...]any{"0000000000000007", 1}, [...]any{st.Incarnation, st.InFlight})
				return
			}
			assert.NotEqual(t, "0000000000000007", st.Incarnation)
			assert.Zero(t, st.InFlight)
			assert.Zero(t, old.hit(kvindex.Sent, prompt(ids(900, 16)...)))
			again := r.ask()
			assert.Equal(t, [...]any{msg.Granted, uint64(3)}, [...]any{again.Refusal, again.Ticket.Epoch})
			assert.Equal(t, st.Incarnation, formatIncarnation(again.Ticket.Incarnation))
		})
	}
}

// TestEventsBeforeTheirBlockSetsAreKept: the goroutine of a new subscription may queue events before the
// replica lets its block sets begin.
func TestEventsBeforeTheirBlockSetsAreKept(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		in := newEventQueue(2, testHasher, "demo", r.notifyRecorder)
		in.Stored(&kvevents.Stored{
			BlockSize: 4, Tokens: ids(0, 4), Hashes: []kvevents.Hash{kvevents.UintHash(1)},
		})
		synctest.Wait()
		assert.Empty(t, r.held(t), "these block sets are of the subscription before")
		r.stream.mu.Lock()
		sets := r.stream.setsID
		r.stream.mu.Unlock()
		r.recorder.box.Send(setsBegin{
			setsID: sets, subscriptionID: 2, settings: recorderSettings{facts: msg.Facts{BlockSize: 4}},
		})
		synctest.Wait()
		assert.Equal(t, map[kvindex.Tier]uint64{kvindex.GPU: 1}, r.held(t))
	})
}

// TestCountersThatFellAreARestart: without events, counters that fell show a restart. One such report does
// not suffice, nor do two that contradict each other.
func TestCountersThatFellAreARestart(t *testing.T) {
	withPublisher(t, false, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		p.publish(storedBlocks(1, nil, ids(0, 16)))
		say := func(prompt, generated float64) {
			r.engine.set(func(f *fakeEngine) {
				f.counters = engine.Counters{PromptTokens: prompt, GenerationTokens: generated, Seen: true}
			})
			time.Sleep(time.Second)
			synctest.Wait()
		}
		incarnation := func() string { return r.Status().Incarnation }
		for _, c := range [][2]float64{{100, 50}, {110, 50}, {5, 5}, {120, 50}, {5, 60}, {4, 70}, {130, 60}} {
			say(c[0], c[1])
			assert.Equal(t, "0000000000000007", incarnation(), "%v", c)
		}
		say(5, 5)
		say(6, 5)
		assert.NotEqual(t, "0000000000000007", incarnation())
		now := incarnation()
		time.Sleep(5 * time.Second)
		old.follow(r)
		assert.Equal(t, now, incarnation())
		assert.Equal(t, 4, old.hit(kvindex.GPU, prompt(ids(0, 16)...)),
			"the new subscription asked for all there is")
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

// TestReadyAfterAFenceListensAnew: an attached engine that was not followed for a while is asked for all
// events again.
func TestReadyAfterAFenceListensAnew(t *testing.T) {
	withPublisher(t, false, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		p.publish(storedBlocks(1, nil, ids(0, 16)))
		r.Fence("health check")
		p.publish(storedBlocks(1, nil, ids(100, 16)))
		old.follow(r)
		require.Equal(t, uint64(8), old.blockSums()[kvindex.GPU][0])
		p.restart()
		p.batch(storedBlocks(2, nil, ids(200, 16)))
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 9, BlockSize: 4}))
		old.follow(r)
		time.Sleep(time.Second)
		old.follow(r)
		assert.Equal(t, map[kvindex.Tier][2]uint64{kvindex.GPU: {4, sum(prompt(ids(200, 16)...))}},
			old.blockSums())
		assert.Equal(t, "0000000000000008", r.Status().Incarnation)
		assert.Equal(t, client.EventsLive, events(r).State)
		time.Sleep(2 * healthPeriod(&standard))
		assert.Equal(t, uint64(3), events(r).Batches, "counters go on")
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

// TestKV5ClearedEmptiesThisRankAlone: the engine's event empties the block sets of events and of sent
// prompts.
func TestKV5ClearedEmptiesThisRankAlone(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		r.engine.set(func(f *fakeEngine) { f.counters.Seen = true })
		old := newReader(t)
		p.publish(storedBlocks(1, nil, ids(0, 16)), storedBlocks(1, nil, ids(0, 16), -1, "CPU"))
		old.follow(r)
		require.Equal(t, [...]int{4, 4}, [...]int{
			old.hit(kvindex.GPU, prompt(ids(0, 16)...)),
			old.hit(kvindex.CPU, prompt(ids(0, 16)...)),
		})
		id := r.sendPrompt(prompt(ids(0, 16)...), 4)
		r.send(&msg.Done{TicketID: id, FirstToken: 1})
		p.publish(list{"AllBlocksCleared"}, storedBlocks(1, nil, ids(300, 8)))
		old.follow(r)
		holds := old.blockSums()
		assert.LessOrEqual(t, holds[kvindex.Sent][0], uint64(2),
			"no more than the engine holds, now or between the two events")
		delete(holds, kvindex.Sent)
		assert.Equal(t, map[kvindex.Tier][2]uint64{kvindex.GPU: {2, sum(prompt(ids(300, 8)...))}}, holds)
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())

		r.engine.set(func(f *fakeEngine) { f.counters.Asleep = true })
		time.Sleep(1500 * time.Millisecond)
		old.follow(r)
		assert.Empty(t, old.blockSums(), "asleep: no event told")
		p.publish(removedBlocks(1300, 1304), storedBlocks(1, nil, ids(300, 8)))
		time.Sleep(3 * time.Second)
		old.follow(r)
		assert.Equal(t, 2, old.hit(kvindex.GPU, prompt(ids(300, 8)...)), "what comes after it stands")
	})
}

// TestKV13GarbageIsCountedAndChangesNothing is KV13 on the replica's side.
func TestKV13GarbageIsCountedAndChangesNothing(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		p.publish(storedBlocks(1, nil, ids(0, 16)))
		old.follow(r)
		was := old.blockSums()
		p.publish(
			list{"BlockStored", list{7, 8}, 7, ids(0, 8), 4},     // its own parent
			list{"BlockStored", list{1012}, 1000, ids(90, 4), 4}, // known elsewhere
			list{"BlockStored", list{55, 56}, nil, ids(0, 3), 4}, // too few tokens
			list{"BlockStored", list{57}, nil, ids(0, 8), 8},     // another block size
			list{"BlockStored", list{58}, 4711, ids(0, 4), 4},    // an unknown parent: kept aside
			list{"BlockRemoved", list{9999}},                     // never stored
			list{"BlockExploded", 1},                             // unknown
			storedBlocks(3, nil, ids(700, 8), -1, "TAPE"),        // a place that is no tier
		)
		old.follow(r)
		assert.Equal(t, was, old.blockSums())
		p.ring = append(p.ring, []byte{0xc1, 0xff}) // so it is in the engine's own ring
		p.raw(2, p.ring[2])
		old.follow(r)
		assert.Equal(t, was, old.blockSums())
		time.Sleep(1500 * time.Millisecond)
		assert.Equal(t, client.EventsPartial, events(r).State)
		time.Sleep(time.Second)
		assert.GreaterOrEqual(t, events(r).Dropped, uint64(6))
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

// TestBlockSizesThatDiffer: the events are used, and status names both sizes.
func TestBlockSizesThatDiffer(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		p.publish(list{"BlockStored", list{1, 2}, nil, ids(0, 16), 8})
		st := r.Status().KV
		assert.Equal(t, "kv events come in blocks of 8 tokens, the engine reported 4", st.Note)
		assert.Equal(t, [...]any{8, int64(8000), 2}, [...]any{st.BlockSize, st.Capacity, st.Blocks})
		old := r.newSubscriber(t)
		assert.Equal(t, 8, old.size[kvindex.GPU])
	})
}

// TestKV10SilentEvents: under traffic without an event for 30 s status says so, and sent prompts live for the
// full record time until events come again.
func TestKV10SilentEvents(t *testing.T) {
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		serve := func(from uint32) {
			id := r.sendPrompt(prompt(ids(from, 16)...), 0)
			r.send(&msg.Done{
				TicketID: id, FirstToken: 1, PromptTokens: 16, CompletionTokens: 3,
				HasCached: true,
			})
		}
		p.publish(storedBlocks(1, nil, ids(0, 16)))
		serve(0)
		time.Sleep(liveSentTTL + minExpiryInterval)
		old.follow(r)
		assert.Zero(t, old.hit(kvindex.Sent, prompt(ids(0, 16)...)),
			"events tell the truth: the record is for the time until they come")
		assert.Equal(t, 4, old.hit(kvindex.GPU, prompt(ids(0, 16)...)))
		time.Sleep(time.Hour)
		assert.Equal(t, client.EventsLive, events(r).State, "no traffic, no alarm")
		for i := range uint32(40) {
			if i == 25 {
				assert.Equal(t, client.EventsLive, events(r).State)
			}
			serve(1000 * (i + 1))
			time.Sleep(time.Second)
		}
		old.follow(r)
		assert.Equal(t, client.EventsSilent, events(r).State)
		assert.Greater(t, events(r).SilentFor, 30.0)
		assert.Contains(t, r.Status().KV.Note, "no kv event for ")
		assert.Contains(t, r.log.String(), "no kv event comes though requests complete")
		time.Sleep(time.Minute)
		old.follow(r)
		assert.Equal(t, 4, old.hit(kvindex.Sent, prompt(ids(40_000, 16)...)),
			"the rank's own record carries on")
		p.publish(storedBlocks(1, nil, ids(0, 4)))
		time.Sleep(time.Second)
		old.follow(r)
		assert.Equal(t, client.EventsLive, events(r).State)
		assert.Zero(t, old.hit(kvindex.Sent, prompt(ids(40_000, 16)...)))
		assert.Equal(t, old.blockSums(), r.newSubscriber(t).blockSums())
	})
}

// TestNoAlarmWhereNoEventIsDue: requests that were cached whole store no block.
func TestNoAlarmWhereNoEventIsDue(t *testing.T) {
	for name, d := range map[string]msg.Done{
		"cached whole": {
			PromptTokens: 18, CompletionTokens: 2, CachedTokens: 16, HasCached: true,
			FirstToken: 1,
		},
		"shorter than a block": {PromptTokens: 3, FirstToken: 1},
		"failed":               {PromptTokens: 300, Outcome: msg.FailedOutcome},
		"nothing was told":     {FirstToken: 1},
		"a block was filled": {
			PromptTokens: 18, CompletionTokens: 3, CachedTokens: 16, HasCached: true,
			FirstToken: 1,
		},
		"a prompt was computed": {PromptTokens: 18, FirstToken: 1},
	} {
		t.Run(name, func(t *testing.T) {
			withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
				p.publish(storedBlocks(1, nil, ids(0, 4)))
				for range 40 {
					d.TicketID = r.ask().Ticket.ID
					r.send(&d)
					time.Sleep(time.Second)
				}
				want := client.EventsLive
				if name[:2] == "a " {
					want = client.EventsSilent
				}
				assert.Equal(t, want, events(r).State)
			})
		})
	}
}

// TestTheRecordFollowsTheEngine: text blocks live long, but the record never outgrows what the engine's
// events report.
func TestTheRecordFollowsTheEngine(t *testing.T) {
	text := func(_ *Factory, spec *msg.ReplicaSpec) { spec.App.Routing.Identity = app.IdentityText }
	withPublisher(t, true, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		for i := range uint32(4) {
			id := r.sendPrompt(prompt(ids(1000*i, 16)...), 0) // stands for 16 tokens of text
			p.publish(storedBlocks(1, nil, ids(1000*i, 16)))
			r.send(&msg.Done{TicketID: id, FirstToken: 1, PromptTokens: 16})
			time.Sleep(10 * time.Second)
		}
		old.follow(r)
		require.Equal(t, uint64(16), old.blockSums()[kvindex.Sent][0], "no events, no corrections, 120 s")
		p.publish(removedBlocks(1012, 1008, 1004, 1000), removedBlocks(2012, 2008))
		old.follow(r)
		assert.Equal(t, uint64(10), old.blockSums()[kvindex.Sent][0])
		assert.Equal(t, 4, old.hit(kvindex.Sent, prompt(ids(3000, 16)...)), "the oldest go")
		assert.Zero(t, old.hit(kvindex.Sent, prompt(ids(0, 16)...)))
	}, text)
}

// TestTheEnginesReport: the report is read while it is needed, and only changes are published.
func TestTheEnginesReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		threshold := 0.9
		var present atomic.Pointer[app.Application]
		route := func(routing app.Routing) {
			a := demo()
			a.Routing = routing
			present.Store(a)
		}
		r := newRig(t, true, func(f *Factory, _ *msg.ReplicaSpec) {
			f.App = func(string) *app.Application { return present.Load() }
		})
		require.NoError(t, r.Ready(t.Context(),
			msg.Facts{Incarnation: 7, MaxOngoing: 9, BlockSize: 16, Blocks: 10}))
		time.Sleep(10 * time.Second)
		assert.Zero(t, r.engine.count("counters"), "nobody reads it")
		route(app.Routing{BusyThreshold: &threshold})
		r.engine.set(func(f *fakeEngine) {
			f.counters = engine.Counters{
				KVUsage: 0.5, HasKVUsage: true,
				Blocks: 20,
			}
		})
		r.tape.take()
		time.Sleep(10 * time.Second)
		asked := r.engine.count("counters")
		assert.InDelta(t, 10, asked, 1)
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecStatus}, kinds(got))
		assert.Equal(t, msg.Status{KVUsage: 0.5, HasKVUsage: true, Capacity: 320, BlockSize: 16},
			got[0].Status)
		late := &recordingSink{}
		defer r.hub.Subscribe(late)()
		time.Sleep(1500 * time.Millisecond)
		assert.Equal(t, []msg.RecordKind{msg.RecSnapshot, msg.RecStatus}, kinds(late.take()),
			"a newcomer hears it")
		route(app.Routing{})
		time.Sleep(2 * time.Second)
		asked = r.engine.count("counters")
		time.Sleep(10 * time.Second)
		assert.Equal(t, asked, r.engine.count("counters"))
		route(app.Routing{BusyThreshold: &threshold})
		time.Sleep(2 * time.Second)
		assert.Greater(t, r.engine.count("counters"), asked)
		r.Fence("x")
		time.Sleep(2 * time.Second)
		asked = r.engine.count("counters")
		time.Sleep(10 * time.Second)
		assert.Equal(t, asked, r.engine.count("counters"), "nothing is asked of a fenced engine")
	})
}

// TestIdleEnginesAreReadRarely: an engine that is read for its restarts alone is read every third second
// while it has nothing to do, and every second from its first request on.
func TestIdleEnginesAreReadRarely(t *testing.T) {
	withPublisher(t, false, true, func(t *testing.T, r *testRig, _ *publisher) {
		reads := func() int {
			before := r.engine.count("counters")
			time.Sleep(30 * time.Second)
			return r.engine.count("counters") - before
		}
		reads()
		assert.Equal(t, 10, reads())
		r.ask()
		time.Sleep(time.Second)
		assert.GreaterOrEqual(t, reads(), 30)
	})
}

// TestTransfersOfAPool: a rank of a pool reads its engine's transfers, shows them, and tells its sinks when a
// decode rank has read a prompt after its lease. Metrics that do not answer do not take the number back.
func TestTransfersOfAPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true, func(_ *Factory, spec *msg.ReplicaSpec) { spec.App.Pool = app.PoolPrefill })
		set := func(late float64, err error) {
			r.engine.set(func(f *fakeEngine) {
				f.dumb = err
				f.counters = engine.Counters{Transfers: engine.Transfers{
					Count: 2, Seconds: 0.25, Bytes: 65536, Failed: 3, Expired: 4, LateReads: late, Seen: true,
				}}
			})
		}
		set(0, nil)
		assert.Nil(t, r.Status().Transfer, "nothing is read yet")
		require.NoError(t, r.Ready(t.Context(),
			msg.Facts{Incarnation: 7, MaxOngoing: 9, BlockSize: 16, Blocks: 10}))
		time.Sleep(3500 * time.Millisecond)
		assert.Equal(t, &client.TransferStatus{
			Count: 2, TotalMs: 250, Bytes: 65536, Failed: 3, Expired: 4,
		}, r.Status().Transfer)
		r.tape.take()
		set(1, nil)
		time.Sleep(1500 * time.Millisecond)
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecStatus}, kinds(got))
		assert.Equal(t, int64(1), got[0].Status.LateReads)
		set(1, errors.New("no metrics"))
		time.Sleep(10 * time.Second)
		assert.Empty(t, r.tape.take())
		assert.Equal(t, uint64(1), r.Status().Transfer.LateReads)
	})
}

// RP10: the last report of an engine that does not answer any more keeps no requests away.
func TestKVUsageExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		threshold := 0.9
		r := newRig(t, true, func(_ *Factory,
			spec *msg.ReplicaSpec,
		) {
			spec.App.Routing.BusyThreshold = &threshold
		})
		r.engine.set(func(f *fakeEngine) { f.counters = engine.Counters{KVUsage: 0.95, HasKVUsage: true} })
		require.NoError(t, r.Ready(t.Context(),
			msg.Facts{Incarnation: 7, MaxOngoing: 9, BlockSize: 16, Blocks: 10}))
		time.Sleep(3500 * time.Millisecond)
		r.tape.take()
		r.engine.set(func(f *fakeEngine) { f.dumb = errors.New("no metrics") })
		time.Sleep(4 * time.Second)
		assert.Empty(t, r.tape.take(), "some are missed now and then")
		time.Sleep(time.Second)
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecStatus}, kinds(got))
		assert.Equal(t, msg.Status{Capacity: 160, BlockSize: 16}, got[0].Status)
		time.Sleep(10 * time.Second)
		assert.Empty(t, r.tape.take())
		r.engine.set(func(f *fakeEngine) { f.dumb = nil })
		time.Sleep(2 * time.Second)
		got = r.tape.take()
		require.Len(t, got, 1)
		assert.True(t, got[0].Status.HasKVUsage)
	})
}

// slowCounters answers when its context ends.
type slowCounters struct {
	*fakeEngine
}

func (s slowCounters) Counters(ctx context.Context) (engine.Counters, error) {
	_, _ = s.fakeEngine.Counters(ctx)
	s.set(func(f *fakeEngine) { f.asked["at once"]++ })
	<-ctx.Done()
	s.set(func(f *fakeEngine) {
		f.asked["most"] = max(f.asked["most"],
			f.asked["at once"])
		f.asked["at once"]--
	})
	return engine.Counters{}, ctx.Err()
}

func TestReportsAreAskedOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		threshold := 0.5
		var slow slowCounters
		r := newRig(t, true, func(f *Factory, spec *msg.ReplicaSpec) {
			spec.App.Routing.BusyThreshold = &threshold
			f.Timers.Scrape, f.Timers.CounterLimit = 100*time.Millisecond, 500*time.Millisecond
			made := f.NewEngine
			f.NewEngine = func(spec *msg.ReplicaSpec) Engine {
				slow = slowCounters{made(spec).(*fakeEngine)}
				return slow
			}
		})
		for i := range uint64(3) {
			require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7 + i, MaxOngoing: 9}))
			time.Sleep(1050 * time.Millisecond)
		}
		assert.Equal(t, 1, slow.count("most"))
		assert.LessOrEqual(t, slow.count("counters"), 7)
	})
}

// TestEventsOfAnOlderSubscriptionAreDropped: they may come from an engine that has ended.
func TestEventsOfAnOlderSubscriptionAreDropped(t *testing.T) {
	withPublisher(t, false, true, func(t *testing.T, r *testRig, p *publisher) {
		old := newReader(t)
		before := r.subscriptions.current.Load().queue
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 9}))
		synctest.Wait()
		before.Stored(&kvevents.Stored{
			BlockSize: 4, Tokens: ids(0, 4),
			Hashes: []kvevents.Hash{kvevents.UintHash(1)},
		})
		old.follow(r)
		assert.Empty(t, old.blockSums())
		p.publish(storedBlocks(1, nil, ids(100, 8)))
		old.follow(r)
		assert.Equal(t, uint64(2), old.blockSums()[kvindex.GPU][0])
	})
}
