package dpserver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

// RP44: x failed, o was good, p takes a failure back.
func TestWhichAnswersEjectARank(t *testing.T) {
	for _, x := range []struct {
		answers string
		ejects  bool
	}{
		{"", false},
		{"xxxx", false},
		{"xxxxx", true},
		{"xxxxoxxxx", false},
		{"xo xo xo xo xo xo xo xo xo xo", false}, // half of 20
		{"xo xo xo xo xo xo xo xo xo xx", true},
		{"xxo xxo xxo xxo xxo", false}, // 10 of 15
		{"xxo xxo xxo xxo xxo x", true},
		{"xxo xxo xxo xxo xxo xp", false},
		{"xxo xxo xxo xxo xxo oooo oooo xx", false}, // the first are forgotten
		{"xxxxxp", false},
		{"xxxxxpx", true},
		{"ppp xxxx", false}, // there was nothing to take back
		{"ppp xxxxx", true},
	} {
		var a answers
		for _, c := range x.answers {
			switch c {
			case 'x', 'o':
				a.add(c == 'x')
			case 'p':
				a.pardon()
			}
		}
		assert.Equal(t, x.ejects, a.areBad(), x.answers)
	}
}

// RP44: the failure that ejected the rank is taken back.
func TestAPardonEndsAnEjection(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		for range 5 {
			r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Outcome: msg.FailedOutcome, Charge: true})
		}
		require.True(t, r.Status().Ejected)
		r.send(&msg.Pardon{})
		assert.False(t, r.Status().Ejected)
		r.engine.set(func(f *fakeEngine) { f.probe = errors.New("no") })
		time.Sleep(time.Minute)
		assert.Empty(t, r.tape.nodeEvents(), "nothing is held against the engine")
	})
}

// RP44, FS2: five failed answers in a row eject a rank, whatever errors of clients lie between them; an
// answered probe lets it in again.
func TestFiveFailuresEjectAndAProbeClears(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		fail := func(n int) {
			for range n {
				r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Outcome: msg.FailedOutcome, Charge: true})
			}
		}
		fail(4)
		r.send(&msg.Done{TicketID: r.ask().Ticket.ID})
		fail(4)
		r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Cause: msg.CauseClientError}) // shows nothing
		require.Equal(t, msg.Granted, r.ask().Refusal)
		require.False(t, r.Status().Ejected)
		fail(1)
		got := r.tape.take()
		last := got[len(got)-1]
		assert.Equal(t, [...]any{msg.RecState, false, true, "ejected"},
			[...]any{last.Kind, last.Accepting, last.Ejected, last.Cause})
		assert.Equal(t, msg.Granted, r.ask().Refusal, "who sees all ranks decides whether it is left out")
		assert.True(t, r.Status().Ejected)

		r.engine.set(func(f *fakeEngine) { f.probe = errors.New("no") })
		time.Sleep(1001 * time.Millisecond) // the first probe, at 1 s, fails; the second comes 2 s later
		assert.Equal(t, 1, r.engine.count("probe"))
		r.engine.set(func(f *fakeEngine) { f.probe = nil })
		time.Sleep(1998 * time.Millisecond)
		assert.True(t, r.Status().Ejected)
		time.Sleep(3 * time.Millisecond)
		synctest.Wait()
		assert.Equal(t, 2, r.engine.count("probe"))
		assert.False(t, r.Status().Ejected)
		got = r.tape.take()
		last = got[len(got)-1]
		assert.Equal(t, [...]any{msg.RecState, true, false},
			[...]any{last.Kind, last.Accepting, last.Ejected})
		assert.Empty(t, r.tape.nodeEvents())
	})
}

func TestAnEjectedRankIsWatchedAsAnyOther(t *testing.T) {
	withRank(t, 9, false, func(t *testing.T, r *testRig) {
		r.engine.set(func(f *fakeEngine) { f.probe = errors.New("no") })
		for range 5 {
			r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Outcome: msg.FailedOutcome, Charge: true})
		}
		fresh := &recordingSink{}
		defer r.hub.Subscribe(fresh)()
		synctest.Wait()
		assert.True(t, fresh.take()[0].Snapshot.Ejected, "a later subscriber is told, too")
		require.Equal(t, msg.Granted, r.ask().Refusal)
		time.Sleep(45 * time.Second)
		synctest.Wait()
		events := r.tape.nodeEvents()
		require.Len(t, events, 1)
		assert.Contains(t, events[0].Cause, "no progress")
	})
}

