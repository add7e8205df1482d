package msg

import "github.com/dpserve/dpserve/routing"

// RecordKind is the closed list of entries of a replica's stream.
type RecordKind uint8

// The records. RecGone ends an incarnation's stream.
const (
	RecSnapshot RecordKind = iota
	RecAdmitted
	RecFirstToken
	RecProgress
	RecDone
	RecState
	RecGone
)

// Record is one entry of a replica's ordered stream, numbered from 1 per incarnation. It is only valid during Deliver.
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
	Out     int
	Cause   string // RecDone, RecState

	Accepting bool      // RecState
	Fenced    bool      // RecState: the rank is fenced, what it has in hand is lost
	Draining  bool      // RecState: takes nothing new and lets its streams end; with Fenced: the drain is over, and cuts what is left
	Snapshot  *Snapshot // RecSnapshot
}

// Snapshot is a replica's whole account at Record.Seq.
type Snapshot struct {
	Accepting  bool
	MaxOngoing int
	Node       string
	Target     Target
	Mailbox    Mailbox // in-process; remote replicas come with the nodes step
	Open       []OpenRequest
}

// OpenRequest is one request a replica has in hand.
type OpenRequest struct {
	ReqID    uint64
	Ingress  string
	Tokens   int
	Out      int
	Decoding bool
}

// Sink receives a replica's stream in order. Deliver must not block and must not keep the record.
type Sink interface{ Deliver(r *Record) }

// Feed is the source of the streams of all ranks of a node. A subscriber gets one RecSnapshot per live rank, then deltas;
// a rank that starts later begins with its snapshot. cancel returns after the last Deliver.
type Feed interface {
	Subscribe(s Sink) (cancel func())
}
