package state

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

var allPhases = []Phase{"", Pending, Starting, Ready, Fenced, Killing, Backoff, Draining, Failed, Gone}

var eventNames = map[UnitEventKind]string{
	EvWant: "want", EvRedeploy: "redeploy", EvUnwant: "unwant", EvGranted: "granted", EvLost: "lost",
	EvNodeLost: "node lost", EvLeave: "leave", EvTick: "tick",
	EvStarted: "started", EvReady: "ready", EvFenced: "fenced", EvKilling: "killing", EvDraining: "draining",
	EvGone: "gone",
}

var effectNames = map[EffectKind]string{
	DoGrant: "grant", DoStart: "start", DoStop: "stop", DoStopOthers: "stop others",
	ProposeReady: "UnitReady", ProposeFenced: "UnitFenced",
	ProposeFailed: "UnitFailed", ProposeRelease: "Release",
}

// in is a machine in a phase, at epoch 3, as it gets there: second attempt of a start, or ready, or after it.
func in(p Phase) Machine {
	m := Machine{Phase: p, Epoch: 3, Attempt: 2, Since: noon}
	switch p {
	case Starting:
		m.Due = noon
	case Ready, Fenced:
		m.WasReady, m.Confirmed, m.ReadyAt = true, true, noon
	case Draining:
		m.WasReady, m.Stopping, m.Due, m.StopBy = true, true, noon, noon.Add(time.Minute)
	case Backoff, Failed:
		m.Due = noon
	default:
	}
	return m
}

// edges is the whole table: what is not in it changes nothing. "phase event" → "phase: effects".
var edges = map[string]string{
	" want":           "pending: grant",
	" granted":        "gone: Release",
	"gone want":       "pending: grant",
	"gone granted":    "gone: Release",
	"pending unwant":  "gone: Release",
	"pending granted": "starting: start",

	"starting unwant":    "killing: stop",
	"starting lost":      "backoff:",
	"starting node lost": "backoff: Release",
	"starting tick":      "starting: start",
	"starting started":   "starting:",
	"starting ready":     "ready: UnitReady",
	"starting fenced":    "fenced: stop others",
	"starting killing":   "killing: stop others",
	"starting gone":      "backoff:",

	"ready unwant":    "draining: stop",
	"ready lost":      "pending: grant",
	"ready node lost": "pending: Release, grant",
	"ready fenced":    "fenced: UnitFenced, stop others",
	"ready killing":   "killing: UnitFenced, stop others",
	"ready draining":  "draining:",
	"ready gone":      "backoff: UnitFenced",

	"fenced unwant":    "killing: stop",
	"fenced lost":      "pending: grant",
	"fenced node lost": "pending: Release, grant",
	"fenced killing":   "killing:",
	"fenced gone":      "backoff:",

	"killing unwant":    "killing: stop",
	"killing lost":      "backoff:",
	"killing node lost": "backoff: Release",
	"killing killing":   "killing:",
	"killing gone":      "backoff:",

	"backoff unwant":    "gone: Release",
	"backoff redeploy":  "pending: grant",
	"backoff node lost": "pending: Release, grant",
	"backoff leave":     "backoff: grant",
	"backoff tick":      "backoff: grant",
	"backoff granted":   "starting: start",

	"draining lost":      "gone: Release",
	"draining node lost": "gone: Release",
	"draining tick":      "draining: stop",
	"draining draining":  "draining:",
	"draining killing":   "killing:",
	"draining gone":      "gone: Release",

	"failed unwant":   "gone: Release",
	"failed redeploy": "pending: grant",
	"failed tick":     "failed: grant",
	"failed granted":  "starting: start",
}

// edgesOthers are those that differ while other nodes of the unit live and have not said the same.
var edgesOthers = map[string]string{
	"starting node lost": "killing: stop others",
	"starting gone":      "killing: stop others",
	"ready node lost":    "killing: UnitFenced, stop others",
	"ready gone":         "killing: UnitFenced, stop others",
	"fenced node lost":   "killing: stop others",
	"fenced gone":        "killing:",
	"killing node lost":  "killing: stop others",
	"killing gone":       "killing:",
	"draining node lost": "killing: stop others",
	"draining gone":      "killing:",
}

