package client

import (
	"slices"
	"strings"
	"time"
)

// Values of an application's status, which are those of Ray.
const (
	StatusDeploying    = "DEPLOYING"
	StatusRunning      = "RUNNING"
	StatusUnhealthy    = "UNHEALTHY"
	StatusDeployFailed = "DEPLOY_FAILED"
	StatusDeleting     = "DELETING"
)

// AppStatus is an application as status and the admin API show it.
type AppStatus struct {
	Name     string `json:"name"`
	Status   string `json:"status"` // StatusRunning and the like
	Message  string `json:"message,omitempty"`
	Revision uint64 `json:"revision"`
	// the units of the revision are still replaced, or have not been ready for rollout.min_ready_s
	RollingOut bool `json:"rolling_out,omitempty"`
	// why the last roll-out ended early; nil: it did not, or the application was deployed again since
	Halt     *Halt     `json:"halt,omitempty"`
	Model    string    `json:"model"`
	Kind     string    `json:"kind"`
	Coupling string    `json:"coupling"`
	Policy   string    `json:"policy"`
	DPSize   int       `json:"dp_size"`
	Groups   int       `json:"groups"`
	Desired  int       `json:"desired"` // ranks
	Ready    int       `json:"ready"`   // ranks
	Queued   int       `json:"queued"`  // requests in this node's FIFO
	Identity string    `json:"identity,omitempty"`
	Index    *Index    `json:"index,omitempty"` // of this node's ingress; nil: the policy reads none
	PD       *PDStatus `json:"pd,omitempty"`    // nil: the application has one pool
	// the pools whose ranks are loaded unevenly, now or in the last minute
	Imbalances []Imbalance  `json:"imbalances,omitempty"`
	Units      []UnitStatus `json:"units"`
	// of an application with prefill and decode ranks: its two pools, prefill first. Units has the units of
	// both
	Pools []PoolStatus `json:"pools,omitempty"`
	// requests that the queue of one ingress holds; more are refused
	MaxQueued int `json:"max_queued,omitempty"`
	// nil: no ingress has it yet. Of an application with two pools: of the decode pool, which answers
	Traffic *Traffic `json:"traffic,omitempty"`
}

// Halt is why the roll-out of a revision ended early.
type Halt struct {
	Revision uint64    `json:"revision"`
	BackTo   uint64    `json:"back_to,omitempty"` // the revision that was deployed again; 0 = none was
	Unit     string    `json:"unit"`              // whose end halted it
	Unready  bool      `json:"unready,omitempty"` // it was never ready: its first starts failed
	Cause    string    `json:"cause"`
	LogTail  []string  `json:"log_tail,omitempty"` // the last lines of its engine
	At       time.Time `json:"at"`
}

// Revision is one of the revisions of an application that the cluster keeps.
type Revision struct {
	Revision  uint64    `json:"revision"`
	At        time.Time `json:"at"`             // when it was deployed
	From      uint64    `json:"from,omitempty"` // the revision that it repeats; 0 = it came from a file
	IsCurrent bool      `json:"current,omitempty"`
	IsGood    bool      `json:"good,omitempty"`   // its roll-out ended well
	Halted    string    `json:"halted,omitempty"` // why its roll-out was halted
}

// AppFile is an application at a revision, in the form of a file.
type AppFile struct {
	App      string `json:"app"`
	Revision uint64 `json:"revision"`
	Text     string `json:"text"` // app.yaml. It has the values of engine.env
}

// Pools of an application with prefill and decode ranks.
const (
	PoolPrefill = "prefill"
	PoolDecode  = "decode"
)

// PoolStatus is one pool of an application.
type PoolStatus struct {
	Pool     string `json:"pool"` // PoolPrefill or PoolDecode
	Name     string `json:"name"` // the pool's units begin with it: APP.prefill, APP.decode
	Status   string `json:"status"`
	Policy   string `json:"policy"`
	Coupling string `json:"coupling"`
	DPSize   int    `json:"dp_size"`
	Groups   int    `json:"groups"`
	Ready    int    `json:"ready"`   // ranks
	Desired  int    `json:"desired"` // ranks
}

