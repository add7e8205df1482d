package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/state"
)

// foundUnit is what an earlier process of the node has left of one unit at one epoch.
type foundUnit struct {
	order   *msg.StartRank
	engines map[int]*Found // by rank; an engine with several ranks stands there for each
	decided chan struct{}  // closed when the unit may be adopted, or has to end
}

// groupFound groups engines by unit, and by epoch in ascending order. An engine that does not say for whom it
// was started is in rest.
func groupFound(found []Found) (units []*foundUnit, rest []Found) {
	byKey := map[string]*foundUnit{}
	for i := range found {
		f := &found[i]
		o := f.Order
		if o == nil || o.App == nil || o.Unit == "" || len(o.Ranks) == 0 ||
			len(f.Incarnations) != len(f.Ranks) {
			rest = append(rest, *f)
			continue
		}
		key := fmt.Sprint(o.Epoch, " ", o.Unit)
		u := byKey[key]
		if u == nil {
			u = &foundUnit{order: o, engines: map[int]*Found{}, decided: make(chan struct{})}
			byKey[key] = u
			units = append(units, u)
		}
		if slices.ContainsFunc(f.Ranks, func(r int) bool { return u.engines[r] != nil }) {
			rest = append(rest, *f) // a second engine for a rank
			continue
		}
		for _, r := range f.Ranks {
			u.engines[r] = f
		}
	}
	slices.SortFunc(units, func(a, b *foundUnit) int {
		return cmp.Or(cmp.Compare(a.order.Unit, b.order.Unit), cmp.Compare(a.order.Epoch, b.order.Epoch))
	})
	return units, rest
}

// newestOrders are the orders of the newest epoch of each unit.
func newestOrders(units []*foundUnit) (orders []*msg.StartRank) {
	for i, u := range units {
		if i+1 == len(units) || units[i+1].order.Unit != u.order.Unit {
			orders = append(orders, u.order)
		}
	}
	return orders
}

// openFound makes units of what an earlier process of the node has left. Those of an older epoch end at once,
// the others when the leader has granted them elsewhere.
func openFound(n *Node, units []*foundUnit, rest []Found) {
	var before *unit
	for _, f := range units {
		if before != nil && before.m.Unit != f.order.Unit {
			before = nil
		}
		life := n.core.Life(f.order.Unit)
		isNewest := life.Order == f.order
		if !isNewest {
			life = &Life{Order: f.order, Phase: state.Starting, found: foundOpen}
			life.Fail(Failure{Rank: -1, Cause: causeSuperseded})
		}
		u := newFoundUnit(n, f, life, before)
		if isNewest {
			n.units[f.order.Unit] = u
		}
		n.found, before = append(n.found, u), u
	}
	for _, u := range n.found {
		n.running.Go(u.run)
	}
	for i := range rest {
		n.running.Go(func() { endUnreadable(n, &rest[i]) }) // bounded by VerifyNamed
	}
}

// newFoundUnit makes a unit whose ranks have engines, and no DPServers yet.
func newFoundUnit(n *Node, f *foundUnit, life *Life, before *unit) *unit {
	u := newUnit(n, life, before)
	u.found = f
	passed := map[*Found]bool{} // engines whose output goes to a rank
	for _, g := range f.order.Ranks {
		r := &rank{unit: u, grant: g, replica: absentReplica{u, g}}
		r.openLog()
		r.setProgress("waiting for the leader's answer")
		u.ranks = append(u.ranks, r)
		e := f.engines[g.Rank]
		if e == nil {
			life.Fail(Failure{
				Rank: g.Rank, Cause: "its engine was not found after dpserve was started again",
			})
			continue
		}
		r.setProc(e.Process)
		if !passed[e] {
			passed[e] = true
			e.Process.Adopt(r.out[0], r.out[1])
		}
		u.log.Info("engine of an earlier process found", slog.Int("rank", g.Rank),
			slog.Int("pid", e.Process.PID()))
	}
	return u
}

// endUnreadable ends an engine of which this version cannot tell whom it belongs to.
func endUnreadable(n *Node, f *Found) {
	n.log.Warn("ending an engine of an earlier process that does not say what it was started for",
		slog.Int("pid", f.Process.PID()), slog.String("unit", f.Unit))
	f.Process.Kill()
	late := time.NewTimer(n.timers.VerifyNamed)
	defer late.Stop()
	select {
	case <-f.Process.Exited():
		f.Process.Release()
	case <-n.detached:
	case <-n.hard:
	case <-late.C:
		n.log.Error("it does not end", slog.Int("pid", f.Process.PID()))
	}
}