func describe(m Machine, effects []Effect) string {
	var names []string
	for _, e := range effects {
		names = append(names, effectNames[e.Kind])
	}
	return strings.TrimSuffix(string(m.Phase)+": "+strings.Join(names, ", "), " ")
}

func epochFor(k UnitEventKind) uint64 {
	if k == EvGranted {
		return 4
	}
	return 3
}

func TestEveryPhaseAndEvent(t *testing.T) {
	for _, others := range []bool{false, true} {
		seen := map[string]bool{}
		for _, p := range allPhases {
			for k := EvWant; k <= EvGone; k++ {
				seen[string(p)+" "+eventNames[k]] = true
				checkEdge(t, p, k, others)
			}
		}
		for name := range edges {
			assert.True(t, seen[name], "edge %q of the table belongs to no phase and event", name)
		}
		for name := range edgesOthers {
			assert.True(t, seen[name], "edge %q of the table belongs to no phase and event", name)
		}
	}
}

func checkEdge(t *testing.T, p Phase, k UnitEventKind, others bool) {
	name := string(p) + " " + eventNames[k]
	want, listed := edges[name]
	if w, differs := edgesOthers[name]; others && differs {
		want, listed = w, true
	}
	before := in(p)
	after, effects := Next(before, Event{
		Kind: k, Epoch: epochFor(k), Attempt: 3, Grace: time.Minute,
		Others: others,
	}, noon, Timers{})
	assert.Equal(t, in(p), before, "the argument changed")
	if !listed {
		assert.Equal(t, before, after, name)
		assert.Empty(t, effects, name)
		return
	}
	assert.Equal(t, want, describe(after, effects), "%s, others %v", name, others)
}

func TestEventsOfOtherEpochsChangeNothing(t *testing.T) {
	for _, p := range allPhases {
		for k := EvWant; k <= EvGone; k++ {
			for _, epoch := range []uint64{0, 2, 4} {
				if k < EvStarted && (k != EvGranted || epoch > 3) {
					continue
				}
				after, effects := Next(in(p), Event{Kind: k, Epoch: epoch}, noon, Timers{})
				assert.Equal(t, in(p), after, "%s %s", p, eventNames[k])
				assert.Empty(t, effects)
			}
		}
	}
}

func TestAttachedUnitRecoversUnderItsEpoch(t *testing.T) {
	m := in(Ready)
	m.Attach = true
	m, effects := Next(m, Event{Kind: EvFenced, Epoch: 3, Reason: "refused"}, noon, Timers{})
	assert.Equal(t, "fenced: UnitFenced", describe(m, effects))
	assert.Equal(t, "refused", m.Reason)
	m, effects = Next(m, Event{Kind: EvReady, Epoch: 3}, noon.Add(time.Second), Timers{})
	assert.Equal(t, "ready: UnitReady", describe(m, effects))
	assert.Equal(t, uint64(3), m.Epoch)
	assert.Empty(t, m.Reason)
	assert.Equal(t, noon.Add(time.Second), m.Since)
}