// OfPool returns one pool, by its name, in the form of an application.
func (a *AppStatus) OfPool(name string) (AppStatus, bool) {
	i := slices.IndexFunc(a.Pools, func(p PoolStatus) bool { return p.Name == name })
	if i < 0 {
		return AppStatus{}, false
	}
	out, p := *a, &a.Pools[i]
	out.Name, out.Status, out.Policy, out.Coupling = p.Name, p.Status, p.Policy, p.Coupling
	out.DPSize, out.Groups, out.Ready, out.Desired, out.Pools = p.DPSize, p.Groups, p.Ready, p.Desired, nil
	out.PD = nil
	out.Imbalances = slices.DeleteFunc(slices.Clone(a.Imbalances),
		func(i Imbalance) bool { return i.Pool != name })
	out.Units = slices.DeleteFunc(slices.Clone(a.Units), func(u UnitStatus) bool { return u.Pool != p.Pool })
	var lines []string
	for line := range strings.Lines(a.Message) {
		if strings.HasPrefix(line, p.Name+"/") {
			lines = append(lines, line)
		}
	}
	out.Message = strings.TrimSpace(strings.Join(lines, ""))
	return out, true
}

// PDStatus is how an application with a prefill and a decode pool works.
type PDStatus struct {
	Transfer string `json:"transfer"`  // nixl | nixl-push | mooncake | sglang | sim
	Decide   string `json:"decide"`    // isl | prefill-load | uncached>=N | always | mex
	Fallback string `json:"fallback"`  // local | fail
	Pairs    string `json:"pairs"`     // PairsOn, or "off: " and why no prefill rank can be used
	Met      int    `json:"connected"` // of All: pairs that may have a client's request
	All      int    `json:"all"`       // pairs of a ready prefill rank and a ready decode rank
	// requests that ended, by what computed their prompt: a prefill rank, or the decode rank as decided, or
	// the decode rank because no prefill rank could
	Remote    uint64 `json:"remote"`
	Local     uint64 `json:"local"`
	Fallbacks uint64 `json:"fallbacks"`
	// what the decode ranks' engines count since their start; 0: they do not say
	TransferMs    float64 `json:"transfer_ms"`    // mean of one transfer
	TransferBytes uint64  `json:"transfer_bytes"` // sum
}

// PairsOn is PDStatus.Pairs while requests may use prefill ranks.
const PairsOn = "on"

// Index is the size of an ingress's index of an application's KV caches.
type Index struct {
	Blocks  int    `json:"blocks"`
	Bytes   int    `json:"bytes"`
	Cap     int    `json:"cap_bytes"`
	Orphans int    `json:"orphans"`
	Evicted uint64 `json:"evicted"`
}

// UnitStatus is one unit of an application.
type UnitStatus struct {
	Unit     string       `json:"unit"`
	Pool     string       `json:"pool,omitempty"` // PoolPrefill or PoolDecode
	Group    int          `json:"group"`
	Phase    string       `json:"phase"`
	Epoch    uint64       `json:"epoch"`
	Attempt  int          `json:"attempt"`
	Restarts int          `json:"restarts"`
	Since    time.Time    `json:"since"`             // of the phase
	NextTry  time.Time    `json:"next_try,omitzero"` // when a unit in backoff, or a failed one, starts again
	Reason   string       `json:"reason,omitempty"`
	LogTail  []string     `json:"log_tail,omitempty"`
	LastEnd  *LastEnd     `json:"last_end,omitempty"` // nil: it has not ended so far, except as ordered
	Ranks    []RankStatus `json:"ranks"`
}

