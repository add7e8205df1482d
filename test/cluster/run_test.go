package cluster_test

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// draw is the run that a seed stands for.
func draw(seed uint64, m mutant) config {
	s := newSim(seed^0xabcdef, false)
	cfg := config{ttl: state.LeaseTTL, renew: 2 * time.Second, mutant: m, fence: s.IntN(2) == 0}
	switch s.IntN(5) {
	case 0:
		cfg.gentle, cfg.controls, cfg.workers = true, 3, 3
	case 1:
		cfg.full, cfg.workers = 1, 2
	case 2:
		cfg.full = 3 + 2*s.IntN(2)
	case 3:
		cfg.full, cfg.workers = 3, 2
	case 4:
		cfg.controls, cfg.full, cfg.workers = 3, s.IntN(2), 2+s.IntN(2)
	}
	cfg.steady = !cfg.gentle && s.IntN(6) == 0
	cfg.pairs, cfg.swapped = s.IntN(3) == 0, s.IntN(2) == 0
	cfg.lone = s.IntN(4) == 0
	return cfg
}

// outcome of a run.
type outcome struct {
	hash    uint64
	events  uint64
	lost    int
	grants  int
	tickets int
	ops     int
	lines   []string
	err     string // the rule that was broken, "" if none was
}

// play runs a seed.
func play(seed uint64, cfg config, trace bool) (o outcome) {
	c := newCluster(seed, cfg, trace)
	defer func() {
		o.hash, o.events, o.lines = c.hash, c.count, c.lines
		o.lost, o.grants, o.tickets = c.audit.lost, len(c.audit.grants), c.audit.tickets
		if v, broken := recover().(violation); broken {
			o.err = v.text
		}
	}()
	c.work = newWorkload(c)
	f := &faults{c: c, heal: c.span(25*time.Second, 70*time.Second)}
	f.plan()
	c.after(nil, 0, c.bounded)
	c.run(f.heal)
	c.settle()
	for _, decide := range c.work.undecided {
		decide()
	}
	for _, ops := range c.work.history {
		o.ops += len(ops)
	}
	c.checkRevisions()
	c.checkLeases()
	return o
}

// Bounds of how long it takes until everything is as it is wanted when nothing is wrong any more.
const (
	oneViewIn   = 10 * time.Second
	settleExtra = 45 * time.Second // one unit after the other: drain, end, start
	steadyFor   = 2 * time.Second
)

// settle waits until the machines agree and what runs is what is wanted, and for as long as it may take.
func (c *cluster) settle() {
	healed := c.now
	c.run(healed + oneViewIn)
	if why := c.divided(); why != "" {
		c.violate("%v after everything was healed: %s", oneViewIn, why)
	}
	c.run(c.now + 2*time.Second) // clients have given up by now
	redeployed := false
	limit := c.now + c.backoff() + settleExtra
	for steady := time.Duration(0); steady < steadyFor; {
		c.run(c.now + 500*time.Millisecond)
		why := c.unsettled()
		if why == "" {
			steady += 500 * time.Millisecond
			continue
		}
		steady = 0
		if !redeployed && (c.failed() || c.spared()) {
			if l := c.leading(); l != nil {
				redeployed, limit = true, c.now+settleExtra
				c.work.redeploy(l)
			}
		}
		if c.now > limit {
			c.violate("%v after everything was healed: %s", c.now-healed, why)
		}
	}
}

// leading is the one leader; nil if there is none, or more.
func (c *cluster) leading() *shell {
	var l *shell
	for _, m := range c.machines {
		if m.alive && m.shell != nil {
			if l != nil {
				return nil
			}
			l = m.shell
		}
	}
	return l
}

// members are the machines that the cluster knows.
func (c *cluster) members() []*machine {
	var out []*machine
	for _, m := range c.machines {
		if n := c.canon.now().Nodes[m.name]; n != nil && m.alive {
			out = append(out, m)
		}
	}
	return out
}

// divided says why there is not one view; "" if there is.
func (c *cluster) divided() string {
	if c.leading() == nil {
		return "nobody leads, or more than one does"
	}
	now := c.canon.now()
	for _, m := range c.members() {
		if now.Nodes[m.name].Lost {
			return m.name + " is lost"
		}
		if len(c.canon.states) > 1 && m.view.Index+10 < now.Index {
			return fmt.Sprintf("the state on %s is at %d, not %d", m.name, m.view.Index, now.Index)
		}
	}
	return ""
}

// backoff is the longest wait that a unit may be in.
func (c *cluster) backoff() time.Duration {
	d := time.Second
	for _, u := range c.canon.now().Units {
		d = max(d, min(time.Second<<min(u.Restarts, 9), state.DefaultRestartMax))
	}
	return d
}

// spared says whether a unit waits for long because its starts have ended machines.
func (c *cluster) spared() bool {
	for _, epochs := range c.audit.deaths {
		if len(epochs) >= deadlyStarts {
			return true
		}
	}
	return false
}

func (c *cluster) failed() bool {
	for _, u := range c.canon.now().Units {
		if u.Phase == state.Failed {
			return true
		}
	}
	return false
}

// unsettled says what is not as it is wanted.
func (c *cluster) unsettled() string {
	if why := c.divided(); why != "" {
		return why
	}
	now, wanted := c.canon.now(), 0
	for _, name := range sorted(now.Apps) {
		if now.Apps[name].Deleting {
			return name + " is still being deleted"
		}
		spec := c.specOf(now.Apps[name])
		for _, w := range spec.Units() {
			wanted++
			u := now.Units[w.ID]
			if u == nil || u.Phase != state.Ready {
				return fmt.Sprintf("%s is not ready: %+v", w.ID, u)
			}
			for _, r := range u.Ranks {
				h := c.named(r.Node).host.units[w.ID]
				if h == nil || h.Phase != state.Ready || h.Order.Epoch != u.Epoch ||
					h.Order.App.Model.Source != spec.Model.Source {
					return fmt.Sprintf("%s does not run %s at epoch %d", r.Node, w.ID, u.Epoch)
				}
			}
		}
	}
	if wanted != len(now.Units) {
		return "there are units that nobody wants"
	}
	for _, m := range c.members() {
		for _, id := range sorted(m.host.units) {
			if u := m.host.units[id]; u.Phase != state.Gone && (now.Units[id] == nil ||
				now.Units[id].Epoch != u.Order.Epoch) {
				return fmt.Sprintf("%s still has %s at epoch %d", m.name, id, u.Order.Epoch)
			}
		}
		switch {
		case m.host.core.Waiting():
			return m.name + " has news that nobody took"
		case m.view.Index < now.Index:
			return fmt.Sprintf("%s is at %d of the state, not %d", m.name, m.view.Index, now.Index)
		case m.ing != nil:
			if why := m.ing.blind(now); why != "" {
				return why
			}
		}
	}
	return ""
}

// blind says what an ingress cannot use although it is ready.
func (g *gateway) blind(now *state.State) string {
	for _, id := range sorted(now.Units) {
		for _, r := range now.Units[id].Ranks {
			l := g.links[g.c.named(r.Node).i]
			if l == nil || l.silent || l.parts[id] == nil || !l.parts[id].accepting ||
				l.parts[id].epoch != now.Units[id].Epoch {
				return fmt.Sprintf("the ingress of %s does not use rank %d of %s on %s", g.m.name, r.Rank, id,
					r.Node)
			}
		}
	}
	return ""
}
