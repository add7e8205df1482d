// Package routing holds every routing policy, the view they read and the Router that serializes them. A
// policy is a pure function (request, view, state, rand) → decision: no clock, no network, no lock, no log
// inside.
package routing

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// RankID numbers a rank inside its application: group in the high, rank in the low 16 bits, so that ids order
// by group, then rank.
type RankID uint32

// ID packs group and rank.
func ID(group, rank int) RankID {
	return RankID(uint32(group)<<16 | uint32(rank)&0xffff)
}

// Group is the group number.
func (id RankID) Group() int { return int(id >> 16) }

// Rank is the rank number inside the group, 0..dp_size-1.
func (id RankID) Rank() int { return int(id & 0xffff) }

// String is "GROUP/RANK", as in x-dpserve-rank.
func (id RankID) String() string { return fmt.Sprintf("%d/%d", id.Group(), id.Rank()) }

// Load is the open work of a rank, own bumps included, in requests unless a field says otherwise.
type Load struct {
	W int // waiting for their prefill
	F int // prefilling: the first of those whose first token is not known of
	R int // decoding
	// tokens: uncached prompt tokens still to prefill, without what was computed of the first prompt by
	// View.Now
	Q  int64
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
	Busy        bool // KV usage went above busy_threshold and is not yet well below it: gets nothing
	LeftOut     bool // Ejected, and one of those that the cap leaves out: gets nothing
	HasKVUsage  bool // the engine reported KVUsage
	MaxOngoing  int  // max_ongoing_requests of this rank
	Load        Load
	// of Load: what answers of the rank that failed count as. It takes no room
	Failed Load
	Bumps  Bumps // of Load: what this router sent and the rank's records have not named yet
	// of Load: prompts that are computed by View.Now as reckoned, and whose first token is not reported yet
	Computed Prompts
	// token pairs × 2: attention still to prefill, Σ u² + 2·u·hit over waiting and prefilling requests; as of
	// View.Now like Load.Q
	Pairs     int64
	Capacity  int64   // tokens: the rank's KV cache (C); 0 = unknown
	BlockSize int     // tokens per KV block; 0 = unknown, DefaultBlockSize is assumed
	KVUsage   float64 // referenced blocks / all blocks, as reported by the engine
	// its last answers failed: its place in the order in which ranks were ejected, from 1; 0 = they did not
	Ejected int

	Since time.Duration // View.Now when this incarnation came into the view
	Lag   time.Duration // how old the rank's records are when they come; 0 = not known
	// how long the rank takes beside the median of its application's ranks, as far as it is certain; 0 = not
	// known, 1 is assumed
	Slow       float64
	SlowSpread float64 // what Slow is judged by: from 1/SlowSpread to SlowSpread a rank counts as equal
	Rho        float64 // share of its time that prefill takes, as of View.Now: what all ingresses sent it

	Machine string // that runs its engine
}

// Bumps counts own dispatches that the rank's records have not named yet. Other ingresses have such
// dispatches too, which this Router cannot see.
type Bumps struct {
	N     int   // requests
	Q     int64 // tokens: uncached prompt tokens
	Kq    int64 // tokens: full prompts
	Pairs int64 // as Rank.Pairs
}

// Prompts is a number of prompts and their total length.
type Prompts struct {
	N      int
	Tokens int64
}

// slowness is Slow; 1 if that is unknown.
func (rk *Rank) slowness() float64 {
	if rk.Slow > 0 {
		return rk.Slow
	}
	return 1
}

// setFailed replaces the part of the load that stands for failed answers.
func (rk *Rank) setFailed(part Load) {
	l, was := &rk.Load, &rk.Failed
	n := l.W + l.F + part.W - was.W
	l.F = min(n, 1) // the first of them is being computed
	l.W, l.R = n-l.F, l.R+part.R-was.R
	l.Q, l.K, l.Kq = l.Q+part.Q-was.Q, l.K+part.K-was.K, l.Kq+part.Kq-was.Kq
	rk.Failed = part
}

// Open is the number of open requests: those of Load that do not stand for failed answers.
func (rk *Rank) Open() int { return rk.ongoing() - rk.Failed.W - rk.Failed.R }

// decodes are the requests that the rank decodes, and their context in tokens.
func (rk *Rank) decodes() (n int, context int64) {
	return rk.Load.R - rk.Failed.R, rk.Load.K - rk.Failed.K
}

// DefaultBlockSize is the tokens per KV block of a rank that has not said its own: vLLM's default.
const DefaultBlockSize = 16

// blockSize is the rank's tokens per block, else the request's, else DefaultBlockSize.
func (rk *Rank) blockSize(q *Request) int {
	switch {
	case rk.BlockSize > 0:
		return rk.BlockSize
	case q.BlockSize > 0:
		return q.BlockSize
	}
	return DefaultBlockSize
}