// LastEnd is how a unit ended last without an order: an engine failed, or a node was lost. It stays when the
// unit is ready again.
type LastEnd struct {
	At    time.Time `json:"at"`
	Exit  string    `json:"exit,omitempty"` // of the engine that ended by itself: "code 1", "signal killed"
	Cause string    `json:"cause,omitempty"`
	Line  string    `json:"line,omitempty"` // the last one of the engine's log
}

// Unreachable is the phase that status shows of units and ranks on a node that does not answer. It is no
// phase of the unit's life (state.Phase): nothing is granted, released or counted because of it.
const Unreachable = "unreachable"

// RankStatus is one rank. The account is the replica's own.
type RankStatus struct {
	Group       int     `json:"group"`
	Rank        int     `json:"rank"`
	Node        string  `json:"node"`
	Devices     []int   `json:"devices,omitempty"`
	Share       float64 `json:"share,omitempty"` // of its one device; 0: its devices are its own
	Phase       string  `json:"phase"`
	Epoch       uint64  `json:"epoch"`
	Incarnation string  `json:"incarnation,omitempty"` // 16 hex digits
	PID         int     `json:"pid,omitempty"`
	Memory      uint64  `json:"memory_bytes,omitempty"` // of its engine's processes; 0 = not known
	URL         string  `json:"url,omitempty"`
	MaxOngoing  int     `json:"max_ongoing,omitempty"`
	InFlight    int     `json:"in_flight"`
	OpenTokens  int     `json:"open_tokens"`        // prompt and generated tokens of those requests
	Requests    uint64  `json:"requests"`           // ended tickets
	Tokens      uint64  `json:"tokens"`             // generated
	TokensPerS  float64 `json:"tokens_per_s"`       // over the last 10 s
	TTFTp50Ms   float64 `json:"ttft_p50_ms"`        // over the last 512 requests
	TTFTp95Ms   float64 `json:"ttft_p95_ms"`        //
	ITLp50Ms    float64 `json:"itl_p50_ms"`         // mean time between the tokens of a request, over the
	ITLp95Ms    float64 `json:"itl_p95_ms"`         // last 512 requests
	Progress    string  `json:"progress,omitempty"` // while starting: what it waits for
	// its last answers failed, and no probe has come back yet
	Ejected bool `json:"ejected,omitempty"`
	// asleep or scaling: its engine says that it does not compute now, and gets no request until it does
	Away string `json:"away,omitempty"`
	// names of the LoRA adapters that its engine has; before it is ready, of those that it will have
	Adapters []string `json:"adapters,omitempty"`

	// of ended requests whose engine reported cached tokens
	PromptTokens uint64 `json:"prompt_tokens,omitempty"`
	CachedTokens uint64 `json:"cached_tokens,omitempty"` // of PromptTokens, found in the rank's cache
	// CachedTokens / PromptTokens over the last 512 such requests
	HitRate float64   `json:"hit_rate"`
	KV      *KVStatus `json:"kv,omitempty"` // nil: nothing reads this rank's KV index
	// nil: the rank is of no prefill or decode pool, or its engine counts no transfers
	Transfer *TransferStatus `json:"transfer,omitempty"`
}

// TransferStatus is what a rank's engine counts of the KV blocks that prefill ranks compute for decode ranks,
// since its start.
type TransferStatus struct {
	Count     uint64  `json:"count"` // ended transfers; a decode rank that reads counts them
	TotalMs   float64 `json:"total_ms"`
	Bytes     uint64  `json:"bytes"`
	Failed    uint64  `json:"failed"`     // handshakes included
	Expired   uint64  `json:"expired"`    // prompts that this prefill rank dropped before they were read
	LateReads uint64  `json:"late_reads"` // prompts that were read after that: their text may be wrong
}

