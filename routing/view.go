// Package routing holds every routing policy, the view they read and the Router that serializes them. A policy is a
// pure function (request, view, state, rand) → decision: no clock, no network, no lock, no log inside.
package routing

import (
	"fmt"
	"time"
)

// RankID numbers a rank inside its application: group in the high, rank in the low 16 bits, so that ids order by group, then rank.
type RankID uint32

// ID packs group and rank.
func ID(group, rank int) RankID { return RankID(uint32(group)<<16 | uint32(rank)&0xffff) } //nolint:gosec // both are bounded by app validation (< 65536)

// Group is the group number.
func (id RankID) Group() int { return int(id >> 16) }

// Rank is the rank number inside the group, 0..dp_size-1.
func (id RankID) Rank() int { return int(id & 0xffff) }

// String is "GROUP/RANK", as in x-dpserve-rank.
func (id RankID) String() string { return fmt.Sprintf("%d/%d", id.Group(), id.Rank()) }

// Load is what a rank has in hand, own bumps included. Requests unless said.
type Load struct {
	W  int   // waiting (admitted, prefill not known to have begun)
	F  int   // prefilling
	R  int   // decoding
	Q  int64 // tokens: uncached prompt tokens still to prefill
	K  int64 // tokens: context of decoding requests
	Kq int64 // tokens: full prompts of waiting and prefilling requests
}

// O is the number of open requests.
func (l Load) O() int { return l.W + l.F + l.R }

// Rank is one row of a View.
type Rank struct {
	ID          RankID
	Epoch       uint64
	Incarnation uint64
	Ready       bool // unit ready at the highest epoch known, and the replica accepts
	Silent      bool // its stream has been silent for 1 s: picked only when nothing else is left
	Local       bool // on the ingress's own node
	MaxOngoing  int  // max_ongoing_requests of this rank
	Load        Load
}

// View is the published picture of one application's ranks, ascending by ID. Policies only read it.
type View struct {
	Now      time.Duration // monotonic, since an arbitrary origin
	Ranks    []Rank
	OnTheWay int // units of the app that are pending, starting, fenced, killing or in backoff
}

// Request is what a policy knows of a request.
type Request struct {
	ID        uint64 // unique per ingress process; the key of its bump
	Tokens    int    // prompt length L
	Estimated bool   // Tokens is bytes/k, not a count
	Direct    RankID // x-dpserve-rank, if HasDirect
	HasDirect bool
	Tried     []RankID // never picked again
}

// Kind says what to do with a request.
type Kind uint8

// Route to Ranked[0]; Queue until room is freed; Reject now.
const (
	Route Kind = iota
	Queue
	Reject
)

// Term is one summand of one candidate's score. Value = Raw × Weight unless the policy's doc says otherwise.
type Term struct {
	Rank   RankID  `json:"rank"`
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Raw    float64 `json:"raw"`
	Weight float64 `json:"weight"`
	Value  float64 `json:"value"`
}

// Decision is a policy's answer. The caller owns and reuses it; Ranked and Terms are truncated, not reallocated.
type Decision struct {
	Explain bool     // set by the caller: fill Terms
	Kind    Kind     //
	Ranked  []RankID // best first; at least one entry when Kind is Route
	Reason  string   // constant from a closed list
	Terms   []Term   // one row per (candidate, term) when Explain
}
