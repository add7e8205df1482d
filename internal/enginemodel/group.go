package enginemodel

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// MinWallStep is the shortest step of a group whose ranks are processes: one message per rank and step must
// fit. It bounds the speed-up of lockstep groups to step / MinWallStep.
const MinWallStep = time.Millisecond

// GroupConfig is the shape of a lockstep group.
type GroupConfig struct {
	Ranks        int
	SyncInterval int           // steps between the checks that may end a wave
	MinStep      time.Duration // floor of a step
	// what the ranks do together, on top of the slowest rank's time; the zero value adds nothing
	Shared steptime.Shared
	Speed  float64 // Shared's time is divided by it; 0 = 1
}

// GroupInputKind is the closed list of a coordinator's inputs.
type GroupInputKind uint8

// The inputs of a coordinator.
const (
	GroupWave   GroupInputKind = iota // Rank has work
	GroupReport                       // Rank's step takes Took, it is Unfinished behind it
	GroupLost                         // Rank is gone
)

// GroupInput is one message of a rank.
type GroupInput struct {
	Kind       GroupInputKind
	Rank       int
	Took       time.Duration
	Tokens     int // of its step
	Unfinished bool
}

// GroupEffectKind is the closed list of what a coordinator says, always to all ranks.
type GroupEffectKind uint8

// The effects of a coordinator, each the core's input of the like name.
const (
	GroupBegin  GroupEffectKind = iota // a wave begins
	GroupEnd                           // the step ended for all; Continue = the next one begins at once
	GroupBroken                        // a rank is gone: no step ends any more
)

// GroupEffect is one broadcast.
type GroupEffect struct {
	Kind     GroupEffectKind
	Continue bool
}

// Group coordinates the steps of a lockstep group: while any rank has work every rank steps, a step lasts as
// long as the slowest rank's and what the ranks do together (Shared), and only every SyncInterval steps a
// wave without work left may end. Pure, like Core; not safe for concurrent use.
type Group struct {
	cfg      GroupConfig
	effects  []GroupEffect
	reported []bool
	missing  int
	inWave   bool
	running  bool // every rank has reported, the step ends at endsAt
	broken   bool
	asked    bool // a rank asked for a wave after the last check

	step       int
	slowest    time.Duration
	fullest    int // tokens of the rank that has the most
	tokens     int // of all ranks
	unfinished bool
	startedAt  time.Duration
	endsAt     time.Duration
}

// NewGroup makes an idle coordinator.
func NewGroup(cfg GroupConfig) (*Group, error) {
	if cfg.Ranks < 1 || cfg.SyncInterval < 1 || cfg.MinStep < 0 {
		return nil, fmt.Errorf("group of %d ranks with a sync interval of %d steps: both must be at least 1",
			cfg.Ranks, cfg.SyncInterval)
	}
	return &Group{cfg: cfg, reported: make([]bool, cfg.Ranks), missing: cfg.Ranks}, nil
}

// Step takes what the ranks said, in order, and ends the step that is due. Effects are valid until the next
// call.
func (g *Group) Step(now time.Duration, in []GroupInput) ([]GroupEffect, time.Duration) {
	g.effects = g.effects[:0]
	for i := range in {
		g.take(now, &in[i])
	}
	if g.running && !g.broken && now >= g.endsAt {
		g.end()
	}
	if g.running && !g.broken {
		return g.effects, g.endsAt
	}
	return g.effects, Never
}

func (g *Group) take(now time.Duration, in *GroupInput) {
	switch in.Kind {
	case GroupWave:
		g.wave(now)
	case GroupReport:
		g.report(now, in)
	case GroupLost:
		if !g.broken {
			g.broken = true
			g.effects = append(g.effects, GroupEffect{Kind: GroupBroken})
		}
	}
}

func (g *Group) wave(now time.Duration) {
	if g.inWave {
		g.asked = true
		return
	}
	if g.broken {
		return
	}
	g.inWave, g.step, g.endsAt = true, 0, now
	g.clearReports()
	g.effects = append(g.effects, GroupEffect{Kind: GroupBegin})
}

func (g *Group) report(now time.Duration, in *GroupInput) {
	if !g.inWave || g.running || in.Rank < 0 || in.Rank >= g.cfg.Ranks || g.reported[in.Rank] {
		return // a rank that repeats itself changes nothing
	}
	g.reported[in.Rank] = true
	g.missing--
	g.slowest = max(g.slowest, in.Took)
	g.fullest, g.tokens = max(g.fullest, in.Tokens), g.tokens+in.Tokens
	g.unfinished = g.unfinished || in.Unfinished
	if g.missing > 0 {
		return
	}
	start := now
	if g.step > 0 && now-g.endsAt <= g.endsAt-g.startedAt {
		start = g.endsAt // the messages' way is part of the step, not on top of it
	}
	g.running, g.startedAt, g.endsAt = true, start, start+max(g.slowest+g.shared(), g.cfg.MinStep)
}

// shared is how long the ranks take together for what they have reported.
func (g *Group) shared() time.Duration {
	ms := g.cfg.Shared.Step(g.fullest, g.tokens)
	if g.cfg.Speed > 0 {
		ms /= g.cfg.Speed
	}
	return time.Duration(ms * float64(time.Millisecond))
}

func (g *Group) end() {
	g.step++
	again := g.unfinished || g.asked || g.step%g.cfg.SyncInterval != 0
	g.running, g.inWave = false, again
	if g.step%g.cfg.SyncInterval == 0 {
		g.asked = false
	}
	g.clearReports()
	g.effects = append(g.effects, GroupEffect{Kind: GroupEnd, Continue: again})
}

func (g *Group) clearReports() {
	clear(g.reported)
	g.missing, g.slowest, g.fullest, g.tokens, g.unfinished = g.cfg.Ranks, 0, 0, 0, false
}