// Usage is the share of the KV cache in use, 0 to 1: the engine's report; without one, the context of all
// open requests over the capacity, which counts shared prefixes once per request; 0 if neither is known.
func (rk *Rank) Usage() float64 {
	switch {
	case rk.HasKVUsage:
		return rk.KVUsage
	case rk.Capacity > 0:
		used := rk.Load.K + rk.Load.Kq - rk.Failed.K - rk.Failed.Kq
		return min(1, float64(used)/float64(rk.Capacity))
	}
	return 0
}

// View is the published picture of one application's ranks, ascending by ID. Policies only read it.
type View struct {
	Now      time.Duration // monotonic, since an arbitrary origin
	Ranks    []Rank
	Rho      float64 // mean of the ranks' Rho
	OnTheWay int     // units of the app that are pending, starting, fenced, killing or in backoff

	BusyThreshold    float64 // ranks whose Usage is above it get nothing, if HasBusyThreshold
	HasBusyThreshold bool
	PrefixCachingOff bool // the engines cache no prefixes: every hit counts as 0

	// of one rank's steps, as measured; the zero value: nothing is measured, a policy has its own
	Model steptime.Coefficients
}

// Hit is the part of a request's prompt that one rank holds.
type Hit struct {
	Rank RankID `json:"r"`
	// leading prompt tokens in the device's cache, whole blocks, at most L-1
	Tokens int32 `json:"t"`
	Host   int32 `json:"h,omitempty"` // tokens behind those that are in host memory
	Disk   int32 `json:"d,omitempty"` // tokens behind those that are on disk
}

// Override replaces parameters of policy kv for one request (router_config_override).
type Override struct {
	OverlapScoreWeight    float64
	RouterTemperature     float64
	HasOverlapScoreWeight bool
	HasRouterTemperature  bool
}

// Request is the input of a decision: everything that a policy may read of a request.
type Request struct {
	ID        uint64 // unique per ingress process; the key of its bump
	Tokens    int    // prompt length L
	Estimated bool   // Tokens is bytes/k, not a count
	Direct    RankID // x-dpserve-rank, if HasDirect
	HasDirect bool
	Tried     []RankID // never picked again
	// the ranks that have what it needs, such as its adapter, ascending; nil: all have
	Only []RankID

	Now time.Duration // on View.Now's clock; 0 leaves the view's
	// what ranks hold of the prompt, ascending by Rank, absent = nothing; nil without a look-up
	Hits      []Hit
	Blocks    []uint64 // chain hashes of the prompt's full blocks, nil if unknown
	BlockSize int      // tokens per entry of Blocks; 0 = unknown
	// canonical prompt bytes, for policies with a text tree; empty if there is none. Not kept
	Text    []byte
	Session string // session key (header or body field user), "" = none
	Adapter string // adapter named by the request, "" = none
	// with HasDirect: the caller's rank is taken under every policy (generate with a worker id)
	Force    bool
	Released bool      // with Force: a lockstep group's queue has named the rank
	Override *Override // parameters for this request alone; nil = none
	// Router.Why and PairRouter.Explain draw between equal ranks by ID; else as the next Pick will
	DrawsByID bool

	Priority int     // reserved: higher goes first
	TTFTms   float64 // reserved: SLO of the first token, ms; 0 = the application's
	TPOTms   float64 // reserved: SLO per output token, ms; 0 = the application's
}

// fits reports whether rank id has what q needs.
func (q *Request) fits(id RankID) bool {
	if q.Only == nil {
		return true
	}
	_, found := slices.BinarySearch(q.Only, id)
	return found
}

// source is the generator of a decision that changes nothing. next is that of the next Pick.
func (q *Request) source(next *rand.PCG) rand.PCG {
	if q.DrawsByID {
		return *rand.NewPCG(q.ID, fibonacci)
	}
	return *next
}

// HitOn is the number of prompt tokens that rank id holds, 0 to Tokens-1.
func (q *Request) HitOn(id RankID) int {
	if h := q.findHit(id); h != nil {
		return int(q.clamp(h.Tokens))
	}
	return 0
}

// findHit is the entry of rank id, nil if there is none.
func (q *Request) findHit(id RankID) *Hit {
	i, ok := slices.BinarySearchFunc(q.Hits, id, func(h Hit, id RankID) int {
		return cmp.Compare(h.Rank, id)
	})
	if !ok {
		return nil
	}
	return &q.Hits[i]
}

// clamp keeps a hit within 0 to L-1: the last token is always computed.
func (q *Request) clamp(hit int32) int64 { return max(0, min(int64(hit), int64(q.Tokens)-1)) }

// Kind is the outcome of a decision.
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

func newTerm(id RankID, l label, raw, weight float64) Term {
	return Term{Rank: id, Name: l.name, Unit: l.unit, Raw: raw, Weight: weight, Value: raw * weight}
}

