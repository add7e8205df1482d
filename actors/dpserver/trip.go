package dpserver

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// trip counts failed requests. Tripped is a flag and not a phase: the rank runs and admits. The stream says
// that it is tripped until a canary succeeds, and the Routers leave it out unless too many ranks of the
// application are tripped (routing/DESIGN.md, Tripped ranks).
type trip struct {
	failures       int // in a row
	isTripped      bool
	failedCanaries int // in a row
	backoff        time.Duration
	timer          *time.Timer
}

// Messages of the trip.
type (
	tripTimer  struct{ incarnation uint64 } // the next canary is due
	tripResult struct {
		incarnation uint64
		err         error
	}
)

func (t *trip) stop() {
	if t.timer != nil {
		t.timer.Stop()
	}
}

// countFailure counts an answer that its ingress counts towards the trip.
func (r *replica) countFailure() {
	r.trip.failures++
	if r.trip.failures < tripAfter || r.trip.isTripped || r.state.phase != phaseOpen {
		return
	}
	r.trip.isTripped, r.trip.failedCanaries, r.trip.backoff = true, 0, r.timers.TripBackoff
	r.publishState("tripped")
	r.log.Warn("rank is tripped: its answers failed in a row", slog.Int("failures", r.trip.failures))
	r.armTripTimer()
}

// armTripTimer waits one backoff step: 1, 2, 4 … 64 s.
func (r *replica) armTripTimer() {
	r.trip.timer = r.sendAfter(r.trip.backoff, tripTimer{r.state.incarnation})
	r.trip.backoff = min(2*r.trip.backoff, r.timers.TripCeiling)
}

func (r *replica) onTripTimer(m tripTimer) {
	if !r.trip.isTripped || m.incarnation != r.state.incarnation || r.state.phase != phaseOpen {
		return
	}
	s, model := r.Server, r.spec.App.Model.ID
	r.runProbe(r.timers.Canary, func(ctx context.Context) {
		s.box.Send(tripResult{m.incarnation, s.engine.Canary(ctx, model)})
	})
}

// onTripResult clears the trip, waits longer, or gives up an engine that dpserve started.
func (r *replica) onTripResult(m tripResult) {
	if !r.trip.isTripped || m.incarnation != r.state.incarnation || r.state.phase != phaseOpen {
		return
	}
	if m.err == nil {
		r.trip = trip{}
		r.monitor.noteProgress()
		r.progress.discard()
		r.log.Info("rank answers again")
		r.publishState("")
		return
	}
	r.trip.failedCanaries++
	if r.trip.failedCanaries >= fenceAfter && r.spec.Target.Owned {
		r.fenceAndReport(fmt.Sprintf("%d requests and %d canaries failed in a row: %v", r.trip.failures,
			r.trip.failedCanaries, m.err))
		return
	}
	r.armTripTimer()
}
