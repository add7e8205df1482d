// Package msg holds the messages between actors, and the interfaces between packages that may not import each
// other. It is plain data that checks its own bounds: no other behaviour, no IO.
package msg

import (
	"context"
	"crypto/tls"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
)

// ErrOverloaded is returned by Mailbox.TrySend when the mailbox holds as many unreceived messages as its
// bound.
var ErrOverloaded = inbox.ErrOverloaded

// Mailbox posts messages to an actor of another package. Safe for concurrent use; it never blocks.
type Mailbox interface {
	TrySend(m any) error      // bounded messages; ErrOverloaded when full
	Send(m any)               // messages that give something back; they bypass the bound
	Stopped() <-chan struct{} // closed when the actor answers no message any more
}

// Refusal is the closed list of reasons why a replica refuses a request.
type Refusal uint8

// The refusals. Granted is the zero value.
const (
	Granted Refusal = iota
	Full
	StaleEpoch
	NotReady
	Fenced
	Draining
	NoLease
	Expired
	Gone
	Overloaded
)

var refusalNames = [...]string{
	"granted", "full", "stale_epoch", "not_ready", "fenced", "draining",
	"no_lease", "expired", "gone", "overloaded",
}

func (r Refusal) String() string { return refusalNames[r] }

// Admit asks a DPServer for a ticket. Reply must have room for one answer. The sender keeps it until it has
// read the answer, or has started a goroutine that reads it and gives a late ticket back by Done{Refused}.
// With the reply, Blocks belong to the sender again; without a reply they must not be used again.
type Admit struct {
	Ctx       context.Context // the message's cancellation
	ReqID     uint64          // unique per ingress process, same value as in routing
	Epoch     uint64
	Tokens    int
	Estimated bool
	// the answer comes as a whole: no FirstToken is posted, and the DPServer predicts it
	Whole bool
	// sequences: n × prompts; 0 counts as 1. A rank counts at most as many as it has room for
	Weight    int
	Hit       int      // prompt tokens that the rank has cached, by the sender's index
	Blocks    []uint64 // chain hashes of the prompt's full blocks; nil if the policy reads no index
	HitBlocks int      // leading entries of Blocks that Hit stands for
	// routing.SessionKey of the request's session, for the other ingresses; 0 = none, or the policy reads
	// none
	Session  uint64
	Deadline time.Time // zero: none
	Ingress  string
	Reply    chan AdmitReply
}

// AdmitReply is a ticket (Refusal == Granted) or a typed refusal.
type AdmitReply struct {
	Ticket  Ticket
	Refusal Refusal
	Epoch   uint64
	Seq     uint64
}

// Ticket lets one request use one rank. An unused ticket expires after 5 s; a used one lives as long as its
// stream.
type Ticket struct {
	ID          uint64
	Epoch       uint64
	Incarnation uint64
	Seq         uint64 // of the stream: above earlier records of requests, at most that of its RecAdmitted
	Rank        routing.RankID
}

// Target is the address of a rank's engine, and how the rank is named there.
type Target struct {
	URL        string // http://host:port; of an attached engine also the path that its routes begin with
	Addressing string // url | header | body
	Selector   int
	Owned      bool // started by dpserve (idle connections may live 100 s), else attached (4 s)
	// how the rank's node gets into the engine; nil: without key and as the machine trusts. Other nodes do
	// not get it
	Access Access
	// how the engine calls its model; nil: it knows the names that clients send. Other nodes do not get it
	Model *ModelNames
}

// ModelNames are the names of a model whose engine knows it under another one than clients.
type ModelNames struct {
	Engine  string
	Clients []string // that stand for it: the application's id, then its aliases
}

// ModelName is how the engine calls the application's model, whose id is given.
func (t *Target) ModelName(id string) string {
	if t.Model == nil {
		return id
	}
	return t.Model.Engine
}

// Access is how a node gets into an engine. engine.Access implements it.
type Access interface {
	Key() string       // of dpserve's own requests; "" = none
	ClientKey() string // of requests of clients, in place of what they bring; "" = they keep that
	TLS() *tls.Config  // nil = as the machine trusts
}