// Decision is a policy's answer. The caller owns and reuses it; Ranked and Terms are truncated, not
// reallocated.
type Decision struct {
	Explain bool     // set by the caller: fill Terms
	Kind    Kind     //
	Ranked  []RankID // best first; at least one entry when Kind is Route
	Reason  string   // constant from a closed list
	Terms   []Term   // one row per (candidate, term) when Explain

	Disqualified int // candidates left out because a term was not a finite number
	scratch      scratch
}

// scratch is a decision's working memory. It lives with the Decision so that Decide neither
// allocates nor writes to the policy's state.
type scratch struct {
	tier       tier      // that is chosen from
	candidates []int32   // its rows, ascending
	scores     []float64 // by candidate
	hits       []int64   // by row, tokens
	extra      []int64   // by row: what else a formula needs to know of a rank
	depths     []int32   // by slot of a policy's own table
	all        aggregate
}

// Find is the index of rank id in v.Ranks, or where it would be inserted and false.
func (v *View) Find(id RankID) (int, bool) {
	lo, hi := 0, len(v.Ranks)
	for lo < hi {
		mid := (lo + hi) / 2
		if v.Ranks[mid].ID < id {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(v.Ranks) && v.Ranks[lo].ID == id
}

// row is the row of an incarnation, nil if it is not in the view.
func (v *View) row(ref RankRef) *Rank {
	if i, ok := v.Find(ref.ID); ok && v.Ranks[i].Incarnation == ref.Incarnation {
		return &v.Ranks[i]
	}
	return nil
}

// maxWalk is how many rows findNear looks at before it searches: as many ranks may be missing without a cost.
const maxWalk = 8

// findNear is Find for a view of groups of about width ranks each. With all ranks there the row is group ×
// width + rank, every missing one before it moves it one back. The binary search's wrong guesses are a third
// of a pick otherwise.
func (v *View) findNear(id RankID, width int) (int, bool) {
	i := min(id.Group()*width+id.Rank(), len(v.Ranks)-1)
	for n := 0; n < maxWalk && i >= 0; n++ {
		if v.Ranks[i].ID == id {
			return i, true
		}
		i--
	}
	return v.Find(id)
}

// hitOn is the number of q's prompt tokens that rank id has cached, 0 while prefix caching is off.
func (v *View) hitOn(q *Request, id RankID) int {
	if v.PrefixCachingOff || len(q.Hits) == 0 {
		return 0
	}
	return q.HitOn(id)
}

// alignHits writes every rank's hit beside its row. Both lists ascend by rank, so one walk does it; ranks
// that left between the look-up and now are skipped, ranks that came hold nothing.
func alignHits(q *Request, v *View, c *scratch) {
	hits := resize(&c.hits, len(v.Ranks))
	clear(hits)
	if v.PrefixCachingOff {
		return
	}
	i := 0
	for k := range q.Hits {
		h := &q.Hits[k]
		for i < len(v.Ranks) && v.Ranks[i].ID < h.Rank {
			i++
		}
		if i == len(v.Ranks) {
			break
		}
		if v.Ranks[i].ID == h.Rank {
			hits[i] = q.clamp(h.Tokens)
		}
	}
}

// resize gives a scratch slice the length n, allocating only when it was never that long.
func resize[T any](s *[]T, n int) []T {
	if cap(*s) < n {
		*s = make([]T, n)
	}
	*s = (*s)[:n]
	return *s
}

// size copies the KV cache's size from an event, if the event has it.
func (rk *Rank) size(e *Event) {
	if e.Capacity > 0 {
		rk.Capacity = e.Capacity
	}
	if e.BlockSize > 0 {
		rk.BlockSize = e.BlockSize
	}
}

// status applies an engine's report. ok is false for a usage outside 0 to 1: the report is dropped and
// counted.
func (rk *Rank) status(e *Event) (ok bool) {
	usage := e.KVUsage
	if e.NoKVUsage {
		usage = 0
	}
	if !(usage >= 0 && usage <= 1) { // NaN too
		return false
	}
	rk.KVUsage, rk.HasKVUsage = usage, !e.NoKVUsage
	rk.size(e)
	return true
}

// busyMargin is how far usage must fall below busy_threshold before a rank gets requests again: without it a
// rank at the threshold would flap with every report. Thresholds below 0.1 release at half.
const busyMargin = 0.05

// updateBusy sets Busy; freed reports that the rank may be picked again.
func (v *View) updateBusy(rk *Rank) (freed bool) {
	was := rk.Busy
	switch usage := rk.Usage(); {
	case !v.HasBusyThreshold:
		rk.Busy = false
	case usage > v.BusyThreshold:
		rk.Busy = true
	case usage == 0 || usage < v.BusyThreshold-min(busyMargin, v.BusyThreshold/2):
		rk.Busy = false
	}
	return was && !rk.Busy
}