// awaitDecision waits until a found unit may be adopted; false: it has to end. An engine that ends meanwhile
// ends its unit.
func (f *foundUnit) awaitDecision(u *unit) bool {
	defer close(f.decided)
	u.nudge()
	for _, r := range u.ranks {
		p := r.process()
		switch {
		case p == nil:
		case closed(p.Exited()):
			u.fail(failureOf(r, p))
		default:
			u.n.running.Go(func() { u.watchExit(r, p, f.decided) })
		}
	}
	for {
		switch step, _, _ := u.next(); step {
		case StepAdopt:
			u.n.mu.Lock()
			u.life.Adopt()
			u.n.mu.Unlock()
			return true
		case StepStay:
		default:
			return false
		}
		select {
		case <-u.wake:
		case <-u.n.detached:
			return false
		}
	}
}

// adopt attaches to engines that run already: DPServers with the incarnations of before, health, settings,
// one token, facts. Engines that were ready answer soon or not at all.
func (f *foundUnit) adopt(ctx context.Context, u *unit) error {
	u.n.mu.Lock()
	was, wasReady, byCopy := u.ranks, u.life.WasReady, u.life.byCopy
	u.n.mu.Unlock()
	if err := u.makeRanks(ctx, engine.Bind{}); err != nil {
		return err
	}
	for i, r := range u.ranks {
		p := was[i].process()
		r.out = was[i].out
		r.shareLog(was[i])
		r.setProc(p)
		u.n.running.Go(func() { u.watchExit(r, p, u.done) }) // ends with the engine or the unit
	}
	if !byCopy { // else the copy of the state has confirmed the grant, and no RankAssigner answers
		if err := u.assign(ctx); err != nil {
			return err
		}
	}
	if !wasReady { // other nodes may still wait for the address of rank 0
		if u.hasRankZero() {
			if _, err := u.rendezvous(ctx); err != nil {
				return err
			}
		}
		return u.await(ctx)
	}
	limited, cancel := context.WithTimeoutCause(ctx, u.n.timers.Adopt, errAdoptDeadline)
	defer cancel()
	err := u.await(limited)
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(limited), errAdoptDeadline) {
		rank, progress := u.slowest()
		return &startError{rank, fmt.Errorf("%w within %s; rank %d: %s", errAdoptDeadline,
			u.n.timers.Adopt, rank, progress)}
	}
	return err
}

// errAdoptDeadline ends an adoption.
var errAdoptDeadline = errors.New("the engine did not answer the next process of its node")

// correct replaces what a rank would be launched with today by what its engine was launched with.
func (f *foundUnit) correct(r *rank) {
	if f == nil {
		return
	}
	e := f.engines[r.grant.Rank]
	r.target.URL = e.URL
	if len(e.Ranks) == 1 {
		r.events = eventSource(e.Events)
	}
}

// awaitLeavers waits for found units that end and hold what this one was granted.
func awaitLeavers(u *unit) {
	for _, f := range u.n.found {
		if f == u || !clash(f, u) {
			continue
		}
		<-f.found.decided
		f.n.mu.Lock()
		ends := f.life.IsFound()
		f.n.mu.Unlock()
		if ends {
			<-f.done
		}
	}
}

// clash reports whether two units have a device or port of this node in common.
func clash(u, o *unit) bool {
	if a, b := u.m.Block, o.m.Block; a.Size > 0 && a.Base < b.Base+b.Size && b.Base < a.Base+a.Size {
		return true
	}
	for _, r := range u.m.Ranks {
		for _, s := range o.m.Ranks {
			if slices.ContainsFunc(r.Devices, func(d int) bool { return slices.Contains(s.Devices, d) }) {
				return true
			}
		}
	}
	return false
}

// absentReplica stands in for the DPServer of a rank whose engine was found and is not adopted yet.
type absentReplica struct {
	unit  *unit
	grant state.RankGrant
}

var _ Replica = absentReplica{}

// Assign implements Replica.
func (absentReplica) Assign(context.Context) error { return nil }

// Ready implements Replica.
func (absentReplica) Ready(context.Context, msg.Facts) error { return nil }

// Fence implements Replica.
func (absentReplica) Fence(string) <-chan struct{} { return closedChannel }

// Drain implements Replica.
func (absentReplica) Drain(string) {}

// Controlled implements Replica.
func (absentReplica) Controlled(openai.Effect) {}

// Drained implements Replica.
func (absentReplica) Drained() <-chan struct{} { return closedChannel }

// Stop implements Replica.
func (absentReplica) Stop(context.Context) error { return nil }

// Status implements Replica.
func (a absentReplica) Status() client.RankStatus {
	return client.RankStatus{
		Group: a.unit.m.Group, Rank: a.grant.Rank, Epoch: a.unit.m.Epoch, Devices: a.grant.Devices,
	}
}

var closedChannel = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()