func TestThirdFailedStartIsFailed(t *testing.T) {
	m, effects := Next(Machine{}, Event{Kind: EvWant}, noon, Timers{})
	require.Equal(t, []Effect{{Kind: DoGrant, Attempt: 1}}, effects)
	for attempt, wait := range []time.Duration{time.Second, 2 * time.Second, 0} {
		m, _ = Next(m, Event{Kind: EvGranted, Epoch: uint64(attempt + 1), Attempt: attempt + 1}, noon,
			Timers{})
		m, effects = Next(m, Event{
			Kind: EvGone, Epoch: m.Epoch, Reason: fmt.Sprint("cause ", attempt),
			LogTail: []string{"l"},
		}, noon, Timers{})
		if attempt == 2 {
			break
		}
		require.Equal(t, noon.Add(wait), m.Due)
		early, none := Next(m, Event{Kind: EvTick}, noon.Add(wait-1), Timers{})
		require.Equal(t, m, early)
		require.Empty(t, none)
		m, effects = Next(m, Event{Kind: EvTick}, noon.Add(wait), Timers{})
		require.Equal(t, []Effect{{Kind: DoGrant, Attempt: attempt + 2}}, effects)
	}
	assert.Equal(t, "failed: UnitFailed", describe(m, effects))
	assert.Equal(t, "cause 2", m.Reason)
	assert.Equal(t, []string{"l"}, m.LogTail)
	m, effects = Next(m, Event{Kind: EvRedeploy}, noon, Timers{})
	assert.Equal(t, []Effect{{Kind: DoGrant, Attempt: 1}}, effects)
	assert.Empty(t, m.Reason)
}

// failedOnce is a machine whose first attempts have failed, of what was launched as "l".
func failedOnce() Machine {
	return Machine{Phase: Failed, Epoch: 3, Launch: "l", Attempt: 3, Due: noon}
}

// HF52: TestFailedUnitIsTriedAgain now and then. It counts as failed until it is ready; from then on it is
// started for ever.
func TestFailedUnitIsTriedAgain(t *testing.T) {
	m := failedOnce()
	for try := range 3 {
		var effects []Effect
		m, effects = Next(m, Event{Kind: EvTick}, noon, Timers{})
		require.Equal(t, []Effect{{Kind: DoGrant, Attempt: 4 + try}}, effects)
		require.Equal(t, Failed, m.Phase)
		m, _ = Next(m, Event{
			Kind: EvGranted, Epoch: m.Epoch + 1, Attempt: 4 + try, Launch: "l",
		}, noon, Timers{})
		require.Equal(t, Starting, m.Phase)
		require.True(t, m.HasFailed(), "while it is tried")
		if try == 2 {
			break
		}
		m, effects = Next(m, Event{Kind: EvGone, Epoch: m.Epoch, Spread: 1}, noon, Timers{})
		require.Equal(t, "failed: UnitFailed", describe(m, effects))
		require.Equal(t, noon.Add(DefaultFailedRetry*3/4), m.Due)
		m.Due = noon
	}
	again, none := Next(m, Event{Kind: EvRedeploy}, noon, Timers{})
	assert.Empty(t, none)
	assert.False(t, again.HasFailed(), "after a deploy the start under way is the first of three")
	m, _ = Next(m, Event{Kind: EvReady, Epoch: m.Epoch}, noon, Timers{})
	assert.False(t, m.HasFailed())
	m, effects := Next(m, Event{Kind: EvGone, Epoch: m.Epoch}, noon, Timers{})
	assert.Equal(t, "backoff: UnitFenced", describe(m, effects))
}

// TestHF50WhatHasServedIsStartedForEver, 1, 2, 4 … 300 s apart, under every grant of what it was ready with.
// Another launch has its three attempts.
func TestHF50WhatHasServedIsStartedForEver(t *testing.T) {
	served := Machine{Phase: Pending, Epoch: 3, Served: "l"} // of an earlier leader, and after a release
	start := func(m Machine, launch string, attempt int) Machine {
		m, _ = Next(m, Event{Kind: EvGranted, Epoch: m.Epoch + 1, Attempt: attempt, Launch: launch}, noon,
			Timers{})
		require.Equal(t, Starting, m.Phase)
		return m
	}
	m, attempt := served, 1
	for _, want := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300} {
		m = start(m, "l", attempt)
		var effects []Effect
		m, effects = Next(m, Event{Kind: EvGone, Epoch: m.Epoch}, noon, Timers{})
		require.Equal(t, "backoff:", describe(m, effects))
		require.Equal(t, want, int(m.Due.Sub(noon).Seconds()))
		require.False(t, m.HasFailed())
		_, effects = Next(m, Event{Kind: EvTick}, m.Due, Timers{})
		attempt++
		require.Equal(t, []Effect{{Kind: DoGrant, Attempt: attempt}}, effects)
	}

	other := start(served, "l2", MaxStartAttempts)
	other, effects := Next(other, Event{Kind: EvGone, Epoch: other.Epoch}, noon, Timers{})
	assert.Equal(t, "failed: UnitFailed", describe(other, effects))
	back, _ := Next(other, Event{Kind: EvUnwant}, noon, Timers{})
	back, _ = Next(back, Event{Kind: EvWant}, noon, Timers{})
	back = start(back, "l", MaxStartAttempts)
	back, effects = Next(back, Event{Kind: EvGone, Epoch: back.Epoch}, noon, Timers{})
	assert.Equal(t, "backoff:", describe(back, effects), "the launch before is wanted again")
}