// FirstToken says that the prefill of a ticket is done.
type FirstToken struct {
	TicketID uint64
	At       time.Time
}

// Progress reports the output so far, at most every 50 ms per request.
type Progress struct {
	TicketID uint64
	Out      int
}

// Outcome is how a ticket ended.
type Outcome uint8

// The outcomes.
const (
	OK Outcome = iota
	FailedOutcome
	Cancelled
	Refused // ticket given back unused
)

// CauseClientError is the cause of a request that its engine refused: the engine works, and has computed
// nothing.
const CauseClientError = "client_error"

// CausePredicted is the cause of a RecFirstToken that the DPServer has predicted: the engine has not reported
// it.
const CausePredicted = "predicted"

// CauseStalled is the cause of the fence of a rank whose engine does not work by the verdict of its DPServer:
// it failed a probe. Nothing comes any more on its streams.
const CauseStalled = "stalled"

// Why an open rank takes no request: its engine says that it does not compute now. It comes back when the
// engine says so.
const (
	CauseAsleep  = "asleep"  // somebody has put it to sleep
	CauseScaling = "scaling" // it changes its number of ranks
)

// CauseRestarting is the cause of a rank's drain before its node's process is replaced: the engine lives on,
// and the rank comes back at the same epoch.
const CauseRestarting = "restarting"

// Done ends a ticket and gives its load back, exactly once. Charge says that the failure counts towards the
// ejection; CheckHealth asks for a health check at once, after a refused or reset connection.
type Done struct {
	TicketID         uint64
	Outcome          Outcome
	Cause            string
	PromptTokens     int
	CachedTokens     int
	HasCached        bool // the engine reported CachedTokens
	CompletionTokens int
	FirstToken       time.Duration // admission → first token; 0: none was seen
	Charge           bool
	// engine_busy: so long the rank counts as full. 0: it is not, and a rank that is full for a second or
	// less is no longer
	BusyFor     time.Duration
	CheckHealth bool
}

// Pardon takes back that an answer counts towards the ejection: another rank has answered the same, so it is
// about the request.
type Pardon struct{}

// Demand says that requests of an application wait for room at an ingress, or wait no longer. The ingress
// sends it to every rank of the application, and repeats it while requests wait. A rank that frees room holds
// it for the waiting ingresses, in turn.
type Demand struct {
	Ingress string
	Waits   bool
}

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
	// Base is below the numbers of the rank's records and tickets. It is 0 for a new engine. An engine that
	// an earlier process of the node has served keeps its incarnation, whose numbers may not come again.
	Base        uint64
	MaxOngoing  int          // requests at once
	BlockSize   int          // tokens per KV block; 0: not known
	Blocks      int          // KV blocks on the device; 0: not known
	CachingOff  bool         // the engine runs without prefix caching
	MaxModelLen int          // tokens of a request and its answer; 0: not known
	Adapters    []string     // of the engine, as in Snapshot
	Events      *EventSource // attach: found by asking the engine; nil = as in ReplicaSpec
}

// ReplicaEventKind is the closed list of what a DPServer reports to its node.
type ReplicaEventKind uint8

// ReplicaLost: the DPServer fenced itself for Cause. ReplicaBack: an attached engine answered a probe after
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

// Bounds of messages from other nodes. Each such message has a method Validate beside its type.
const (
	maxName = 1 << 10 // bytes of an id, an address
	maxText = 4 << 10 // bytes of a reason; longer ones are cut
)

// checkBounds refuses a value out of bounds by the name of its field.
func checkBounds(ok bool, name string) error {
	if ok {
		return nil
	}
	return problem.New(problem.InvalidArgument, "message from another node: %s is out of bounds", name).
		WithHint("run the same version of dpserve on every node")
}

func checkName(s, name string) error { return checkBounds(s != "" && len(s) <= maxName, name) }

func cut(s *string) { *s = (*s)[:min(len(*s), maxText)] }
