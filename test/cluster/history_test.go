package cluster_test

import (
	"fmt"
	"time"

	"github.com/anishathalye/porcupine"
)

// checkLimit bounds one check of a history.
const checkLimit = 20 * time.Second

// leaseKind is what happens to a unit's lease.
type leaseKind uint8

const (
	acquires leaseKind = iota
	releases
	serves
)

// leaseOp is one operation on the lease of a unit's ranks.
type leaseOp struct {
	kind  leaseKind
	unit  string
	epoch uint64
	call  time.Duration
	back  time.Duration
}

// maxServes bounds the requests of one unit in a history.
const maxServes = 150

func (c *cluster) lease(op leaseOp) { c.audit.leases = append(c.audit.leases, op) }

// served notes a request that was admitted. Only with on_lease_loss fence is that a history of a lease:
// without, a node that was given up serves on, and says so.
func (c *cluster) served(m *machine, unit string, epoch uint64, asked time.Duration) {
	c.log("served", m.name, unit, epoch)
	c.work.served[unit]++
	if c.cfg.fence && c.work.served[unit] <= maxServes {
		c.lease(leaseOp{kind: serves, unit: unit, epoch: epoch, call: asked, back: c.now})
	}
}

// leaseState is the holder of a lease, if there is one.
type leaseState struct {
	epoch uint64
	held  bool
}

func (s leaseState) step(op leaseOp) (bool, leaseState) {
	switch op.kind {
	case acquires:
		return op.epoch == s.epoch+1, leaseState{op.epoch, true}
	case releases:
		// what has failed is released once more when nobody wants it
		return op.epoch == s.epoch, leaseState{s.epoch, false}
	default:
		return op.epoch == s.epoch && s.held, s
	}
}

// checkLeases: the grants of each unit, and the requests served under them, are those of one lease.
func (c *cluster) checkLeases() {
	ops := map[string][]porcupine.Operation{}
	for _, op := range c.audit.leases {
		ops[op.unit] = append(ops[op.unit], porcupine.Operation{
			Input: op, Call: int64(op.call),
			Return: int64(op.back),
		})
	}
	model := porcupine.Model{
		Init: func() any { return leaseState{} },
		Step: func(s, in, _ any) (bool, any) { return s.(leaseState).step(in.(leaseOp)) },
	}
	for _, unit := range sorted(ops) {
		if r := porcupine.CheckOperationsTimeout(model, ops[unit], checkLimit); r != porcupine.Ok {
			c.violate("the history of the lease of %s: %s: %s", unit, r, describe(ops[unit]))
		}
	}
}

func describe(ops []porcupine.Operation) string {
	text := ""
	for _, o := range ops {
		text += fmt.Sprintf("\n  %v to %v: %+v → %+v", time.Duration(o.Call), time.Duration(o.Return),
			o.Input, o.Output)
	}
	return text
}

// revisionOp is a client's operation on the register of an application's revision.
type revisionOp struct {
	app    string
	put    bool
	expect uint64
	value  int
}

// revisionOut is its answer.
type revisionOut struct {
	revision uint64
	value    int
	stale    bool
}

// revisionState is the register.
type revisionState struct {
	revision uint64
	value    int
}

func (s revisionState) step(op revisionOp, out revisionOut) (bool, revisionState) {
	switch {
	case !op.put:
		return out.revision == s.revision && out.value == s.value, s
	case out.stale:
		return op.expect != s.revision, s
	default:
		next := revisionState{s.revision + 1, op.value}
		return op.expect == s.revision && out.revision == next.revision, next
	}
}

// checkRevisions: all clients saw one register per application, wherever they asked.
func (c *cluster) checkRevisions() {
	model := porcupine.Model{
		Init: func() any { return revisionState{} },
		Step: func(s, in, out any) (bool, any) {
			return s.(revisionState).step(in.(revisionOp), out.(revisionOut))
		},
	}
	for _, name := range sorted(c.work.history) {
		ops := c.work.history[name]
		if r := porcupine.CheckOperationsTimeout(model, ops, checkLimit); r != porcupine.Ok {
			c.violate("the history of the revisions of %s: %s: %s", name, r, describe(ops))
		}
	}
}
