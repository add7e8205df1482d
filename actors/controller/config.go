// Package controller makes the cluster match its applications: it places units, has them granted, tells the
// nodes to start and stop them, and follows the nodes' reports. It runs on the leader only.
package controller

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// DefaultRetry is the pause before a command that consensus did not accept is proposed again.
	DefaultRetry = time.Second
	// DefaultCall bounds one order to a node and one command.
	DefaultCall = 5 * time.Second

	actorName    = "controller"
	mailboxBound = 1024            // unreceived requests; results of commands bypass it
	closeGrace   = 5 * time.Second // time for the actor to stop
	maxCommands  = 64              // concurrent commands; each unit has at most one
	nodeQueue    = 4096            // orders that wait for one node; the resend timer repeats dropped ones
	eventRing    = 1000            // state changes kept for the API
)

// Timers of the controller. Zero fields mean the defaults.
type Timers struct {
	Unit     state.Timers  // retries, restarts, resends
	Retry    time.Duration // before a failed command is proposed again
	Call     time.Duration // bound of one order or one command
	LeaseTTL time.Duration // duration of a node's lease
	Regrant  time.Duration // silence after which a node is lost; more than LeaseTTL
}

func (t Timers) withDefaults() Timers {
	t.Unit = t.Unit.WithDefaults()
	if t.Retry <= 0 {
		t.Retry = DefaultRetry
	}
	if t.Call <= 0 {
		t.Call = DefaultCall
	}
	if t.LeaseTTL <= 0 {
		t.LeaseTTL = state.LeaseTTL
	}
	if t.Regrant <= t.LeaseTTL {
		t.Regrant = t.LeaseTTL + state.LeaseGrace
	}
	return t
}

// Assigner places, numbers, grants and releases ranks; the RankAssigner implements it. Both methods return at
// once. They answer once, from any goroutine, unless the Assigner is closed, and place in the order of calls.
type Assigner interface {
	AssignGroup(m *msg.AssignGroup, answer func(msg.GroupAssigned))
	Release(m msg.ReleaseRank, answer func(error))
}

// Metrics counts the changes of units. It is called from one goroutine at a time and may not block.
type Metrics interface {
	UnitPhase(app, unit string, phase state.Phase, epoch uint64)
	UnitRestart(app, unit string)
	UnitForget(app, unit string)
	AppRanks(app string, ready, desired int)
	AppRanksForget(app string)
}

// Config is the configuration of a Controller. Store, Proposer, Assigner, Agent and Log are required. Store
// must have everything that was committed before this node led: a grant on an older state could use an epoch
// twice.
type Config struct {
	// Self is the id of the leader's node.
	Self     string
	Store    msg.Store
	Proposer msg.Proposer
	Assigner Assigner
	// Agent returns the client for commands to a node; false while the node is not connected.
	Agent func(node string) (msg.NodeAgent, bool)
	// Confirm asks a majority whether this node still leads, before a node is declared lost. nil = it leads.
	Confirm func(ctx context.Context) error
	// StepDown hands the leadership to another voter. An error means that this node still leads. nil = there
	// is no other voter.
	StepDown func(ctx context.Context) error
	Metrics  Metrics // nil = none
	Timers   Timers
	Log      *slog.Logger
	Clock    func() time.Time // nil = time.Now
}

func (c Config) withDefaults() Config {
	c.Timers = c.Timers.withDefaults()
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Confirm == nil {
		c.Confirm = func(context.Context) error { return nil }
	}
	if c.StepDown == nil {
		c.StepDown = func(context.Context) error { return nil }
	}
	if c.Metrics == nil {
		c.Metrics = noMetrics{}
	}
	return c
}

type noMetrics struct{}

func (noMetrics) UnitPhase(string, string, state.Phase, uint64) {}
func (noMetrics) UnitRestart(string, string)                    {}
func (noMetrics) UnitForget(string, string)                     {}
func (noMetrics) AppRanks(string, int, int)                     {}
func (noMetrics) AppRanksForget(string)                         {}
