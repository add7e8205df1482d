package controller

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

// pendingCommand is the next command to propose for a unit.
type pendingCommand struct {
	kind    state.EffectKind // DoGrant, ProposeReady, ProposeFenced, ProposeFailed or ProposeRelease
	attempt int              // for DoGrant
}

// seat is the content of a unit's grant, and what the unit is started with.
type seat struct {
	spec     *app.Application // nil if the pool is gone: nothing is started
	revision uint64
	launch   string
	ranks    []state.RankGrant
	blocks   []state.Block
}

// poolID identifies a pool of an application.
type poolID struct{ app, pool string }

// poolName names the pool, as app.Application.PoolName.
func (p poolID) poolName() string { return app.PoolName(p.app, p.pool) }

// unit is the core's knowledge of one unit: its state machine, its grant, and its commands.
type unit struct {
	id string
	poolID
	group int
	ranks []int // rank numbers
	m     state.Machine

	seat    seat             // of the current epoch
	next    seat             // of the grant under way; its ranks and blocks come with the answer
	pending []pendingCommand // in order; at most a release and a grant
	current pendingCommand   // under way
	busy    bool             // a command of this unit is under way
	proven  uint64           // epoch under which it has passed the probation of a roll-out
	retryAt time.Time
	drain   *time.Duration // drain time set for this unit; nil = the application's
	noRoom  string         // why the RankAssigner found no room; "" = not tried, or found
	// waitsFor says for which other unit's start its last attempt waits; "" = for none. It is on its way.
	waitsFor string
	askedAt  uint64      // Core.changes at the last request to the RankAssigner
	record   *state.Unit // newest record while the unit is wanted; keeps Restarts over a release

	parts      map[string]*part // of the current grant, by node
	nodes      []string         // keys of parts, in order
	reserved   *state.UnitGrant // reserved room for a move off a draining node
	stayReason string           // why it is still on a draining node
}

func newUnit(u *app.Unit) *unit {
	return &unit{
		id: u.ID, poolID: poolID{u.App, u.Pool}, group: u.Group, ranks: u.Ranks, parts: map[string]*part{},
	}
}

// isInGroupOf reports whether two units are of one group.
func (u *unit) isInGroupOf(o *unit) bool { return u.poolID == o.poolID && u.group == o.group }

// applyGrant takes the seat of a grant. The state of its parts is unknown at first.
func (u *unit) applyGrant(s seat) {
	u.seat, u.parts = s, map[string]*part{}
	for i := range s.ranks {
		if n := s.ranks[i].Node; u.parts[n] == nil {
			u.parts[n] = &part{}
		}
	}
	u.nodes = slices.Sorted(maps.Keys(u.parts))
}

// noteFailure notes the node that reports first that the start under way fails. The other nodes of the unit
// end their ranks because of it.
func (u *unit) noteFailure(node string) {
	if u.m.Phase == state.Starting && u.failedOn() == "" {
		u.parts[node].failed = true
	}
}

// failedOn returns the node that reported first that the last start failed; "" if none did.
func (u *unit) failedOn() string {
	for _, n := range u.nodes {
		if u.parts[n].failed {
			return n
		}
	}
	return ""
}

// queueCommand sets the next command. The newest command replaces older ones; only a release is kept before a
// new grant.
func (u *unit) queueCommand(w pendingCommand) {
	if w.kind == state.DoGrant && len(u.pending) > 0 && u.pending[0].kind == state.ProposeRelease {
		u.pending = []pendingCommand{u.pending[0], w}
		return
	}
	u.pending = []pendingCommand{w}
}

// isDue reports whether the next command is of this kind and may be proposed.
func (u *unit) isDue(now time.Time, grant bool) bool {
	return len(u.pending) > 0 && !u.busy && (u.pending[0].kind == state.DoGrant) == grant &&
		!now.Before(u.retryAt)
}

func (u *unit) beginCommand() pendingCommand {
	u.current, u.pending, u.busy = u.pending[0], u.pending[1:], true
	return u.current
}

// isAssigning reports whether the RankAssigner was asked for the unit and has not answered.
func (u *unit) isAssigning() bool { return u.busy && u.current.kind == state.DoGrant }

// requeue repeats the command under way, unless a newer one has replaced it.
func (u *unit) requeue(at time.Time) {
	if len(u.pending) == 0 || u.current.kind == state.ProposeRelease {
		u.pending = append([]pendingCommand{u.current}, u.pending...)
	}
	u.retryAt = at
}

// currentAttempt is the attempt of the grant under way. A unit that was redeployed meanwhile starts counting
// again.
func (u *unit) currentAttempt() int {
	for _, w := range u.pending {
		if w.kind == state.DoGrant {
			return w.attempt
		}
	}
	return u.current.attempt
}

