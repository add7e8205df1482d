package dpserver

import (
	"log/slog"
	"time"
)

// trip counts failed requests. Tripped is a flag and not a phase: the rank runs and admits. The stream says
// that it is tripped until a canary succeeds, and the Routers leave it out unless too many ranks of the
// application are tripped (routing/DESIGN.md, Tripped ranks).
type trip struct {
	r            *replica
	failures     int // in a row
	isTripped    bool
	awaitsCanary bool // a canary was due, and has not ended
	backoff      time.Duration
	timer        *time.Timer
}

// tripTimer says that the next canary of a trip is due.
type tripTimer struct{ incarnation uint64 }

// countFailure counts an answer that its ingress counts towards the trip. An attached engine cannot be
// restarted, so failed canaries never fence it.
func (p *trip) countFailure() {
	p.failures++
	if p.failures < tripAfter || p.isTripped || p.r.state.phase != phaseOpen {
		return
	}
	p.isTripped, p.backoff = true, p.r.timers.TripBackoff
	if p.r.spec.Target.Owned {
		p.r.monitor.gate.report(tripped, "", time.Now())
	}
	p.r.publishState("tripped")
	p.r.log.Warn("rank is tripped: its answers failed in a row", slog.Int("failures", p.failures))
	p.armTimer()
}

// armTimer waits one backoff step: 1, 2, 4 … 64 s.
func (p *trip) armTimer() {
	p.timer = p.r.sendAfter(p.backoff, tripTimer{p.r.state.incarnation})
	p.backoff = min(2*p.backoff, p.r.timers.TripCeiling)
}

func (p *trip) onTimer(m tripTimer) {
	if p.isTripped && m.incarnation == p.r.state.incarnation && p.r.state.phase == phaseOpen {
		p.awaitsCanary = true
		p.r.sendCanary()
	}
}

// end ends the trip after an answered canary.
func (p *trip) end() {
	if !p.isTripped || p.r.state.phase != phaseOpen {
		return
	}
	stopTimer(p.timer)
	*p = trip{r: p.r}
	p.r.log.Info("rank answers again")
	p.r.publishState("")
}

// awaitNext waits for the next canary after one that failed.
func (p *trip) awaitNext() {
	if p.awaitsCanary && p.r.state.phase == phaseOpen {
		p.awaitsCanary = false
		p.armTimer()
	}
}
