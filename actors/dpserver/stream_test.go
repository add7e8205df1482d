package dpserver

import (
	"context"
	"log/slog"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// follower rebuilds a replica's account from its stream alone, as an ingress does.
type follower struct {
	t           *rapid.T
	incarnation uint64
	seq         uint64
	open        map[uint64]msg.OpenRequest
}

func (f *follower) apply(rec *msg.Record) {
	if rec.Kind == msg.RecSnapshot {
		f.incarnation, f.seq, f.open = rec.Incarnation, rec.Seq, map[uint64]msg.OpenRequest{}
		for _, o := range rec.Snapshot.Open {
			f.open[o.ReqID] = o
		}
		return
	}
	require.Equal(f.t, f.incarnation, rec.Incarnation)
	require.Equal(f.t, f.seq+1, rec.Seq, "a gap before %+v", rec)
	f.seq = rec.Seq
	o, known := f.open[rec.ReqID]
	switch rec.Kind {
	case msg.RecAdmitted:
		require.False(f.t, known)
		f.open[rec.ReqID] = msg.OpenRequest{
			ReqID: rec.ReqID, Ingress: rec.Ingress, Tokens: rec.Tokens,
			Hit: rec.Hit,
		}
	case msg.RecFirstToken, msg.RecProgress:
		require.True(f.t, known)
		o.Decoding, o.Out = o.Decoding || rec.Kind == msg.RecFirstToken, rec.Out
		f.open[rec.ReqID] = o
	case msg.RecDone:
		require.True(f.t, known)
		delete(f.open, rec.ReqID)
	case msg.RecSnapshot, msg.RecState, msg.RecGone, msg.RecStatus, msg.RecKVBegin, msg.RecKV, msg.RecKVEnd,
		msg.RecSilent, msg.RecAdapters:
	}
}

// timeChecker holds the last time of each request in the stream.
type timeChecker map[uint64]time.Duration

// check asserts that a record of a request has a time, and that the times of the request do not go back.
func (c timeChecker) check(t require.TestingT, rec *msg.Record) {
	switch rec.Kind {
	case msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone:
		require.Positive(t, rec.At)
		require.GreaterOrEqual(t, rec.At, c[rec.ReqID])
		c[rec.ReqID] = rec.At
	default:
		require.Zero(t, rec.At)
	}
}

// TestTheStreamIsTheAccount: after any sequence of messages, for known tickets or not, a follower of the
// deltas holds the content of a new snapshot, and never more requests than the rank has room for. The times
// of each request do not go back.
func TestTheStreamIsTheAccount(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, rapid.Bool().Draw(rt, "owned"))
			require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7, MaxOngoing: 3}))
			synctest.Wait()
			old, times := &follower{t: rt}, timeChecker{}
			for _, rec := range r.tape.take() {
				old.apply(&rec)
			}
			for i := range rapid.IntRange(0, 40).Draw(rt, "messages") {
				randomMessage(rt, t.Context(), r, uint64(i))
				synctest.Wait()
				for _, rec := range r.tape.take() {
					old.apply(&rec)
					times.check(rt, &rec)
				}
				require.LessOrEqual(rt, len(old.open), 3)
			}
			fresh := &recordingSink{}
			cancel := r.hub.Subscribe(fresh)
			synctest.Wait()
			now := &follower{t: rt}
			for _, rec := range fresh.take() {
				now.apply(&rec)
			}
			assert.Equal(rt, now, old)
			cancel()
		})
	})
}

