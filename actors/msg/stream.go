package msg

import (
	"time"

	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// RecordKind is the closed list of entries of a replica's stream.
type RecordKind uint8

// The records. RecGone ends an incarnation's stream. RecKVBegin, any number of RecKV with Stored, and
// RecKVEnd are the snapshot of one column of the rank's KV cache: they follow a RecSnapshot, carry its
// number, and stand alone where a column begins within a stream. Until RecKVEnd the column must not be shown.
const (
	RecSnapshot RecordKind = iota
	RecAdmitted
	RecFirstToken
	RecProgress // output so far, or as before: the answer to a Probe
	RecDone
	RecState
	RecGone
	RecStatus  // the engine's own report: Status
	RecKVBegin // a column begins anew: KV.Tier, KV.BlockSize
	RecKV      // blocks entered or left a column: KV.Tier, KV.Delta
	RecKVEnd   // a column's snapshot is whole: KV.Tier, KV.Len, KV.Sum
	// Silent: nothing is heard of the rank's node, or is again (a snapshot says so too); not of the rank, so
	// without a number
	RecSilent
)

// Record is one entry of a replica's ordered stream, numbered from 1 per incarnation. It is only valid during
// Deliver.
type Record struct {
	App         string
	Unit        string
	Rank        routing.RankID
	Epoch       uint64
	Incarnation uint64
	Seq         uint64
	Kind        RecordKind

	ReqID   uint64 // RecAdmitted … RecDone: as in Admit
	Ingress string // who asked
	Tokens  int
	Hit     int    // RecAdmitted: prompt tokens expected in the rank's cache
	Session uint64 // RecAdmitted: as in Admit
	Out     int
	Cause   string // RecDone, RecState, RecFirstToken

	// At of RecAdmitted, RecFirstToken, RecProgress and RecDone is when it happened, on the rank's own
	// monotonic clock, whose origin is arbitrary and the same for one incarnation; 0 = not told. A first
	// token may be told late, so a record may have a smaller At than the record before it, but the records of
	// one request never go back.
	At time.Duration

	// RecDone, RecState: for whom the free room is: the name of an ingress, or of no node while it is
	// collected; "" = for all
	Turn      string
	Accepting bool // RecState: open, not tripped and not busy
	// RecState: its answers failed in a row. It admits all the same: readers decide whether they leave it out
	Tripped bool
	Fenced  bool // RecState: the rank is fenced, what it has in hand is lost
	// RecState: takes nothing new and lets its streams end; with Fenced: the drain is over, and cuts what is
	// left
	Draining bool
	Snapshot *Snapshot // RecSnapshot
	KV       KV        // RecKVBegin, RecKV, RecKVEnd
	Status   Status    // RecStatus
	Silent   bool      // RecSilent
}

// KV is what a record says of one column of a rank's KV cache. Delta.Hashes is valid during Deliver only.
type KV struct {
	Tier      kvindex.Tier
	BlockSize int           // RecKVBegin: tokens or bytes per block, 0 = not known yet
	Delta     kvindex.Delta // RecKV
	// RecKVEnd: blocks in the column, and the sum of their hashes: equal at the reader, or it lost something
	Len int
	Sum uint64
}

// Status is an engine's report of itself.
type Status struct {
	KVUsage    float64 // referenced blocks / all blocks, 0 to 1
	HasKVUsage bool
	Capacity   int64 // tokens its KV cache holds; 0 = not known
	BlockSize  int   // tokens per block; 0 = not known
}

// Resync asks a DPServer to give one of its sinks a new RecSnapshot with all KV columns: the sink has missed
// a record.
type Resync struct{ Sink Sink }

// Snapshot is a replica's whole account at Record.Seq.
type Snapshot struct {
	Accepting   bool
	Tripped     bool // as in RecState
	MaxOngoing  int
	Capacity    int64 // tokens of the KV cache; 0 = not known
	BlockSize   int   // tokens per KV block; 0 = not known
	CachingOff  bool  // the engine runs without prefix caching
	MaxModelLen int   // tokens of a request and its answer; 0 = not known
	Node        string
	Target      Target
	Mailbox     Mailbox // of a rank on another node: takes what gives back and Resync, never an Admit
	Open        []OpenRequest
}

// OpenRequest is one request a replica has in hand.
type OpenRequest struct {
	ReqID    uint64
	Ingress  string
	Tokens   int
	Hit      int // of Tokens: expected in the rank's cache when it was admitted
	Out      int
	Decoding bool
}

// Sink receives a replica's stream in order. Deliver must not block and must not keep the record.
type Sink interface{ Deliver(r *Record) }

// Feed is the source of the streams of all ranks of a node. A subscriber gets one RecSnapshot per live rank,
// then deltas; a rank that starts later begins with its snapshot. cancel returns after the last Deliver.
type Feed interface {
	Subscribe(s Sink) (cancel func())
}
