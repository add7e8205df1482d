package msg

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// ErrNodeStopping refuses a start on a node that is ending. The node has started nothing, and the unit is not
// at fault.
var ErrNodeStopping = errors.New("the node is stopping")

// NodeReport is what a node sends to the leader with every renewal of its lease: at least every lease_renew,
// and at once when a unit has an event.
type NodeReport struct {
	Node        state.Node // as the node sees itself; Lost and Draining are set by the leader
	Incarnation uint64     // random per process of the node: its units are those of this process
	Wall        time.Time  // its clock, for people
	Index       uint64     // of its copy of the state
	Trouble     string     // a note for people, such as a full disk; "": none
	// the node ends: it starts no unit any more, and ends its units after their grace
	Stopping bool
	// the previous process of the node had an order to end; false: it crashed, or there was none
	AfterStop bool
	Events    []UnitEvent // not yet acknowledged, by Number
	// the newest event of every unit of the node, acknowledged or not: a new leader learns from these
	Units []UnitEvent
}

// Lease is the leader's answer.
type Lease struct {
	TTL    time.Duration
	Acked  uint64 // events up to this number are acknowledged
	Leader string // node id
	Index  uint64 // of the leader's state
	// Keyring is the gossip keys, for a node that reported others: it accepts all of them and sends with the
	// first. nil: no change.
	Keyring [][]byte
	// Waiting are the applications with units that find no room, for a node with role ingress. It is valid as
	// long as the lease.
	Waiting []Waiting
}

// Waiting is an application with units that placement found no room for. No rank of them will start soon, so
// a request that no ready rank can take is refused instead of queued.
type Waiting struct {
	App      string
	Revision uint64 // of the application: a later one has not been placed yet
	Reason   string // for clients: it names no node
	// unit, and the highest epoch it ever had: with a higher one it does not wait any more
	Units map[string]uint64
}

// Leader is the leader as the nodes use it. Renew refuses a node that was removed with
// problem.PermissionDenied, and returns problem.Unavailable if no node leads.
type Leader interface {
	Renew(ctx context.Context, r *NodeReport) (Lease, error)
}

// NodeView is what the admin API asks a node.
type NodeView interface {
	// Statuses returns what the node's ranks and its ingress count.
	Statuses(ctx context.Context) (NodeCounts, error)
	// Logs passes lines to give in order of time; an error of give ends it. It returns when there are no more
	// lines, or ctx ends.
	Logs(ctx context.Context, q LogQuery, give func(LogLine) error) error
	// ResetRouter restarts the routing of an application on the node's ingress.
	ResetRouter(ctx context.Context, app string) (ranks int, err error)
}

// NodeCounts is what a node's ranks and its ingress count.
type NodeCounts struct {
	Ranks  map[string][]client.RankStatus // every rank's account, by unit
	Queued map[string]int                 // length of the ingress's queue, by application
	// of the ingress, by application with a prefill and a decode pool; without what engines count
	Pairs map[string]client.PDStatus
}

// LogQuery selects log lines. Unit "" and Rank -1 mean all.
type LogQuery struct {
	App    string
	Unit   string
	Rank   int
	Tail   int       // last lines to begin with; 0 = all that are kept
	Since  time.Time // lines at or after
	Follow bool      // go on until ctx is done
}

// LogLine is one line of an engine.
type LogLine struct {
	Unit   string
	Rank   int
	Epoch  uint64
	At     time.Time
	Stream string // stdout | stderr | dpserve
	Text   string
}

// Generate asks an ingress for tokens: pick, send and account in one call. It is a client.GenerateRequest
// whose Sampling keeps the bytes that the client sent.
type Generate struct {
	TokenIDs []uint32 `json:"token_ids"`
	// members of a /v1/completions body: max_tokens, temperature, stop …
	Sampling  map[string]json.RawMessage `json:"sampling,omitempty"`
	RequestID string                     `json:"request_id,omitempty"`
	// a name that the application serves; "" = its model, no adapter
	Model    string           `json:"model,omitempty"`
	Worker   string           `json:"worker,omitempty"`
	Override *client.Override `json:"router_config_override,omitempty"`
}
