package msg

import (
	"context"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// StartRank tells a node to start its ranks of a unit at an epoch. Idempotent by (unit, epoch).
type StartRank struct {
	App         *app.Application
	AppRevision uint64
	Unit        string
	Group       int
	Epoch       uint64
	Ranks       []state.RankGrant // those of this node
	AllRanks    []state.RankGrant // the whole unit
	Block       state.Block       // this node's port block; zero for attach
}

// StopRank ends a unit on a node: drain (if Grace > 0), stop the engines, verify that ports are free.
// UnitEvent Gone follows.
type StopRank struct {
	Unit   string
	Epoch  uint64
	Grace  time.Duration // for running streams; 0 = cut
	Reason string
}

// NodeAgent is the interface of the controller to a node, in-process or over gRPC. Both methods return at
// once.
type NodeAgent interface {
	StartRank(ctx context.Context, m *StartRank) error // typed refusal: stale epoch, no lease
	StopRank(ctx context.Context, m *StopRank) error
}

// UnitEventKind is the closed list of what a node reports about a unit.
type UnitEventKind string

// The unit events.
const (
	UnitStarted UnitEventKind = "started" // the node has accepted StartRank
	UnitReady   UnitEventKind = "ready"   // every rank healthy and a canary answered
	// a ready unit lost a rank; this node's routing leaves it out already
	UnitFenced UnitEventKind = "fenced"
	// the node ends the engines (start failure or after a fence)
	UnitKilling  UnitEventKind = "killing"
	UnitDraining UnitEventKind = "draining" // the node has accepted a StopRank with grace
	UnitGone     UnitEventKind = "gone"     // processes gone, ports verified free
	// UnitPresent stands in a digest for a kind of a later version: the node has the unit, and its state is
	// not known. No node sends it.
	UnitPresent UnitEventKind = "present"
)

// UnitEvent is a node's report about a unit. For Gone, WasReady tells a failed start from a failure after
// ready, and Asked marks a requested stop.
type UnitEvent struct {
	Node     string
	Number   uint64 // per node process, from 1: a repeated event is known by it
	Unit     string
	Epoch    uint64
	Kind     UnitEventKind
	Rank     int // the rank that caused it, -1 if none
	Reason   string
	LogTail  []string
	WasReady bool
	Asked    bool
	At       time.Time
}

// AssignGroup asks the RankAssigner to place, number and grant units of one group.
type AssignGroup struct {
	App      *app.Application
	Grant    state.GrantGroup  // what is wanted; its units have no ranks and port blocks yet
	Nodes    []string          // the nodes that may get ranks
	Reserved []state.UnitGrant // units that move, with the seats that are kept free for them
}

// GroupAssigned is the answer to AssignGroup.
type GroupAssigned struct {
	Grant  state.GrantGroup  // the units that found room, with their seats
	NoRoom map[string]string // by unit: why it found no room
	Result state.Result      // of Grant: the new epochs
	Err    error             // why Grant is not, or perhaps not, committed
}

// AssignReply answers assign_rank(replica_id): the rank, or Err (typed: not granted, group full).
type AssignReply struct {
	Rank   int
	Epoch  uint64
	DPSize int
	Err    error
}

// ReplicaID names the replica at a position of a group, APP.GROUP.POSITION. The position is its rank number.
func ReplicaID(app string, group, position int) string {
	return app + "." + strconv.Itoa(group) + "." + strconv.Itoa(position)
}

// ReleaseRank is release_rank(rank), proposed after a unit's RankGone.
type ReleaseRank struct {
	Unit   string
	Rank   int // -1: all ranks of the unit
	Epoch  uint64
	Reason string
}

// Publish announces rank 0's rendezvous address of a lockstep unit.
type Publish struct {
	Unit  string
	Epoch uint64
	Rank  int
	Addr  string
	Port  int
}

// Await waits for the Publish of (unit, epoch), at most the rendezvous time (120 s).
type Await struct {
	Ctx   context.Context // the message's cancellation
	Unit  string
	Epoch uint64
	Rank  int
	Reply chan AwaitReply // one slot
}

// AwaitReply is rank 0's address, or an Err that names the missing ranks.
type AwaitReply struct {
	Addr string
	Port int
	Err  error
}

// Assigner is the RankAssigner as a DPServer or a node uses it.
type Assigner interface {
	Assign(ctx context.Context, app string, group int, replicaID string) (AssignReply, error)
	Publish(p Publish)
	Await(ctx context.Context, unit string, epoch uint64, rank int) (addr string, port int, err error)
}

// Store is the local copy of the replicated state. State is an immutable snapshot; Changed is closed at the
// next change.
type Store interface {
	State() *state.State
	Changed() <-chan struct{}
}

// Proposer puts a command through consensus. Errors: state's typed refusals, "not leader", or that of ctx.
type Proposer interface {
	Propose(ctx context.Context, c state.Command) (state.Result, error)
}
