package controller

import (
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// What the core is told. Each is one message of the actor.
type (
	// stateSeen carries a snapshot of the store. The first one after the barrier wakes the core.
	stateSeen struct{ state *state.State }
	// reported is what a node says of a unit.
	reported struct{ event msg.UnitEvent }
	// ticked says that a time named by Due has come.
	ticked struct{}
	// redeployed says that applications were deployed again: their failed units get another chance. It carries the state that
	// holds the change, so that who asked sees it in the status; done is closed when it does.
	redeployed struct {
		apps   []string
		before map[string]uint64 // the units there were before the change, with their epochs; nil = whichever there are now
		state  *state.State
		done   chan struct{}
	}
	// granted is the outcome of a grantEffect.
	granted struct {
		units  []string
		result state.Result
		err    error
	}
	// concluded is the outcome of a proposeEffect or releaseEffect: of a unit, or of an application.
	concluded struct {
		app, unit string
		err       error
	}
	// refused says that a node would not start a unit.
	refused struct {
		node, unit string
		epoch      uint64
		err        error
	}
)

// effect is something for the shell to do. Orders to one node are done in their order, everything else at any time.
type effect any

type (
	// grantEffect proposes the units of one placed group; the answer is granted.
	grantEffect struct{ grant state.GrantGroup }
	// proposeEffect proposes any other command; the answer is concluded.
	proposeEffect struct {
		app, unit string
		command   state.Command
	}
	// releaseEffect gives a unit back; the answer is concluded.
	releaseEffect struct {
		app     string
		release msg.ReleaseRank
	}
	startEffect struct {
		node  string
		order *msg.StartRank
	}
	stopEffect struct {
		node  string
		order *msg.StopRank
	}
	// changeEffect is a change of state for the ring, the log and the metrics.
	changeEffect  struct{ Event }
	restartEffect struct{ app, unit string }
	forgetEffect  struct{ app, unit string }
)
