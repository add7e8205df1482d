package dpserver

import (
	"errors"
	"time"

	"github.com/dpserve/dpserve/internal/engine"
)

// sign is something that shows that an engine works.
type sign uint8

const (
	signHealth    sign = iota // /health answered 200: the process lives
	signProbe                 // a probe was answered: the engine computes
	signTokens                // a request got a first token, output, or a whole answer of the model
	signCounters              // the engine counted more prompt tokens or generated tokens
	signGenerated             // the engine generated more tokens than probes asked for
	signEvents                // the engine published KV events
	signCount
)

// suspicion is a reason to believe that an engine does not work.
type suspicion uint8

const (
	lateHealth suspicion = iota // /health was not answered in time, or with an unexpected status
	stalled                     // requests are open, and the engine shows no progress
	ejected                     // the last answers of an engine that dpserve started failed
	suspicionCount
)

// suspicionRule says when a suspicion is enough to fence a rank.
type suspicionRule struct {
	refutedBy [signCount]bool
	reports   int // in a row, of what raises the suspicion
	probes    int // failed probes
}

// suspicionRules are the rules of all suspicions. The front end of an engine may answer /health while the
// core hangs, so /health refutes only its own lateness. An ejected engine may read prompts and fail to answer
// them, so only tokens that come out speak for it.
//
//nolint:gochecknoglobals // a constant table
var suspicionRules = [suspicionCount]suspicionRule{
	lateHealth: {
		refutedBy: [signCount]bool{
			signHealth: true, signProbe: true, signTokens: true, signCounters: true, signEvents: true,
		},
		reports: 2, probes: 1,
	},
	stalled: {
		refutedBy: [signCount]bool{
			signProbe: true, signTokens: true, signCounters: true, signEvents: true,
		},
		reports: 1, probes: 1,
	},
	ejected: {
		refutedBy: [signCount]bool{signProbe: true, signTokens: true, signGenerated: true},
		reports:   1, probes: fenceAfter,
	},
}

// suspicionState is one suspicion of a rank.
type suspicionState struct {
	since    time.Time // no sign that refutes it was seen since then; zero: there is no suspicion
	cause    string
	reports  int
	failed   int   // probes in a row
	failure  error // of the last one
	timedOut bool  // the last one got no answer
}

// healthGate decides whether an engine is sick. Everything that fences a rank because its engine seems to
// hang or to fail passes it: late /health, stalls and ejections raise suspicions, all signs of life refute
// them, and judge is asked after the engine's counters were read anew. An engine that is provably gone (a
// refused connection, a 503 of its front end, the end of its process) needs no gate.
type healthGate struct {
	seen       [signCount]time.Time // when the last sign of each kind was seen
	workSince  time.Time            // when the rank last went from no open request to one
	counters   engine.Counters      // of the last read that had token counters
	countersAt time.Time            // of that read; zero: there was none
	batches    uint64               // of KV events at the last look
	batchesAt  time.Time            // of that look; zero: there was none
	probes     float64              // whose tokens may be in the next read
	suspicions [suspicionCount]suspicionState
}

// newHealthGate is the gate of an engine that works.
func newHealthGate(now time.Time) healthGate {
	g := healthGate{workSince: now}
	for s := range g.seen {
		g.seen[s] = now
	}
	return g
}

// noteSign notes a sign of life at an instant, and ends the suspicions that it refutes. An ejection ends with
// an answered probe only; after another sign its failed probes are counted anew.
func (g *healthGate) noteSign(s sign, at time.Time) {
	if at.After(g.seen[s]) {
		g.seen[s] = at
	}
	for k := range g.suspicions {
		state := &g.suspicions[k]
		if state.since.IsZero() || !suspicionRules[k].refutedBy[s] || at.Before(state.since) {
			continue
		}
		if suspicion(k) == ejected && s != signProbe {
			state.since, state.failed = at, 0
		} else {
			*state = suspicionState{}
		}
	}
}

// noteBatches compares the number of KV event batches with the last look. What has moved did so after that
// look, so this is the time of the sign.
func (g *healthGate) noteBatches(batches uint64, now time.Time) {
	if !g.batchesAt.IsZero() && batches > g.batches {
		g.noteSign(signEvents, g.batchesAt)
	}
	g.batches, g.batchesAt = batches, now
}

// noteCounters compares the engine's counters with the last read in the same way. probeRuns says that a
// probe is under way, whose token the next read may show.
func (g *healthGate) noteCounters(c *engine.Counters, probeRuns bool, now time.Time) {
	if !c.Seen {
		return
	}
	if !g.countersAt.IsZero() {
		if c.Moved(g.counters) {
			g.noteSign(signCounters, g.countersAt)
		}
		if c.GenerationTokens-g.counters.GenerationTokens > g.probes {
			g.noteSign(signGenerated, g.countersAt)
		}
	}
	g.counters, g.countersAt, g.probes = *c, now, 0
	if probeRuns {
		g.probes = 1
	}
}

// noteIdle notes that the rank has no open request. A stall that was reported is still decided: its requests
// may have ended because their ingresses waited no longer.
func (g *healthGate) noteIdle(now time.Time) {
	if g.suspicions[stalled].since.IsZero() {
		g.workSince = now
	}
}

// report raises a suspicion, or adds another report to it.
func (g *healthGate) report(k suspicion, cause string, now time.Time) {
	state := &g.suspicions[k]
	if state.since.IsZero() {
		state.since, state.cause = now, cause
	}
	state.reports++
}

// noteFailedProbe counts a probe that failed against every suspicion, unless a sign that refutes the
// suspicion was seen since the probe was sent: then the engine works, and had no time for it.
func (g *healthGate) noteFailedProbe(sent time.Time, err error) {
	var timeout interface{ Timeout() bool }
	for k := range g.suspicions {
		state := &g.suspicions[k]
		if state.since.IsZero() || g.lastSign(suspicion(k)).After(sent) {
			continue
		}
		state.failed++
		state.failure, state.timedOut = err, errors.As(err, &timeout) && timeout.Timeout()
	}
}

// lastSign is when the last sign was seen that refutes a suspicion. An engine without open requests owes no
// progress, so a stall is counted from the first open request at the earliest.
func (g *healthGate) lastSign(k suspicion) (last time.Time) {
	if k == stalled {
		last = g.workSince
	}
	for s, at := range g.seen {
		if suspicionRules[k].refutedBy[s] && at.After(last) {
			last = at
		}
	}
	return last
}

// verdict is what a suspicion leads to.
type verdict uint8

const (
	keepRank  verdict = iota
	holdRank          // the rank gets no new request until its engine shows a sign or is fenced
	fenceRank         // the engine does not work
)

// judge is the verdict on the engine, and the suspicion that led to it. A probe that got no answer does not
// fence a rank with open requests before the engine was silent for patience: the probe may wait for a place
// in the engine's queue, or the whole process may stand still for a while.
func (g *healthGate) judge(now time.Time, isLoaded bool, patience time.Duration) (verdict, suspicion) {
	result, by := keepRank, suspicion(0)
	for k := range suspicionCount {
		state, rule := &g.suspicions[k], &suspicionRules[k]
		if state.reports < rule.reports || state.failed < rule.probes {
			continue
		}
		if !state.timedOut || !isLoaded || now.Sub(g.lastSign(k)) >= patience {
			return fenceRank, k
		}
		result, by = holdRank, k
	}
	return result, by
}
