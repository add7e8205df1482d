package state

import "encoding/json"

// Command is one entry of the log: exactly one field is set.
type Command struct {
	Init            *Init            `json:"init,omitempty"`
	PutApps         *PutApps         `json:"put_apps,omitempty"`
	DeleteApp       *DeleteApp       `json:"delete_app,omitempty"`
	ForgetApp       *ForgetApp       `json:"forget_app,omitempty"`
	GrantGroup      *GrantGroup      `json:"grant_group,omitempty"`
	UnitReady       *UnitRef         `json:"unit_ready,omitempty"`
	UnitFenced      *UnitRef         `json:"unit_fenced,omitempty"`
	UnitFailed      *UnitRef         `json:"unit_failed,omitempty"`
	Release         *UnitRef         `json:"release,omitempty"`
	PutNode         *PutNode         `json:"put_node,omitempty"`
	NodeLost        *NodeRef         `json:"node_lost,omitempty"`
	NodeBack        *NodeRef         `json:"node_back,omitempty"`
	DrainNode       *DrainNode       `json:"drain_node,omitempty"`
	RemoveNode      *RemoveNode      `json:"remove_node,omitempty"`
	PutToken        *Token           `json:"put_token,omitempty"`
	UseToken        *UseToken        `json:"use_token,omitempty"`
	RotateGossipKey *RotateGossipKey `json:"turn_key,omitempty"`
	nextCommand
}

// Init names the cluster and sets its secrets. It is refused if the cluster has another name. Secrets that
// are set stay.
type Init struct {
	Cluster string `json:"cluster"`
	Secret  []byte `json:"secret,omitempty"` // the key of hashes that ingresses and replicas must agree on
	// LeaseTTL (ms) is how long leases last, for the whole life of the cluster. A leader may give ranks away
	// only when all leases that earlier leaders granted are over, so all leaders must grant the same. The
	// first value stays; 0 = not set by this command.
	LeaseTTL int64 `json:"lease_ttl,omitempty"`
	Secrets
}

// AppSpec is one application of a PutApps.
type AppSpec struct {
	Name  string          `json:"name"`
	Spec  json.RawMessage `json:"spec"`
	Names []string        `json:"names"`
	Route string          `json:"route"` // "": none, of a prefill pool
}

// PutApps creates or replaces the apps that it lists. Other apps stay unless Prune is set. An app whose Spec
// is byte-equal does not change, but both pools of an application always have one revision.
type PutApps struct {
	Apps []AppSpec `json:"apps"`
	// app → revision the caller saw; 0 = must not exist; missing = any
	Expect map[string]uint64 `json:"expect,omitempty"`
	Prune  bool              `json:"prune,omitempty"`
	// apps that end with this command, as by DeleteApp: both pools of an application, or what an application
	// was before it had pools. Those that do not exist are passed over
	End []string `json:"end,omitempty"`
}

// DeleteApp marks an app as deleting.
type DeleteApp struct {
	Name string `json:"name"`
}

// ForgetApp removes a deleting app whose units are all released.
type ForgetApp struct {
	Name string `json:"name"`
}

// GrantGroup starts units in one command, all or none, each at its next epoch.
type GrantGroup struct {
	App         string      `json:"app"`
	AppRevision uint64      `json:"app_revision"`
	Group       int         `json:"group"`
	Units       []UnitGrant `json:"units"`
	At          int64       `json:"at,omitempty"` // Unit.Since of all of them
}

// UnitGrant is one unit of a GrantGroup. ExpectEpoch is the highest epoch that the proposer knows (0 = never
// granted).
type UnitGrant struct {
	Unit        string      `json:"unit"`
	ExpectEpoch uint64      `json:"expect_epoch"`
	Attempt     int         `json:"attempt"`
	Launch      string      `json:"launch,omitempty"`   // as in Unit
	Restarts    int         `json:"restarts,omitempty"` // first Unit.Restarts if the unit has no record
	Ranks       []RankGrant `json:"ranks"`
	Blocks      []Block     `json:"blocks,omitempty"`
}

// UnitRef reports a fact about a unit at an epoch. Apply refuses a stale epoch.
type UnitRef struct {
	Unit    string   `json:"unit"`
	Epoch   uint64   `json:"epoch"`
	Reason  string   `json:"reason,omitempty"`
	LogTail []string `json:"log_tail,omitempty"`
	At      int64    `json:"at,omitempty"` // Unit.Since
}

// Result is the outcome of a command.
type Result struct {
	Revision uint64            `json:"revision,omitempty"` // cluster revision after PutApps, DeleteApp
	Apps     map[string]uint64 `json:"apps,omitempty"`     // PutApps: revision per app
	Epochs   map[string]uint64 `json:"epochs,omitempty"`   // GrantGroup: new epoch per unit

	// Unchanged is set if a command about nodes or tokens changed nothing but Index. The node then wakes no
	// reader.
	Unchanged bool `json:"unchanged,omitempty"`

	// Index is the raft index of the command. Consensus sets it, Apply does not.
	Index uint64 `json:"index,omitempty"`
}
