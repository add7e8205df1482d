package controller

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// wish is what raft should be told of a unit next.
type wish struct {
	kind    state.EffectKind // DoGrant, ProposeReady, ProposeFenced, ProposeFailed or ProposeRelease
	attempt int              // DoGrant
}

// seat is what a grant gives a unit, and what it is started with.
type seat struct {
	spec     *app.Application // nil if the application is gone: then nothing is started
	revision uint64
	launch   string
	ranks    []state.RankGrant
	blocks   []state.Block
}

// unit is all that the core knows of one unit: its machine, its grant, and what is under way.
type unit struct {
	id    string
	app   string
	group int
	ranks []int // rank numbers
	m     state.Machine

	seat    seat   // of the epoch in hand
	next    seat   // of the grant under way
	wishes  []wish // in order; at most a release and a grant
	current wish   // under way
	busy    bool   // a command of this unit is under way
	retryAt time.Time
	drain   *time.Duration // grace of the end that was ordered for this unit; nil = the application's
	noRoom  string         // why placement found no place; "" = not tried, or found one
	record  *state.Unit    // the newest in the state while the unit is wanted: it keeps Restarts over a release

	parts map[string]*part // of the grant in hand, by node
	nodes []string         // those of parts, in order
	away  *seat            // where it is to go from a draining node: kept free for it
	stays string           // why it is still on a draining node
}

func newUnit(id, app string, group int, ranks []int) *unit {
	return &unit{id: id, app: app, group: group, ranks: ranks, parts: map[string]*part{}}
}

// sit takes the seat of a grant: nothing is known of its parts.
func (u *unit) sit(s seat) {
	u.seat, u.parts = s, map[string]*part{}
	for i := range s.ranks {
		if n := s.ranks[i].Node; u.parts[n] == nil {
			u.parts[n] = &part{}
		}
	}
	u.nodes = slices.Sorted(maps.Keys(u.parts))
}

// wantRaft notes what raft should be told. The newest wish counts; only a release is not left out before a new grant.
func (u *unit) wantRaft(w wish) {
	if w.kind == state.DoGrant && len(u.wishes) > 0 && u.wishes[0].kind == state.ProposeRelease {
		u.wishes = []wish{u.wishes[0], w}
		return
	}
	u.wishes = []wish{w}
}

// due says whether the next wish is of the kind and may be carried out.
func (u *unit) due(now time.Time, grant bool) bool {
	return len(u.wishes) > 0 && !u.busy && (u.wishes[0].kind == state.DoGrant) == grant && !now.Before(u.retryAt)
}

// begin takes the next wish under way.
func (u *unit) begin() wish {
	u.current, u.wishes, u.busy = u.wishes[0], u.wishes[1:], true
	return u.current
}

// again puts the wish under way back, unless a newer one has taken its place.
func (u *unit) again(at time.Time) {
	if len(u.wishes) == 0 || u.current.kind == state.ProposeRelease {
		u.wishes = append([]wish{u.current}, u.wishes...)
	}
	u.retryAt = at
}

// attempted is the number of the start that the grant under way is for: a unit that was given another chance meanwhile begins anew.
func (u *unit) attempted() int {
	for _, w := range u.wishes {
		if w.kind == state.DoGrant {
			return w.attempt
		}
	}
	return u.current.attempt
}

// startOn is the order to start the ranks of one node.
func (u *unit) startOn(node string) *msg.StartRank {
	s := &msg.StartRank{
		App: u.seat.spec, AppRevision: u.seat.revision, Unit: u.id, Group: u.group, Epoch: u.m.Epoch, AllRanks: u.seat.ranks,
	}
	for _, r := range u.seat.ranks {
		if r.Node == node {
			s.Ranks = append(s.Ranks, r)
		}
	}
	for _, b := range u.seat.blocks {
		if b.Node == node {
			s.Block = b
		}
	}
	return s
}

// idle says that nothing is left of the unit: no grant, no processes, nothing under way.
func (u *unit) idle(s *state.State) bool {
	return (u.m.Phase == state.Gone || u.m.Phase == "") && !u.busy && len(u.wishes) == 0 && s.Units[u.id] == nil
}

// awaitsGrant says whether a grant, asked for or not, is something the unit's machine can take.
func (u *unit) awaitsGrant() bool {
	switch u.m.Phase {
	case "", state.Gone, state.Pending, state.Backoff:
		return true
	default:
		return false
	}
}

// keepRecord notes the unit's record in the state, nil if it has none now.
func (u *unit) keepRecord(rec *state.Unit) {
	if rec != nil && u.m.Phase != state.Gone {
		u.record = rec
	}
}

// restarts is what the count of restarts of a grant begins with if the record before it is released by then.
func (u *unit) restarts(launch string) int {
	if u.record == nil || u.record.Launch != launch {
		return 0
	}
	return u.record.Restarts + 1
}

// ref is a report on the grant in hand.
func (u *unit) ref() *state.UnitRef {
	return &state.UnitRef{Unit: u.id, Epoch: u.m.Epoch, Reason: u.m.Reason, At: u.m.Since.UnixMilli()}
}