// startOrder is the order to start the ranks of one node.
func (u *unit) startOrder(node string) *msg.StartRank {
	s := &msg.StartRank{
		App: u.seat.spec, AppRevision: u.seat.revision, Unit: u.id, Group: u.group, Epoch: u.m.Epoch,
		AllRanks: u.seat.ranks,
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

// isIdle reports whether nothing is left of the unit: no grant, no processes, no command.
func (u *unit) isIdle(s *state.State) bool {
	return (u.m.Phase == state.Gone || u.m.Phase == "") && !u.busy && len(u.pending) == 0 &&
		s.Units[u.id] == nil
}

// awaitsGrant reports whether the unit's state machine can take a grant.
func (u *unit) awaitsGrant() bool {
	switch u.m.Phase {
	case "", state.Gone, state.Pending, state.Backoff, state.Failed:
		return true
	default:
		return false
	}
}

// nextRestarts is the first count of restarts of a new grant if the record before it is released by then.
func (u *unit) nextRestarts(launch string) int {
	if u.record == nil || u.record.Launch != launch {
		return 0
	}
	return u.record.Restarts + 1
}

// ref identifies the current grant in a command.
func (u *unit) ref() *state.UnitRef {
	return &state.UnitRef{Unit: u.id, Epoch: u.m.Epoch, Reason: u.m.Reason, At: u.m.Since.UnixMilli()}
}

func (u *unit) phaseReason() string {
	if u.stayReason != "" {
		return u.stayReason
	}
	switch {
	case u.isWithoutRoom():
		return u.noRoom
	case u.waitsFor != "" && u.awaitsGrant():
		return u.waitsFor
	}
	return u.m.Reason
}

// isWithoutRoom reports whether the unit waits for room. A unit that ended stays in backoff while it asks for
// its next grant.
func (u *unit) isWithoutRoom() bool {
	return (u.m.Phase == state.Pending || u.m.Phase == state.Backoff) && u.noRoom != ""
}

// drainingNode is the draining node that the unit has ranks on and can leave now; nil if there is none.
func (u *unit) drainingNode(draining map[string]*state.Node) *state.Node {
	if u.hasUnreportedPart() || u.m.Stopping || !u.canMove() {
		return nil
	}
	for _, id := range u.nodes {
		if n := draining[id]; n != nil && !u.parts[id].gone {
			return n
		}
	}
	return nil
}

// canMove is false for a unit that ends or has ended: it starts elsewhere without a move.
func (u *unit) canMove() bool {
	switch u.m.Phase {
	case state.Starting, state.Ready, state.Draining:
		return true
	default:
		return u.m.Phase == state.Fenced && u.m.Attach
	}
}

// rankStatus lists the ranks of the current grant or, without one, the wanted ranks.
func (u *unit) rankStatus(phase state.Phase) []client.RankStatus {
	out := make([]client.RankStatus, 0, len(u.ranks))
	if len(u.seat.ranks) > 0 {
		for _, r := range u.seat.ranks {
			out = append(out, client.RankStatus{
				Group: u.group, Rank: r.Rank, Node: r.Node, Devices: r.Devices,
				Share: share.Devices(r.Share), Phase: string(phase), Epoch: u.m.Epoch,
			})
		}
		return out
	}
	for _, r := range u.ranks {
		out = append(out, client.RankStatus{Group: u.group, Rank: r, Phase: string(phase), Epoch: u.m.Epoch})
	}
	return out
}

// part is one node's share of a unit's current grant.
type part struct {
	started, ready, draining bool
	idle                     bool // it drains, has no request left, and waits for the other parts
	wasReady                 bool // its ranks were ready under this grant
	ended                    bool // its node ends it, or has ended it, by itself
	gone                     bool // nothing is left of it
	failed                   bool // its node reported first that the start fails
	adopted                  bool // granted before this leader led, and its node has not reported it
	absent                   bool // adopted, and its node reports that it does not have it

	process      uint64    // incarnation of the node that reported it last
	number       uint64    // newest event taken from that incarnation
	missingSince time.Time // since when that incarnation has not reported it; zero = it does
}

// isNewer reports whether an event is newer than the last one. Number 0 means no number and is always new.
func (p *part) isNewer(process, number uint64) bool {
	if p.process != process {
		p.process, p.number = process, 0
	}
	if number == 0 {
		return true
	}
	if number <= p.number {
		return false
	}
	p.number = number
	return true
}

func (p *part) markGone() { p.ended, p.gone, p.adopted = true, true, false }

// allParts reports whether so holds for every part.
func (u *unit) allParts(so func(*part) bool) bool {
	for _, p := range u.parts {
		if !so(p) {
			return false
		}
	}
	return true
}

// othersLack reports whether so is false for a part on another node.
func (u *unit) othersLack(node string, so func(*part) bool) bool {
	for n, p := range u.parts {
		if n != node && !so(p) {
			return true
		}
	}
	return false
}

// hasUnreportedPart reports whether a node has not told this leader yet what it has of the unit.
func (u *unit) hasUnreportedPart() bool { return !u.allParts(func(p *part) bool { return !p.adopted }) }

func isStarted(p *part) bool    { return p.started }
func isReady(p *part) bool      { return p.ready }
func hasBeenReady(p *part) bool { return p.wasReady }
func isDraining(p *part) bool   { return p.draining || p.ended }
func isIdle(p *part) bool       { return p.idle || p.ended }
func isEnded(p *part) bool      { return p.ended }
func isGone(p *part) bool       { return p.gone }