func TestThreeFailedProbesGiveAnOwnedEngineUp(t *testing.T) {
	for _, owned := range []bool{true, false} {
		withRank(t, 9, owned, func(t *testing.T, r *testRig) {
			r.engine.set(func(f *fakeEngine) { f.probe = errors.New("500") })
			for range 5 {
				r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Outcome: msg.FailedOutcome, Charge: true})
			}
			time.Sleep((1+2+4)*time.Second + time.Millisecond)
			synctest.Wait()
			assert.Equal(t, 3, r.engine.count("probe"))
			events := r.tape.nodeEvents()
			if !owned {
				assert.Empty(t, events)
				time.Sleep((8+16+32+64+64)*time.Second + time.Millisecond)
				assert.Equal(t, 8, r.engine.count("probe"), "the backoff ends at 64 s")
				return
			}
			require.Len(t, events, 1)
			assert.Equal(t, msg.ReplicaEvent{
				Unit: "demo/0/2", Epoch: 3, Rank: 2, Incarnation: 7, Kind: msg.ReplicaLost,
				Cause: "5 requests and 3 probes failed: 500",
			}, events[0])
			assert.Equal(t, msg.Fenced, r.ask().Refusal)
		})
	}
}

// HF55: failed probes fence an engine only if no token came out since the last sign. The tokens that
// probes ask for themselves are no sign.
func TestAnEjectedEngineThatStreamsIsNotGivenUp(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.engine.set(func(f *fakeEngine) { f.probe, f.counters.Seen = errors.New("500"), true })
		long := r.ask().Ticket.ID
		for range 5 {
			r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Outcome: msg.FailedOutcome, Charge: true})
		}
		for out := range 40 {
			time.Sleep(time.Second)
			r.send(&msg.Progress{TicketID: long, Out: out})
		}
		assert.Equal(t, 5, r.engine.count("probe"), "at 1, 3, 7, 15, 31 s")
		for range 20 { // an answer that is not streamed shows in the counters only
			time.Sleep(2 * time.Second)
			r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens += 100 })
		}
		assert.Empty(t, r.tape.nodeEvents())
		r.send(&msg.Done{TicketID: long, Outcome: msg.Cancelled})
		time.Sleep(time.Second / 2) // probes are sent at whole seconds: each read shows the token of one
		for range 200 {
			time.Sleep(time.Second)
			probes := r.engine.count("probe")
			r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens = 2000 + float64(probes) })
		}
		require.Len(t, r.tape.nodeEvents(), 1)
	})
}

// RP48: a rank whose engine said that it is busy refuses as full until a request ends or the time that it
// named is over.
func TestAnEngineBusyAnswerFillsTheRank(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		first, other := r.ask().Ticket.ID, r.ask().Ticket.ID
		r.send(&msg.Done{TicketID: first, BusyFor: time.Second, Outcome: msg.FailedOutcome})
		assert.Equal(t, msg.Full, r.ask().Refusal)
		r.send(&msg.Done{TicketID: other})
		third := r.ask()
		require.Equal(t, msg.Granted, third.Refusal, "the next Done clears it")
		r.send(&msg.Done{TicketID: third.Ticket.ID, BusyFor: time.Second})
		time.Sleep(999 * time.Millisecond)
		assert.Equal(t, msg.Full, r.ask().Refusal)
		r.tape.take()
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecState}, kinds(got),
			"a queue is woken even if no request is in hand")
		assert.True(t, got[0].Accepting)
		assert.Equal(t, msg.Granted, r.ask().Refusal)
	})
}

// RP48: no request that ends meanwhile, and no shorter time, ends that.
func TestAnEngineSaysHowLongItIsBusy(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		first, second, other := r.ask().Ticket.ID, r.ask().Ticket.ID, r.ask().Ticket.ID
		r.send(&msg.Done{TicketID: first, BusyFor: 20 * time.Second, Outcome: msg.FailedOutcome})
		r.send(&msg.Done{TicketID: second, BusyFor: time.Second, Outcome: msg.FailedOutcome})
		r.send(&msg.Done{TicketID: other})
		time.Sleep(19 * time.Second)
		assert.Equal(t, msg.Full, r.ask().Refusal)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, msg.Granted, r.ask().Refusal)
	})
}