// TestNodesThatEndWithAStartAreSpared: each start may end a node with all of its ranks, so the third one in a
// row of a unit that has served is followed by the longest wait.
func TestNodesThatEndWithAStartAreSpared(t *testing.T) {
	m := in(Starting)
	m.Launch, m.Served, m.Attempt, m.NodeDied = "l", "l", MaxStartAttempts, true
	m, effects := Next(m, Event{Kind: EvLost}, noon, Timers{})
	assert.Equal(t, "backoff:", describe(m, effects))
	assert.Equal(t, noon.Add(DefaultRestartMax), m.Due)
}

// HF50: chance takes up to a quarter of a restart's wait, and nothing of the first attempts'.
func TestWaitsAreSpread(t *testing.T) {
	first, restart := in(Starting), in(Ready)
	for spread, want := range map[float64]int64{0: 4000, 0.5: 3500, 1: 3000} {
		restart.Failures = 2
		m, _ := Next(restart, Event{Kind: EvGone, Epoch: 3, Spread: spread}, noon, Timers{})
		assert.Equal(t, want, m.Due.Sub(noon).Milliseconds())
		m, _ = Next(first, Event{Kind: EvGone, Epoch: 3, Spread: spread}, noon, Timers{})
		assert.Equal(t, 2*time.Second, m.Due.Sub(noon))
	}
}

// HF50: TestAClockThatJumpsADay makes a unit wait no longer than its longest wait. A jump ahead tries it at
// once.
func TestAClockThatJumpsADay(t *testing.T) {
	for phase, longest := range map[Phase]time.Duration{
		Backoff: DefaultRestartMax, Failed: DefaultFailedRetry, Starting: DefaultResend,
		Draining: DefaultResend,
	} {
		m := in(phase)
		m.Due = noon.Add(longest)
		_, effects := Next(m, Event{Kind: EvTick}, noon.Add(24*time.Hour), Timers{})
		assert.Len(t, effects, 1, "%s, a day ahead", phase)
		back := noon.Add(-24 * time.Hour)
		m, effects = Next(m, Event{Kind: EvTick}, back, Timers{})
		assert.Empty(t, effects)
		assert.Equal(t, back.Add(longest), m.Due, "%s, a day back", phase)
	}
}

// HF68: A start that finds its ports taken is no attempt, three times in a row. Then the unit is failed.
func TestPortsThatAreTakenAreNoFailedStart(t *testing.T) {
	m, _ := Next(Machine{}, Event{Kind: EvWant}, noon, Timers{})
	var effects []Effect
	start := func(epoch uint64, gone Event) {
		m, _ = Next(m, Event{Kind: EvGranted, Epoch: epoch, Attempt: m.Attempt + 1}, noon, Timers{})
		gone.Kind, gone.Epoch = EvGone, epoch
		m, effects = Next(m, gone, noon, Timers{})
	}
	start(1, Event{Reason: "exit 1"})
	for i := range uint64(MaxRefusals) {
		start(2+i, Event{Reason: "port 20000 is taken", Taken: true})
		assert.Equal(t, "backoff:", describe(m, effects))
		assert.Equal(t, noon.Add(DefaultStartRetry), m.Due)
		_, effects = Next(m, Event{Kind: EvTick}, m.Due, Timers{})
		assert.Equal(t, []Effect{{Kind: DoGrant, Attempt: 2}}, effects, "still the second attempt")
	}
	once, refused := m, uint64(2+MaxRefusals)
	start(refused, Event{Reason: "port 20000 is taken by nginx (process 7)", Taken: true})
	assert.Equal(t, "failed: UnitFailed", describe(m, effects))
	assert.Equal(t, "port 20000 is taken by nginx (process 7)", m.Reason)

	m, _ = Next(once, Event{Kind: EvGranted, Epoch: refused, Attempt: 2}, noon, Timers{})
	m, _ = Next(m, Event{Kind: EvReady, Epoch: refused}, noon, Timers{})
	assert.Zero(t, m.Refusals, "a start that succeeds begins the count again")
}

