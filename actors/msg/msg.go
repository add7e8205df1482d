// Package msg holds the message structs that the actors send each other, and the interfaces over which rooms
// of one floor meet. Plain data: no behaviour, no IO.
package msg

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/routing"
)

// ErrOverloaded is returned by Mailbox.TrySend when the mailbox holds as many unreceived messages as its
// bound.
var ErrOverloaded = inbox.ErrOverloaded

// Mailbox is how a room posts to an actor of another room. Safe for concurrent use; never blocks.
type Mailbox interface {
	TrySend(m any) error      // bounded messages; ErrOverloaded when full
	Send(m any)               // messages that give something back; bypass the bound
	Stopped() <-chan struct{} // closed once the actor answers nobody any more
}

// Class says which part of a request a ticket is for. Prefill and decode come with the pd step.
type Class uint8

// ClassBoth is a request served whole by one rank.
const ClassBoth Class = iota

// Refusal is the closed list of reasons why a replica does not take a request.
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

var refusalNames = [...]string{"granted", "full", "stale_epoch", "not_ready", "fenced", "draining",
	"no_lease", "expired", "gone", "overloaded"}

func (r Refusal) String() string { return refusalNames[r] }

// Admit asks a DPServer for a ticket. Reply must have room for one answer; the sender keeps it until it has
// read it or has started a drain that does (a late ticket goes back by Done{Refused}). Blocks are the
// sender's again with the reply: without one they must not be used again.
type Admit struct {
	Ctx       context.Context // the message's cancellation
	ReqID     uint64          // unique per ingress process, same value as in routing
	Epoch     uint64
	Class     Class
	Tokens    int
	Estimated bool
	Whole     bool // the answer comes as a whole: no FirstToken is posted, the DPServer predicts it
	// sequences: n × prompts; 0 counts as 1. A rank counts at most as many as it has room for
	Weight    int
	Hit       int      // prompt tokens that the sender's index says the rank has cached
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
	Ticket     Ticket
	Refusal    Refusal
	Epoch      uint64
	Seq        uint64
	RetryAfter time.Duration
}

// Ticket lets one request use one rank. Unused it expires after 5 s; used it lives as long as its stream.
type Ticket struct {
	ID          uint64
	Epoch       uint64
	Incarnation uint64
	Seq         uint64 // the replica's stream number after admission
	Rank        routing.RankID
	Target      Target
}

// Target is where the engine of a rank listens and how the rank is named there.
type Target struct {
	URL        string // http://host:port, no path
	Addressing string // url | header | body
	Selector   int
	Owned      bool // started by dpserve (idle connections may live 100 s), else attached (4 s)
}

// FirstToken says that prefill of a ticket is done.
type FirstToken struct {
	TicketID uint64
	At       time.Time
}

// Progress reports output so far, at most every 50 ms per request.
type Progress struct {
	TicketID uint64
	Out      int
}

// Probe asks whether the rank's engine makes progress, because the answer that TicketID stands for has been
// silent for a while. If the engine's counters or KV events have moved since the Probe before, a RecProgress
// of the ticket says so in the rank's stream; no answer means that no progress is seen.
type Probe struct{ TicketID uint64 }

// Outcome is how a ticket ended.
type Outcome uint8

// The outcomes.
const (
	OK Outcome = iota
	FailedOutcome
	Cancelled
	Refused // ticket given back unused
)

// CauseClientError is the cause of a request that its engine refused: it did its work, and computed nothing.
const CauseClientError = "client_error"

// CausePredicted is the cause of a RecFirstToken that the DPServer has predicted: the engine has not said
// that it made progress.
const CausePredicted = "predicted"

// Done ends a ticket and gives its load back, exactly once. Trip says that the failure counts towards the
// trip; Probe asks for an immediate health probe (refused or reset connection).
type Done struct {
	TicketID         uint64
	Outcome          Outcome
	Cause            string
	PromptTokens     int
	CachedTokens     int
	HasCached        bool // the engine reported CachedTokens
	CompletionTokens int
	FirstToken       time.Duration // admission → first token; 0 = none seen
	Trip             bool
	Busy             bool // engine_busy: take the rank as full until the next Done, at most 1 s
	Probe            bool
}

// Demand says that requests of an application wait for room at an ingress, or wait no longer. It is said of
// every rank of the application, and again while it lasts: a rank that frees room keeps it for the ingresses
// that wait, in turn.
type Demand struct {
	Ingress string
	Waits   bool
}

// Drain stops admission and lets running streams go on until Deadline.
type Drain struct {
	Deadline time.Time
	Cause    string
}

// Fence stops admission at once.
type Fence struct{ Cause string }
