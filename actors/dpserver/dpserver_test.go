package dpserver

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeEngine answers with preset results.
type fakeEngine struct {
	mu       sync.Mutex
	health   engine.Health
	probe    error
	counters engine.Counters
	dumb     error         // what it says instead of its counters
	held     chan struct{} // it says its counters when this is closed; nil: at once
	asked    map[string]int
	frozen   chan struct{} // nothing answers until this is closed; nil: it is not frozen
	full     bool          // a probe finds no place
	models   []engine.Model
}

// standStill holds an answer back while the engine is frozen, or as long as the caller waits.
func (f *fakeEngine) standStill(ctx context.Context, waits bool) error {
	f.mu.Lock()
	frozen := f.frozen
	f.mu.Unlock()
	if frozen == nil && !waits {
		return nil
	}
	if waits {
		frozen = nil
	}
	select {
	case <-frozen:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *fakeEngine) set(change func(f *fakeEngine)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeEngine) count(what string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[what]
}

func (f *fakeEngine) Models(context.Context) ([]engine.Model, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.models, nil
}

func (f *fakeEngine) Health(ctx context.Context) (engine.Health, error) {
	f.set(func(f *fakeEngine) { f.asked["health"]++ })
	if err := f.standStill(ctx, false); err != nil {
		return engine.Unanswered, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.health == engine.Alive {
		return engine.Alive, nil
	}
	return f.health, errors.New("it is " + f.health.String())
}

func (f *fakeEngine) Probe(ctx context.Context, _ string) error {
	f.set(func(f *fakeEngine) { f.asked["probe"]++ })
	f.mu.Lock()
	full := f.full
	f.mu.Unlock()
	if err := f.standStill(ctx, full); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.probe
}

func (f *fakeEngine) Counters(ctx context.Context) (engine.Counters, error) {
	f.set(func(f *fakeEngine) { f.asked["counters"]++ })
	if err := f.standStill(ctx, false); err != nil {
		return engine.Counters{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if held := f.held; held != nil {
		f.mu.Unlock()
		<-held
		f.mu.Lock()
	}
	return f.counters, f.dumb
}

// recordingSink is a sink that keeps copies of the records, and a ReplicaWatcher.
type recordingSink struct {
	mu      sync.Mutex
	records []msg.Record
	events  []msg.ReplicaEvent
}

func (s *recordingSink) Deliver(r *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec := *r
	rec.KV.Delta.Hashes = slices.Clone(rec.KV.Delta.Hashes)
	s.records = append(s.records, rec)
}

func (s *recordingSink) ReplicaEvent(e msg.ReplicaEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, e)
}

func (s *recordingSink) take() []msg.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.records
	s.records = nil
	return out
}

func (s *recordingSink) nodeEvents() []msg.ReplicaEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.events
	s.events = nil
	return out
}

type assigner struct {
	reply msg.AssignReply
	err   error
}

func (a assigner) Assign(context.Context, string, int, string) (msg.AssignReply, error) {
	return a.reply, a.err
}
func (assigner) Publish(msg.Publish) {}
func (assigner) Await(context.Context, string, uint64, int) (msg.AwaitReply, error) {
	return msg.AwaitReply{}, nil
}

// testRig is one DPServer at epoch 3 on fake time.
type testRig struct {
	*Server
	t      *testing.T
	engine *fakeEngine
	tape   *recordingSink
	hub    *msg.Hub
	log    *bytes.Buffer
	next   uint64
}

func demo() *app.Application {
	return &app.Application{
		Name: "demo", Model: app.Model{ID: "demo"}, HealthCheckPeriodS: 1, HealthCheckTimeoutS: 5,
		Engine: app.Engine{Kind: app.KindSim, StallTimeoutS: 20}, DataParallel: app.DataParallel{DPSize: 4},
	}
}

// withRank runs a test on fake time with one rank of room maxOngoing; owned says whether dpserve started the
// engine.
func withRank(t *testing.T, maxOngoing int, owned bool, f func(t *testing.T, r *testRig)) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, owned)
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7, MaxOngoing: maxOngoing}))
		synctest.Wait()
		r.tape.take()
		f(t, r)
	})
}