func TestJoinPorts(t *testing.T) {
	assert.Empty(t, JoinPorts(nil))
	assert.Equal(t, []PortRange{{20, 22}, {24, 24}}, JoinPorts([]int{20, 21, 22, 24}))
	var many []int
	for p := 20000; p < 30000; p += 16 {
		many = append(many, p)
	}
	joined := JoinPorts(many)
	assert.LessOrEqual(t, len(joined), MaxTakenRanges)
	r := Resources{Taken: joined}
	for _, p := range many {
		assert.True(t, r.HasTaken(Block{Base: p, Size: 1}))
	}
	r.Taken = []PortRange{{20, 22}}
	assert.True(t, r.HasTaken(Block{Base: 16, Size: 16}))
	assert.False(t, r.HasTaken(Block{Base: 32, Size: 16}))
	assert.False(t, r.HasTaken(Block{}))
}

// TestNodeThatDiesOfAStart: the process of the node, or the whole node, ends during each start of the unit.
func TestNodeThatDiesOfAStart(t *testing.T) {
	for kind, effects := range map[UnitEventKind][]string{
		EvLost:     {"pending: grant", "backoff:", "failed: UnitFailed"},
		EvNodeLost: {"pending: Release, grant", "backoff: Release", "failed: UnitFailed"},
	} {
		m, asked := Next(Machine{}, Event{Kind: EvWant}, noon, Timers{})
		for i, want := range effects {
			require.Equal(t, DoGrant, asked[len(asked)-1].Kind)
			m, _ = Next(m, Event{Kind: EvGranted, Epoch: uint64(i + 1), Attempt: asked[len(asked)-1].Attempt},
				noon, Timers{})
			require.Equal(t, i+1, m.Attempt)
			m, asked = Next(m, Event{Kind: kind, Reason: "dpserve was started again on node a"}, noon,
				Timers{})
			require.Equal(t, want, describe(m, asked))
			require.True(t, m.NodeDied)
			if m.Phase == Backoff {
				require.Equal(t, noon.Add(2*time.Second), m.Due)
				m, asked = Next(m, Event{Kind: EvTick}, m.Due, Timers{})
			}
		}
		assert.Equal(t, "dpserve was started again on node a, while the unit was starting", m.Reason)
	}
}

// TestNodeThatEndsIsNoFailedStart of a unit that served, that starts nothing, or whose node was told to end,
// however often.
func TestNodeThatEndsIsNoFailedStart(t *testing.T) {
	attached := in(Starting)
	attached.Attach = true
	for name, c := range map[string]struct {
		m Machine
		e Event
	}{
		"ready":       {in(Ready), Event{Kind: EvLost}},
		"fenced":      {in(Fenced), Event{Kind: EvLost}},
		"node lost":   {in(Ready), Event{Kind: EvNodeLost}},
		"attached":    {attached, Event{Kind: EvLost}},
		"told to end": {in(Starting), Event{Kind: EvLost, Asked: true}},
	} {
		m, effects := Next(c.m, c.e, noon, Timers{})
		assert.Equal(t, Pending, m.Phase, name)
		assert.Equal(t, Effect{Kind: DoGrant, Attempt: 1}, effects[len(effects)-1], name)
		assert.False(t, m.NodeDied, name)
	}
}

