package msg

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/promtext"
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

// Validate refuses an order out of bounds.
func (m *StartRank) Validate() error {
	if m.App == nil {
		return checkBounds(false, "app")
	}
	b := m.Block // the zero block is that of attached engines
	return cmp.Or(checkName(m.Unit, "unit"), checkName(m.App.Name, "app.name"),
		checkBounds(m.Group >= 0, "group"), checkBounds(m.Epoch > 0, "epoch"),
		checkBounds(len(m.Ranks) > 0, "ranks"), checkGrants(m.Ranks, "ranks"),
		checkGrants(m.AllRanks, "all_ranks"),
		checkBounds(len(b.Node) <= maxName && b.Base >= 0 && b.Base <= math.MaxUint16 && b.Size >= 0 &&
			b.Size <= math.MaxUint16+1-b.Base, "block"))
}

func checkGrants(grants []state.RankGrant, name string) error {
	for i := range grants {
		g := &grants[i]
		if err := cmp.Or(checkName(g.Node, name+".node"), checkBounds(g.Rank >= 0, name+".rank"),
			checkBounds(g.Slot >= -1, name+".slot"), checkBounds(g.Share >= 0, name+".share")); err != nil {
			return err
		}
	}
	return nil
}

// StopRank ends a unit on a node: drain (if Grace > 0), stop the engines, verify that ports are free.
// UnitEvent Gone follows.
type StopRank struct {
	Unit   string
	Epoch  uint64
	Grace  time.Duration // for running streams; 0 = cut
	Reason string
}

// Validate refuses an order out of bounds, and cuts its reason.
func (m *StopRank) Validate() error {
	cut(&m.Reason)
	return cmp.Or(checkName(m.Unit, "unit"), checkBounds(m.Grace >= 0, "grace"))
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
	UnitReady   UnitEventKind = "ready"   // every rank healthy and a probe answered
	// a ready unit lost a rank; this node's routing leaves it out already
	UnitFenced UnitEventKind = "fenced"
	// the node ends the engines (start failure or after a fence)
	UnitKilling  UnitEventKind = "killing"
	UnitDraining UnitEventKind = "draining" // the node has accepted a StopRank with grace
	// a part that drains has no request left, and waits for an order to end: other nodes have parts
	UnitIdle UnitEventKind = "idle"
	UnitGone UnitEventKind = "gone" // processes gone, ports verified free
	// UnitPresent is only in a report's list of units: the node has the unit, and does not tell its phase. A
	// process of a node sends it for a unit whose engines an earlier one has left, until it has decided about
	// them. It also stands for a kind of a later version. A unit that is present is not gone, and not started
	// again.
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
	Exit     string // of the engine that ended by itself, as in state.LastEnd
	WasReady bool
	Asked    bool
	At       time.Time
}

// isKnown reports whether this version knows the kind of the event.
func (e *UnitEvent) isKnown() bool {
	switch e.Kind {
	case UnitStarted, UnitReady, UnitFenced, UnitKilling, UnitDraining, UnitIdle, UnitGone, UnitPresent:
		return true
	}
	return false
}

// AssignGroup asks the RankAssigner to place, number and grant units of one group.
type AssignGroup struct {
	App      *app.Application
	Grant    state.GrantGroup  // what is wanted; its units have no ranks and port blocks yet
	Nodes    []string          // the nodes that may get ranks
	Avoid    []string          // nodes that get ranks only if the others have no room; the last one first
	Reserved []state.UnitGrant // units that move, with the seats that are kept free for them
}

// GroupAssigned is the answer to AssignGroup.
type GroupAssigned struct {
	Grant  state.GrantGroup  // the units that found room, with their seats
	NoRoom map[string]string // by unit: why it found no room
	Result state.Result      // of Grant: the new epochs
	Err    error             // why Grant is not, or perhaps not, committed
}

// Assign is assign_rank(replica_id).
type Assign struct {
	App       string
	Group     int
	ReplicaID string
}

// Validate refuses names out of bounds.
func (m *Assign) Validate() error {
	return cmp.Or(checkName(m.App, "app"), checkName(m.ReplicaID, "replica_id"))
}

// AssignReply answers Assign.
type AssignReply struct {
	Rank   int
	Epoch  uint64
	DPSize int
}

