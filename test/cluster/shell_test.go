package cluster_test

import (
	"errors"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// shell is what runs on the machine that leads: the controller's core, and a model of what surrounds it.
// Commands have 5 s each and at most 64 are under way; orders to one node are sent in order, one after the
// other; a timer ticks when the core wants it.
type shell struct {
	m        *machine
	term     uint64 // of the election
	began    time.Duration
	core     *controller.Core
	seen     *state.State // the newest that the core was shown
	orders   map[string]*orderQueue
	underWay []*state.GrantGroup // grants without an answer
	running  int
	waiting  []func()
	armed    int // number of the timer
	leaving  bool
	closed   bool
	heard    map[string]time.Duration
	stopping map[string]bool   // nodes that have said that they stop
	sure     time.Duration     // when it asked last whether it leads, and a majority said yes
	deafTill time.Duration     // it answers no renewals before
	meetings map[string]uint64 // rank 0 of the unit at this epoch has said where it listens
}

type orderQueue struct {
	list []controller.Effect
	busy bool
}

// Bounds of the controller's shell.
const (
	maxCommands = 64
	maxOrders   = 4096
	orderLimit  = 5 * time.Second
	minTick     = time.Millisecond
	// between an answer and the controller that takes it out of its mailbox
	outcomeWithin = 2 * time.Millisecond
)

func newShell(m *machine) *shell {
	l := &shell{
		m: m, term: m.raft.term, began: m.c.now, core: controller.NewCore(m.c.cfg.controller()),
		orders: map[string]*orderQueue{}, meetings: map[string]uint64{}, heard: map[string]time.Duration{},
		stopping: map[string]bool{},
	}
	l.core.Self = m.name
	m.c.log("shell", m.name)
	l.seen = m.view
	l.step(controller.StateSeen{State: l.shown(m.view)})
	l.keepVoters()
	return l
}

// close ends it: nothing it has under way comes to anything here.
func (l *shell) close() {
	if l.closed {
		return
	}
	l.closed = true
	l.m.c.log("shell closed", l.m.name)
	if l.m.shell == l {
		l.m.shell = nil
	}
	l.m.led()
}

// step feeds the core and carries out what it asks for; the answer to a renewal is returned.
func (l *shell) step(in any) (renewed controller.RenewEffect) {
	if l.closed {
		return controller.RenewEffect{Err: errUnreachable}
	}
	for _, e := range l.core.Step(l.m.c.clock(), in) {
		switch e := e.(type) {
		case controller.RenewEffect:
			renewed = e
		case controller.ChangeEffect:
			l.m.c.log("unit", l.m.name, e.App, e.Unit, e.Epoch, e.From, e.To, e.Reason)
		default:
			l.do(e)
		}
	}
	l.arm()
	return renewed
}

// arm sets the one timer.
func (l *shell) arm() {
	due := l.core.Due()
	if due.IsZero() {
		return
	}
	l.armed++
	armed := l.armed
	l.m.c.after(l.m.process, max(minTick, due.Sub(l.m.c.clock())), func() {
		if l.armed == armed && !l.closed {
			l.step(controller.TimerFired{})
		}
	})
}

// look shows the core the newest state, a moment later: answers to commands may overtake it.
func (l *shell) look() {
	l.m.c.after(l.m.process, l.m.c.span(0, outcomeWithin), l.freshen)
}

// shown is a state as the controller sees it.
func (l *shell) shown(s *state.State) *state.State {
	if l.m.c.cfg.mutant == forgetsReady {
		s = s.Clone()
		s.Served = nil
	}
	return s
}

func (l *shell) freshen() {
	if !l.closed && l.m.view != l.seen {
		l.seen = l.m.view
		l.step(controller.StateSeen{State: l.shown(l.seen)})
		l.changeVoters()
	}
}

// renew is msg.Leader: a majority is asked first whether this leads.
func (l *shell) renew(r *msg.NodeReport, answer func(msg.Lease, error)) {
	if l.m.c.now < l.deafTill {
		l.m.c.led = l.m.c.now // it asks nobody, and takes writes
		return
	}
	if l.m.c.cfg.mutant == noConfirm {
		l.m.c.led = l.m.c.now
		l.renewed(r, answer)
		return
	}
	l.confirm(renewLimit, func(leads bool) {
		if !leads {
			answer(msg.Lease{}, errNotLeader)
			return
		}
		l.renewed(r, answer)
	})
}

func (l *shell) renewed(r *msg.NodeReport, answer func(msg.Lease, error)) {
	if l.closed {
		answer(msg.Lease{}, errUnreachable)
		return
	}
	l.freshen()
	own := *r // the report is the core's from then on, and may come twice
	own.Events, own.Units = append([]msg.UnitEvent(nil), r.Events...),
		append([]msg.UnitEvent(nil), r.Units...)
	switch l.m.c.cfg.mutant {
	case ignoresStop:
		own.Stopping = false
	case forgivesDeath:
		own.AfterStop = true
	default:
	}
	stopped := l.stopping[r.Node.ID]
	l.stopping[r.Node.ID] = stopped && r.Stopping // the same step may grant on a node that is back
	e := l.step(controller.NodeReported{Report: &own})
	l.stopping[r.Node.ID] = stopped
	if problem.CodeOf(e.Err) != problem.Conflict { // it was not overtaken by a later one
		l.stopsHere(r)
	}
	e.Lease.Leader = l.m.name
	l.heard[r.Node.ID] = l.m.c.now
	if e.Err == nil {
		e.Lease.TTL = l.m.c.cfg.ttl // a mutant leader gives what it does not keep
	}
	answer(e.Lease, e.Err)
}

func (l *shell) do(e controller.Effect) {
	switch e := e.(type) {
	case controller.AssignEffect:
		l.assignGroup(e.Request)
	case controller.ProposeEffect:
		l.propose(&e)
	case controller.StepDownEffect:
		l.stepDown(&e)
	case controller.ReleaseEffect:
		ref := &state.UnitRef{Unit: e.Release.Unit, Epoch: e.Release.Epoch, Reason: e.Release.Reason}
		l.command(state.Command{Release: ref}, func(_ state.Result, err error) {
			l.step(controller.CommandDone{App: e.App, Unit: e.Release.Unit, Err: err})
		})
	case controller.StartEffect:
		l.order(e.Node, e)
	case controller.StopEffect:
		l.order(e.Node, e)
	}
}

// assignGroup places a group at once, as the RankAssigner does in the order of the requests, and proposes its
// grant. Seats of grants under way count as used.
func (l *shell) assignGroup(m *msg.AssignGroup) {
	out := controller.GroupAssigned{}
	out.Grant, out.NoRoom = rankassigner.Place(l.m.view, m, l.underWay)
	if len(out.Grant.Units) == 0 {
		l.m.c.after(l.m.process, minTick, func() { l.step(out) })
		return
	}
	grant := &out.Grant
	l.mayGrant(grant)
	l.m.c.audit.proposed[grant] = l.m.c.now
	l.underWay = append(l.underWay, grant)
	l.command(state.Command{GrantGroup: grant}, func(r state.Result, err error) {
		l.underWay = slices.DeleteFunc(l.underWay, func(g *state.GrantGroup) bool { return g == grant })
		out.Result, out.Err = r, err
		l.step(out)
	})
}

// propose proposes a command. The loss of a node is proposed when a majority has confirmed the leader, and if
// it stands then.
func (l *shell) propose(e *controller.ProposeEffect) {
	done := func(_ state.Result, err error) {
		l.step(controller.CommandDone{App: e.App, Unit: e.Unit, Node: e.Node, Err: err})
	}
	if ref := e.Command.NodeLost; ref != nil {
		l.m.c.audit.silent[ref] = l.m.c.now
	}
	if e.Command.NodeLost == nil || l.m.c.cfg.mutant == hasty {
		l.command(e.Command, done)
		return
	}
	l.confirm(renewLimit, func(leads bool) {
		if !leads || !l.core.Stands(e) {
			l.m.c.after(l.m.process, outcomeWithin, func() { done(state.Result{}, errNotLeader) })
			return
		}
		l.command(e.Command, done)
	})
}

// confirm asks a majority whether this leads, for so long.
func (l *shell) confirm(limit time.Duration, done func(leads bool)) {
	over, asked := false, l.m.c.now
	finish := func(leads bool) {
		if !over {
			over = true
			if leads {
				l.sure = max(l.sure, asked)
			}
			done(leads && !l.closed)
		}
	}
	l.m.c.after(l.m.process, limit, func() { finish(false) })
	l.m.raft.verify(finish)
}

// stepDown hands over because the leader may be what keeps the nodes silent.
func (l *shell) stepDown(e *controller.StepDownEffect) {
	l.m.c.log("step down", l.m.name, e.Overdue)
	if l.m.c.cfg.mutant != innocent {
		l.handOver(l.m.c.now + raftElection)
		return
	}
	for _, id := range e.Overdue {
		n := l.m.view.Nodes[id]
		l.confirm(proposeLimit, func(leads bool) {
			if leads && n != nil {
				l.command(state.Command{NodeLost: &state.NodeRef{Node: id, UID: n.UID}},
					func(state.Result, error) {})
			}
		})
	}
}

// handOver asks another voter to lead as soon as that one has the whole log.
func (l *shell) handOver(until time.Duration) {
	if r := l.m.raft; r.role == leader && !l.closed && l.m.c.now < until && r.transfer() {
		l.m.c.after(l.m.process, 100*time.Millisecond, func() { l.handOver(until) })
	}
}

// command waits for a slot, proposes, and tells the outcome.
func (l *shell) command(c state.Command, done func(state.Result, error)) {
	if l.running == maxCommands {
		l.waiting = append(l.waiting, func() { l.command(c, done) })
		return
	}
	l.running++
	l.m.c.log("propose", l.m.name, c.Kind())
	l.m.proposeHere(c, proposeLimit, func(r state.Result, err error) {
		l.m.c.after(l.m.process, l.m.c.span(0, outcomeWithin), func() {
			l.running--
			if len(l.waiting) > 0 && !l.closed {
				next := l.waiting[0]
				l.waiting = l.waiting[1:]
				next()
			}
			done(r, err)
		})
	})
}

// order queues an order for a node. A full queue drops it: the resend timer sends it again.
func (l *shell) order(id string, e controller.Effect) {
	q := l.orders[id]
	if q == nil {
		q = &orderQueue{}
		l.orders[id] = q
	}
	if len(q.list) < maxOrders {
		q.list = append(q.list, e)
	}
	l.serve(id, q)
}

func (l *shell) serve(id string, q *orderQueue) {
	for !q.busy && len(q.list) > 0 && !l.closed {
		e := q.list[0]
		q.list = q.list[1:]
		q.busy = true
		l.send(id, e, func() {
			q.busy = false
			l.serve(id, q)
		})
	}
}

// send passes an order to a node, if the node is known and the order is not outdated, and goes on when it has
// answered or the time is over.
func (l *shell) send(id string, e controller.Effect, next func()) {
	to := l.agent(id)
	c := l.m.c
	switch e := e.(type) {
	case controller.StartEffect:
		if rec := l.m.view.Units[e.Order.Unit]; to == nil || rec == nil || rec.Epoch != e.Order.Epoch {
			next()
			return
		}
		c.log("order start", id, e.Order.Unit, e.Order.Epoch)
		call(c, l.m, to, orderLimit, true, func(answer func(struct{}, error)) {
			to.host.startRank(e.Order, answer)
		}, func(_ struct{}, err error) {
			if err != nil && !silence(err) {
				l.step(controller.Refused{Node: id, Unit: e.Order.Unit, Epoch: e.Order.Epoch, Err: err})
			}
			next()
		})
	case controller.StopEffect:
		if to == nil {
			next()
			return
		}
		c.log("order stop", id, e.Order.Unit, e.Order.Epoch)
		call(c, l.m, to, orderLimit, true, func(answer func(struct{}, error)) {
			to.host.stopRank(e.Order, answer)
		}, func(struct{}, error) { next() })
	}
}

// agent is the machine of a node, nil if it is not a member.
func (l *shell) agent(id string) *machine {
	if n := l.m.view.Nodes[id]; n != nil {
		return l.m.c.machines[l.m.c.byUID[n.UID]]
	}
	return nil
}

// silence distinguishes a call without an answer from a refusal, as the controller does.
func silence(err error) bool {
	if errors.Is(err, msg.ErrNodeStopping) {
		return false
	}
	switch problem.CodeOf(err) {
	case problem.Overloaded, problem.Unavailable, problem.Timeout:
		return true
	default:
		return false
	}
}

// assign is the RankAssigner's answer: the epoch of the grant that holds the unit's ranks.
func (l *shell) assign(unit string, answer func(uint64, error)) {
	rec := l.m.view.Units[unit]
	if rec == nil || !rec.Holds() {
		answer(0, problem.New(problem.Conflict, "not granted"))
		return
	}
	answer(rec.Epoch, nil)
}

// deploy changes applications as the admin API does: the controller sees the change with the word that it was
// asked for.
func (l *shell) deploy(put *state.PutApps, answer func(state.Result, error)) {
	before := map[string]uint64{}
	for id := range l.m.view.Units {
		before[id] = l.m.view.Epochs[id]
	}
	l.m.proposeHere(state.Command{PutApps: put}, proposeLimit, func(r state.Result, err error) {
		if err == nil && !l.closed {
			in := controller.AppsRedeployed{Before: before, State: l.m.view}
			for i := range put.Apps {
				in.Apps = append(in.Apps, put.Apps[i].Name)
			}
			l.seen = l.m.view
			l.step(in)
		}
		answer(r, err)
	})
}
