package msg

import "github.com/dpserve/dpserve/internal/app"

// ReplicaSpec is one rank as its node passes it to a DPServer.
type ReplicaSpec struct {
	App     *app.Application
	Unit    string
	Group   int
	Rank    int
	Epoch   uint64
	Node    string
	Devices []int
	Target  Target
	// where its engine publishes KV events; nil: it publishes none, or Facts has them
	Events  *EventSource
	Watcher ReplicaWatcher
}

// EventSource is the address of one engine's KV events: exactly one of Connect and Bind (the engine dials).
type EventSource struct {
	Connect string // tcp://HOST:PORT of the engine's publisher
	Bind    string // tcp://HOST:PORT to listen on
	Replay  string // tcp://HOST:PORT of the engine's replay socket; "" = none
	Topic   string
	Host    string // of the engine, if it is on another machine: only this host may be contacted
}

// Facts are what a node knows about an engine process when it opens the rank for it.
type Facts struct {
	Incarnation uint64
	MaxOngoing  int          // requests at once
	BlockSize   int          // tokens per KV block; 0: not known
	Blocks      int          // KV blocks on the device; 0: not known
	CachingOff  bool         // the engine runs without prefix caching
	MaxModelLen int          // tokens of a request and its answer; 0: not known
	Events      *EventSource // attach: found by asking the engine; nil = as in ReplicaSpec
}

// ReplicaEventKind is the closed list of what a DPServer reports to its node.
type ReplicaEventKind uint8

// ReplicaLost: the DPServer fenced itself for Cause. ReplicaBack: an attached engine answered a canary after
// a fence; the node decides when the unit is ready again.
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

// ReplicaWatcher receives a replica's events. It must not block.
type ReplicaWatcher interface{ ReplicaEvent(e ReplicaEvent) }
