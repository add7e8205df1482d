package msg

import "github.com/dpserve/dpserve/app"

// ReplicaSpec is one rank as its node hands it to a DPServer.
type ReplicaSpec struct {
	App     *app.Application
	Unit    string
	Group   int
	Rank    int
	Epoch   uint64
	Node    string
	Devices []int
	Target  Target
	Watcher ReplicaWatcher
}

// ReplicaEventKind is the closed list of what a DPServer tells its node.
type ReplicaEventKind uint8

// ReplicaLost: the DPServer fenced itself, Cause says why. ReplicaBack: an attached engine answers again after a fence, with
// a canary; the node decides when the unit is ready again.
const (
	ReplicaLost ReplicaEventKind = iota
	ReplicaBack
)

// ReplicaEvent is one such message.
type ReplicaEvent struct {
	Unit        string
	Epoch       uint64
	Rank        int
	Incarnation uint64
	Kind        ReplicaEventKind
	Cause       string
}

// ReplicaWatcher hears of a replica's events. It must not block.
type ReplicaWatcher interface{ ReplicaEvent(e ReplicaEvent) }
