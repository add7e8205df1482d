package dpserver

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// trip counts failures of requests. Tripped is a flag and not a phase: the rank lives and admits. The stream says that it is tripped
// until a canary comes back, and the Routers leave it out, unless too many ranks of the application are (routing, View.leaveOut).
type trip struct {
	failures int // in a row
	tripped  bool
	canaries int // failed in a row
	wait     time.Duration
	timer    *time.Timer
}

// Messages of the trip.
type (
	tripCanary struct{ incarnation uint64 } // time for one
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

// failed counts an answer that its ingress counts towards the trip.
func (r *replica) failed() {
	r.trip.failures++
	if r.trip.failures < tripAfter || r.trip.tripped || r.vitals.phase != open {
		return
	}
	r.trip.tripped, r.trip.canaries, r.trip.wait = true, 0, r.timers.TripBackoff
	r.state("tripped")
	r.log.Warn("rank is tripped: its answers failed in a row", slog.Int("failures", r.trip.failures))
	r.armTrip()
}

// armTrip waits one backoff step: 1, 2, 4 … 64 s.
func (r *replica) armTrip() {
	r.trip.timer = r.after(r.trip.wait, tripCanary{r.vitals.incarnation})
	r.trip.wait = min(2*r.trip.wait, r.timers.TripCeiling)
}

func (r *replica) onTripCanary(m tripCanary) {
	if !r.trip.tripped || m.incarnation != r.vitals.incarnation || r.vitals.phase != open {
		return
	}
	s, model := r.Server, r.spec.App.Model.ID
	r.probe(r.timers.Canary, func(ctx context.Context) {
		s.box.Send(tripResult{m.incarnation, s.engine.Canary(ctx, model)})
	})
}

// onTripResult clears the trip, waits longer, or gives an owned engine up.
func (r *replica) onTripResult(m tripResult) {
	if !r.trip.tripped || m.incarnation != r.vitals.incarnation || r.vitals.phase != open {
		return
	}
	if m.err == nil {
		r.trip = trip{}
		r.keeper.moved()
		r.silence.forget()
		r.log.Info("rank answers again")
		r.state("")
		return
	}
	r.trip.canaries++
	if r.trip.canaries >= fenceAfter && r.spec.Target.Owned {
		r.lose(fmt.Sprintf("%d requests and %d canaries failed in a row: %v", r.trip.failures, r.trip.canaries, m.err))
		return
	}
	r.armTrip()
}
