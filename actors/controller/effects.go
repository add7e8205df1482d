package controller

import (
	"github.com/dpserve/dpserve/actors/msg"
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
	// RanksEffect reports how many ranks of an application are ready and wanted, first and after each change.
	RanksEffect struct {
		App            string
		Ready, Desired int
	}
	// ForgetAppEffect reports that an application is gone.
	ForgetAppEffect struct{ App string }
	// RestartEffect counts a start of a unit after its first one.
	RestartEffect struct{ App, Unit string }
	// ForgetEffect reports that nothing is left of a unit.
	ForgetEffect struct{ App, Unit string }
)
