package dpserver

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// healthMonitor checks one incarnation of an engine: does its process answer, and does it make progress while
// it has work?
type healthMonitor struct {
	round         uint64 // number of this monitor: results and ticks of an earlier one are dropped
	timer         *time.Timer
	listedAt      time.Time // of the last check that asked for the engine's models; zero: the next one asks
	healthPending bool      // a health check runs
	probeSent     time.Time // of the probe that runs; zero: none runs
	reportedBack  bool      // attach: ReplicaBack was reported, and the node's Ready has not come yet
	readPending   bool      // a read of the counters for the gate runs
	gate          healthGate
	holdsBack     bool // the gate keeps new requests away
}

// Messages of the health monitor. The round identifies late results of an earlier monitor.
type (
	healthTick   struct{ round uint64 }
	healthResult struct {
		round  uint64
		health engine.Health
		err    error
		models []engine.Model // none: it was not asked, or does not tell
	}
	probeResult struct {
		sent time.Time
		err  error
		read counterRead // after a probe that failed
	}
	countersResult struct{ counterRead }
)

// counterRead is one read of the engine's counters. round is that of the health monitor.
type counterRead struct {
	round    uint64
	counters engine.Counters
	err      error
}

// readEngine reads the engine's counters beside the actor, and posts what resultOf makes of them.
func (r *replica) readEngine(resultOf func(counterRead) any) {
	s, round := r.Server, r.monitor.round
	r.runCheck(r.timers.CounterLimit, func(ctx context.Context) {
		s.box.Send(resultOf(s.readCounters(ctx, round)))
	})
}

func (r *replica) startMonitor() {
	stopTimer(r.monitor.timer)
	r.state.lastRound++
	r.monitor = healthMonitor{round: r.state.lastRound, gate: newHealthGate(time.Now())}
	stopTimer(r.scrape.timer)
	r.scrape = scrape{isPending: r.scrape.isPending}
	r.armHealthTick()
}

func (r *replica) armHealthTick() {
	r.monitor.timer = r.sendOnBeat(healthPeriod(r.spec.App), healthTick{r.monitor.round})
}

func (r *replica) receiveMonitor(m any) {
	switch m := m.(type) {
	case healthTick:
		if m.round == r.monitor.round {
			r.onHealthTick()
		}
	case healthResult:
		if m.round == r.monitor.round {
			r.monitor.healthPending = false
			if r.isMonitored() { // a result may come after the fence
				r.onHealth(m)
				r.noteModels(m.models)
			}
		}
	case probeResult:
		if m.read.round == r.monitor.round && m.sent.Equal(r.monitor.probeSent) {
			r.monitor.probeSent = time.Time{}
			if r.isMonitored() {
				r.onProbe(m)
			}
		}
	case countersResult:
		if m.round == r.monitor.round {
			r.monitor.readPending = false
			r.onCounters(m)
		}
	case ejectionTimer:
		r.ejection.onTimer(m)
	}
}

// isMonitored says whether the engine's health matters. A fenced engine is monitored only if it is attached:
// it may come back by itself.
func (r *replica) isMonitored() bool {
	switch r.state.phase {
	case phaseOpen, phaseDraining:
		return true
	case phaseFenced:
		return !r.spec.Target.Owned
	case phaseStarting, phaseEnded:
	}
	return false
}

func (r *replica) onHealthTick() {
	if !r.isMonitored() {
		return
	}
	r.armHealthTick()
	r.checkHealth()
	r.checkStall()
	r.refreshRouting()
	r.kv.checkEventHealth()
	if r.subscriptions.current.Load() == nil {
		r.kv.startSubscription()
	}
}