// TestRecordsTellTheRanksOwnTime: also of first tokens that are reported late, and never outside of the time
// that the rank has seen.
func TestRecordsTellTheRanksOwnTime(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		const ms = time.Millisecond
		told := func() []time.Duration {
			var out []time.Duration
			for _, rec := range r.tape.take() {
				out = append(out, rec.At)
			}
			return out
		}
		time.Sleep(time.Second)
		first, second, third, fourth := r.ask().Ticket, r.ask().Ticket, r.ask().Ticket, r.ask().Ticket
		t0 := told()
		require.Len(t, t0, 4)
		began := t0[0]
		assert.GreaterOrEqual(t, began, time.Second, "since the DPServer was made")
		assert.Equal(t, []time.Duration{began, began, began, began}, t0)

		time.Sleep(100 * ms)
		r.send(&msg.FirstToken{TicketID: first.ID, At: time.Now().Add(-30 * ms)})
		r.send(&msg.FirstToken{TicketID: second.ID})
		r.send(&msg.FirstToken{TicketID: third.ID, At: time.Now().Add(-time.Hour)})
		r.send(&msg.FirstToken{TicketID: fourth.ID, At: time.Now().Add(time.Hour)})
		assert.Equal(t, []time.Duration{began + 70*ms, began + 100*ms, began, began + 100*ms}, told())

		time.Sleep(50 * ms)
		r.send(&msg.Progress{TicketID: first.ID, Out: 5})
		time.Sleep(50 * ms)
		r.send(&msg.Done{TicketID: first.ID, CompletionTokens: 9})
		assert.Equal(t, []time.Duration{began + 150*ms, began + 200*ms}, told())

		r.node.PrefillTime = perToken
		r.ask(whole)
		time.Sleep(2 * time.Second)
		r.send(lapseTimer{})
		assert.Equal(t, []time.Duration{began + 200*ms, began + 1200*ms}, told(),
			"a predicted first token is at its predicted time")
	})
}

// TestSnapshotsAreInTheOrderOfAdmission: a reader assumes that the engine computes the first request without
// a token.
func TestSnapshotsAreInTheOrderOfAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 16
		r := newRig(t, true)
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7, MaxOngoing: n}))
		var want, got []uint64
		for i := range uint64(n) {
			want = append(want, i*0x9E3779B97F4A7C15)
			r.box.Send(&msg.Admit{
				Ctx: t.Context(), ReqID: want[i], Epoch: 3, Tokens: 10, Ingress: "i",
				Reply: make(chan msg.AdmitReply, 1),
			})
		}
		synctest.Wait()
		fresh := &recordingSink{}
		cancel := r.hub.Subscribe(fresh)
		defer cancel()
		synctest.Wait()
		for _, rec := range fresh.take() {
			if rec.Kind == msg.RecSnapshot {
				for _, o := range rec.Snapshot.Open {
					got = append(got, o.ReqID)
				}
			}
		}
		assert.Equal(t, want, got)
	})
}

// randomMessage posts one message, also for tickets that do not exist.
func randomMessage(rt *rapid.T, ctx context.Context, r *testRig, i uint64) {
	ticket := rapid.Uint64Range(1, 12).Draw(rt, "ticket")
	ingress := rapid.SampledFrom([]string{"i", "j", "k"}).Draw(rt, "ingress")
	switch rapid.IntRange(0, 7).Draw(rt, "kind") {
	case 0, 1:
		r.box.Send(&msg.Admit{
			Ctx: ctx, ReqID: 100 + i, Epoch: 3, Tokens: 10, Hit: int(i), Ingress: ingress,
			Reply: make(chan msg.AdmitReply, 1),
		})
	case 2:
		m := &msg.FirstToken{TicketID: ticket}
		if rapid.Bool().Draw(rt, "at") {
			m.At = time.Now().Add(time.Duration(rapid.IntRange(-5000, 1000).Draw(rt,
				"at_ms")) * time.Millisecond)
		}
		r.box.Send(m)
	case 3:
		r.box.Send(&msg.Progress{TicketID: ticket, Out: rapid.IntRange(0, 9).Draw(rt, "out")})
	case 4:
		r.box.Send(&msg.Done{
			TicketID: ticket, Outcome: msg.Outcome(rapid.IntRange(0, 3).Draw(rt, "outcome")),
			Charge: rapid.Bool().Draw(rt, "charge"), CompletionTokens: 4,
			BusyFor: time.Duration(rapid.IntRange(0, 3).Draw(rt, "busy_s")) * time.Second,
		})
	case 5:
		time.Sleep(time.Duration(rapid.IntRange(0, 3000).Draw(rt, "ms")) * time.Millisecond)
	case 7:
		r.box.Send(msg.Demand{Ingress: ingress, Waits: rapid.Bool().Draw(rt, "waits")})
	case 6:
		if rapid.IntRange(0, 9).Draw(rt, "again") == 0 {
			require.NoError(rt, r.Ready(ctx, msg.Facts{Incarnation: 8 + i, MaxOngoing: 3}))
		}
	}
}

