package controller

import (
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// What the core is told, one at a time.
type (
	// StateSeen carries a snapshot of the store. The first one after the barrier wakes the core; an older one than the last says
	// nothing.
	StateSeen struct{ State *state.State }
	// NodeSeen is a renewal of a node's lease with all that the node has to say; the answer is a RenewEffect of the same step. The
	// report is not changed, and must not be by others.
	NodeSeen struct{ Report *msg.NodeReport }
	// Ticked says that a time named by Due has come.
	Ticked struct{}
	// Redeployed says that applications were deployed again: their failed units get another chance. State holds the change (nil =
	// it was seen before).
	Redeployed struct {
		Apps   []string
		Before map[string]uint64 // the units there were before the change, with their epochs; nil = whichever there are now
		State  *state.State
	}
	// Granted is the outcome of a GrantEffect.
	Granted struct {
		Units  []string
		Result state.Result
		Err    error
	}
	// Concluded is the outcome of a ProposeEffect or ReleaseEffect: of a unit, of an application (Unit empty), or of a node.
	Concluded struct {
		App, Unit, Node string
		Err             error
	}
	// Refused says that a node would not start a unit.
	Refused struct {
		Node, Unit string
		Epoch      uint64
		Err        error
	}
)
