package ingress

import (
	"hash/maphash"
	"strconv"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// causeBusy is the RecState cause of a rank whose engine reported that it is busy. The rank counts as full,
// not as unhealthy, so requests wait for it.
const causeBusy = "engine_busy"

// rank is one incarnation of a rank as its stream tells it. What does not change after newRank may be read by
// anyone; the rest belongs to appRouter.mu.
type rank struct {
	*rankleg.Rank
	local   bool   // the rank is on this node
	unitKey uint64 // equal for the ranks of one incarnation of a unit
	asker   rankleg.Asker
	values  rankValues

	accepting     bool
	busy          bool   // not accepting because of causeBusy or msg.CauseScaling
	away          string // msg.CauseAsleep or CauseScaling: its engine says that it does not compute now
	ejectionOrder int    // place in the order of ejections, from 1; 0: the rank is not ejected
	lost          bool   // fenced, gone, or replaced by a new incarnation: its attempts fail
	engineFailed  bool   // fenced because its engine, or that of another rank of its lockstep unit, failed
	draining      bool   // takes no new requests and lets its streams end
	silent        bool   // its node is not heard
	seq           uint64 // of the last record
	maxOngoing    int
	rankRoom
	engineFacts
	publishedState
	attempts *attempt // attempts on this rank: head of a list
}

// rankValues are the values of header fields that name the rank. All answers share them.
type rankValues struct{ group, rank []string }

// rankRoom says for which ingress a rank has room.
type rankRoom struct {
	// refused as full, or its room is for another ingress, and its stream has reported no room since
	full      bool
	offeredTo string // ingress to which the free slots are offered, by the last record that says so; "": all
	offered   int    // requests for which room was offered to this ingress, and not used yet
	// requests of this ingress that need no room, see uncountedPlace
	uncounted int
}

// engineFacts are what a rank's stream says of its engine.
type engineFacts struct {
	heard          bool // it has served, or its rank said why not: its node has not just taken it over
	cachingOff     bool // it runs without prefix caching
	blockSize      int  // tokens per KV block; 0: unknown
	sizeFromEvents bool // its KV events use blockSize
	maxModelLen    int  // tokens of a request and its answer; 0: unknown
	adapters       []string
	hasStatus      bool // its engine has reported a status
	lateReads      int64
}

// publishedState holds the values that the Router has of a rank.
type publishedState struct {
	publishedReady    bool
	publishedMax      int
	publishedSilent   bool
	publishedEjection int
}

// newRank makes a rank from its snapshot. The error is about the engine's URL.
func newRank(rec *msg.Record, in *Ingress) (*rank, error) {
	leg, err := rankleg.NewRank(rec)
	if err != nil {
		return nil, err
	}
	r := &rank{
		Rank: leg, local: leg.Node == in.node || in.remote == nil, asker: in.remote,
		values: rankValues{
			group: []string{strconv.Itoa(leg.ID.Group())}, rank: []string{strconv.Itoa(leg.ID.Rank())},
		},
		unitKey: maphash.Comparable(restrictionSeed, unitEpoch{leg.Unit, leg.Epoch}),
	}
	if r.local {
		r.asker = in.near
	}
	return r, nil
}

// unitEpoch is one incarnation of a unit.
type unitEpoch struct {
	unit  string
	epoch uint64
}

// ref names the incarnation.
func (r *rank) ref() routing.RankRef { return routing.RankRef{ID: r.ID, Incarnation: r.Incarnation} }

// isIncarnation reports whether rec comes from this incarnation.
func (r *rank) isIncarnation(rec *msg.Record) bool {
	return r.Epoch == rec.Epoch && r.Incarnation == rec.Incarnation
}

// routerState is what the Router should see: whether the rank is ready, and how many requests it may hold. A
// busy rank is ready and full. An ejected rank is ready, because the Router decides whether to leave it out.
func (r *rank) routerState(stateReady bool) (ready bool, maxOngoing int) {
	ready = stateReady && !r.lost && (r.accepting || r.busy || r.ejectionOrder > 0)
	if r.busy || r.full {
		return ready, 0
	}
	return ready, r.maxOngoing
}

// track adds an attempt to the rank's list.
func (r *rank) track(a *attempt) {
	a.next = r.attempts
	if a.next != nil {
		a.next.prev = a
	}
	r.attempts, a.prev, a.isTracked = a, nil, true
}

// untrack removes an attempt from the rank's list. Safe to call twice.
func (r *rank) untrack(a *attempt) {
	if !a.isTracked {
		return
	}
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		r.attempts = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	}
	a.prev, a.next, a.isTracked = nil, nil, false
}

// failPendingAttempts cancels every attempt without a first byte, so that it is retried on another rank at
// once and not only when the engine's process has exited. Streams with a first byte go on as long as their
// engine does.
func (r *rank) failPendingAttempts() {
	r.lost = true
	for a := r.attempts; a != nil; a = a.next {
		if !a.hasFirstByte {
			a.cancel(errUnitLost)
		}
	}
}

// cutStreams cancels the streams of a rank: of an attached one whose drain is over, because dpserve does not
// stop its engine, and of one whose engine failed its probe.
func (r *rank) cutStreams(cause error) {
	for a := r.attempts; a != nil; a = a.next {
		if a.hasFirstByte {
			a.cancel(cause)
		}
	}
}

// blockSetOwner is the key of a rank's block set of a tier in the index.
func (r *rank) blockSetOwner(tier kvindex.Tier) kvindex.Owner {
	return kvindex.Owner{Rank: uint32(r.ID), Tier: tier, Epoch: r.Epoch, Incarnation: r.Incarnation}
}

// awayRanks counts the ranks whose engines say that they do not compute now, by the reason; nil: none.
func (t *rankTable) awayRanks() map[string]int {
	var out map[string]int
	for _, r := range t.ranks {
		if r.away != "" && !r.lost {
			if out == nil {
				out = map[string]int{}
			}
			out[r.away]++
		}
	}
	return out
}