type discardSink struct{}

func (discardSink) Deliver(*msg.Record) {}

type healthyEngine struct{}

func (healthyEngine) Health(context.Context) (engine.Health, error) { return engine.Alive, nil }

func (healthyEngine) Models(context.Context) ([]engine.Model, error) { return nil, nil }
func (healthyEngine) Probe(context.Context, string) error            { return nil }
func (healthyEngine) Counters(context.Context) (engine.Counters, error) {
	return engine.Counters{}, nil
}

// BenchmarkAdmission is one request at a rank: Admit and its answer, FirstToken, Done. Goal: 2 µs for the
// admission, which is reported separately.
func BenchmarkAdmission(b *testing.B) { benchmarkAdmission(b, nil) }

// BenchmarkAdmissionBlocks is the same with a prompt of 128 blocks that the rank records: half of it is
// shared by all requests, half is new. Goal: the admission costs the same as without blocks, and allocates
// only the entries of the recorder's mailbox more.
func BenchmarkAdmissionBlocks(b *testing.B) {
	benchmarkAdmission(b, manyPrompts(128))
}

// manyPrompts are prompts of n blocks, of which half is shared by all, and half is their own.
func manyPrompts(n int) [][]uint64 {
	prompts := make([][]uint64, 1024)
	for i := range prompts {
		prompts[i] = salted(kvindex.Salt{}, append(ids(0, 4*n/2), ids(uint32(1000*(i+1)), 4*n/2)...)...)
	}
	return prompts
}

func benchmarkAdmission(b *testing.B, prompts [][]uint64) {
	sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
	defer sys.Shutdown()
	f := &Factory{
		System: sys, Hub: msg.NewHub(), Assigner: assigner{},
		NewEngine: func(*msg.ReplicaSpec) Engine { return healthyEngine{} },
		Log:       slog.New(slog.DiscardHandler),
	}
	defer f.Hub.Subscribe(discardSink{})()
	s, err := f.New(msg.ReplicaSpec{
		App: demo(), Unit: "demo/0/0", Epoch: 1, Watcher: &recordingSink{},
		Target: msg.Target{Owned: true},
	})
	require.NoError(b, err)
	defer func() { _ = s.Stop(context.Background()) }()
	require.NoError(b, s.Ready(b.Context(),
		msg.Facts{Incarnation: 1, MaxOngoing: 256, Blocks: 4096, BlockSize: 4}))
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	admit := &msg.Admit{Ctx: ctx, Epoch: 1, Tokens: 100, Reply: make(chan msg.AdmitReply, 1)}
	b.ReportAllocs()
	var admission time.Duration
	// refused: when its answer comes, the actor has handled all earlier messages
	settle := &msg.Admit{Reply: make(chan msg.AdmitReply, 1)}
	for b.Loop() {
		if admit.ReqID++; len(prompts) > 0 {
			admit.Blocks = append(admit.Blocks[:0], prompts[int(admit.ReqID)%len(prompts)]...)
		}
		s.box.Send(settle)
		<-settle.Reply
		for s.recorder.box.Pending() > 0 { // it handles the last prompt now
			runtime.Gosched()
		}
		began := time.Now()
		if err := s.box.TrySend(admit); err != nil {
			b.Fatal(err)
		}
		id := (<-admit.Reply).Ticket.ID
		admission += time.Since(began)
		s.box.Send(&msg.FirstToken{TicketID: id})
		s.box.Send(&msg.Done{TicketID: id, CompletionTokens: 8, FirstToken: time.Millisecond})
	}
	b.ReportMetric(float64(admission.Nanoseconds())/float64(b.N), "ns/admission")
}
