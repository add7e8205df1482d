package controller

import (
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Inputs of the core.
type (
	// StateSeen carries a snapshot of the store. The first one after the barrier starts the core; one older
	// than the last is ignored.
	StateSeen struct{ State *state.State }
	// NodeSeen is the renewal of a node's lease with the node's report. The same step answers it with a
	// RenewEffect. Neither the core nor the caller may change the report.
	NodeSeen struct{ Report *msg.NodeReport }
	// Ticked reports that a time returned by Due has come.
	Ticked struct{}
	// Redeployed reports that applications were deployed again: their failed units are tried again. State
	// holds the change (nil = the core has it).
	Redeployed struct {
		Apps   []string
		Before map[string]uint64 // epochs of the units before the change; nil = all current units
		State  *state.State
	}
	// Granted is the outcome of a GrantEffect.
	Granted struct {
		Units  []string
		Result state.Result
		Err    error
	}
	// Concluded is the result of a ProposeEffect or ReleaseEffect: of a unit, of an application (Unit empty),
	// or of a node.
	Concluded struct {
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
