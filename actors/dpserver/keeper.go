package dpserver

import (
	"context"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine"
)

// keeper watches one incarnation of an engine: does its process answer, and does it move on while it has work?
type keeper struct {
	round   uint64 // of ticks: an older round's tick is dropped
	timer   *time.Timer
	asking  bool // a health probe is under way
	canary  bool // a canary of health or stall is under way
	backing bool // attach: ReplicaBack was told, the node's Ready is awaited

	lastMove time.Time
	look     look
	looking  bool
}

// look is the engine's counters at one moment of a quiet stretch.
type look struct {
	taken    bool
	counters engine.Counters
}

// Messages of the keeper. incarnation and round keep late results of a former life away.
type (
	tick         struct{ round uint64 }
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

func (k *keeper) moved() { k.lastMove, k.look = time.Now(), look{} }

func (k *keeper) stop() {
	if k.timer != nil {
		k.timer.Stop()
	}
}

// fenced drops what was asked of the incarnation before the fence; ticks go on for an attached engine.
func (k *keeper) fenced() { k.backing, k.canary = false, false }

// keep begins a watch.
func (r *replica) keep() {
	r.keeper.stop()
	r.vitals.rounds++
	r.keeper = keeper{round: r.vitals.rounds}
	r.scrape.stop()
	r.scrape = scrape{asking: r.scrape.asking}
	r.silence = silence{}
	r.keeper.moved()
	r.armTick()
}

func (r *replica) armTick() {
	r.keeper.timer = r.after(healthPeriod(r.spec.App), tick{r.keeper.round})
}

// watch handles the keeper's messages.
func (r *replica) watch(m any) {
	switch m := m.(type) {
	case tick:
		if m.round == r.keeper.round {
			r.onTick()
		}
	case healthResult:
		if m.round == r.keeper.round {
			r.keeper.asking = false
			if r.watched() { // an answer may come after the fence
				r.onHealth(m)
			}
		}
	case canaryResult:
		if m.round == r.keeper.round {
			r.keeper.canary = false
			if r.watched() {
				r.onCanary(m)
			}
		}
	case countersResult:
		if m.round == r.keeper.round {
			r.keeper.looking = false
			r.onCounters(m)
		}
	case silenceLook:
		if m.round == r.keeper.round {
			r.onSilenceLook(m)
		}
	case tripCanary:
		r.onTripCanary(m)
	case tripResult:
		r.onTripResult(m)
	}
}

// watched says whether the engine is still of interest: a fenced one only if it may come back by itself.
func (r *replica) watched() bool {
	switch r.vitals.phase {
	case open, draining:
		return true
	case fenced:
		return !r.spec.Target.Owned
	case starting, ended:
	}
	return false
}

func (r *replica) onTick() {
	if !r.watched() {
		return
	}
	r.armTick()
	r.probeHealth()
	r.checkStall()
	r.refresh()
	r.feelPulse()
	if r.listening.now.Load() == nil {
		r.startListening()
	}
}

// probeHealth asks GET /health beside the actor; one question at a time.
func (r *replica) probeHealth() {
	if r.keeper.asking || !r.watched() {
		return
	}
	r.keeper.asking = true
	s, round := r.Server, r.keeper.round
	r.probe(healthTimeout(r.spec.App), func(ctx context.Context) {
		h, err := s.engine.Health(ctx)
		s.box.Send(healthResult{round, h, err})
	})
}

// onHealth: a 503 or a refused connection fences at once, silence only starts the canary; alive proves nothing but a process.
func (r *replica) onHealth(m healthResult) {
	if r.vitals.phase == fenced {
		r.onHealthWhileFenced(m.health)
		return
	}
	switch m.health {
	case engine.Alive:
	case engine.Dead, engine.RefusedConn:
		r.lose("health check: " + m.err.Error())
	case engine.Unanswered, engine.Odd:
		r.sendCanary("health check: " + m.err.Error())
	}
}

// onHealthWhileFenced looks for an attached engine to come back, and whether it stays while the node waits for its siblings.
func (r *replica) onHealthWhileFenced(h engine.Health) {
	switch {
	case h == engine.Alive && !r.keeper.backing:
		r.sendCanary("")
	case h != engine.Alive && r.keeper.backing:
		r.keeper.backing = false
		r.tell(msg.ReplicaLost, "the engine is "+h.String()+" again")
	}
}

func (r *replica) sendCanary(cause string) {
	if r.keeper.canary {
		return
	}
	r.keeper.canary = true
	s, round, model := r.Server, r.keeper.round, r.spec.App.Model.ID
	r.probe(r.timers.Canary, func(ctx context.Context) {
		s.box.Send(canaryResult{round, cause, s.engine.Canary(ctx, model)})
	})
}

func (r *replica) onCanary(m canaryResult) {
	switch {
	case r.vitals.phase == fenced && m.err == nil && m.cause == "":
		r.keeper.backing = true
		r.tell(msg.ReplicaBack, "the engine answers again")
	case r.vitals.phase == fenced:
	case m.err == nil:
		r.keeper.moved()
		r.silence.forget()
	default:
		r.lose(fmt.Sprintf("%s; then the canary failed: %v", m.cause, m.err))
	}
}

// checkStall: with work in hand, something must move within the stall timeout. Half way through a quiet stretch the engine's
// own counters are read, at its end again: if they moved, the engine works on something no stream shows yet.
func (r *replica) checkStall() {
	if r.account.open() == 0 || r.vitals.phase == fenced {
		r.keeper.moved()
		return
	}
	quiet, limit := time.Since(r.keeper.lastMove), r.stallLimit()
	if quiet >= limit || quiet >= limit/2 && !r.keeper.look.taken {
		r.lookAtCounters()
	}
}

// stallLimit is max(stall_timeout_s, 3 × the predicted time of the prefill in front).
func (r *replica) stallLimit() time.Duration {
	limit := stallTimeout(r.spec.App)
	if r.prefill != nil && r.account.prefillTokens > 0 {
		limit = max(limit, stallFactor*r.prefill(r.account.prefillTokens))
	}
	return limit
}

func (r *replica) lookAtCounters() {
	if r.keeper.looking || r.keeper.canary {
		return
	}
	r.keeper.looking = true
	s, round := r.Server, r.keeper.round
	r.probe(r.timers.CounterLimit, func(ctx context.Context) {
		c, err := s.engine.Counters(ctx)
		s.box.Send(countersResult{round, c, err})
	})
}

func (r *replica) onCounters(m countersResult) {
	before := r.keeper.look
	quiet, limit := time.Since(r.keeper.lastMove), r.stallLimit()
	switch {
	case r.account.open() == 0, r.vitals.phase == fenced:
	case m.err == nil && before.taken && m.counters.Moved(before.counters):
		r.keeper.moved()
	case quiet < limit:
		r.keeper.look = look{taken: true, counters: m.counters}
	default:
		r.sendCanary(fmt.Sprintf("no progress for %s with %d requests in hand", quiet.Round(time.Millisecond), r.account.open()))
	}
}