func newRig(t *testing.T, owned bool, change ...func(f *Factory, spec *msg.ReplicaSpec)) *testRig {
	r := &testRig{
		t: t, tape: &recordingSink{}, hub: msg.NewHub(), log: &bytes.Buffer{},
		engine: &fakeEngine{health: engine.Alive, asked: map[string]int{}},
	}
	sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
	f := &Factory{
		System: sys, Hub: r.hub, Assigner: assigner{reply: msg.AssignReply{Rank: 2, Epoch: 3, DPSize: 4}},
		NewEngine: func(*msg.ReplicaSpec) Engine { return r.engine },
		Log:       slog.New(slog.NewTextHandler(r.log, nil)),
	}
	spec := msg.ReplicaSpec{
		App: demo(), Unit: "demo/0/2", Rank: 2, Epoch: 3, Node: "n", Watcher: r.tape,
		Target: msg.Target{URL: "http://e", Owned: owned},
	}
	for _, c := range change {
		c(f, &spec)
	}
	cancel := r.hub.Subscribe(r.tape)
	var err error
	r.Server, err = f.New(spec)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, r.Stop(context.Background()))
		cancel()
		sys.Shutdown()
		time.Sleep(2 * time.Minute) // fake time: lets timers of contexts run out
	})
	return r
}

// ask admits a request of 100 tokens and returns the answer.
func (r *testRig) ask(change ...func(a *msg.Admit)) msg.AdmitReply {
	r.t.Helper()
	r.next++
	a := &msg.Admit{
		Ctx: context.Background(), ReqID: r.next, Epoch: 3, Tokens: 100, Ingress: "i",
		Reply: make(chan msg.AdmitReply, 1),
	}
	for _, c := range change {
		c(a)
	}
	require.NoError(r.t, r.box.TrySend(a))
	defer synctest.Wait() // the answer comes before the record
	return <-a.Reply
}

func (r *testRig) send(m any) {
	r.box.Send(m)
	synctest.Wait()
}

func kinds(records []msg.Record) []msg.RecordKind {
	var out []msg.RecordKind
	for _, r := range records {
		out = append(out, r.Kind)
	}
	return out
}

// RA5: every ingress must know on which rank a session is.
func TestTheStreamTellsARequestsSession(t *testing.T) {
	withRank(t, 2, true, func(t *testing.T, r *testRig) {
		r.ask(func(a *msg.Admit) { a.Session = 99 })
		r.ask()
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecAdmitted, msg.RecAdmitted}, kinds(got))
		assert.Equal(t, []uint64{99, 0}, []uint64{got[0].Session, got[1].Session})
	})
}

func TestARequestsWayThroughTheStream(t *testing.T) {
	withRank(t, 2, true, func(t *testing.T, r *testRig) {
		a := r.ask()
		require.Equal(t, msg.Granted, a.Refusal)
		assert.Equal(t, msg.Ticket{
			ID: 1, Epoch: 3, Incarnation: 7, Seq: 1, Rank: routing.ID(0, 2),
		}, a.Ticket)
		r.send(&msg.FirstToken{TicketID: 1})
		r.send(&msg.FirstToken{TicketID: 1})
		r.send(&msg.Progress{TicketID: 1, Out: 5})
		r.send(&msg.Progress{TicketID: 1, Out: 5})
		assert.Equal(t, 1, r.Status().InFlight)
		r.send(&msg.Done{TicketID: 1, CompletionTokens: 9, FirstToken: 30 * time.Millisecond})
		r.send(&msg.Done{TicketID: 1, CompletionTokens: 9})

		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone},
			kinds(got))
		for i, rec := range got {
			assert.Equal(t, uint64(i+1), rec.Seq)
			assert.Equal(t, [...]any{
				"demo", "demo/0/2", routing.ID(0, 2), uint64(3), uint64(7), uint64(1),
				"i", 100,
			},
				[...]any{
					rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation, rec.ReqID, rec.Ingress,
					rec.Tokens,
				})
		}
		assert.Equal(t, 5, got[2].Out)
		assert.Equal(t, 9, got[3].Out)
		st := r.Status()
		assert.Equal(t, client.RankStatus{
			Rank: 2, Node: "n", Epoch: 3, Incarnation: "0000000000000007", URL: "http://e", MaxOngoing: 2,
			Requests: 1, Tokens: 9, TokensPerS: 0.9, TTFTp50Ms: 30, TTFTp95Ms: 30,
		}, st)
	})
}

