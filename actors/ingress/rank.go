package ingress

import (
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// causeBusy is the RecState cause of a rank whose engine said that it is busy: it counts as full, not as ill, so requests
// wait for it.
const causeBusy = "engine_busy"

// rank is one incarnation of a rank as its stream tells it. What does not change after newRank may be read by anyone; the
// rest belongs to lane.mu.
type rank struct {
	id          routing.RankID
	unit        string
	epoch       uint64
	incarnation uint64
	node        string // that runs it
	local       bool
	mailbox     msg.Mailbox
	target      msg.Target
	urls        [openai.NumRoutes]*url.URL
	groupValue  []string // of the answer's headers; shared by all answers
	rankValue   []string

	accepting   bool
	busy        bool   // not accepting because of causeBusy
	tripped     int    // its answers failed in a row: its place in the lane's order of trips, from 1; 0: they did not
	full        bool   // said full, or its room is for another ingress, and the stream has told nothing new since
	turn        string // for whom its free room is, by its last record that says so; "": for all
	offered     int    // requests that room was held for, and that have not taken it
	lost        bool   // fenced, gone, or replaced by a new incarnation: what it has in hand fails
	failed      bool   // fenced because its engine failed, or another one of its lockstep unit
	draining    bool   // takes nothing new and lets its streams end
	silent      bool   // nothing is heard of its node
	maxOngoing  int
	seq         uint64 // of the last record
	steps       uint64 // records of a first token or of output: each says that its engine made progress
	cachingOff  bool   // its engine runs without prefix caching
	blockSize   int    // tokens per KV block; 0: not known
	maxModelLen int    // tokens of a request and its answer; 0: not known
	proven      bool   // its events came in blocks of that size

	deaf   bool          // a record was missed: nothing of its cache is believed before its next snapshot
	asked  time.Duration // when it was asked for one last; 0: never
	asking *time.Timer   // until it is asked again; nil: it is not

	shownReady   bool // what the Router was told
	shownMax     int
	shownSilent  bool
	shownTripped int
	attempts     *attempt // those it has in hand: head of a list
}

// newRank reads a snapshot. The error is about the target's URL.
func newRank(rec *msg.Record, node string) (*rank, error) {
	s := rec.Snapshot
	r := &rank{
		id: rec.Rank, unit: rec.Unit, epoch: rec.Epoch, incarnation: rec.Incarnation,
		node: s.Node, local: s.Node == node, mailbox: s.Mailbox, target: s.Target,
		groupValue: []string{strconv.Itoa(rec.Rank.Group())}, rankValue: []string{strconv.Itoa(rec.Rank.Rank())},
	}
	base, err := url.Parse(s.Target.URL)
	if err != nil || base.Host == "" {
		return nil, fmt.Errorf("rank %s: engine URL %q has no host; want http://host:port", rec.Rank, s.Target.URL)
	}
	for route := range r.urls {
		u := *base
		u.Path = openai.Route(route).Path()
		r.urls[route] = &u
	}
	return r, nil
}

// is says that rec speaks of this very incarnation.
func (r *rank) is(rec *msg.Record) bool {
	return r.epoch == rec.Epoch && r.incarnation == rec.Incarnation
}

// want is what the Router should see: is the rank ready, and how many requests may it hold. A busy rank is ready and full;
// a tripped one is ready, as the Router decides whether it is left out.
func (r *rank) want(stateReady bool) (ready bool, maxOngoing int) {
	ready = stateReady && !r.lost && (r.accepting || r.busy || r.tripped > 0)
	if r.busy || r.full {
		return ready, 0
	}
	return ready, r.maxOngoing
}

// track puts an attempt on the list of those the rank has in hand.
func (r *rank) track(a *attempt) {
	a.next = r.attempts
	if a.next != nil {
		a.next.prev = a
	}
	r.attempts, a.prev, a.tracked = a, nil, true
}

// untrack takes an attempt off the list. Safe to call twice.
func (r *rank) untrack(a *attempt) {
	if !a.tracked {
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
	a.prev, a.next, a.tracked = nil, nil, false
}

// lose gives up every attempt that has not begun: each is tried again elsewhere at once, instead of when the engine's
// process is gone. Streams that have begun go on as long as their engine does.
func (r *rank) lose() {
	r.lost = true
	for a := r.attempts; a != nil; a = a.next {
		if !a.begun {
			a.cancel(errUnitLost)
		}
	}
}

// cut ends the streams of an attached rank whose drain is over: its engine goes on, and would let them go on too.
func (r *rank) cut() {
	for a := r.attempts; a != nil; a = a.next {
		if a.begun {
			a.cancel(ErrDrained)
		}
	}
}