func TestHealthFencesAtOnceOrAsksTheProbe(t *testing.T) {
	cases := map[string]struct {
		health engine.Health
		probe  error
		cause  string
	}{
		"alive":                   {engine.Alive, nil, ""},
		"503":                     {engine.Dead, nil, "health check: it is dead"},
		"refused":                 {engine.RefusedConn, nil, "health check: it is refused"},
		"silent, but it computes": {engine.Unanswered, nil, ""},
		"silent": {
			engine.Unanswered, errors.New("time-out"),
			"health check: it is unanswered; then the probe failed: time-out",
		},
		"odd": {
			engine.Odd, errors.New("no"),
			"health check: it is odd; then the probe failed: no",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			withRank(t, 9, true, func(t *testing.T, r *testRig) {
				r.engine.set(func(f *fakeEngine) { f.health, f.probe = c.health, c.probe })
				time.Sleep(1001 * time.Millisecond)
				synctest.Wait()
				if c.probe != nil {
					require.Empty(t, r.tape.nodeEvents(), "once is no suspicion")
					time.Sleep(time.Second)
					synctest.Wait()
				}
				events := r.tape.nodeEvents()
				if c.cause == "" {
					assert.Empty(t, events)
					assert.Equal(t, msg.Granted, r.ask().Refusal)
					return
				}
				require.Len(t, events, 1)
				assert.Equal(t, c.cause, events[0].Cause)
				assert.Equal(t, msg.Fenced, r.ask().Refusal)
				asked := r.engine.count("health")
				time.Sleep(time.Minute)
				assert.Equal(t, asked, r.engine.count("health"),
					"an owned engine that is fenced is not asked again")
			})
		})
	}
}

func TestAFailedConnectionIsProbedAtOnce(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.engine.set(func(f *fakeEngine) { f.health = engine.RefusedConn })
		r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Outcome: msg.FailedOutcome, CheckHealth: true})
		assert.Len(t, r.tape.nodeEvents(), 1, "no time has passed")
	})
}

// RP50: a stream with gaps of 40 s, near and far; a rank with open requests and no progress, with and without
// `/metrics`, whose probe is answered or fails; a short `between_tokens_s`; a rank fenced for another
// reason; a lockstep group; one stream that is silent beside a working engine: the stream goes on and its
// rank is not ejected; a failed probe fences the rank as `stalled` and cuts its streams and those of its
// group at once, any other fence none; the one stream ends after `first_token_s` as `silent_stream` and
// ejects nothing.
func TestStalls(t *testing.T) {
	stuck := errors.New("time-out")
	cases := map[string]struct {
		work   bool
		during func(r *testRig)
		probe  error
		dumb   error   // of /metrics
		quick  float64 // between_tokens_s
		lost   string  // after how long without progress; "": the rank lives
	}{
		"no work":                        {probe: stuck},
		"nothing moves":                  {work: true, probe: stuck, lost: "20s"},
		"nothing moves, no metrics":      {work: true, probe: stuck, dumb: stuck, lost: "20s"},
		"a short between_tokens_s":       {work: true, probe: stuck, quick: 5, lost: "5s"},
		"the probe answers":              {work: true},
		"the probe answers, no metrics":  {work: true, dumb: stuck},
		"the probe answers, asked early": {work: true, quick: 5},
		"the engine's counters move": {
			work: true, probe: stuck,
			during: func(r *testRig) { r.engine.set(func(f *fakeEngine) { f.counters.PromptTokens++ }) },
		},
		"a stream moves": {
			work: true, probe: stuck,
			during: func(r *testRig) { r.send(&msg.Progress{TicketID: 1, Out: int(time.Now().Unix())}) },
		},
		"another request was answered": {
			work: true, probe: stuck,
			during: func(r *testRig) { r.send(&msg.Done{TicketID: r.ask().Ticket.ID}) },
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			withRank(t, 9, true, func(t *testing.T, r *testRig) {
				r.engine.set(func(f *fakeEngine) {
					f.probe, f.counters.Seen, f.dumb = c.probe, true, c.dumb
				})
				if c.work {
					r.spec.App.Timeouts.BetweenTokensS = c.quick
					r.ask()
				}
				for range 5 {
					time.Sleep(9 * time.Second)
					if c.during != nil {
						c.during(r)
					}
				}
				events := r.tape.nodeEvents()
				if c.lost == "" {
					assert.Empty(t, events)
					return
				}
				require.Len(t, events, 1)
				assert.Equal(t, "no progress for "+c.lost+
					" with 1 requests in hand; then the probe failed: time-out", events[0].Cause)
				records := r.tape.take()
				last := records[len(records)-1]
				assert.True(t, last.Fenced && last.Cause == msg.CauseStalled, "its streams are cut")
			})
		})
	}
}

