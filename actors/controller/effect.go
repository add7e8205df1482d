package controller

import (
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Effect is something for the shell to do. Orders to one node are done in their order, everything else at any time.
type Effect any

// The effects.
type (
	// GrantEffect proposes the units of one placed group; the answer is Granted.
	GrantEffect struct{ Grant state.GrantGroup }
	// ProposeEffect proposes any other command; the answer is Concluded with the same App, Unit and Node. A NodeLost is proposed only
	// after a majority has confirmed that this node leads, asked when the effect is carried out, and if it Stands then.
	ProposeEffect struct {
		App, Unit, Node string
		Command         state.Command
	}
	// ReleaseEffect gives a unit back; the answer is Concluded.
	ReleaseEffect struct {
		App     string
		Release msg.ReleaseRank
	}
	// StartEffect is an order to a node. Silence is no answer; a refusal is Refused.
	StartEffect struct {
		Node  string
		Order *msg.StartRank
	}
	// StopEffect is an order to a node.
	StopEffect struct {
		Node  string
		Order *msg.StopRank
	}
	// RenewEffect answers a NodeSeen: a lease, or Err.
	RenewEffect struct {
		Node  string
		Lease msg.Lease
		Err   error
	}
	// StepDownEffect hands the leadership to another voter, because this leader may be what keeps nodes silent. There is no answer:
	// where nobody else can lead, nothing happens.
	StepDownEffect struct {
		Overdue []string // nodes that had to be taken for lost otherwise
	}
	// ChangeEffect is a change of state for the ring, the log and the metrics.
	ChangeEffect struct{ Event }
	// RanksEffect tells how many ranks of an application are ready and wanted: at first, and when that has
	// changed.
	RanksEffect struct {
		App            string
		Ready, Desired int
	}
	// ForgetAppEffect says that an application is gone.
	ForgetAppEffect struct{ App string }
	// RestartEffect counts a start of a unit after its first one.
	RestartEffect struct{ App, Unit string }
	// ForgetEffect says that nothing is left of a unit.
	ForgetEffect struct{ App, Unit string }
)
