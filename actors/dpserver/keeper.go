package dpserver

import (
	"context"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine"
)

// healthMonitor checks one incarnation of an engine: does its process answer, and does it make progress while
// it has work?
type healthMonitor struct {
	round         uint64 // number of this monitor: results and ticks of an earlier one are dropped
	timer         *time.Timer
	healthPending bool // a health probe runs
	canaryPending bool // a canary of health or stall runs
	reportedBack  bool // attach: ReplicaBack was reported, and the node's Ready has not come yet

	lastProgress    time.Time
	sample          counterSample
	countersPending bool
}

// counterSample is the engine's counters at one moment without progress.
type counterSample struct {
	isSet    bool
	counters engine.Counters
}

// Messages of the health monitor. The round identifies late results of an earlier monitor.
type (
	healthTick   struct{ round uint64 }
	healthResult struct {
		round  uint64
		health engine.Health
		err    error
	}
	canaryResult struct {
		round uint64
		cause string // why it was sent
		err   error
	}
	countersResult struct {
		round    uint64
		counters engine.Counters
		err      error
	}
)

func (k *healthMonitor) noteProgress() { k.lastProgress, k.sample = time.Now(), counterSample{} }

func (k *healthMonitor) stop() {
	if k.timer != nil {
		k.timer.Stop()
	}
}

// resetPending drops the state of the incarnation before the fence. The ticks go on for an attached engine.
func (k *healthMonitor) resetPending() { k.reportedBack, k.canaryPending = false, false }

// startMonitor starts a new monitor.
func (r *replica) startMonitor() {
	r.monitor.stop()
	r.state.lastRound++
	r.monitor = healthMonitor{round: r.state.lastRound}
	r.scrape.stop()
	r.scrape = scrape{isPending: r.scrape.isPending}
	r.progress = progressCheck{}
	r.monitor.noteProgress()
	r.armHealthTick()
}

func (r *replica) armHealthTick() {
	r.monitor.timer = r.sendAfter(healthPeriod(r.spec.App), healthTick{r.monitor.round})
}

// receiveMonitor handles the messages of the health monitor.
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
			}
		}
	case canaryResult:
		if m.round == r.monitor.round {
			r.monitor.canaryPending = false
			if r.isMonitored() {
				r.onCanary(m)
			}
		}
	case countersResult:
		if m.round == r.monitor.round {
			r.monitor.countersPending = false
			r.onCounters(m)
		}
	case progressResult:
		if m.round == r.monitor.round {
			r.onProgressResult(m)
		}
	case tripTimer:
		r.onTripTimer(m)
	case tripResult:
		r.onTripResult(m)
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
	r.probeHealth()
	r.checkStall()
	r.refreshRouting()
	r.checkEventHealth()
	if r.subscriptions.current.Load() == nil {
		r.startSubscription()
	}
}

// probeHealth sends GET /health beside the actor, one request at a time.
func (r *replica) probeHealth() {
	if r.monitor.healthPending || !r.isMonitored() {
		return
	}
	r.monitor.healthPending = true
	s, round := r.Server, r.monitor.round
	r.runProbe(healthTimeout(r.spec.App), func(ctx context.Context) {
		h, err := s.engine.Health(ctx)
		s.box.Send(healthResult{round, h, err})
	})
}

// onHealth fences at once on a 503 or a refused connection. After a timeout or an odd status it sends a
// canary. A healthy answer only proves that a process exists.
func (r *replica) onHealth(m healthResult) {
	if r.state.phase == phaseFenced {
		r.onHealthWhileFenced(m.health)
		return
	}
	switch m.health {
	case engine.Alive:
	case engine.Dead, engine.RefusedConn:
		r.fenceAndReport("health check: " + m.err.Error())
	case engine.Unanswered, engine.Odd:
		r.sendCanary("health check: " + m.err.Error())
	}
}

// onHealthWhileFenced checks whether an attached engine is back, and whether it stays healthy while the node
// waits for its siblings.
func (r *replica) onHealthWhileFenced(h engine.Health) {
	switch {
	case h == engine.Alive && !r.monitor.reportedBack:
		r.sendCanary("")
	case h != engine.Alive && r.monitor.reportedBack:
		r.monitor.reportedBack = false
		r.reportToNode(msg.ReplicaLost, "the engine is "+h.String()+" again")
	}
}

func (r *replica) sendCanary(cause string) {
	if r.monitor.canaryPending {
		return
	}
	r.monitor.canaryPending = true
	s, round, model := r.Server, r.monitor.round, r.spec.App.Model.ID
	r.runProbe(r.timers.Canary, func(ctx context.Context) {
		s.box.Send(canaryResult{round, cause, s.engine.Canary(ctx, model)})
	})
}

func (r *replica) onCanary(m canaryResult) {
	switch {
	case r.state.phase == phaseFenced && m.err == nil && m.cause == "":
		r.monitor.reportedBack = true
		r.reportToNode(msg.ReplicaBack, "the engine answers again")
	case r.state.phase == phaseFenced:
	case m.err == nil:
		r.monitor.noteProgress()
		r.progress.discard()
	default:
		r.fenceAndReport(fmt.Sprintf("%s; then the canary failed: %v", m.cause, m.err))
	}
}

// checkStall checks that an engine with open requests makes progress within the stall timeout. Half way
// through a time without progress, and at its end, it reads the engine's counters: if they moved, the engine
// works on something that no stream shows yet.
func (r *replica) checkStall() {
	if r.account.openCount() == 0 || r.state.phase == phaseFenced {
		r.monitor.noteProgress()
		return
	}
	quiet, limit := time.Since(r.monitor.lastProgress), r.stallLimit()
	if quiet >= limit || quiet >= limit/2 && !r.monitor.sample.isSet {
		r.readCounters()
	}
}

// stallLimit is max(stall_timeout_s, 3 × the predicted time of the open prefill).
func (r *replica) stallLimit() time.Duration {
	limit := stallTimeout(r.spec.App)
	if r.prefillTime != nil && r.account.prefillTokens > 0 {
		limit = max(limit, stallFactor*r.prefillTime(r.account.prefillTokens))
	}
	return limit
}

func (r *replica) readCounters() {
	if r.monitor.countersPending || r.monitor.canaryPending {
		return
	}
	r.monitor.countersPending = true
	s, round := r.Server, r.monitor.round
	r.runProbe(r.timers.CounterLimit, func(ctx context.Context) {
		c, err := s.engine.Counters(ctx)
		s.box.Send(countersResult{round, c, err})
	})
}

func (r *replica) onCounters(m countersResult) {
	before := r.monitor.sample
	quiet, limit := time.Since(r.monitor.lastProgress), r.stallLimit()
	switch {
	case r.account.openCount() == 0, r.state.phase == phaseFenced:
	case m.err == nil && before.isSet && m.counters.Moved(before.counters):
		r.monitor.noteProgress()
	case quiet < limit:
		r.monitor.sample = counterSample{isSet: true, counters: m.counters}
	default:
		r.sendCanary(fmt.Sprintf("no progress for %s with %d requests in hand", quiet.Round(time.Millisecond),
			r.account.openCount()))
	}
}
