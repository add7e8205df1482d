package controller

import (
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Effect is an action for the shell. The orders of one node are carried out in sequence, all other effects in
// any order.
type Effect any

// The effects.
type (
	// GrantEffect proposes the units of one placed group. The answer is Granted.
	GrantEffect struct{ Grant state.GrantGroup }
	// ProposeEffect proposes any other command. The answer is Concluded with the same App, Unit and Node.
	// NodeLost is proposed only if a majority confirms this leader when the effect is carried out, and if the
	// effect still Stands after that.
	ProposeEffect struct {
		App, Unit, Node string
		Command         state.Command
	}
	// ReleaseEffect releases a unit. The answer is Concluded.
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
	// RenewEffect answers a NodeSeen with a lease, or with Err.
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
