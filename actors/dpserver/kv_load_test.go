package dpserver

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// heldSink holds the first record of a kind until it is released.
type heldSink struct {
	kind    msg.RecordKind
	reached chan struct{}
	release chan struct{}
	once    sync.Once
}

func (s *heldSink) Deliver(rec *msg.Record) {
	if rec.Kind == s.kind {
		s.once.Do(func() {
			close(s.reached)
			<-s.release
		})
	}
}

// TestAnAdmissionIsAnsweredDuringKVWork: an Admit is answered while the record of the KV cache is in the
// middle of a change.
func TestAnAdmissionIsAnsweredDuringKVWork(t *testing.T) {
	for name, kind := range map[string]msg.RecordKind{"first block": msg.RecKVBegin, "blocks": msg.RecKV} {
		t.Run(name, func(t *testing.T) {
			withRank(t, 9, true, func(t *testing.T, r *testRig) {
				held := &heldSink{kind: kind, reached: make(chan struct{}), release: make(chan struct{})}
				defer r.hub.Subscribe(held)()
				synctest.Wait()
				in := newEventQueue(1, testHasher, "demo", r.notifyRecorder)
				in.Stored(&kvevents.Stored{
					BlockSize: 4, Tokens: ids(0, 4), Hashes: []kvevents.Hash{kvevents.UintHash(1)},
				})
				<-held.reached
				began := time.Now()
				a := &msg.Admit{
					Ctx: t.Context(), ReqID: 1, Epoch: 3, Tokens: 16, Blocks: prompt(ids(100, 16)...),
					Reply: make(chan msg.AdmitReply, 1),
				}
				require.NoError(t, r.box.TrySend(a))
				assert.Equal(t, msg.Granted, (<-a.Reply).Refusal)
				assert.Zero(t, time.Since(began))
				close(held.release)
				synctest.Wait()
				assert.Equal(t, map[kvindex.Tier]uint64{kvindex.GPU: 1, kvindex.Sent: 4}, r.held(t))
			})
		})
	}
}

// held is how many blocks a new subscriber finds in each tier.
func (r *testRig) held(t *testing.T) map[kvindex.Tier]uint64 {
	out := map[kvindex.Tier]uint64{}
	for tier, sums := range r.newSubscriber(t).blockSums() {
		out[tier] = sums[0]
	}
	return out
}

// checkingSink is a reader of the stream as it comes.
type checkingSink struct {
	mu     sync.Mutex
	reader *reader
}

func (s *checkingSink) Deliver(rec *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reader.applyInOrder(rec)
}

// TestSnapshotsAmongRequestsAndEvents: while requests, events and requests for snapshots come at the same
// time, no reader gets a record with an unexpected number, or of a block set that it does not know. All hold
// the same blocks in the end.
func TestSnapshotsAmongRequestsAndEvents(t *testing.T) {
	withRank(t, 99, true, func(t *testing.T, r *testRig) {
		const rounds = 300
		first := &checkingSink{reader: newReader(t)}
		defer r.hub.Subscribe(first)()
		synctest.Wait()
		var work sync.WaitGroup
		work.Go(func() {
			in := newEventQueue(1, testHasher, "demo", r.notifyRecorder)
			for i := range uint32(rounds) {
				in.Stored(&kvevents.Stored{
					BlockSize: 4, Tokens: ids(10*i, 8),
					Hashes: []kvevents.Hash{
						kvevents.UintHash(uint64(2 * i)), kvevents.UintHash(uint64(2*i + 1)),
					},
				})
				if i%3 == 0 {
					last := kvevents.UintHash(uint64(2*i + 1))
					in.Removed(&kvevents.Removed{Hashes: []kvevents.Hash{last}})
				}
			}
		})
		work.Go(func() {
			for i := range uint32(rounds) {
				a := &msg.Admit{
					ReqID: uint64(i), Epoch: 3, Tokens: 16, Blocks: prompt(ids(7*i, 16)...),
					Reply: make(chan msg.AdmitReply, 1),
				}
				r.box.Send(a)
				r.box.Send(&msg.Done{TicketID: (<-a.Reply).Ticket.ID, Outcome: msg.Outcome(i % 3)})
			}
		})
		work.Go(func() {
			for range rounds / 10 {
				r.hub.List(first)
				late := &checkingSink{reader: newReader(t)}
				defer r.hub.Subscribe(late)()
			}
		})
		work.Wait()
		synctest.Wait()
		want := r.newSubscriber(t).blockSums()
		assert.NotEmpty(t, want)
		assert.Equal(t, want, first.reader.blockSums())
		synctest.Wait()
		r.stream.mu.Lock()
		defer r.stream.mu.Unlock()
		assert.Len(t, r.stream.sinks, 2, "a sink that has left is not kept")
	})
}

