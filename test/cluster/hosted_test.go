package cluster_test

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// hosted is one unit at one epoch on a machine: its node.Life, and a model of what actors/node does about it.
type hosted struct {
	*node.Life
	h           *host
	before      *hosted // of an older epoch: must be gone first
	waits       bool    // for before
	engines     []*engine
	accepting   bool
	streams     bool // one of its streams goes on as long as it may
	incarnation uint64
	step        int // number of what it does now: timers of older steps are dropped
	gone        []func()
}

// Times of engines. A real one takes minutes to start; here the order of things counts.
const (
	startMin  = 100 * time.Millisecond
	startMax  = 1500 * time.Millisecond
	killMax   = 400 * time.Millisecond
	killLong  = 6 * time.Second // it ignores SIGTERM, and its memory is freed late
	killOften = 20              // one in so many takes up to killLong
	askAgain  = 200 * time.Millisecond
)

// after is a step of the unit's life that nothing else has replaced.
func (u *hosted) after(d time.Duration, do func()) {
	u.step++
	step := u.step
	u.h.c.after(u.h.m.process, d, func() {
		if u.step == step {
			do()
		}
	})
}

func (u *hosted) begin() {
	u.log(msg.UnitStarted, "")
	if b := u.before; b != nil && b.Phase != state.Gone {
		u.waits = true
		b.gone = append(b.gone, func() {
			u.waits, u.before = false, nil
			u.start()
		})
		return
	}
	u.start()
}

func (u *hosted) start() {
	if u.over() {
		return
	}
	u.assign(askAgain / 4)
}

// over ends a start that is not wanted any more.
func (u *hosted) over() bool {
	if u.Next(u.h.c.clock()) != node.StepEnd {
		return false
	}
	u.finish()
	return true
}

// assign is assign_rank: round after round, until a leader answers.
func (u *hosted) assign(pause time.Duration) {
	u.ask(func(l *shell, answer func(bool, error)) {
		l.assign(u.Order.Unit, func(epoch uint64, err error) { answer(epoch == u.Order.Epoch, err) })
	}, pause, func(same bool) {
		if !same {
			u.fail("the rank assigner knows another epoch")
			return
		}
		u.meet()
	})
}

// ask asks the leader again and again until it answers; a refusal fails the start.
func (u *hosted) ask(question func(l *shell, answer func(bool, error)), pause time.Duration,
	then func(bool),
) {
	u.step++
	step := u.step
	askLeader(u.h.m, 2*time.Second, true, question, func(ok bool, err error) {
		switch {
		case u.step != step:
		case err == nil:
			then(ok)
		case silence(err):
			u.after(pause, func() { u.ask(question, min(2*pause, 500*time.Millisecond), then) })
		default:
			u.fail(err.Error())
		}
	})
}

func (u *hosted) lockstep() bool { return u.Order.App.DataParallel.Coupling == app.Lockstep }

// meet is the rendezvous of a unit over several nodes.
func (u *hosted) meet() {
	switch {
	case !u.lockstep() || len(u.Order.AllRanks) == len(u.Order.Ranks):
		u.bringUp()
	case u.Order.Ranks[0].Rank == 0:
		u.publish()
		u.bringUp()
	default:
		u.await()
	}
}

// publish tells rank 0's address, again as long as the unit starts: a new leader has heard of none.
func (u *hosted) publish() {
	askLeader(u.h.m, 2*time.Second, true, func(l *shell, answer func(bool, error)) {
		l.meetings[u.Order.Unit] = max(l.meetings[u.Order.Unit], u.Order.Epoch)
		answer(true, nil)
	}, func(bool, error) {
		u.h.c.after(u.h.m.process, u.h.c.cfg.renew/4, func() {
			if u.Phase == state.Starting {
				u.publish()
			}
		})
	})
}