// ReplicaID names the replica at a position of a group, APP.GROUP.POSITION. The position is its rank number.
func ReplicaID(app string, group, position int) string {
	return app + "." + strconv.Itoa(group) + "." + strconv.Itoa(position)
}

// ReleaseRank is release_rank(rank) of a unit's ranks, proposed after they are gone.
type ReleaseRank struct {
	Unit   string
	Epoch  uint64
	Reason string
}

// Publish announces rank 0's rendezvous address of a lockstep unit and, once its engine is up, the engine's
// settings.
type Publish struct {
	Unit     string
	Epoch    uint64
	Rank     int
	Addr     string
	Port     int
	Settings string // "" = not known yet
}

// Validate refuses names out of bounds, and cuts the settings.
func (p *Publish) Validate() error {
	cut(&p.Settings)
	return cmp.Or(checkName(p.Unit, "unit"), checkName(p.Addr, "addr"))
}

// Await waits for the Publish of (unit, epoch), at most the rendezvous time (120 s).
type Await struct {
	Ctx   context.Context `json:"-"` // the message's cancellation
	Unit  string
	Epoch uint64
	Rank  int
	Reply chan AwaitReply `json:"-"` // one slot
}

// Validate refuses a name out of bounds.
func (m *Await) Validate() error { return checkName(m.Unit, "unit") }

// AwaitReply is what rank 0 has published, or an Err that names the missing ranks. An answer of another node
// without Addr says: not yet, ask again.
type AwaitReply struct {
	Addr     string
	Port     int
	Settings string // "" = not published yet
	Err      error  `json:"-"`
}

// Validate cuts the settings.
func (r *AwaitReply) Validate() error {
	cut(&r.Settings)
	return nil
}

// Assigner is the RankAssigner as a DPServer or a node uses it.
type Assigner interface {
	Assign(ctx context.Context, app string, group int, replicaID string) (AssignReply, error)
	Publish(p Publish)
	Await(ctx context.Context, unit string, epoch uint64, rank int) (AwaitReply, error)
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
	// the node's process is about to be replaced, and its engines live on: its silence is expected for so
	// long; 0: no.
	RestartGrace time.Duration
	Events       []UnitEvent // not yet acknowledged, by Number
	// the newest event of every unit of the node, acknowledged or not: a new leader learns from these
	Units []UnitEvent
	// of every rank that is ready
	Loads []RankLoad
}

// RankLoad is the load of one rank: prompt and generated tokens of its open requests.
type RankLoad struct {
	Unit   string
	Rank   int
	Tokens int
}

// Bounds of a report.
const (
	maxEvents       = 64 << 10  // events, units or ranks
	maxNodeRecord   = 64 << 10  // bytes of the node's record as JSON
	maxRoles        = 8         // there are three
	maxRestartGrace = time.Hour // a node that is silent for longer has not been restarted
)

// Validate refuses a report out of bounds, and cuts its texts.
func (r *NodeReport) Validate() error {
	cut(&r.Trouble)
	r.RestartGrace = min(max(0, r.RestartGrace), maxRestartGrace)
	if err := cmp.Or(ValidateNode(&r.Node), checkBounds(len(r.Events) <= maxEvents, "events"),
		checkBounds(len(r.Units) <= maxEvents, "units"),
		checkBounds(len(r.Loads) <= maxEvents, "loads")); err != nil {
		return err
	}
	for i := range r.Loads {
		l := &r.Loads[i]
		l.Tokens = max(0, l.Tokens)
		if err := cmp.Or(checkName(l.Unit, "unit"), checkBounds(l.Rank >= 0, "rank")); err != nil {
			return err
		}
	}
	for _, list := range [][]UnitEvent{r.Events, r.Units} {
		for i := range list {
			if err := checkName(list[i].Unit, "unit"); err != nil {
				return err
			}
			cut(&list[i].Reason)
			cut(&list[i].Exit)
			list[i].LogTail = state.Tail(list[i].LogTail)
		}
	}
	return nil
}

// ValidateNode refuses the record of a node that is too large for the state.
func ValidateNode(n *state.Node) error {
	data, err := json.Marshal(n)
	return cmp.Or(err, checkName(n.ID, "node.id"), checkName(n.UID, "node.uid"),
		checkBounds(len(n.Roles) <= maxRoles, "node.roles"), checkBounds(len(data) <= maxNodeRecord, "node"))
}