// A node without a lease refuses before anything else is looked at, and takes requests again as soon as it
// has one.
func TestNothingIsAdmittedWithoutTheNodesLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var held atomic.Bool
		r := newRig(t, true, func(f *Factory, _ *msg.ReplicaSpec) { f.Lease = held.Load })
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 7, MaxOngoing: 1}))
		assert.Equal(t, msg.NoLease, r.ask(func(a *msg.Admit) { a.Epoch = 2 }).Refusal)
		assert.Equal(t, msg.NoLease, r.ask().Refusal)
		assert.Zero(t, r.Status().InFlight)
		held.Store(true)
		require.Equal(t, msg.Granted, r.ask().Refusal)
		held.Store(false)
		assert.Equal(t, msg.NoLease, r.ask().Refusal, "also of a full rank")
		assert.Equal(t, 1, r.Status().InFlight, "what runs goes on")
	})
}

func TestGrantOrderAndRefusals(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	withRank(t, 1, true, func(t *testing.T, r *testRig) {
		late := func(a *msg.Admit) { a.Deadline = time.Now() }
		stale := func(a *msg.Admit) { a.Epoch = 2 }
		assert.Equal(t, msg.Expired, r.ask(func(a *msg.Admit) { a.Ctx = gone }).Refusal)
		assert.Equal(t, msg.Expired, r.ask(late, stale).Refusal)
		assert.Equal(t, msg.StaleEpoch, r.ask(stale).Refusal)
		require.Equal(t, msg.Granted, r.ask(func(a *msg.Admit) { a.Deadline = time.Now().Add(1) }).Refusal)
		full := r.ask()
		assert.Equal(t, msg.Full, full.Refusal)
		assert.Equal(t, uint64(1), full.Seq)
		assert.Equal(t, uint64(3), full.Epoch)
		r.Drain("draining")
		assert.Equal(t, msg.Draining, r.ask().Refusal)
		assert.Equal(t, msg.StaleEpoch, r.ask(stale).Refusal)
		r.Fence("x")
		assert.Equal(t, msg.Fenced, r.ask().Refusal)
	})
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true)
		assert.Equal(t, msg.NotReady, r.ask().Refusal)
	})
}

func TestAReplyWithoutRoomLeavesNoTicket(t *testing.T) {
	withRank(t, 1, true, func(t *testing.T, r *testRig) {
		r.send(&msg.Admit{Epoch: 3, Reply: make(chan msg.AdmitReply)})
		assert.Empty(t, r.tape.take())
		assert.Equal(t, msg.Granted, r.ask().Refusal)
	})
}

func TestATicketWhoseOwnerForgotItLapses(t *testing.T) {
	withRank(t, 1, true, func(t *testing.T, r *testRig) {
		ctx, cancel := context.WithCancel(t.Context())
		r.ask(func(a *msg.Admit) { a.Ctx = ctx })
		cancel()
		time.Sleep(4999 * time.Millisecond)
		assert.Equal(t, msg.Full, r.ask().Refusal)
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		got := r.tape.take()
		assert.Equal(t, "ticket_lapsed", got[len(got)-1].Cause)
		assert.Equal(t, msg.Granted, r.ask().Refusal)
	})
}

