// Package state holds what must never exist twice: applications with revisions, grants of ranks, epochs. It
// is pure: Apply(command) changes a State and nothing else, without IO, clock or actors. Raft replicates the
// commands.
package state

import (
	"encoding/json"
	"errors"
	"slices"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/share"
)

// Phase is a step of a unit's life. Code, status, logs and metrics use the same words.
type Phase string

// The phases of a unit (see DESIGN.md for the edges).
const (
	Pending  Phase = "pending"
	Starting Phase = "starting"
	Ready    Phase = "ready"
	Fenced   Phase = "fenced"
	Killing  Phase = "killing"
	Backoff  Phase = "backoff"
	Draining Phase = "draining"
	Failed   Phase = "failed"
	Gone     Phase = "gone"
)

// Describe says in words that a unit is in the phase: "is in backoff".
func (p Phase) Describe() string {
	switch p {
	case Backoff:
		return "is in backoff"
	case Failed:
		return "has failed"
	case Killing:
		return "is being killed"
	default:
		return "is " + string(p)
	}
}

// App is one application at its current revision, with all of its pools.
type App struct {
	Name      string          `json:"name"`
	Revision  uint64          `json:"revision"`   // +1 per change of this app
	ChangedAt uint64          `json:"changed_at"` // State.Revision of its last change
	Spec      json.RawMessage `json:"spec"`       // its pools: []app.Application as JSON
	Names     []string        `json:"names"`      // every model name clients may send; unique over all apps
	Deleting  bool            `json:"deleting,omitempty"`
	Halt      *Halt           `json:"halt,omitempty"` // of the last roll-out; nil = it was not halted

	pools []*app.Application // Spec; nil: not decoded, or unreadable
}

// Pools returns the pools that Spec describes: the one without a name, or prefill and decode. Nobody may
// change them: Apply and Decode read each spec once, and every reader of the state shares the result. Spec
// stays as it was proposed, because it may have fields of another version.
func (a *App) Pools() ([]*app.Application, error) {
	if a.pools != nil {
		return a.pools, nil
	}
	var specs []json.RawMessage
	if err := json.Unmarshal(a.Spec, &specs); err != nil {
		return nil, err
	}
	if len(specs) == 0 {
		return nil, errors.New("it has no pool")
	}
	var out []*app.Application
	for _, text := range specs {
		spec := app.Default() // for keys that the version which stored the spec did not have
		if err := json.Unmarshal(text, &spec); err != nil {
			return nil, err
		}
		out = append(out, &spec)
	}
	return out, nil
}

// decode reads Spec for Pools. An unreadable one is reported there: the state keeps it.
func (a *App) decode() { a.pools, _ = a.Pools() }

// RankGrant is one rank of a unit on a node.
type RankGrant struct {
	Rank    int    `json:"rank"`
	Node    string `json:"node"`
	Slot    int    `json:"slot"` // -1: takes no slot (attach)
	Devices []int  `json:"devices,omitempty"`
	// parts of its one device (share.Whole); 0: its devices are its own
	Share int `json:"share,omitempty"`
}

// DeviceParts returns how much of its node's devices the rank has, in parts of a device.
func (r *RankGrant) DeviceParts() int { return share.On(r.Share) * len(r.Devices) }

// Block is a port block of a unit on a node.
type Block struct {
	Node string `json:"node"`
	Base int    `json:"base"`
	Size int    `json:"size"`
}

// Unit is the replicated record of a unit. Its Phase is one of those that raft decides: Starting (granted),
// Ready, Fenced, Failed.
type Unit struct {
	ID          string `json:"id"`
	App         string `json:"app"`
	Pool        string `json:"pool,omitempty"` // app.PoolPrefill or app.PoolDecode
	Group       int    `json:"group"`
	Epoch       uint64 `json:"epoch"`
	Phase       Phase  `json:"phase"`
	Attempt     int    `json:"attempt"`  // starts since the last ready, from 1
	Restarts    int    `json:"restarts"` // starts after the first of this app revision
	AppRevision uint64 `json:"app_revision"`
	// Launch is the hash of what the engines were started with. A newer revision with an equal hash needs no
	// restart.
	Launch  string      `json:"launch,omitempty"`
	Ranks   []RankGrant `json:"ranks"`
	Blocks  []Block     `json:"blocks,omitempty"`
	Reason  string      `json:"reason,omitempty"`
	LogTail []string    `json:"log_tail,omitempty"` // failed: 20 lines of the engine's log
	LastEnd *LastEnd    `json:"last_end,omitempty"` // nil = none; of an earlier grant, or failed: of this one
	Since   int64       `json:"since,omitempty"`    // unix ms, leader's clock: begin of Phase
}