// TestNodeLostInBackoffForgivesNothing: the failed starts before it stay counted.
func TestNodeLostInBackoffForgivesNothing(t *testing.T) {
	_, effects := Next(in(Backoff), Event{Kind: EvNodeLost}, noon, Timers{})
	assert.Equal(t, []Effect{{Kind: ProposeRelease}, {Kind: DoGrant, Attempt: 3}}, effects)
}

// TestUnitOverNodesThatKillsThem counts the same: the others end their parts first.
func TestUnitOverNodesThatKillsThem(t *testing.T) {
	m := in(Starting)
	m, effects := Next(m, Event{Kind: EvNodeLost, Others: true, Reason: "node a is lost"}, noon, Timers{})
	require.Equal(t, "killing: stop others", describe(m, effects))
	m, effects = Next(m, Event{Kind: EvGone, Epoch: 3}, noon, Timers{})
	assert.Equal(t, "backoff: Release", describe(m, effects))
	assert.True(t, m.NodeDied)
	assert.False(t, m.NodeLost)
}

// TestUnitOverNodesOfWhichOneDies: the process of one node ends during the start, and the parts of the others
// end after it. The start has failed, and its node has died, even where the others were ready.
func TestUnitOverNodesOfWhichOneDies(t *testing.T) {
	m, effects := Next(in(Starting), Event{
		Kind: EvGone, Epoch: 3, Others: true, Died: true,
		Reason: "dpserve was started again on node a",
	}, noon, Timers{})
	require.Equal(t, "killing: stop others", describe(m, effects))
	m, effects = Next(m, Event{Kind: EvGone, Epoch: 3}, noon, Timers{})
	assert.Equal(t, "backoff:", describe(m, effects))
	assert.True(t, m.NodeDied)
	m, _ = Next(m, Event{Kind: EvGranted, Epoch: 4, Attempt: 3}, noon, Timers{})
	require.True(t, m.NodeDied, "it is suspected until it has started")
	m, effects = Next(m, Event{Kind: EvGone, Epoch: 4}, noon, Timers{})
	assert.Equal(t, "failed: UnitFailed", describe(m, effects))
	assert.False(t, m.NodeDied, "the last start failed by itself")
}

// TestRanksThatWereReadyBesideOthersThatWereNot: a start fails although the ranks of one node were ready; if
// the others were ready too, and only their reports late, the unit was ready.
func TestRanksThatWereReadyBesideOthersThatWereNot(t *testing.T) {
	for wasReady, want := range map[bool][2]string{
		false: {"fenced: stop others", "failed: UnitFailed"},
		true:  {"fenced: UnitFenced, stop others", "backoff:"},
	} {
		m := in(Starting)
		m.Attempt = MaxStartAttempts
		m, effects := Next(m, Event{Kind: EvFenced, Epoch: 3, WasReady: wasReady}, noon, Timers{})
		require.Equal(t, want[0], describe(m, effects))
		m, effects = Next(m, Event{Kind: EvGone, Epoch: 3}, noon, Timers{})
		assert.Equal(t, want[1], describe(m, effects))
	}
}

func TestRestartsDoubleAndReset(t *testing.T) {
	m := in(Ready)
	now := noon
	fail := func() time.Duration {
		m.Phase, m.WasReady, m.ReadyAt = Ready, true, now
		m, _ = Next(m, Event{Kind: EvGone, Epoch: 3}, now, Timers{})
		return m.Due.Sub(now) / time.Second
	}
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300} {
		require.Equal(t, want, fail())
	}
	m.Phase, m.WasReady, m.ReadyAt = Ready, true, now
	m, _ = Next(m, Event{Kind: EvGone, Epoch: 3}, now.Add(DefaultRestartReset), Timers{})
	assert.Equal(t, noon.Add(DefaultRestartReset+time.Second), m.Due)
	assert.Zero(t, m.Attempt, "the next start is the first attempt")
}