// checkHealth sends GET /health beside the actor, one request at a time.
func (r *replica) checkHealth() {
	if r.monitor.healthPending || !r.isMonitored() {
		return
	}
	r.monitor.healthPending = true
	s, m, now := r.Server, healthResult{round: r.monitor.round}, time.Now()
	lists := now.Sub(r.monitor.listedAt) >= listPeriod && r.state.phase == phaseOpen
	if lists {
		r.monitor.listedAt = now
	}
	r.runCheck(healthTimeout(r.spec.App), func(ctx context.Context) {
		if m.health, m.err = s.engine.Health(ctx); m.health == engine.Alive && lists {
			limited, cancel := context.WithTimeout(ctx, listLimit)
			defer cancel()
			m.models, _ = s.engine.Models(limited) // not every engine tells
		}
		s.box.Send(m)
	})
}

const (
	listPeriod = 10 * time.Second // between two questions for the engine's models
	listLimit  = time.Second      // for the answer
)

// noteModels publishes the engine's adapters if they are other ones than before.
func (r *replica) noteModels(models []engine.Model) {
	if r.state.phase != phaseOpen {
		return
	}
	now := engine.AdaptersOf(r.spec.App, models)
	if len(models) > 0 && !slices.Equal(now, r.state.facts.Adapters) {
		r.state.facts.Adapters = now
		r.stream.emit(&msg.Record{Kind: msg.RecAdapters, Adapters: now})
		r.updateStats()
	}
	if r.monitor.listedAt.IsZero() { // they have changed while the engine was asked
		r.checkHealth()
	}
}

// onHealth fences at once on a 503 or a refused connection. A timeout or an odd status is reported to the
// gate. The probe is sent with the first report already, so that waiting for the second one costs no time. A
// healthy answer only proves that a process exists.
func (r *replica) onHealth(m healthResult) {
	if r.state.phase == phaseFenced {
		r.onHealthWhileFenced(m.health)
		return
	}
	switch m.health {
	case engine.Alive:
		r.noteSign(signHealth)
		isAwake := r.away.byHealth == engine.Asleep.String() // somebody has woken it
		r.setAway(away{byCounters: r.away.byCounters, byCall: r.away.byCall && !isAwake})
	case engine.Asleep, engine.Scaling:
		r.noteSign(signHealth)
		r.setAway(away{
			byHealth: m.health.String(), byCounters: r.away.byCounters, byCall: r.away.byCall,
		})
	case engine.Dead, engine.RefusedConn:
		r.fenceAndReport("health check: " + m.err.Error())
	case engine.Unanswered, engine.Odd:
		r.monitor.gate.report(lateHealth, "health check: "+m.err.Error(), time.Now())
		r.readCounters()
		if r.monitor.gate.suspicions[lateHealth].failed == 0 {
			r.sendProbe()
		}
	}
}

// away is what the engine says of itself: that it does not compute now.
type away struct {
	byHealth   string // msg.CauseAsleep or CauseScaling
	byCounters bool   // asleep, by the last read of them
	byCall     bool   // dpserve has put it to sleep, or paused it, and not woken it since
}

// reason is why the engine does not compute; "": it does.
func (a away) reason() string {
	if a.byCounters || a.byCall && a.byHealth == "" {
		return msg.CauseAsleep
	}
	return a.byHealth
}

// setAway keeps new requests away from an engine that says that it does not compute, and lets them come again
// when it does. Its open requests stay. The health gate asks nothing of it meanwhile.
func (r *replica) setAway(now away) {
	was, why := r.away.reason(), now.reason()
	if r.state.phase != phaseOpen {
		return
	}
	if r.away = now; why == was {
		return
	}
	r.noteSign(signTokens) // it does as it was told, and the stall clock begins anew
	if why != "" {
		r.shares.releaseAll()
		r.log.Info("engine does not compute now: the rank takes no request", slog.String("cause", why))
		r.publishState(why)
		return
	}
	r.log.Info("engine computes again: the rank takes requests", slog.String("was", was))
	r.publishFreeRoom()
}

// onHealthWhileFenced checks whether an attached engine is back, and whether it stays healthy while the node
// waits for its siblings.
func (r *replica) onHealthWhileFenced(h engine.Health) {
	switch {
	case h == engine.Alive && !r.monitor.reportedBack:
		r.sendProbe()
	case h != engine.Alive && r.monitor.reportedBack:
		r.monitor.reportedBack = false
		r.reportToNode(msg.ReplicaLost, "the engine is "+h.String()+" again")
	}
}