// BenchmarkAdmissionUnderEvents is some thousand admissions a second, each of a prompt of 128 blocks, at a
// rank whose engine stores 50,000 blocks a second, in steps of several sizes. It reports the time to the
// answer of the Admit.
func BenchmarkAdmissionUnderEvents(b *testing.B) {
	for _, step := range []int{0, 50, 500, 4096} {
		b.Run("step="+strconv.Itoa(step), func(b *testing.B) { benchmarkUnderEvents(b, step) })
	}
}

func benchmarkUnderEvents(b *testing.B, step int) {
	const blocksPerSecond, pause = 50_000, 100 * time.Microsecond
	sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
	defer sys.Shutdown()
	f := &Factory{
		System: sys, Hub: msg.NewHub(), NewEngine: func(*msg.ReplicaSpec) Engine { return healthyEngine{} },
		Log: slog.New(slog.DiscardHandler),
	}
	defer f.Hub.Subscribe(discardSink{})()
	s, err := f.New(msg.ReplicaSpec{
		App: demo(), Unit: "demo/0/0", Epoch: 1, Watcher: &recordingSink{}, Target: msg.Target{Owned: true},
	})
	require.NoError(b, err)
	defer func() { _ = s.Stop(context.Background()) }()
	require.NoError(b, s.Ready(b.Context(),
		msg.Facts{Incarnation: 1, MaxOngoing: 256, Blocks: 1 << 16, BlockSize: 16}))
	h, err := s.newSubscription(&msg.EventSource{Connect: "tcp://127.0.0.1:9"}, 1)
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(b.Context())
	var engine sync.WaitGroup
	if step > 0 {
		every := time.Duration(step) * time.Second / blocksPerSecond
		engine.Go(func() { storeSteadily(ctx, h.queue, step, every) })
	}
	admit := &msg.Admit{Ctx: ctx, Epoch: 1, Tokens: 100, Reply: make(chan msg.AdmitReply, 1)}
	prompts := manyPrompts(128)
	var waits []time.Duration
	for b.Loop() {
		time.Sleep(pause)
		admit.ReqID++
		admit.Blocks = append(admit.Blocks[:0], prompts[int(admit.ReqID)%len(prompts)]...)
		began := time.Now()
		s.box.Send(admit)
		id := (<-admit.Reply).Ticket.ID
		waits = append(waits, time.Since(began))
		s.box.Send(&msg.Done{TicketID: id, CompletionTokens: 8, FirstToken: time.Millisecond})
	}
	cancel()
	engine.Wait()
	slices.Sort(waits)
	for name, at := range map[string]int{"p50": 500, "p99": 990, "p99.9": 999} {
		b.ReportMetric(float64(waits[len(waits)*at/1000].Nanoseconds())/1e3, name+"-µs")
	}
}

// storeSteadily stores n new blocks per step, and removes those of 16 steps before.
func storeSteadily(ctx context.Context, in *eventQueue, n int, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	name := uint64(1)
	var held [][]kvevents.Hash
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ev := &kvevents.Stored{BlockSize: 16, Tokens: ids(uint32(name), 16*n)}
		for range n {
			ev.Hashes = append(ev.Hashes, kvevents.UintHash(name))
			name++
		}
		in.Stored(ev)
		if held = append(held, ev.Hashes); len(held) > 16 {
			in.Removed(&kvevents.Removed{Hashes: held[0]})
			held = held[1:]
		}
	}
}