// PassOverUnknown replaces events of kinds that this version does not know by UnitPresent, and counts them. A
// node must not lose its lease over them, and a unit that is missing counts as gone.
func (r *NodeReport) PassOverUnknown() (n int) {
	for _, list := range [][]UnitEvent{r.Events, r.Units} {
		for i := range list {
			if e := &list[i]; !e.isKnown() {
				*e = UnitEvent{
					Node: e.Node, Number: e.Number, Unit: e.Unit, Epoch: e.Epoch, Kind: UnitPresent, Rank: -1,
				}
				n++
			}
		}
	}
	return n
}

// Lease is the leader's answer.
type Lease struct {
	TTL       time.Duration
	Acked     uint64 // events up to this number are acknowledged
	Leader    string // node id
	Index     uint64 // of the leader's state
	GossipKey []byte // for a node that reported another one; nil: no change
	// Waiting are the applications with units that find no room, for a node with role ingress. It is valid as
	// long as the lease.
	Waiting []Waiting
}

// Validate refuses a lease out of bounds, and cuts the reasons.
func (l *Lease) Validate() error {
	for i := range l.Waiting {
		cut(&l.Waiting[i].Reason)
	}
	return cmp.Or(checkBounds(l.TTL > 0, "ttl"), checkName(l.Leader, "leader"),
		checkBounds(len(l.GossipKey) == 0 || len(l.GossipKey) == state.GossipKeySize, "gossip_key"))
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
	// CallEngines makes a call to the engines of an application's ranks on the node. Each rank has an answer,
	// or says why there is none.
	CallEngines(ctx context.Context, q *EngineCall) ([]client.RankAnswer, error)
	// EngineMetrics passes the metrics page of each engine on the node to give, in the order in which they
	// come; an error of give ends it. An engine that gives no page is left out.
	EngineMetrics(ctx context.Context, give func(*EnginePage) error) error
	// ResetRouter restarts the routing of an application on the node's ingress.
	ResetRouter(ctx context.Context, app string) (ranks int, err error)
}

// NodeCounts is what a node's ranks and its ingress count.
type NodeCounts struct {
	Ranks  map[string][]client.RankStatus // every rank's account, by unit
	Queued map[string]int                 // length of the ingress's queue, by application
	// of the ingress, by application with a prefill and a decode pool; without what engines count
	Pairs map[string]client.PDStatus
	// of the ingress, by application; of one with two pools, of that which answers
	Traffic map[string]*client.Traffic
}

// EngineCall is a control call to the engines of an application.
type EngineCall struct {
	App    string   // or one of its pools
	Ranks  []string // GROUP/RANK; none: all
	Method string
	Path   string // with its query
	Body   []byte // JSON; empty: none
}

// EnginePage is the metrics page of an engine. Epoch is that of its unit: of two pages of a rank, the one
// with the lower epoch comes from an engine that ends.
type EnginePage struct {
	promtext.Source
	Epoch uint64
}

// Validate refuses names out of bounds, and a page of no rank.
func (p *EnginePage) Validate() error {
	return cmp.Or(checkBounds(len(p.App) <= maxName && len(p.Pool) <= maxName, "app or pool"),
		checkBounds(len(p.Ranks) > 0 && len(p.Ranks) <= app.MaxDPSize, "ranks"))
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

// Validate refuses names out of bounds.
func (q *LogQuery) Validate() error {
	q.Rank, q.Tail = max(-1, q.Rank), max(0, q.Tail)
	return checkBounds(len(q.App) <= maxName && len(q.Unit) <= maxName, "app or unit")
}

// LogLines are lines that are sent together.
type LogLines []LogLine

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
	Sampling map[string]json.RawMessage `json:"sampling,omitempty"`
	// the same in two parts, as Dynamo's callers write them; members that are null count as left out
	StopConditions  map[string]json.RawMessage `json:"stop_conditions,omitempty"`
	SamplingOptions map[string]json.RawMessage `json:"sampling_options,omitempty"`

	RequestID string `json:"request_id,omitempty"`
	// a name that the application serves; "" = its model, no adapter
	Model    string           `json:"model,omitempty"`
	Worker   string           `json:"worker,omitempty"`
	Override *client.Override `json:"router_config_override,omitempty"`
}