// KVStatus is what a rank knows of its engine's KV cache.
type KVStatus struct {
	Blocks    int          `json:"blocks"` // in the index, by events or by the rank's own record
	Bytes     int          `json:"bytes"`  // memory of the rank's index
	BlockSize int          `json:"block_size,omitempty"`
	Capacity  int64        `json:"capacity_tokens,omitempty"`
	Usage     float64      `json:"usage"`
	Sent      int          `json:"sent_blocks"` // of Blocks: by the rank's own record of what it was sent
	Orphans   int          `json:"orphans"`     // of Blocks: their parent is not there
	Evicted   uint64       `json:"evicted"`     // blocks dropped at the index's memory cap
	Events    *EventStatus `json:"events,omitempty"`
	// what a person should know: silent events, other block size, caching off
	Note string `json:"note,omitempty"`
}

// States of a rank's KV events.
const (
	EventsConnecting = "connecting" // the engine cannot be reached
	EventsWaiting    = "waiting"    // for the first event
	EventsLive       = "live"
	EventsPartial    = "partial" // events were lost: the older blocks of the rank are not known
	EventsSilent     = "silent"  // requests end, and no event comes
)

// EventStatus is the health of a rank's KV events.
type EventStatus struct {
	State     string  `json:"state"` // connecting | waiting | live | partial | silent
	Batches   uint64  `json:"batches"`
	Gaps      uint64  `json:"gaps"`
	Restarts  uint64  `json:"restarts"`
	Dropped   uint64  `json:"dropped"` // malformed, unknown or contradictory events
	SilentFor float64 `json:"silent_for_s,omitempty"`
	// members of events that this version does not know: they may set blocks apart that it takes for equal
	UnknownMembers uint64 `json:"unknown_members,omitempty"`
}

// NodeStatus is a node as `dpserve nodes` shows it.
type NodeStatus struct {
	Node       string    `json:"node"`
	State      string    `json:"state"` // alive | silent | lost | draining | drained | unknown
	Reason     string    `json:"reason,omitempty"`
	Roles      []string  `json:"roles"`
	Address    string    `json:"address,omitempty"`
	Zone       string    `json:"zone,omitempty"`
	Version    string    `json:"version,omitempty"`
	Leader     bool      `json:"leader,omitempty"`
	Voter      bool      `json:"voter,omitempty"`
	SlotsUsed  int       `json:"slots_used"`
	Slots      int       `json:"slots"`
	GPUsUsed   float64   `json:"gpus_used"` // with shares of devices
	GPUs       int       `json:"gpus"`
	Ranks      int       `json:"ranks"`
	Groups     []string  `json:"groups,omitempty"` // app/group that have a rank there
	InFlight   int       `json:"in_flight"`
	SkewMs     int64     `json:"clock_skew_ms"`
	LeaseLeftS float64   `json:"lease_left_s"`
	LastSeen   time.Time `json:"last_seen,omitzero"`
	// leader | gossip | itself (the asked node, while no node leads)
	SeenBy string   `json:"seen_by,omitempty"`
	Notes  []string `json:"notes,omitempty"` // for people: clock skew, version skew, devices that fail
	// Devices are the devices that the node found; those that --gpus only declares are not among them.
	Devices []DeviceModel `json:"devices,omitempty"`
	// Shared are the devices of which ranks have a share.
	Shared []SharedDevice `json:"shared,omitempty"`
}

// SharedDevice is a device of which ranks have a share.
type SharedDevice struct {
	Device int      `json:"device"`
	Used   float64  `json:"used"`  // the sum of the shares
	Ranks  []string `json:"ranks"` // APP/GROUP/RANK
}

// DeviceModel is one model of device, and which devices of the node are of it.
type DeviceModel struct {
	Kind      string `json:"kind"` // nvidia | amd
	Name      string `json:"name"`
	MemoryMiB int64  `json:"memory_mib,omitempty"` // of each; 0 = not known
	Driver    string `json:"driver,omitempty"`     // its version
	Devices   []int  `json:"devices"`
}
