// Package state is what the cluster must never double: applications with revisions, grants of ranks, epochs. It is pure:
// Apply(command) changes a State and nothing else; no IO, no clock, no actors. Raft replicates the commands.
package state

import "encoding/json"

// Phase is a unit's place in its life; one vocabulary for code, status, logs and metrics.
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

// App is one application at its current revision.
type App struct {
	Name      string          `json:"name"`
	Revision  uint64          `json:"revision"`   // +1 per change of this app
	ChangedAt uint64          `json:"changed_at"` // State.Revision of its last change
	Spec      json.RawMessage `json:"spec"`       // app.Application as JSON
	Names     []string        `json:"names"`      // every model name clients may send; unique over all apps
	Route     string          `json:"route"`      // route prefix
	Deleting  bool            `json:"deleting,omitempty"`
	Previous  json.RawMessage `json:"previous,omitempty"` // spec of the revision before, for rollback
}

// RankGrant is one rank of a unit on a node.
type RankGrant struct {
	Rank    int    `json:"rank"`
	Node    string `json:"node"`
	Slot    int    `json:"slot"` // -1: takes no slot (attach)
	Devices []int  `json:"devices,omitempty"`
}

// Block is a port block of a unit on a node.
type Block struct {
	Node string `json:"node"`
	Base int    `json:"base"`
	Size int    `json:"size"`
}

// Unit is the replicated record of a unit. Its Phase holds only what raft decides: Starting (granted), Ready, Fenced, Failed.
type Unit struct {
	ID          string      `json:"id"`
	App         string      `json:"app"`
	Group       int         `json:"group"`
	Epoch       uint64      `json:"epoch"`
	Phase       Phase       `json:"phase"`
	Attempt     int         `json:"attempt"`  // starts since the last ready, from 1
	Restarts    int         `json:"restarts"` // starts after the first of this app revision
	AppRevision uint64      `json:"app_revision"`
	Launch      string      `json:"launch,omitempty"` // hash of what the engines were started with; equal = a newer revision needs no restart
	Ranks       []RankGrant `json:"ranks"`
	Blocks      []Block     `json:"blocks,omitempty"`
	Reason      string      `json:"reason,omitempty"`
	LogTail     []string    `json:"log_tail,omitempty"` // failed: the engine's last 20 lines
	Since       int64       `json:"since,omitempty"`    // unix ms by the leader's clock: when Phase began; 0 = not told
}

// State is the replicated state. Apply is its only writer; readers hold a snapshot (Clone) and never change it.
type State struct {
	Index     uint64            `json:"index"`            // raft index of the last command
	Cluster   string            `json:"cluster"`          // cluster id, set once
	Secret    []byte            `json:"secret,omitempty"` // set once, by Init
	Revision  uint64            `json:"revision"`         // +1 per PutApps or DeleteApp that changed something
	Apps      map[string]*App   `json:"apps"`
	Units     map[string]*Unit  `json:"units"`
	Revisions map[string]uint64 `json:"revisions"` // last revision of apps that are gone, so that a re-deployed name never repeats one
	Epochs    map[string]uint64 `json:"epochs"`    // highest epoch per unit ever; outlives the unit, so a re-deployed name never repeats
	Nodes     map[string]*Node  `json:"nodes,omitempty"`

	// Of what is gone only the last maxGone names are in Revisions and Epochs; what was left out was at these at most.
	RevisionFloor uint64 `json:"revision_floor,omitempty"`
	EpochFloor    uint64 `json:"epoch_floor,omitempty"`

	Tokens    map[string]*Token `json:"tokens,omitempty"`     // by hash
	Removed   []string          `json:"removed,omitempty"`    // UIDs of nodes that were removed, the latest last
	RemovedAt map[string]int64  `json:"removed_at,omitempty"` // by UID: unix ms; replaced, never written into
	Secrets   Secrets           `json:"secrets,omitzero"`     // not in what followers get
	LeaseTTL  int64             `json:"lease_ttl,omitempty"`  // ms; set once, by Init; 0 = an older version began the cluster: each leader has its own
	Freed     []Block           `json:"freed,omitempty"`      // port blocks freed and not used again, the latest last; placement re-uses them last
	nextState                   //nolint:unused // fields only in the build of next_version.go
}
