package client

import (
	"net/url"
	"strconv"
	"strings"
	"time"
)

// DeployRequest is a file to deploy.
type DeployRequest struct {
	File string // its name in messages
	Text []byte // app.yaml, or the same as JSON
	// the cluster revision the caller saw; code conflict if a named app has changed since; nil = any
	Revision *uint64
	Prune    bool // delete the apps that the file does not list
	Partial  bool // start what finds a place; the rest waits for one
}

// query returns the query string of the paths that take a file.
func (d DeployRequest) query() url.Values {
	q := url.Values{}
	if d.File != "" {
		q.Set("file", d.File)
	}
	if d.Revision != nil {
		q.Set("revision", strconv.FormatUint(*d.Revision, 10))
	}
	if d.Prune {
		q.Set("prune", "true")
	}
	if d.Partial {
		q.Set("partial", "true")
	}
	return q
}

// Effect is what a deploy does to the ranks of an application, or to one unit.
type Effect string

// The effects.
const (
	EffectCreate    Effect = "create"
	EffectUpdate    Effect = "update"  // no rank that runs is touched
	EffectScale     Effect = "scale"   // ranks are added or end; the others are not touched
	EffectRestart   Effect = "restart" // ranks that run are started again; ready ones one unit at a time
	EffectDelete    Effect = "delete"
	EffectUnchanged Effect = "unchanged"
)

// Impact is what a deploy does to an application and its ranks.
type Impact struct {
	Effect  Effect      `json:"effect"`
	Reasons []string    `json:"reasons,omitempty"` // of a restart: "KV events go on", or the path of a field
	Diffs   []FieldDiff `json:"diffs,omitempty"`   // the fields that differ, with their values
	// wanted ranks, before and after
	RanksBefore int `json:"ranks_before"`
	RanksAfter  int `json:"ranks_after"`
}

// FieldDiff is one field that differs. Values are JSON; "" means that the field is absent. Values of
// engine.env are hidden.
type FieldDiff struct {
	Path string `json:"path"`
	Old  string `json:"old,omitempty"`
	New  string `json:"new,omitempty"`
}

// Change is one application of a deploy.
type Change struct {
	App string `json:"app"`
	Impact
	// of attached ranks: those that the file does not list, GROUP/RANK (of a pool POOL/GROUP/RANK) and engine
	Gone []string `json:"gone,omitempty"`
}

// DeployResult is a committed deploy.
type DeployResult struct {
	Revision uint64            `json:"revision"` // of the cluster
	Apps     map[string]uint64 `json:"apps"`     // revision per app of the file
	Changes  []Change          `json:"changes"`
	Warnings []Fault           `json:"warnings,omitempty"`
}

// Plan is what a deploy would do.
type Plan struct {
	Revision uint64     `json:"revision"` // of the cluster it was made for: `deploy --revision`
	Changes  bool       `json:"changes"`
	Apps     []AppPlan  `json:"apps"`
	Nodes    []NodePlan `json:"nodes"`
	Fits     bool       `json:"fits"` // there is room for all units
}

// AppPlan is one application's part.
type AppPlan struct {
	Change
	Units []UnitPlan `json:"units,omitempty"`
	// of a pool that gains little from data parallelism: why, and what to write instead
	Advice []string `json:"advice,omitempty"`
}

// UnitPlan is the plan for one unit: create, restart, delete, or unchanged with its present seats.
type UnitPlan struct {
	Unit    string     `json:"unit"`
	Pool    string     `json:"pool,omitempty"` // PoolPrefill or PoolDecode
	Effect  Effect     `json:"effect"`
	Reasons []string   `json:"reasons,omitempty"` // of a restart
	Seats   []SeatPlan `json:"seats,omitempty"`
	Why     string     `json:"why,omitempty"`  // the reason why it cannot be placed
	Hint    string     `json:"hint,omitempty"` // what would make room
}

// SeatPlan is one rank's place.
type SeatPlan struct {
	Rank    int     `json:"rank"`
	Node    string  `json:"node"`
	Devices []int   `json:"devices,omitempty"`
	Share   float64 `json:"share,omitempty"` // of its one device; 0: its devices are its own
}

// NodePlan is what a node has and what the plan takes of it.
type NodePlan struct {
	Node      string  `json:"node"`
	Slots     int     `json:"slots"`
	SlotsFree int     `json:"slots_free"` // before
	SlotsNeed int     `json:"slots_need"` // that the plan adds
	GPUs      int     `json:"gpus"`
	GPUsFree  float64 `json:"gpus_free"` // with shares of devices, as gpus_need
	GPUsNeed  float64 `json:"gpus_need"`
	// why placement leaves it out (lost, draining, no role worker), or which applications avoid it
	Note string `json:"note,omitempty"`
	// Devices are the devices that the node found.
	Devices []DeviceModel `json:"devices,omitempty"`
	// Shared are the devices of which ranks will have a share.
	Shared []SharedDevice `json:"shared,omitempty"`
}

// RankRemoval selects an attached rank to remove: by its URL, with Selector if several ranks are behind it,
// or with URL "" by Group and Rank.
type RankRemoval struct {
	URL         string
	Selector    *int
	Group, Rank int
	// for its running streams, 0 = cut; nil = graceful_shutdown_timeout_s of the application
	Deadline *time.Duration
}

func (r *RankRemoval) query() url.Values {
	q := url.Values{}
	if r.URL == "" {
		q.Set("rank", strconv.Itoa(r.Group)+"/"+strconv.Itoa(r.Rank))
	} else {
		q.Set("url", r.URL)
	}
	if r.URL != "" && r.Selector != nil {
		q.Set("selector", strconv.Itoa(*r.Selector))
	}
	if r.Deadline != nil {
		q.Set("deadline", r.Deadline.String())
	}
	return q
}

// RankChange is a committed change of an attached rank.
type RankChange struct {
	App      string `json:"app"`
	Pool     string `json:"pool,omitempty"` // PoolPrefill or PoolDecode
	Group    int    `json:"group"`
	Rank     int    `json:"rank"`
	URL      string `json:"url"`
	Service  bool   `json:"service,omitempty"`  // the URL is that of a service, whose ranks come and go
	Selector *int   `json:"selector,omitempty"` // if several ranks are behind the URL
	Revision uint64 `json:"revision"`           // of the application
}

// RankName is GROUP/RANK.
func RankName(group, rank int) string { return strconv.Itoa(group) + "/" + strconv.Itoa(rank) }

// ParseRankName reads GROUP/RANK.
func ParseRankName(s string) (group, rank int, ok bool) {
	a, b, found := strings.Cut(s, "/")
	g, err := strconv.ParseUint(a, 10, 16)
	r, err2 := strconv.ParseUint(b, 10, 16)
	return int(g), int(r), found && err == nil && err2 == nil
}