// TestManyOrphans: a context that ends before the actor reads its Done needs no timer of its own. Only
// tickets without a Done lapse, each at its own time.
func TestManyOrphans(t *testing.T) {
	withRank(t, 3, true, func(t *testing.T, r *testRig) {
		forgotten := func() {
			ctx, cancel := context.WithCancel(t.Context())
			require.Equal(t, msg.Granted, r.ask(func(a *msg.Admit) { a.Ctx = ctx }).Refusal)
			cancel()
		}
		forgotten()
		time.Sleep(time.Second)
		forgotten()
		for range maxOrphans {
			ctx, cancel := context.WithCancel(t.Context())
			rep := r.ask(func(a *msg.Admit) { a.Ctx = ctx })
			cancel()
			synctest.Wait()
			r.send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.OK})
		}
		synctest.Wait()
		r.orphans.mu.Lock()
		assert.Less(t, len(r.orphans.queue), maxOrphans)
		r.orphans.mu.Unlock()
		assert.Equal(t, 2, r.Status().InFlight)
		time.Sleep(4*time.Second + time.Millisecond)
		synctest.Wait()
		assert.Equal(t, 1, r.Status().InFlight)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Zero(t, r.Status().InFlight)
		assert.Empty(t, r.orphans.queue)
	})
}

func TestASubscriberGetsASnapshotThenDeltas(t *testing.T) {
	withRank(t, 4, true, func(t *testing.T, r *testRig) {
		r.ask()
		r.ask()
		r.send(&msg.FirstToken{TicketID: 2})
		late := &recordingSink{}
		cancel := r.hub.Subscribe(late)
		synctest.Wait()
		r.ask()
		got := late.take()
		require.Equal(t, []msg.RecordKind{msg.RecSnapshot, msg.RecAdmitted}, kinds(got))
		assert.Equal(t, []uint64{3, 4}, []uint64{got[0].Seq, got[1].Seq})
		snap := got[0].Snapshot
		assert.True(t, snap.Accepting)
		assert.Equal(t, 4, snap.MaxOngoing)
		assert.Equal(t, "n", snap.Node)
		assert.NotNil(t, snap.Mailbox)
		assert.ElementsMatch(t, []msg.OpenRequest{
			{ReqID: 1, Ingress: "i", Tokens: 100},
			{ReqID: 2, Ingress: "i", Tokens: 100, Decoding: true},
		}, snap.Open)
		cancel()
		r.ask()
		assert.Empty(t, late.take())
	})
}

func TestDrainWaitsForTheLastRequest(t *testing.T) {
	withRank(t, 4, true, func(t *testing.T, r *testRig) {
		r.ask()
		r.Drain("draining")
		synctest.Wait()
		select {
		case <-r.Drained():
			t.Fatal("drained with a request in hand")
		default:
		}
		r.send(&msg.Done{TicketID: 1})
		<-r.Drained()
		got := r.tape.take()
		assert.Equal(t, []msg.RecordKind{msg.RecAdmitted, msg.RecState, msg.RecDone}, kinds(got))
		assert.False(t, got[1].Accepting)
	})
}

// TestADrainThatIsOverCutsAsADrain: the cause of the cut requests differs from that of a failure.
func TestADrainThatIsOverCutsAsADrain(t *testing.T) {
	withRank(t, 4, true, func(t *testing.T, r *testRig) {
		r.ask()
		r.Drain("draining")
		r.Fence(causeDrained)
		synctest.Wait()
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecAdmitted, msg.RecState, msg.RecState}, kinds(got))
		assert.Equal(t, [...]bool{false, true}, [...]bool{got[1].Fenced, got[1].Draining})
		assert.Equal(t, [...]bool{true, true}, [...]bool{got[2].Fenced, got[2].Draining})
	})
}

func TestAFenceIsHeardOnceAndGoneEndsTheStream(t *testing.T) {
	withRank(t, 4, true, func(t *testing.T, r *testRig) {
		r.Fence("process exited")
		r.Fence("again")
		synctest.Wait()
		require.NoError(t, r.Stop(t.Context()))
		require.NoError(t, r.Stop(t.Context()))
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecState, msg.RecGone}, kinds(got))
		assert.Equal(t, "process exited", got[0].Cause)
		assert.Empty(t, r.tape.nodeEvents(), "a fence from outside is no news to the node")
		require.ErrorIs(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 1}), inbox.ErrStopped)
	})
}