// HF55, HF56: an engine that hangs is out after as long as ever, and one that stood still for a while goes
// on. The engine's probe finds no place before or after.
func TestASilentEngineIsFencedWhenNothingMoves(t *testing.T) {
	const never, soon, late = time.Duration(0), 16 * time.Second, 31 * time.Second
	for name, c := range map[string]struct {
		requests int           // of a rank with room for two
		health   bool          // /health and /metrics answer: the core alone hangs
		pause    time.Duration // never: for ever
		out      time.Duration // latest time when it takes no further request
		lost     time.Duration // latest time when it is fenced
	}{
		"an idle process hangs":         {out: soon, lost: soon},
		"an idle process pauses":        {pause: 7 * time.Second},
		"a loaded process hangs":        {requests: 1, out: soon, lost: late},
		"a full process hangs":          {requests: 2, out: soon, lost: late},
		"a loaded process pauses":       {requests: 1, pause: 7 * time.Second},
		"a full process pauses":         {requests: 2, pause: 7 * time.Second},
		"a full process pauses long":    {requests: 2, pause: 25 * time.Second, out: soon},
		"a full core hangs":             {requests: 2, health: true, out: late, lost: late},
		"a full core pauses long":       {requests: 2, health: true, pause: 25 * time.Second},
		"a full rank in perfect health": {requests: 2, pause: time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			withRank(t, 2, true, func(t *testing.T, r *testRig) {
				for range c.requests {
					r.ask()
				}
				time.Sleep(10500 * time.Millisecond)
				for id := range c.requests {
					r.send(&msg.Progress{TicketID: uint64(id + 1), Out: 1})
				}
				frozen := make(chan struct{})
				r.engine.set(func(f *fakeEngine) {
					f.full, f.counters.Seen = true, true
					if !c.health {
						f.frozen = frozen
					}
				})
				r.tape.take()
				begin, out, lost := time.Now(), never, never
				for since := never; since < time.Minute; {
					time.Sleep(500 * time.Millisecond)
					synctest.Wait()
					since = time.Since(begin)
					if c.pause != never && since >= c.pause && frozen != nil {
						close(frozen)
						frozen = nil
						r.engine.set(func(f *fakeEngine) { f.frozen = nil })
					}
					for id := range c.requests {
						if frozen == nil {
							r.send(&msg.Progress{TicketID: uint64(id + 1), Out: int(since.Milliseconds())})
						}
					}
					for _, rec := range r.tape.take() {
						if rec.Kind == msg.RecState && !rec.Accepting && out == never {
							out = since
						}
					}
					if len(r.tape.nodeEvents()) > 0 {
						lost = since
					}
				}
				assert.LessOrEqual(t, out, c.out)
				assert.Equal(t, c.out == never, out == never, "out of routing after %s", out)
				assert.LessOrEqual(t, lost, c.lost)
				assert.Equal(t, c.lost == never, lost == never, "fenced after %s", lost)
				if c.pause != never && c.requests < 2 {
					assert.Equal(t, msg.Granted, r.ask().Refusal)
				}
			})
		})
	}
}

// HF56: an ingress gives its streams up at the same time.
func TestAStallIsDecidedAlsoWhenItsRequestsEnd(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.engine.set(func(f *fakeEngine) { f.full = true })
		id := r.ask().Ticket.ID
		time.Sleep(25 * time.Second)
		require.Equal(t, 1, r.engine.count("probe"))
		r.send(&msg.Done{TicketID: id, Outcome: msg.FailedOutcome})
		r.send(&msg.Done{TicketID: r.ask().Ticket.ID, Cause: msg.CauseClientError})
		time.Sleep(6 * time.Second)
		require.Len(t, r.tape.nodeEvents(), 1)
	})
}