func (u *hosted) await() {
	u.ask(func(l *shell, answer func(bool, error)) {
		answer(l.meetings[u.Order.Unit] == u.Order.Epoch, nil)
	}, askAgain, func(there bool) {
		if there {
			u.bringUp()
			return
		}
		u.after(askAgain, u.await)
	})
}

// bringUp starts the engines and waits until they answer.
func (u *hosted) bringUp() {
	c := u.h.c
	if err := u.h.core.MayLaunch(c.clock()); err != nil {
		u.fail(err.Error())
		return
	}
	u.h.launch(u)
	if c.chance(c.startFails) {
		u.after(c.span(0, startMax), func() { u.fail("the engine exited while it started") })
		return
	}
	u.after(c.span(startMin, startMax), u.up)
}

// up is the readiness of all ranks here. Engines that are coupled wait for each other first.
func (u *hosted) up() {
	c := u.h.c
	if u.lockstep() && !u.WasReady && !c.complete(u.Order) {
		u.after(askAgain/2, u.up)
		return
	}
	u.accepting = !u.h.core.Restarting()
	u.enter(msg.UnitReady, node.Failure{Rank: -1})
}

// complete says whether all engines of a unit's grant run.
func (c *cluster) complete(o *msg.StartRank) bool {
	for _, r := range o.AllRanks {
		m := c.named(r.Node)
		if !m.alive || !slices.ContainsFunc(m.host.engines, func(e *engine) bool {
			return e.unit == o.Unit && e.epoch == o.Epoch && e.grant.Rank == r.Rank
		}) {
			return false
		}
	}
	return true
}

// fail takes the unit out of routing before anything else.
func (u *hosted) fail(cause string) {
	if u.Fail(u.Order.Ranks[0].Rank, cause) {
		u.closed()
		u.poke()
	}
}

// closed shows that the unit admits nothing any more.
func (u *hosted) closed() {
	u.accepting = false
	u.h.show(u)
}

// poke does what the unit has to do next.
func (u *hosted) poke() {
	if u.waits {
		return
	}
	switch u.Next(u.h.c.clock()) {
	case node.StepFence:
		u.enter(msg.UnitFenced, u.Why())
		u.finish()
	case node.StepDrain:
		u.accepting = false
		u.enter(msg.UnitDraining, u.Why())
		u.drained()
	case node.StepEnd:
		u.finish()
	case node.StepAdopt:
		u.adopt()
	case node.StepStay:
		if u.Phase == state.Draining { // perhaps with another deadline
			u.drained()
		}
	}
}

func (u *hosted) drained() {
	left := u.Grace(u.h.c.clock())
	if !u.streams {
		left = u.h.c.span(0, min(left, drainShort))
	}
	u.after(left, u.finish)
}

// finish takes the unit down.
func (u *hosted) finish() {
	if u.Phase == state.Killing || u.Phase == state.Gone {
		return
	}
	c := u.h.c
	why := u.Why()
	u.accepting = false
	u.enter(msg.UnitKilling, why)
	d := time.Duration(0)
	switch {
	case len(u.engines) == 0:
	case c.IntN(killOften) == 0:
		d = c.span(0, killLong)
	default:
		d = c.span(0, killMax)
	}
	if c.cfg.mutant == early {
		u.enter(msg.UnitGone, why)
	}
	u.after(d, func() {
		u.h.kill(u)
		u.h.c.left(u)
		u.enter(msg.UnitGone, why)
		for _, f := range u.gone {
			f()
		}
		u.gone = nil
	})
}

// enter changes the phase, shows it, and lets the leader know.
func (u *hosted) enter(kind msg.UnitEventKind, why node.Failure) {
	u.log(kind, why.Cause)
	u.h.core.Enter(u.h.c.clock(), u.Life, kind, why, nil)
	u.h.show(u)
	u.h.plan()
}

func (u *hosted) log(kind msg.UnitEventKind, why string) {
	u.h.c.log("event", u.h.m.name, u.Order.Unit, u.Order.Epoch, string(kind), why)
}
