package cluster_test

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// hosted is one unit at one epoch on a machine: a model of the life in actors/node.
type hosted struct {
	h           *host
	order       *msg.StartRank
	before      *hosted // of an older epoch: must be gone first
	waits       bool    // for before
	phase       state.Phase
	wasReady    bool
	failure     string // why it left routing, "": it did not
	stop        *stopWish
	last        msg.UnitEvent
	engines     []*engine
	accepting   bool
	streams     bool // one of its streams goes on as long as it may
	incarnation uint64
	step        int // number of what it does now: timers of older steps are dropped
	gone        []func()
}

type stopWish struct {
	deadline time.Duration
	reason   string
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
	u.tell(msg.UnitEvent{Kind: msg.UnitStarted, Rank: -1})
	if b := u.before; b != nil && b.phase != state.Gone {
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
	if u.stop == nil && u.failure == "" {
		return false
	}
	u.finish()
	return true
}

// assign is assign_rank: round after round, until a leader answers.
func (u *hosted) assign(pause time.Duration) {
	u.ask(func(l *shell, answer func(bool, error)) {
		l.assign(u.order.Unit, func(epoch uint64, err error) { answer(epoch == u.order.Epoch, err) })
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

func (u *hosted) lockstep() bool { return u.order.App.DataParallel.Coupling == app.Lockstep }

// meet is the rendezvous of a unit over several nodes.
func (u *hosted) meet() {
	switch {
	case !u.lockstep() || len(u.order.AllRanks) == len(u.order.Ranks):
		u.bringUp()
	case u.order.Ranks[0].Rank == 0:
		u.publish()
		u.bringUp()
	default:
		u.await()
	}
}

// publish tells rank 0's address, again as long as the unit starts: a new leader has heard of none.
func (u *hosted) publish() {
	askLeader(u.h.m, 2*time.Second, true, func(l *shell, answer func(bool, error)) {
		l.meetings[u.order.Unit] = max(l.meetings[u.order.Unit], u.order.Epoch)
		answer(true, nil)
	}, func(bool, error) {
		u.h.c.after(u.h.m.process, u.h.c.cfg.renew/4, func() {
			if u.phase == state.Starting {
				u.publish()
			}
		})
	})
}

func (u *hosted) await() {
	u.ask(func(l *shell, answer func(bool, error)) {
		answer(l.meetings[u.order.Unit] == u.order.Epoch, nil)
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
	if !u.h.rules.Starts(c.clock()) {
		u.fail("no lease")
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
	if u.lockstep() && !c.complete(u.order) {
		u.after(askAgain/2, u.up)
		return
	}
	u.phase, u.wasReady, u.accepting, u.incarnation = state.Ready, true, true, c.Uint64()
	u.h.show(u)
	u.tell(msg.UnitEvent{Kind: msg.UnitReady, Rank: -1})
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
	if u.fence(cause) {
		u.poke()
	}
}

func (u *hosted) fence(cause string) bool {
	if u.failure != "" || u.phase == state.Killing || u.phase == state.Gone {
		return false
	}
	u.failure, u.accepting = cause, false
	u.h.show(u)
	return true
}

// askStop leaves the wish to end; false if the unit is gone already.
func (u *hosted) askStop(grace time.Duration, reason string) bool {
	if u.phase == state.Gone {
		u.last.Asked = true
		return false
	}
	u.wish(grace, reason)
	u.poke()
	return true
}

func (u *hosted) wish(grace time.Duration, reason string) {
	if by := u.h.c.now + grace; u.stop == nil || by < u.stop.deadline {
		u.stop = &stopWish{by, reason}
	}
}

// cut fences and ends at once; false if it is gone already.
func (u *hosted) cut(cause string) bool {
	if u.phase == state.Gone {
		return false
	}
	u.wish(0, cause)
	u.fence(cause)
	u.poke()
	return true
}

// poke does what the wishes ask for.
func (u *hosted) poke() {
	switch {
	case u.waits:
	case u.phase == state.Starting:
		u.over()
	case u.phase == state.Ready && u.stop != nil && u.failure == "" && u.h.c.now < u.stop.deadline:
		u.drain()
	case u.phase == state.Ready && u.stop == nil && u.failure != "":
		u.phase = state.Fenced
		u.tell(msg.UnitEvent{Kind: msg.UnitFenced, Rank: u.order.Ranks[0].Rank, Reason: u.failure})
		u.finish()
	case u.phase == state.Ready && (u.stop != nil || u.failure != ""):
		u.finish()
	case u.phase == state.Draining && (u.failure != "" || u.h.c.now >= u.stop.deadline):
		u.finish()
	case u.phase == state.Draining:
		u.drained()
	}
}

// drain lets streams go on.
func (u *hosted) drain() {
	u.phase, u.accepting = state.Draining, false
	u.h.show(u)
	u.tell(msg.UnitEvent{Kind: msg.UnitDraining, Rank: -1, Reason: u.stop.reason})
	u.drained()
}

func (u *hosted) drained() {
	left := u.stop.deadline - u.h.c.now
	if !u.streams {
		left = u.h.c.span(0, min(left, drainShort))
	}
	u.after(left, u.finish)
}

// finish takes the unit down.
func (u *hosted) finish() {
	if u.phase == state.Killing || u.phase == state.Gone {
		return
	}
	c := u.h.c
	u.phase, u.accepting = state.Killing, false
	u.h.show(u)
	u.tell(msg.UnitEvent{Kind: msg.UnitKilling, Rank: -1, Reason: u.why()})
	d := time.Duration(0)
	switch {
	case len(u.engines) == 0:
	case c.IntN(killOften) == 0:
		d = c.span(0, killLong)
	default:
		d = c.span(0, killMax)
	}
	if c.cfg.mutant == early {
		u.tell(msg.UnitEvent{Kind: msg.UnitGone, Rank: -1, Reason: u.why(), Asked: u.stop != nil})
	}
	u.after(d, func() {
		u.h.kill(u)
		u.phase = state.Gone
		u.h.c.left(u)
		u.h.show(u)
		u.tell(msg.UnitEvent{Kind: msg.UnitGone, Rank: -1, Reason: u.why(), Asked: u.stop != nil})
		for _, f := range u.gone {
			f()
		}
		u.gone = nil
	})
}

func (u *hosted) why() string {
	if u.failure != "" {
		return u.failure
	}
	if u.stop != nil {
		return u.stop.reason
	}
	return "unknown"
}

func (u *hosted) tell(e msg.UnitEvent) {
	e.Unit, e.Epoch, e.WasReady = u.order.Unit, u.order.Epoch, u.wasReady
	u.last = e
	u.h.tell(e)
}

// repeat reports the last event again, to a controller that missed it.
func (u *hosted) repeat() { u.h.tell(u.last) }
