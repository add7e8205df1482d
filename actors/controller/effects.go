package controller

import (
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/lines"
	"github.com/dpserve/dpserve/internal/state"
)

// Inputs of the core.
type (
	// StateSeen carries a snapshot of the store. The first one after the barrier starts the core; one older
	// than the last is ignored.
	StateSeen struct{ State *state.State }
	// NodeReported is the renewal of a node's lease with the node's report. The same step answers it with a
	// RenewEffect. Neither the core nor the caller may change the report.
	NodeReported struct{ Report *msg.NodeReport }
	// TimerFired reports that a time returned by Due has come.
	TimerFired struct{}
	// AppsRedeployed reports that applications were deployed again: their failed units are tried again. State
	// holds the change (nil = the core has it).
	AppsRedeployed struct {
		Apps   []string
		Before map[string]uint64 // epochs of the units before the change; nil = all current units
		State  *state.State
	}
	// GroupAssigned is the answer to an AssignEffect.
	GroupAssigned struct{ msg.GroupAssigned }
	// CommandDone is the result of a ProposeEffect or ReleaseEffect: of a unit, of an application (Unit
	// empty), or of a node.
	CommandDone struct {
		App, Unit, Node string
		Err             error
	}
	// Refused reports that a node refused to start a unit.
	Refused struct {
		Node, Unit string
		Epoch      uint64
		Err        error
	}
)

// Effect is an action for the shell. The orders of one node are carried out in sequence, all other effects in
// any order.
type Effect any

// The effects.
type (
	// AssignEffect asks the RankAssigner to place and grant units of one group. Requests are passed on in
	// their order. The answer is GroupAssigned.
	AssignEffect struct{ Request *msg.AssignGroup }
	// ProposeEffect proposes any other command. The answer is CommandDone with the same App, Unit and Node.
	// NodeLost is proposed only if a majority confirms this leader when the effect is carried out, and if the
	// effect still Stands after that.
	ProposeEffect struct {
		App, Unit, Node string
		Command         state.Command
	}
	// ReleaseEffect releases a unit. The answer is CommandDone.
	ReleaseEffect struct {
		App     string
		Release msg.ReleaseRank
	}
	// StartEffect is an order to a node. A refusal is answered by Refused; a missing answer by nothing.
	StartEffect struct {
		Node  string
		Order *msg.StartRank
	}
	// StopEffect is an order to a node.
	StopEffect struct {
		Node  string
		Order *msg.StopRank
	}
	// ForgetNodeEffect reports that a node is no member any more: it gets no further orders.
	ForgetNodeEffect struct{ Node string }
	// RenewEffect answers a NodeReported with a lease, or with Err.
	RenewEffect struct {
		Node  string
		Lease msg.Lease
		Err   error
	}
	// StepDownEffect hands the leadership to another voter, because this leader may be the cause of the
	// silence. It has no answer: without another voter nothing happens.
	StepDownEffect struct {
		Overdue []string // nodes that would otherwise be declared lost
	}
	// ChangeEffect is a change for the ring, the log and the metrics.
	ChangeEffect struct{ Event }
	// ForgetEffect reports that nothing is left of a unit.
	ForgetEffect struct{ Pool, Unit string }
)

// Event is one change of a unit or of a node or, without both, of an application.
type Event struct {
	Seq    uint64    `json:"seq"` // from 1, without gaps
	At     time.Time `json:"at"`
	Former bool      `json:"former,omitempty"` // under an earlier leader: all that the state says of it
	App    string    `json:"app"`
	Node   string    `json:"node,omitempty"`
	Pool   string    `json:"pool,omitempty"` // the name of the unit's pool
	Unit   string    `json:"unit,omitempty"`
	Epoch  uint64    `json:"epoch,omitempty"`
	From   string    `json:"from,omitempty"`
	To     string    `json:"to"`
	Reason string    `json:"reason,omitempty"`
}

// ring keeps the last changes and wakes waiting callers.
type ring struct {
	mu      sync.Mutex
	events  lines.Ring[Event]
	changed chan struct{}
}

func newRing() *ring {
	return &ring{events: lines.Ring[Event]{Most: eventRing}, changed: make(chan struct{})}
}

func (r *ring) add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Seq = r.events.Next() + 1
	r.events.Add(e)
}

// since returns the kept events after seq.
func (r *ring) since(seq uint64) []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept, _ := r.events.From(seq)
	return slices.Clone(kept)
}

func (r *ring) watch() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

func (r *ring) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.changed)
	r.changed = make(chan struct{})
}