// Holds reports whether the unit holds its ranks, slots, devices and ports. A failed unit holds nothing,
// because it fails only after its processes are gone.
func (u *Unit) Holds() bool { return u.Phase != Failed }

// PoolName names the unit's pool, as app.Application.PoolName.
func (u *Unit) PoolName() string { return app.PoolName(u.App, u.Pool) }

// HasRank reports whether a rank of the group is the unit's.
func (u *Unit) HasRank(rank int) bool {
	return slices.ContainsFunc(u.Ranks, func(r RankGrant) bool { return r.Rank == rank })
}

// IsOn reports whether the unit has a rank on a node.
func (u *Unit) IsOn(node string) bool {
	return slices.ContainsFunc(u.Ranks, func(r RankGrant) bool { return r.Node == node })
}

// floors are the least numbers that a name may get anew.
type floors struct {
	// Revisions and Epochs keep only the last maxGoneNames names of what is gone. The dropped numbers are at
	// most these.
	RevisionFloor uint64 `json:"revision_floor,omitempty"`
	EpochFloor    uint64 `json:"epoch_floor,omitempty"`
	// EpochLeast is set by Recover: every later grant has a higher epoch. 0 = the voters were never lost.
	EpochLeast uint64 `json:"epoch_least,omitempty"`
}

// State is the replicated state. Only Apply writes it. Readers hold a snapshot (Clone) and never change it.
type State struct {
	Index    uint64           `json:"index"`            // raft index of the last command
	Cluster  string           `json:"cluster"`          // cluster id, set once
	Secret   []byte           `json:"secret,omitempty"` // set once, by Init
	Revision uint64           `json:"revision"`         // +1 per PutApps or DeleteApp that changed something
	Apps     map[string]*App  `json:"apps"`
	Units    map[string]*Unit `json:"units"`
	// Revisions has the last revision of removed apps, so that a re-deployed name never repeats one.
	Revisions map[string]uint64 `json:"revisions"`
	// Epochs has the highest epoch of each unit. It outlives the unit, so that a re-deployed name never
	// repeats one.
	Epochs map[string]uint64 `json:"epochs"`
	// History has the last specs of each application, the current one last. Followers do not get it.
	History map[string][]PastSpec `json:"history,omitempty"`
	Nodes   map[string]*Node      `json:"nodes,omitempty"`
	// Served has what each unit was ready with last: its Unit.Launch. It outlives grants and releases, and
	// ends with the application. What has served is started again for ever.
	Served map[string]string `json:"served,omitempty"`

	floors

	Tokens    map[string]*Token `json:"tokens,omitempty"`     // by hash
	Removed   []string          `json:"removed,omitempty"`    // UIDs of removed nodes, the latest last
	RemovedAt map[string]int64  `json:"removed_at,omitempty"` // by UID: unix ms; replaced, never written into
	Secrets   Secrets           `json:"secrets,omitzero"`     // followers do not get it
	// LeaseTTL (ms) is set once, by Init.
	LeaseTTL int64 `json:"lease_ttl,omitempty"`
	// Freed are port blocks that were freed and not used again, the latest last. Placement re-uses the latest
	// last.
	Freed []Block `json:"freed,omitempty"`
	// Level is the highest level of a command that has changed the state: a version below it cannot read the
	// log.
	Level int `json:"level,omitempty"`
}

// AppStatus is an application's state as users see it, in the words of Ray.
type AppStatus string

// The application states.
const (
	Deploying    AppStatus = "DEPLOYING"
	Running      AppStatus = "RUNNING"
	Unhealthy    AppStatus = "UNHEALTHY"
	DeployFailed AppStatus = "DEPLOY_FAILED"
	Deleting     AppStatus = "DELETING"
)

// Seen is the input of DeriveStatus.
type Seen struct {
	Deleting   bool
	Halted     bool    // the roll-out of this revision was halted
	WasRunning bool    // this revision was RUNNING before
	Units      []Phase // of every wanted unit; one that still runs an older revision counts as Pending
}

// DeriveStatus derives an application's status from its units. The first case that applies wins: the
// application is being deleted, its roll-out was halted or a unit failed, all units are ready, this revision
// was running before, else it is deploying.
func DeriveStatus(s Seen) AppStatus {
	ready := 0
	failed := s.Halted
	for _, p := range s.Units {
		if p == Ready {
			ready++
		}
		failed = failed || p == Failed
	}
	switch {
	case s.Deleting:
		return Deleting
	case failed:
		return DeployFailed
	case ready == len(s.Units):
		return Running
	case s.WasRunning:
		return Unhealthy
	default:
		return Deploying
	}
}
