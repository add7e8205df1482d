package controller

import (
	"bytes"
	"encoding/json"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// peer is the core's knowledge of a node beside its record in the state.
type peer struct {
	uid     string
	process uint64     // incarnation that renewed last; 0 = none under this leader
	past    []uint64   // earlier incarnations, the latest last
	node    state.Node // the node's own record in that renewal
	wall    time.Time  // by the node's clock
	warning string     // warning for the node's status

	stopping  bool      // the node is ending, or refused a start because of that
	afterStop bool      // the node's previous process was told to end
	restarts  bool      // its process is about to be replaced, with its engines running
	backAt    time.Time // when it was heard again after a long silence
	seen      time.Time // last renewal, by the leader's clock

	losing   bool // its lease is over and NodeLost is to be proposed
	returned bool // it was lost, and renews with no processes left
	changed  bool // its record differs from its report
	declined []byte
	why      string // why its record was not changed to declined

	busy    bool // a command about it is under way
	retryAt time.Time
}

// compareRecord notes whether a node's record differs from its report, unless the state has refused that
// change.
func (p *peer) compareRecord(n *state.Node) {
	said := reportedRecord(&p.node)
	switch {
	case bytes.Equal(said, reportedRecord(n)):
		p.changed, p.declined, p.why = false, nil, ""
	default:
		p.changed = !bytes.Equal(said, p.declined)
	}
}

// recordReport stores the incarnation and the record of a report.
func (p *peer) recordReport(now time.Time, r *msg.NodeReport) {
	if p.process != r.Incarnation && p.process != 0 {
		p.past = append(p.past, p.process)
		p.past = p.past[max(0, len(p.past)-maxPast):]
	}
	p.process, p.node, p.wall, p.warning, p.seen = r.Incarnation, r.Node, r.Wall, r.Trouble, now
	p.stopping, p.afterStop, p.restarts = r.Stopping, r.AfterStop, r.RestartGrace > 0
}

// reportedRecord encodes the part of a record that the node itself determines, for comparison.
func reportedRecord(n *state.Node) []byte {
	own := *n
	// set by the leader, not by the node
	own.Lost, own.Reason, own.Draining, own.DrainBy, own.Key = false, "", false, 0, ""
	own.Resources.Devices = append([]int(nil), n.Resources.Devices...)
	b, _ := json.Marshal(&own) // plain data cannot fail
	return b
}

func leaseRefusal(s *state.State, said, holder *state.Node) error {
	switch {
	case slices.Contains(s.Removed, said.UID):
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID,
			state.ErrNodeRemoved).
			WithHint("join again with a new --data-dir and a new token")
	case holder != nil:
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID,
			state.ErrNodeTaken).
			WithHint("another machine has this name: join again under another --node-id")
	default:
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w %q",
			said.ID, state.ErrUnknownNode, said.ID).
			WithHint("join again: dpserve join ADDR --token TOKEN")
	}
}

// ackedEvent is the highest event number to acknowledge. The leader acknowledges all: an event lost later is
// recovered from the list of units in the next report.
func ackedEvent(r *msg.NodeReport) uint64 {
	var n uint64
	for i := range r.Events {
		n = max(n, r.Events[i].Number)
	}
	return n
}

const (
	// delayPart of lease_ttl is the longest delay of a report. A report that is older than the last one by
	// less was overtaken; a report that is older by more comes from a clock that was set back.
	delayPart = 2
	// maxPast bounds the memory of a node's earlier incarnations.
	maxPast = 16
)