func TestStopCarriesTheGraceThatIsLeft(t *testing.T) {
	m, effects := Next(in(Ready), Event{Kind: EvUnwant, Grace: 3 * time.Second, Reason: "deleted"}, noon,
		Timers{})
	assert.Equal(t, []Effect{{Kind: DoStop, Grace: 3 * time.Second}}, effects)
	m, effects = Next(m, Event{Kind: EvTick}, noon.Add(2*time.Second), Timers{})
	assert.Equal(t, []Effect{{Kind: DoStop, Grace: time.Second}}, effects)
	_, effects = Next(m, Event{Kind: EvTick}, noon.Add(4*time.Second), Timers{})
	assert.Equal(t, []Effect{{Kind: DoStop}}, effects)
	m, _ = Next(m, Event{Kind: EvKilling, Epoch: 3, Reason: "exit"}, noon, Timers{})
	assert.Equal(t, "deleted", m.Reason)
	assert.True(t, m.Due.IsZero())
}

func TestFirstReasonIsKept(t *testing.T) {
	m, _ := Next(in(Ready), Event{Kind: EvFenced, Epoch: 3, Reason: "rank 5: signal killed"}, noon, Timers{})
	m, _ = Next(m, Event{Kind: EvKilling, Epoch: 3, Reason: "after fence"}, noon, Timers{})
	m, _ = Next(m, Event{Kind: EvGone, Epoch: 3, LogTail: make([]string, 30)}, noon, Timers{})
	assert.Equal(t, "rank 5: signal killed", m.Reason)
	assert.Len(t, m.LogTail, LogTailLines)
}

// TestWhatDoesNotEndIsNamed: a node that says what is left adds it to the reason. The reasons of others do
// not take its place.
func TestWhatDoesNotEndIsNamed(t *testing.T) {
	m, _ := Next(in(Ready), Event{Kind: EvFenced, Epoch: 3, Reason: "rank 5: signal killed"}, noon, Timers{})
	for _, reason := range []string{
		"rank 5: signal killed",
		"rank 5: signal killed; still held after 10s: process 7", "rank 6: exit code 1",
	} {
		m, _ = Next(m, Event{Kind: EvKilling, Epoch: 3, Reason: reason}, noon, Timers{})
	}
	assert.Equal(t, "rank 5: signal killed; still held after 10s: process 7", m.Reason)
}

// TestTheCauseInTheLogIsAdded: at the end a node adds what the log of the ended engine tells.
func TestTheCauseInTheLogIsAdded(t *testing.T) {
	m, _ := Next(in(Starting), Event{Kind: EvKilling, Epoch: 3, Reason: "engine exited with code 1"}, noon,
		Timers{})
	m, _ = Next(m, Event{Kind: EvGone, Epoch: 3, Reason: "engine exited with code 1: out of memory"}, noon,
		Timers{})
	assert.Equal(t, "engine exited with code 1: out of memory", m.Reason)
}

func TestTimersArePinned(t *testing.T) {
	assert.Equal(t, Timers{
		StartRetry: time.Second, FailedRetry: 5 * time.Minute, RestartMin: time.Second,
		RestartMax: 5 * time.Minute, RestartReset: 10 * time.Minute, Resend: 2 * time.Second,
	}, Timers{}.WithDefaults())
	assert.Equal(t, 3, MaxStartAttempts)
	quick := Timers{StartRetry: 1, FailedRetry: 6, RestartMin: 2, RestartMax: 3, RestartReset: 4, Resend: 5}
	assert.Equal(t, quick, quick.WithDefaults())
	assert.Equal(t, 5*time.Minute, Timers{}.WithDefaults().restartDelay(1<<40))
}