// sendProbe sends a probe beside the actor, one at a time. If it fails, the engine's counters are read at
// once, within the time of the probe.
func (r *replica) sendProbe() {
	if !r.monitor.probeSent.IsZero() {
		return
	}
	r.monitor.probeSent = time.Now()
	r.monitor.gate.probes++
	s, round, sent := r.Server, r.monitor.round, r.monitor.probeSent
	model := r.spec.Target.ModelName(r.spec.App.Model.ID)
	r.runCheck(r.timers.Probe, func(ctx context.Context) {
		limited, cancel := context.WithTimeout(ctx, s.timers.Probe-s.timers.CounterLimit)
		defer cancel()
		m := probeResult{sent: sent, err: s.engine.Probe(limited, model), read: counterRead{round: round}}
		if m.err != nil {
			m.read = s.readCounters(ctx, round)
		}
		s.box.Send(m)
	})
}

func (r *replica) onProbe(m probeResult) {
	isFenced := r.state.phase == phaseFenced
	switch {
	case isFenced && m.err == nil:
		r.monitor.reportedBack = true
		r.reportToNode(msg.ReplicaBack, "the engine answers again")
	case isFenced:
	case m.err == nil:
		r.ejection.end()
		r.noteSign(signProbe)
	default:
		r.noteRead(m.read)
		if r.away.reason() == "" {
			r.monitor.gate.noteFailedProbe(m.sent, m.err)
			r.judgeEngine()
		}
		r.ejection.awaitNext()
	}
}

// checkStall checks that an engine with open requests makes progress. Half way through a time without
// progress, and from its end on, it reads the engine's counters: if they moved, the engine works on something
// that no stream shows yet. It also reads them while a failed probe has not led to a decision.
func (r *replica) checkStall() {
	now, g := time.Now(), &r.monitor.gate
	if r.account.openCount() == 0 {
		g.noteIdle(now)
	}
	since, limit := g.lastSign(stalled), r.suspectAfter()
	if quiet := now.Sub(since); quiet >= limit || quiet >= limit/2 && !g.countersAt.After(since) ||
		r.monitor.holdsBack {
		r.readCounters()
	}
}

// suspectAfter is how long an engine with open requests may show no progress until a probe asks whether it
// works: the stall limit, or between_tokens_s if that is shorter.
func (r *replica) suspectAfter() time.Duration {
	return r.atLeastPrefill(min(stallTimeout(r.spec.App), betweenTokens(r.spec.App)))
}

// stallLimit is max(stall_timeout_s, 3 × the predicted time of the open prefill).
func (r *replica) stallLimit() time.Duration { return r.atLeastPrefill(stallTimeout(r.spec.App)) }

func (r *replica) atLeastPrefill(limit time.Duration) time.Duration {
	if r.node.PrefillTime != nil && r.account.prefillTokens > 0 {
		limit = max(limit, stallFactor*r.node.PrefillTime(r.account.prefillTokens))
	}
	return limit
}

func (r *replica) readCounters() {
	if r.monitor.readPending || r.state.phase == phaseFenced {
		return
	}
	r.monitor.readPending = true
	r.readEngine(func(c counterRead) any { return countersResult{c} })
}

func (r *replica) onCounters(m countersResult) {
	if r.state.phase == phaseFenced {
		return
	}
	r.noteRead(m.counterRead)
	now, g := time.Now(), &r.monitor.gate
	quiet, open := now.Sub(g.lastSign(stalled)), r.account.openCount()
	if r.away.reason() == "" && open > 0 && quiet >= r.suspectAfter() && g.suspicions[stalled].failed == 0 {
		g.report(stalled, fmt.Sprintf("no progress for %s with %d requests in hand",
			quiet.Round(time.Millisecond), open), now)
		r.sendProbe()
	}
	r.judgeEngine()
}

