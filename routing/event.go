package routing

import "time"

// EventKind is the closed list of a Router's events.
type EventKind uint8

// The events. Dispatched is raised by Pick itself; Ticket and Undo come from the ingress; the rest from the
// replica's stream.
const (
	EvDispatched EventKind = iota // a bump under (ReqID): W+1, Q+Tokens, Kq+Tokens
	// admission granted with stream number Seq: the bump lives until a record with seq ≥ Seq is applied
	EvTicket
	// attempt refused, failed to connect or was given up before a ticket: the bump goes
	EvUndo
	// stream: the replica counts the request (ReqID is its key in the replica's account, Tokens, Seq)
	EvAdmitted
	EvFirstToken // stream: prefill done, decoding
	EvProgress   // stream: Out output tokens so far
	// stream: request over, whatever the outcome, after Out output tokens (0 = not known)
	EvFinished
	// rank serves: Epoch, Incarnation, MaxOngoing, Local; its account begins as Snapshot (nil = empty) taken
	// at Seq; it is Ready unless EvAccepting says otherwise
	EvRankUp
	EvRankDown   // rank leaves the view; bumps on it go
	EvAccepting  // Ready changes to Accepting
	EvSilent     // Silent changes to Silent
	EvTripped    // Tripped = N: the rank's answers failed in a row; 0 = a canary came back
	EvOnTheWay   // View.OnTheWay = N
	EvMaxOngoing // MaxOngoing = N
	EvStatus     // the engine's report: KVUsage; Capacity and BlockSize unless 0
	EvConfigured // the application's settings are *Config
	// told by the caller, not by the stream: prefill of the own dispatch ReqID is done
	// (mark_prefill_complete). EvUndo ends it (free)
	EvPrefillDone
	// derived by the Router, to policies that watch: ReqID counts on Rank from now on, with Tokens
	EvOpened
	// derived by the Router, to policies that watch: ReqID no longer counts on Rank, whatever the reason
	EvClosed
)

// Config is what an application sets for all policies.
type Config struct {
	BusyThreshold    *float64 // 0 to 1; nil = off
	PrefixCachingOff bool     // the engines run without prefix caching
}

// Open is one open request of a replica's snapshot.
type Open struct {
	ReqID    uint64
	Tokens   int
	Hit      int // prompt tokens that were cached when it was dispatched
	Out      int
	Decoding bool
}

// Event is one input of a Router. ReqID in stream events is the replica's key for the request: the ingress
// folds its hash and the request id into one uint64, the same value as in Dispatched for its own requests.
type Event struct {
	Kind        EventKind
	Rank        RankID
	ReqID       uint64
	Seq         uint64
	Tokens      int
	Out         int
	Epoch       uint64
	Incarnation uint64
	MaxOngoing  int
	N           int
	Accepting   bool
	Silent      bool
	Assumed     bool // EvFirstToken: the rank has predicted it; it is not measured
	Local       bool
	Snapshot    []Open

	Now time.Duration // on View.Now's clock; 0 leaves the view's
	// EvAdmitted, EvFirstToken, EvProgress, EvFinished: when it happened, on the rank's own clock; 0 = the
	// rank did not say
	At        time.Duration
	Hit       int     // EvDispatched, EvAdmitted: prompt tokens cached on Rank at dispatch
	Capacity  int64   // EvRankUp, EvStatus: tokens
	BlockSize int     // EvRankUp, EvStatus: tokens
	KVUsage   float64 // EvStatus: 0 to 1
	// EvStatus: the engine reports no usage, or has not for a while; the rank's own account stands
	NoKVUsage bool
	Config    *Config  // EvConfigured
	Request   *Request // EvDispatched by Pick, and the EvOpened of it: what was routed. Not to be kept
	// EvAdmitted: SessionKey of the request's session; 0 = it has none, or its ingress did not say
	Session uint64
	// EvAdmitted, written by the Router for its policy: it did not count the request yet, another router
	// dispatched it
	Elsewhere bool
}