// TestAFailedReadIsNoSample: counters that cannot be read half way are not taken for zero, so that the next
// read is no progress.
func TestAFailedReadIsNoSample(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.engine.set(func(f *fakeEngine) { f.probe, f.dumb = errors.New("time-out"), errors.New("busy") })
		r.ask()
		time.Sleep(10500 * time.Millisecond)
		r.engine.set(func(f *fakeEngine) { f.dumb, f.counters.Seen, f.counters.PromptTokens = nil, true, 7 })
		time.Sleep(11 * time.Second)
		require.Len(t, r.tape.nodeEvents(), 1)
	})
}

func TestAPredictedPrefillStretchesTheStallTimeout(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.node.PrefillTime = func(tokens int) time.Duration { return time.Duration(tokens) * time.Second }
		r.engine.set(func(f *fakeEngine) { f.probe = errors.New("no") })
		r.ask() // 100 tokens: 3 × 100 s
		time.Sleep(299 * time.Second)
		assert.Empty(t, r.tape.nodeEvents())
		time.Sleep(3 * time.Second)
		assert.Len(t, r.tape.nodeEvents(), 1)
	})
}

// FS3: an attached engine that was lost comes back by itself, within 5 s of the first token that it computes.
func TestAnAttachedEngineComesBackWithANewIncarnation(t *testing.T) {
	withRank(t, 9, false, func(t *testing.T, r *testRig) {
		r.ask()
		r.engine.set(func(f *fakeEngine) { f.health, f.probe = engine.RefusedConn, errors.New("no") })
		time.Sleep(1001 * time.Millisecond)
		synctest.Wait()
		require.Len(t, r.tape.nodeEvents(), 1)
		r.engine.set(func(f *fakeEngine) { f.health = engine.Alive })
		time.Sleep(5 * time.Second)
		require.Empty(t, r.tape.nodeEvents(), "alive is not enough")
		r.engine.set(func(f *fakeEngine) { f.probe = nil })
		time.Sleep(5 * time.Second)
		events := r.tape.nodeEvents()
		require.Len(t, events, 1)
		assert.Equal(t, msg.ReplicaBack, events[0].Kind)
		r.engine.set(func(f *fakeEngine) { f.health = engine.RefusedConn })
		time.Sleep(2 * time.Second)
		require.Len(t, r.tape.nodeEvents(), 1, "the node hears when it is lost again before its Ready")
		r.engine.set(func(f *fakeEngine) { f.health = engine.Alive })
		time.Sleep(2 * time.Second)
		require.Len(t, r.tape.nodeEvents(), 1)

		r.tape.take()
		require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 9}))
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecSnapshot}, kinds(got))
		assert.Equal(t, uint64(8), got[0].Incarnation)
		assert.Empty(t, got[0].Snapshot.Open)
		r.send(&msg.Done{TicketID: 1}) // of the engine that died
		assert.Empty(t, r.tape.take())
		assert.Equal(t, uint64(1), r.ask().Ticket.Seq)
	})
}

func TestAPanicLosesTheAccountAndNothingElse(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.ask()
		r.tape.take()
		r.box.Send(&msg.Admit{Epoch: 3, Ctx: brokenContext{}})
		synctest.Wait()
		got := r.tape.take()
		require.Equal(t, []msg.RecordKind{msg.RecSnapshot}, kinds(got))
		assert.Empty(t, got[0].Snapshot.Open)
		assert.True(t, got[0].Accepting)
		assert.Equal(t, [...]uint64{1, 7}, [...]uint64{got[0].Seq, got[0].Incarnation})
		again := r.ask()
		assert.Equal(t, [...]uint64{2, 2}, [...]uint64{again.Ticket.ID, again.Ticket.Seq})
		asked := r.engine.count("health")
		time.Sleep(3500 * time.Millisecond)
		assert.Equal(t, asked+3, r.engine.count("health"), "the watch goes on, once")
	})
}

type brokenContext struct{ context.Context } //nolint:containedctx // a context of a test

func (brokenContext) Err() error { panic("broken") }

func TestAssignChecksTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true)
		require.NoError(t, r.Assign(t.Context()))
		r.node.Assigner = assigner{reply: msg.AssignReply{Rank: 1, Epoch: 3}}
		err := r.Assign(t.Context())
		require.ErrorIs(t, err, errNotGranted)
		require.EqualError(t, err,
			"the rank is not granted to this replica: asked for rank 2 at epoch 3, got rank 1 at epoch 3")
		r.node.Assigner = assigner{err: errors.New("group full")}
		require.EqualError(t, r.Assign(t.Context()), "assign rank 0/2: group full")
	})
}

func TestDefaultsArePinned(t *testing.T) {
	assert.Equal(t, Timers{
		Probe: 10 * time.Second, TicketLapse: 5 * time.Second,
		EjectionBackoff: time.Second,
		EjectionCeiling: 64 * time.Second, CounterLimit: 500 * time.Millisecond, Scrape: time.Second,
		Silence: 30 * time.Second,
	}, Timers{}.withDefaults())
	assert.Equal(t, [...]int{4096, 5, 3, 3}, [...]int{mailboxBound, ejectAfter, fenceAfter, stallFactor})
	var none app.Application
	assert.Equal(t, [...]time.Duration{time.Second, 5 * time.Second, 20 * time.Second},
		[...]time.Duration{healthPeriod(&none), healthTimeout(&none), stallTimeout(&none)})
}

// RP51, RP52: TestAnEngineThatSaysThatItDoesNotCompute leaves routing at its first word and comes back at its
// next. It is not fenced, though its open requests stand still and no probe is answered.
func TestAnEngineThatSaysThatItDoesNotCompute(t *testing.T) {
	for title, say := range map[string]func(f *fakeEngine, isAway bool){
		msg.CauseAsleep: func(f *fakeEngine, isAway bool) { f.counters.Asleep = isAway },
		"asleep, by /is_sleeping": func(f *fakeEngine, isAway bool) {
			f.health = engine.Alive
			if isAway {
				f.health = engine.Asleep
			}
		},
		msg.CauseScaling: func(f *fakeEngine, isAway bool) { // it says so to every request
			f.health, f.dumb = engine.Alive, nil
			if isAway {
				f.health, f.dumb = engine.Scaling, errors.New("503")
			}
		},
	} {
		for _, isScraped := range []bool{true, false} { // else only the stall check reads the counters
			withRank(t, 9, true, func(t *testing.T, r *testRig) {
				name, _, _ := strings.Cut(title, ",")
				threshold, first := 0.9, 30*time.Second
				if isScraped || title != msg.CauseAsleep {
					r.spec.App.Routing.BusyThreshold, first = &threshold, 2*time.Second
				}
				id := r.ask().Ticket.ID
				time.Sleep(2 * time.Second)
				r.tape.take()
				r.engine.set(func(f *fakeEngine) {
					f.full = true
					say(f, true)
				})
				time.Sleep(first)
				states := r.states()
				require.Len(t, states, 1, name)
				assert.False(t, states[0].Accepting || states[0].Fenced, name)
				assert.Equal(t, name, states[0].Cause)
				assert.Equal(t, name, r.Status().Away)
				assert.Equal(t, msg.Full, r.ask().Refusal)

				time.Sleep(5 * time.Minute)
				assert.Empty(t, r.tape.nodeEvents(), "%s: it is not sick", name)
				assert.Empty(t, r.states())
				r.send(&msg.Done{TicketID: id, Outcome: msg.FailedOutcome, BusyFor: time.Second})
				time.Sleep(2 * time.Second)
				for _, rec := range r.states() {
					assert.Equal(t, name, rec.Cause, "the engine is full beside it")
				}
				r.tape.take()
				r.hub.List(r.tape)
				synctest.Wait()
				assert.Equal(t, name, r.tape.take()[0].Cause, "a snapshot says why")

				r.engine.set(func(f *fakeEngine) {
					f.full = false
					say(f, false)
				})
				time.Sleep(2 * time.Second)
				states = r.states()
				require.Len(t, states, 1, name)
				assert.True(t, states[0].Accepting)
				assert.Empty(t, r.Status().Away)
				assert.Equal(t, msg.Granted, r.ask().Refusal)
			})
		}
	}
}

// states are the states that the stream told since the last call.
func (r *testRig) states() []msg.Record {
	synctest.Wait()
	return slices.DeleteFunc(r.tape.take(), func(rec msg.Record) bool { return rec.Kind != msg.RecState })
}