// noteSign notes that the engine works. It never fences, because the counters were not read just now.
func (r *replica) noteSign(s sign) {
	r.monitor.gate.noteSign(s, time.Now())
	if r.monitor.holdsBack {
		if v, by := r.judge(); v == keepRank {
			r.holdBack(false, by)
		}
	}
}

// noteRead notes what a read of the engine's counters shows, and how many KV events came meanwhile. A
// sleeping engine says so in every read.
func (r *replica) noteRead(m counterRead) {
	now := time.Now()
	r.monitor.gate.noteBatches(r.kv.eventStats().Batches, now)
	if m.err == nil {
		r.monitor.gate.noteCounters(&m.counters, !r.monitor.probeSent.IsZero(), now)
		r.setAway(away{
			byHealth: r.away.byHealth, byCounters: m.counters.Asleep, byCall: r.away.byCall,
		})
	}
}

// onControlled applies what a control call did to the engine.
func (r *replica) onControlled(effect openai.Effect) {
	now := r.away
	switch effect {
	case openai.Sleeps:
		now.byCall = true
		r.setAway(now)
	case openai.Wakes:
		r.setAway(away{}) // the next health check and the next counters say so if it still sleeps
		r.checkHealth()
	case openai.ClearsCache:
		r.recorder.box.Send(engineSlept{})
	case openai.ChangesModels:
		r.monitor.listedAt = time.Time{}
		r.checkHealth()
	case openai.NoEffect:
	}
}

func (r *replica) judge() (verdict, suspicion) {
	patience := r.stallLimit() + r.timers.Probe
	return r.monitor.gate.judge(time.Now(), r.account.openCount() > 0, patience)
}

// judgeEngine fences the rank of an engine that does not work, and lets the ingresses cut its streams. The
// counters were read just now.
func (r *replica) judgeEngine() {
	v, by := r.judge()
	if v == fenceRank {
		state := &r.monitor.gate.suspicions[by]
		cause := fmt.Sprintf("%s; then the probe failed: %v", state.cause, state.failure)
		if by == ejected {
			cause = fmt.Sprintf("%d requests and %d probes failed: %v", r.ejection.answers.failed(),
				state.failed, state.failure)
		}
		r.fence(msg.CauseStalled)
		r.reportToNode(msg.ReplicaLost, cause)
		return
	}
	if holds := v == holdRank; holds != r.monitor.holdsBack && r.state.phase == phaseOpen {
		r.holdBack(holds, by)
	}
}

// holdBack keeps new requests away from an engine that seems to hang and has open requests. They go to other
// ranks while it is not certain whether the engine goes on.
func (r *replica) holdBack(holds bool, by suspicion) {
	r.monitor.holdsBack = holds
	if !holds {
		r.log.Info("engine goes on: the rank takes requests again")
		r.publishFreeRoom()
		return
	}
	r.shares.releaseAll()
	r.log.Info("engine seems to hang: the rank takes no further request", slog.String("cause",
		r.monitor.gate.suspicions[by].cause))
	r.publishState("suspected")
}

// busy keeps the rank full for a while after the engine answered engine_busy.
type busy struct {
	on    bool
	until time.Time
	holds bool // no Done ends it: the engine has said how long
	round uint64
}

// shortBusy is the time of an engine that says nothing of how long it is busy: the next Done may end it.
const shortBusy = time.Second

// setBusy treats the rank as full for d after an engine_busy answer. The sinks get a record when it ends,
// because a rank without open requests has no Done that would wake a queue.
func (r *replica) setBusy(d time.Duration) {
	r.busy.holds = r.busy.holds || d > shortBusy
	if until := time.Now().Add(d); until.After(r.busy.until) {
		r.busy.until = until
		r.busy.round++
		r.sendAfter(d, busyTimer{r.busy.round})
	}
	if !r.busy.on {
		r.busy.on = true
		r.shares.releaseAll()
		r.publishState("engine_busy")
	}
}

func (r *replica) clearBusy() {
	if r.busy.on {
		r.busy = busy{round: r.busy.round + 1}
		r.publishState("")
	}
}
