package msg

import (
	"time"

	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// RecordKind is the closed list of entries of a replica's stream.
type RecordKind uint8

// The records. RecGone ends an incarnation's stream. RecKVBegin, any number of RecKV with Stored, and
// RecKVEnd are the snapshot of one block set of the rank's KV cache: they follow a RecSnapshot, carry the
// number of the record before them, and stand alone where a block set begins within a stream. No other RecKV
// comes between, but records of requests may. Until RecKVEnd the block set must not be shown.
const (
	RecSnapshot RecordKind = iota
	RecAdmitted
	RecFirstToken
	RecProgress // output so far
	RecDone
	RecState
	RecGone
	RecStatus   // the engine's own report: Status
	RecKVBegin  // a block set starts: KV.Tier, KV.BlockSize
	RecKV       // blocks entered or left a block set: KV.Tier, KV.Delta
	RecKVEnd    // a block set's snapshot is complete: KV.Tier
	RecAdapters // the engine has other adapters: Adapters
	// Silent: the rank's node is silent, or is heard again (which a snapshot implies). It is made by the
	// reader, so it has no number
	RecSilent
)

// Record is one entry of a replica's ordered stream, numbered per incarnation from Facts.Base + 1. It is only
// valid during Deliver.
type Record struct {
	App         string
	Unit        string
	Rank        routing.RankID
	Epoch       uint64
	Incarnation uint64
	Seq         uint64
	Kind        RecordKind

	ReqID   uint64 // RecAdmitted … RecDone: as in Admit
	Ingress string // the ingress of the request
	Tokens  int
	Hit     int    // RecAdmitted: prompt tokens expected in the rank's cache
	Session uint64 // RecAdmitted: as in Admit
	Out     int
	Cause   string // RecDone, RecState, RecFirstToken; RecSnapshot: CauseAsleep, CauseScaling or ""

	// At of RecAdmitted, RecFirstToken, RecProgress and RecDone is when it happened, on the rank's own
	// monotonic clock, whose origin is arbitrary and the same for one DPServer; 0: not known. A first
	// token may be reported late, so a record may have a smaller At than the record before it, but the
	// records of one request never go back.
	At time.Duration

	// RecDone, RecState: the ingress that may use the free slots; no node's name while slots are collected
	// for one request; "": every ingress
	OfferedTo string
	RankState
	Snapshot *Snapshot // RecSnapshot
	KV       KV        // RecKVBegin, RecKV, RecKVEnd
	Status   Status    // RecStatus
	Adapters []string  // RecAdapters: as in Snapshot
}

// RankState is what a RecState says about the rank. A RecSnapshot has Accepting, and RecSilent only Silent.
type RankState struct {
	Accepting bool // open, not ejected, not busy and not held back
	Ejected   bool // its last answers failed. It still admits: readers decide whether they leave it out
	Fenced    bool // the rank is fenced, and its open requests are lost
	// admits no request and lets its streams end; with Fenced: the drain is over, and open requests are cut
	Draining bool
	Silent   bool // the rank's node is silent
}

// KV is what a record says about one block set of a rank's KV cache. Delta.Hashes is valid during Deliver
// only.
type KV struct {
	Tier      kvindex.Tier
	BlockSize int           // RecKVBegin: tokens or bytes per block, 0 = not known yet
	Delta     kvindex.Delta // RecKV
}

// Status is an engine's report about itself.
type Status struct {
	KVUsage    float64 // referenced blocks / all blocks, 0 to 1
	HasKVUsage bool
	Capacity   int64 // tokens its KV cache holds; 0 = not known
	BlockSize  int   // tokens per block; 0 = not known
	// prompts that this prefill rank's engine held for decode ranks and that were read after their lease: the
	// decode rank may have another prompt's blocks in its prefix cache. The count begins with the engine.
	LateReads int64
}

// List asks a DPServer for one RecSnapshot with all KV block sets. The sink gets nothing else. Done is closed
// after the last block set; if the DPServer has stopped, it may stay open.
type List struct {
	Sink Sink
	Done chan struct{}
}

// Snapshot is a replica's whole account at Record.Seq.
type Snapshot struct {
	Accepting   bool
	Ejected     bool // as in RecState
	MaxOngoing  int
	Capacity    int64 // tokens of the KV cache; 0 = not known
	BlockSize   int   // tokens per KV block; 0 = not known
	CachingOff  bool  // the engine runs without prefix caching
	MaxModelLen int   // tokens of a request and its answer; 0 = not known
	Node        string
	Target      Target
	Adapters    []string // names of the engine's LoRA adapters, ascending, at most MaxAdapters
	// of a rank on another node: it accepts messages that give something back, never an Admit
	Mailbox Mailbox
	Open    []OpenRequest
}

// MaxAdapters is how many adapters of a rank are known. Requests for others are refused.
const MaxAdapters = 1024

// OpenRequest is one open request of a replica.
type OpenRequest struct {
	ReqID    uint64
	Ingress  string
	Tokens   int
	Hit      int // of Tokens: expected in the rank's cache at its admission
	Out      int
	Decoding bool
}

// Sink receives the ranks' streams, each in order. Records of several ranks may come at the same time.
// Deliver must not wait for others and must not keep the record.
type Sink interface{ Deliver(r *Record) }

// Feed is the source of the streams of all ranks that a node knows: list, then watch. A subscriber gets one
// RecSnapshot per live rank with its KV block sets, then every record; a rank that starts later begins with
// its snapshot. cancel returns after the last Deliver.
type Feed interface {
	Subscribe(s Sink) (cancel func())
	// List sends a sink that has subscribed every rank's snapshot and KV block sets again.
	List(s Sink)
}