// HF50: TestAnyEventsKeepTheMachineRight plays random events against raft as it is (epochs by grant) and a
// dumb count of starts. What was ready before under the launch of the grant in hand is never failed.
func TestAnyEventsKeepTheMachineRight(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := Machine{Attach: rapid.Bool().Draw(t, "attach")}
		now, raft, asked := noon, uint64(0), 0
		row := 0                 // failed starts in a row
		launch, served := "", "" // of the grant in hand; of the last one that was ready
		for range rapid.IntRange(1, 80).Draw(t, "events") {
			now = now.Add(time.Duration(rapid.IntRange(0, 90).Draw(t, "s")) * time.Second)
			k := UnitEventKind(rapid.IntRange(0, int(EvGone)).Draw(t, "event"))
			e := Event{
				Kind: k, Epoch: raft, Grace: time.Second,
				WasReady: rapid.IntRange(0, 9).Draw(t, "was") == 0,
				Asked:    rapid.IntRange(0, 3).Draw(t, "asked") == 0,
			}
			if rapid.IntRange(0, 6).Draw(t, "old") == 0 && raft > 0 {
				e.Epoch = raft - 1
			}
			if k == EvGranted {
				if asked == 0 {
					continue // raft grants what was asked for
				}
				raft++
				e.Epoch, e.Attempt, asked = raft, asked, 0
				e.Launch = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "launch")
			}
			before := m
			next, effects := Next(m, e, now, Timers{})
			m = next
			if m.Phase == Starting && before.Phase != Starting {
				launch = e.Launch
			}
			if m.WasReady {
				served = launch
			}
			require.GreaterOrEqual(t, m.Epoch, before.Epoch, "epochs never fall")
			if m.Phase == Starting && before.Phase != Starting {
				require.Greater(t, m.Epoch, before.Epoch, "every start has a new epoch")
				require.False(t, before.mayRun(), "two live grants")
			}
			row = countFailures(t, row, e, before, m, launch == served)
			for _, f := range effects {
				if f.Kind == DoGrant {
					require.False(t, m.mayRun(), "a grant is asked for while one may be alive")
					asked = f.Attempt
				}
				if f.Kind == ProposeRelease {
					require.False(t, m.mayRun(), "released while it may be alive")
				}
			}
		}
	})
}

// countFailures is how many starts in a row have failed by now.
func countFailures(t *rapid.T, row int, e Event, before, after Machine, served bool) int {
	k, wasReady, asked := e.Kind, before.WasReady || e.Kind == EvGone && e.WasReady, e.Kind != EvGone &&
		e.Asked
	switch {
	case after.Phase == Ready, after.Phase == Gone, k == EvWant && before.Phase != after.Phase,
		k == EvRedeploy && before.Phase != after.Phase:
		row = 0
	case before.mayRun() && after.Phase == Pending: // its node, or the process there, is no more
		if row++; wasReady || asked || before.Attach {
			row = 0
		}
	case before.mayRun() && after.Phase == Backoff && after.Attempt == 0:
		row = 0
	case before.mayRun() && (after.Phase == Backoff || after.Phase == Failed):
		row++
	}
	if before.mayRun() && !after.mayRun() {
		require.Equal(t, row >= MaxStartAttempts && !served, after.Phase == Failed)
	}
	return row
}

func TestDeriveStatus(t *testing.T) {
	for _, c := range []struct {
		seen Seen
		want AppStatus
	}{
		{Seen{Deleting: true, Units: []Phase{Failed}}, Deleting},
		{Seen{Units: []Phase{Ready, Failed}, WasRunning: true}, DeployFailed},
		{Seen{Units: []Phase{Ready, Ready}}, Running},
		{Seen{Units: []Phase{Ready, Backoff}, WasRunning: true}, Unhealthy},
		{Seen{Units: []Phase{Draining, Fenced}, WasRunning: true}, Unhealthy},
		{Seen{Units: []Phase{Ready, Starting}}, Deploying},
		{Seen{Units: []Phase{Pending}}, Deploying},
		{Seen{Units: []Phase{Backoff}}, Deploying},
	} {
		assert.Equal(t, c.want, DeriveStatus(c.seen), "%+v", c.seen)
	}
}
